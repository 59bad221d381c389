"""Largest and smallest values and where they are: extremes of the parts, then of the ranks.

What is no number wins as it does in torch. Indices are global, and of equal values the first counts: of the positions
that attain the global extreme the smallest index is taken, by one more small all-reduce.
"""

from functools import wraps

import torch

from core import collectives as c
from core.above import above
from core.dispatch import Plan, composed, op
from core.errors import ShardingError
from core.ops.reduction import count_of, groups_of, reduced, reduced_dims, squeezed

aten = torch.ops.aten
_NOWHERE = torch.iinfo(torch.int64).max


def extreme_of_parts(t, dims, low, groups):
    """The extreme over ``dims`` (kept) of all parts."""
    value = _extreme_of_part(t.to(torch.uint8) if t.dtype == torch.bool else t, dims, low)
    for group in groups:
        value = _extreme_of_ranks(value, group, low)
    return value.to(t.dtype)


def _extreme_of_part(t, dims, low):
    if all(t.shape[d] for d in dims if d < t.ndim):
        return (torch.amin if low else torch.amax)(t, dims, keepdim=True)
    shape = [1 if d in dims else n for d, n in enumerate(t.shape)]
    info = torch.finfo(t.dtype) if t.dtype.is_floating_point else torch.iinfo(t.dtype)
    empty = (float("inf") if low else float("-inf")) if t.dtype.is_floating_point else (info.max if low else info.min)
    return t.new_full(shape, empty)


def _extreme_of_ranks(value, group, low):
    """What is no number anywhere is none in the result; the wire's own minimum and maximum may lose it."""
    if not value.is_floating_point():
        return c.send_all_reduce(value, group, "min" if low else "max")
    lost = value.isnan()
    both = torch.stack([(-value if low else value).masked_fill(lost, float("-inf")), lost.to(value.dtype)])
    value, lost = c.send_all_reduce(both, group, "max")
    return (-value if low else value).masked_fill(lost > 0, float("nan"))


def _low(func):
    return "min" in func.__name__


def _over(func, x, dim, keepdim):
    """Reduced dims, spec of the result, and the axes that cut a reduced dim."""
    dims = reduced_dims(x, dim)
    if not count_of(x, dims):
        raise ShardingError("no values to choose from", op=func.__name__, operands=[x])
    return dims, *reduced(x, dims, keepdim)


@op(aten.amax, aten.amin, aten.max.default, aten.min.default)
def extreme(func, x, dim=(), keepdim=False):
    """Torch's own derivative shares the gradient among all positions that attain the extreme."""
    dims, out, axes = _over(func, x, dim, keepdim)
    if not axes:
        return Plan((x,), out)
    low, groups = _low(func), groups_of(x, axes)

    def local(t, *a, **k):
        return squeezed(extreme_of_parts(t, dims, low, groups), dims, keepdim)

    return Plan((x,), out.finished(), local)


@op(aten.aminmax)
def aminmax(func, x, *, dim=None, keepdim=False):
    dims, out, axes = _over(func, x, dim, keepdim)
    groups = groups_of(x, axes)

    def local(t, **k):
        return tuple([squeezed(extreme_of_parts(t, dims, low, groups), dims, keepdim) for low in (True, False)])

    return Plan((x,), (out.finished(),) * 2, local if axes else None)


# -- with indices -----------------------------------------------------------------------------------------------------
def _found(t, dim, low, place, groups):
    """Extreme along ``dim`` (kept) of all parts and its smallest global index; ``place`` makes local ones global."""
    t = t.detach()
    best = extreme_of_parts(t, (dim,), low, groups)
    if t.ndim and not t.shape[dim]:
        index = torch.full_like(best, _NOWHERE, dtype=torch.int64)
    else:
        mine, at = (torch.min if low else torch.max)(t, dim, keepdim=True)
        index = place(at).masked_fill((mine != best) & ~((mine != mine) & (best != best)), _NOWHERE)
    for group in groups:
        index = c.send_all_reduce(index, group, "min")
    return best, index


