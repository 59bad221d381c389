"""New tensors shaped like old ones, and copies: the cut is kept and nothing is sent."""

import torch

from core.dispatch import TARGET, Plan, op
from core.ops.pointwise import operand
from core.spec import replicated_spec

aten = torch.ops.aten


@op(aten.detach, aten.alias, aten.clone, aten._to_copy, aten.lift_fresh, pending=True, elementwise=True)
def copy(func, x, *args, dtype=None, memory_format=None, **kwargs):
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        x = x.finished()  # whole numbers are no linear function
    return Plan((x,), x if func.overloadpacket in _VIEWS else in_format(x, memory_format))


_VIEWS = {aten.detach, aten.alias}


def in_format(x, memory_format):
    """The same cut with its memory in the order asked for; by default as it is, but an expanded dim is written out."""
    if memory_format in (None, torch.preserve_format):
        return x if 0 not in x.stride else x.recut(x.placements, x.sizes)
    if memory_format == torch.contiguous_format:
        return x.recut(x.placements, x.sizes)
    return x.recut(x.placements, x.sizes, stride=_packed(x.shape, [0, *range(2, x.ndim), 1]))


def _packed(shape, order):
    """Strides of memory without gaps, the last dim of ``order`` running fastest."""
    stride, step = [0] * len(shape), 1
    for d in reversed(order):
        stride[d] = step
        step *= max(shape[d], 1)
    return stride


@op(aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, pending=True, elementwise=True)
def like(func, x, *args, memory_format=None, **kwargs):
    return Plan((x,), in_format(x.finished(), memory_format))


@op(aten.new_zeros, aten.new_ones, aten.new_empty, aten.new_full)
def new(func, x, size, *args, **kwargs):
    """A tensor of any shape is whole on every rank; of the operand's shape, cut as the operand."""
    if tuple(size) == tuple(x.shape):
        return Plan((x,), x, lambda t, size, *a, **k: func(t, t.shape, *a, **k))
    return Plan((x,), replicated_spec(x.mesh, size))


@op(aten.new_empty_strided)
def new_strided(func, x, size, stride, *args, **kwargs):
    """Memory order is a matter of each part: autograd asks for it where a gradient is laid out unlike its tensor."""
    plan = new(func, x, size)
    shape = plan.outputs.local_shape()
    order = sorted(range(len(shape)), key=lambda d: (-stride[d], d))

    def local(t, *args, **kwargs):
        return torch.empty_strided(shape, _packed(shape, order), dtype=t.dtype, device=t.device)

    return Plan(plan.inputs, plan.outputs, local)


@op(aten.copy_)
def copy_(func, target, source, *args, **kwargs):
    return Plan((target, operand(source, target)), TARGET)
