"""Reductions that are sums and products: the part's own result, then one small all-reduce over the axes whose cut was
reduced away. Also what all reductions share: which dims, and how the result is cut."""

import math

import torch
from torch.distributed.tensor.placement_types import Partial

from core import collectives as c
from core.dispatch import Plan, op
from core.errors import ShardingError
from core.spec import PARTIAL, REPLICATE

aten = torch.ops.aten


def finish_local(local, spec):
    """Carries out the pending sums of ``spec`` on a local tensor."""
    for axis, p in enumerate(spec.placements):
        if isinstance(p, Partial):
            local = c.send_all_reduce(local, c.axis_group(spec.mesh, axis))
    return local


def reduced_dims(x, dim):
    if dim is None or (isinstance(dim, (tuple, list)) and len(dim) == 0):
        return tuple(range(x.ndim))
    dims, n = (dim,) if isinstance(dim, int) else tuple(dim), max(x.ndim, 1)
    for d in dims:
        if not -n <= d < n:
            raise IndexError(f"Dimension out of range (expected to be in range of [{-n}, {n - 1}], but got {d})")
    return tuple(d % n for d in dims)


def reduced(x, dims, keepdim):
    """Spec of the result, pending on the axes whose dim is reduced, and those axes."""
    shape, to = [], {}
    for d in range(x.ndim):
        if d not in dims:
            to[d] = len(shape)
            shape.append(x.shape[d])
        elif keepdim:
            shape.append(1)
    axes = tuple(axis for axis, d in x.cuts() if d in dims)
    out = x.reshaped(shape, to)
    for axis in axes:
        out = out.with_axis(axis, PARTIAL)
    return out, axes


def groups_of(x, axes):
    return [c.axis_group(x.mesh, axis) for axis in axes]


def count_of(x, dims):
    return math.prod(x.shape[d] for d in dims if d < x.ndim)


def squeezed(value, dims, keepdim):
    """A result with its reduced dims dropped, unless they are to be kept."""
    return value if keepdim or not value.ndim else value.squeeze(dims)


# -- sums and means: of a pending sum the sum is pending too -----------------------------------------------------------
@op(torch.sum, torch.Tensor.sum, torch.mean, torch.Tensor.mean, pending=True)
def sum_or_mean(func, x, dim=None, keepdim=False, *, dtype=None, axis=None):
    """A mean is the sum over the global count, so uneven shards count as they should."""
    x = x if dtype is None else x.finished()  # a change of dtype may be no linear function
    dims = reduced_dims(x, dim if axis is None else axis)
    out, _ = reduced(x, dims, keepdim)
    if func in (torch.sum, torch.Tensor.sum):
        return Plan((x,), out, lambda t, *a, **k: torch.sum(t, dims, keepdim, dtype=dtype))
    count = count_of(x, dims)
    return Plan((x,), out, lambda t, *a, **k: _mean(t, dims, keepdim, dtype, count))


def _mean(t, dims, keepdim, dtype, count):
    """Added up and divided in fp32 or wider: half precision may not hold the sum."""
    dtype = dtype or t.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        raise ShardingError(f"a mean of {dtype} is none of its numbers", op="mean", remedy="Give a dtype.")
    return (torch.sum(t, dims, keepdim, dtype=torch.promote_types(dtype, torch.float32)) / count).to(dtype)


@op(aten.sum, aten.mean, aten.nansum, pending=True)
def sum_below(func, x, dim=None, keepdim=False, *, dtype=None):
    kind = func.overloadpacket
    x = x if dtype is None and kind is not aten.nansum else x.finished()
    dims = reduced_dims(x, dim)
    out, axes = reduced(x, dims, keepdim)
    for axis in axes:
        out = out.with_axis(axis, REPLICATE)
    count, groups = count_of(x, dims), groups_of(x, axes)
    add = torch.nansum if kind is aten.nansum else torch.sum

    def local(t, *a, **k):
        mean = kind is aten.mean
        value = _mean(t, dims, keepdim, dtype, count) if mean else add(t, dims, keepdim, dtype=dtype)
        for group in groups:
            value = c.send_all_reduce(value, group)
        return value

    return Plan((x,), None if axes and out.is_replicated() else out, local)


@op(aten.count_nonzero)
def count_nonzero(func, x, dim=None):
    out, _ = reduced(x, reduced_dims(x, dim), False)
    return Plan((x,), out.finished(), lambda t, *a, **k: finish_local(func(t, *a, **k), out))


@op(torch.trace, torch.Tensor.trace)
def trace(func, x):
    if x.ndim != 2:
        raise ShardingError("not a matrix", op="trace", operands=[x])
    out, _ = reduced(x, (0, 1), False)
    offset = x.local_range(0)[0] - x.local_range(1)[0]
    return Plan((x,), out, lambda t: t.diagonal(offset).sum())


@op(aten.any, aten.all)
def truth(func, x, dim=None, keepdim=False):
    if isinstance(dim, (tuple, list)) and not dim:  # torch reduces nothing then
        return Plan((x,), x)
    pending, axes = reduced(x, reduced_dims(x, dim), keepdim)
    which, groups = "max" if func.overloadpacket is aten.any else "min", groups_of(x, axes)

    def local(t, *a, **k):
        value = func(t, *a, **k)
        dtype, value = value.dtype, value.to(torch.int32)
        for group in groups:
            value = c.send_all_reduce(value, group, which)
        return value.to(dtype)

    return Plan((x,), pending.finished(), local)


@op(torch.prod, torch.Tensor.prod)
def prod(func, x, dim=None, keepdim=False, *, dtype=None, axis=None):
    """The product of the parts' products. These are gathered, one a rank, and multiplied by torch, whose gradient is
    right where one of them is zero."""
    dim = dim if axis is None else axis
    dims = reduced_dims(x, dim)
    out, axes = reduced(x, dims, keepdim)
    groups = groups_of(x, axes)

    def local(t, *a, **k):
        value = torch.prod(t, dtype=dtype) if dim is None else torch.prod(t, dims[0], keepdim, dtype=dtype)
        for group in groups:
            value = torch.prod(c.gather(value.unsqueeze(0), 0, (1,) * group.size, group), 0)
        return value

    return Plan((x,), out.finished(), local)
