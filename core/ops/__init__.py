"""The rules, one file a family; importing them fills the registry of ``core.dispatch``."""

from core.ops import attention, conv, factory, loss, matmul, neighborhood, norm, pad, pointwise, reduction, view  # noqa: F401