@op(aten.argmax, aten.argmin)
def argument(func, x, dim=None, keepdim=False):
    """Without a dim the index is that of the flattened whole."""
    dims, out, axes = _over(func, x, dim, keepdim)
    if not axes:
        return Plan((x,), out)
    low, groups = _low(func), groups_of(x, axes)
    starts = [x.local_range(d)[0] for d in range(x.ndim)]

    def local(t, *a, **k):
        if dim is not None:
            index = _found(t, dims[0], low, lambda at: at + starts[dims[0]], groups)[1]
            return squeezed(index, dims, keepdim)
        index = _found(t.reshape(-1), 0, low, lambda at: _flat_index(at, t.shape, starts, x.shape), groups)[1]
        return index.view(out.shape)

    return Plan((x,), out.finished(), local)


def _flat_index(at, shape, starts, whole):
    """Index in the flattened whole of index ``at`` in the flattened part."""
    index, step = 0, 1
    for n, start, total in reversed(list(zip(shape, starts, whole))):
        index = index + (at % n + start) * step
        at, step = at // n, step * total
    return index


class _Chosen(torch.autograd.Function):
    """A value that all ranks know already; its gradient goes to the position ``at`` of the part that holds it."""

    @staticmethod
    def forward(ctx, t, value, index, dim, start, groups):
        ctx.save_for_backward(index)
        ctx.call = t.shape, dim, start, groups
        return value

    @staticmethod
    def backward(ctx, grad):
        (index,), (shape, dim, start, groups) = ctx.saved_tensors, ctx.call
        for group in groups:
            grad = c.all_reduce(grad, group)
        at, n = index - start, shape[dim]
        if n:
            here = (at >= 0) & (at < n)
            grad = grad.new_zeros(shape).scatter(dim, at.clamp(0, n - 1), grad.where(here, 0))
        else:
            grad = grad.narrow(dim, 0, 0)
        return grad, None, None, None, None, None


@op(aten.max.dim, aten.min.dim)
def extreme_along(func, x, dim, keepdim=False):
    """Values and indices along one dim."""
    dims, out, axes = _over(func, x, dim, keepdim)
    (d,) = dims
    if not axes:
        return Plan((x,), (out, out))
    low, groups, start = _low(func), groups_of(x, axes), x.local_range(d)[0]

    def local(t, *a, **k):
        value, index = _found(t, d, low, lambda at: at + start, groups)
        value = _Chosen.apply(t, value, index, d, start, groups)
        return squeezed(value, dims, keepdim), squeezed(index, dims, keepdim)

    return Plan((x,), (out.finished(),) * 2, local)


def _with_dim(function):
    """The form of torch.max and torch.min that takes a dim, as a function with a rule of its own."""

    @wraps(function)
    def along(*args, **kwargs):
        return function(*args, **kwargs)

    op(along)(extreme_along)
    return lambda *args, **kwargs: above(along, (), args, kwargs)


def _three_forms(along, of_all, of_two):
    """torch.max and torch.min: along a dim with indices, of everything, or of two tensors, by their arguments."""

    def call(input, dim=None, *args, axis=None, other=None, **kwargs):
        dim = dim if axis is None else axis
        if isinstance(dim, int):
            return along(input, dim, *args, **kwargs)
        other = dim if other is None else other
        return of_all(input, **kwargs) if other is None else of_two(input, other, **kwargs)

    return call


for _f, _all, _two in (
    (torch.max, aten.max.default, torch.maximum),
    (torch.Tensor.max, aten.max.default, torch.maximum),
    (torch.min, aten.min.default, torch.minimum),
    (torch.Tensor.min, aten.min.default, torch.minimum),
):
    composed(_f)(_three_forms(_with_dim(_f), _all, _two))
