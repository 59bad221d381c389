"""The rules, one file a family; importing them fills the registry of ``core.dispatch``."""

from core.ops import factory, matmul, norm, pointwise, reduction, view  # noqa: F401
