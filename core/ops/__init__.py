"""The rules, one file a family; importing them fills the registry of ``core.dispatch``."""

from core.ops import (  # noqa: F401
    attention,
    conv,
    factory,
    loss,
    matmul,
    neighborhood,
    norm,
    pad,
    pointwise,
    random,
    reduction,
    view,
)
