"""Complex numbers as pairs of real ones, and conjugates.

Torch marks a conjugate or a negative by a bit on the tensor and leaves the memory as it is. A part of a ShardTensor
holds the finished numbers instead: what goes over the wire is memory.
"""

import torch

from core.dispatch import Plan, op
from core.errors import ShardingError

aten = torch.ops.aten


@op(aten.view_as_real, pending=True)
def view_as_real(func, x):
    return Plan((x,), x.reshaped((*x.shape, 2)))


@op(aten.view_as_complex, pending=True)
def view_as_complex(func, x):
    if x.ndim == 0 or x.shape[-1] != 2:
        raise ShardingError("the last dim must hold pairs", op="view_as_complex", operands=[x])
    x = x.whole(-1)
    return Plan((x,), x.reshaped(x.shape[:-1], {d: d for d in range(x.ndim - 1)}), lambda t: func(t.contiguous()))


@op(aten._conj, aten._neg_view, pending=True)
def marked(func, x):
    return Plan((x,), x)
