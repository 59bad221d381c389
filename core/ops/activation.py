"""Activations that are more than pointwise: a gate takes half of a dim, and one keeps a buffer for its derivative."""

import torch

from core.dispatch import Plan, op
from core.errors import ShardingError
from core.ops.pointwise import operand

aten = torch.ops.aten


@op(aten.glu)
def glu(func, x, dim=-1):
    """The halves of a cut dim lie on different ranks: its cut moves to another dim by one all-to-all."""
    dim = _halved(x, dim)
    x = x.aside(dim)
    return Plan((x,), _half(x, dim))


@op(aten.glu_backward)
def glu_backward(func, grad, x, dim):
    dim = _halved(x, dim)
    x = x.aside(dim)
    return Plan((operand(grad, _half(x, dim)), x), x)


def _halved(x, dim):
    if not -x.ndim <= dim < x.ndim:
        raise IndexError(f"Dimension out of range (expected to be in [{-x.ndim}, {x.ndim - 1}], but got {dim})")
    if x.shape[dim] % 2:
        raise ShardingError(f"{x.shape[dim]} rows along dim {dim} have no halves", op="glu", operands=[x])
    return dim % x.ndim


def _half(x, dim):
    shape = [n // 2 if d == dim else n for d, n in enumerate(x.shape)]
    return x.reshaped(shape)


@op(aten.log_sigmoid_forward)
def log_sigmoid_forward(func, x):
    """The buffer of the CPU has the operand's shape; that of CUDA is empty and never read."""

    def local(t):
        out, buffer = func(t)
        return out, buffer if buffer.shape == out.shape else out

    return Plan((x,), (x, x), local)
