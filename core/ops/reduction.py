"""Reductions: the part's own result, then one small all-reduce over the axes whose cut was reduced away."""

import torch
from torch.distributed.tensor.placement_types import Partial

from core import collectives as c
from core.dispatch import Plan, op
from core.spec import PARTIAL

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


def _count(x, dims):
    n = 1
    for d in dims:
        n *= x.shape[d]
    return n


@op(torch.sum, torch.Tensor.sum, torch.mean, torch.Tensor.mean)
def sum_or_mean(func, x, dim=None, keepdim=False, *, dtype=None, axis=None):
    """A mean is the sum over the global count, so uneven shards count as they should."""
    dims = reduced_dims(x, dim if axis is None else axis)
    out, _ = reduced(x, dims, keepdim)
    if func in (torch.sum, torch.Tensor.sum):
        return Plan((x,), out, lambda t, *a, **k: torch.sum(t, dims, keepdim, dtype=dtype))
    count = _count(x, dims)
    return Plan((x,), out, lambda t, *a, **k: _mean(t, dims, keepdim, dtype, count))


def _mean(t, dims, keepdim, dtype, count):
    if not (dtype or t.dtype).is_floating_point and not (dtype or t.dtype).is_complex:
        raise RuntimeError(f"mean(): input dtype should be either floating point or complex, got {t.dtype}")
    return torch.sum(t, dims, keepdim, dtype=dtype) / count


@op(aten.sum, aten.mean)
def sum_below(func, x, dim=None, keepdim=False, *, dtype=None):
    dims = reduced_dims(x, dim)
    pending, axes = reduced(x, dims, keepdim)
    out = pending.finished()
    count = _count(x, dims) if func.overloadpacket is aten.mean else 1

    def local(t, *a, **k):
        value = torch.sum(t, dims, keepdim, dtype=dtype)
        return finish_local(value / count if count != 1 else value, pending)

    return Plan((x,), None if axes and out.is_replicated() else out, local)


@op(torch.amax, torch.Tensor.amax, torch.amin, torch.Tensor.amin)
def extreme(func, x, dim=(), keepdim=False):
    """Extremes: the gradient goes to all positions that attain the global extreme, shared evenly, as torch does."""
    dims = reduced_dims(x, dim)
    out, axes = reduced(x, dims, keepdim)
    low = "min" in func.__name__
    groups = [c.axis_group(x.mesh, a) for a in axes]
    return Plan((x,), out.finished(), lambda t, *a, **k: _Extreme.apply(t, dims, keepdim, low, groups))


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, dims, keepdim, low, groups):
        value = _local_extreme(t.to(torch.uint8) if t.dtype == torch.bool else t, dims, low)
        for g in groups:
            value = _extreme_of_ranks(value, g, low)
        value = value.to(t.dtype)
        ctx.save_for_backward(t, value)
        ctx.call = dims, keepdim, groups
        return value if keepdim else value.squeeze(dims)

    @staticmethod
    def backward(ctx, grad):
        t, value = ctx.saved_tensors
        dims, keepdim, groups = ctx.call
        hit = (t == value).to(grad.dtype)
        count = hit.sum(dims, keepdim=True)
        grad = grad if keepdim else grad.reshape(count.shape)
        for g in groups:
            count, grad = c.send_all_reduce(count, g), c.send_all_reduce(grad, g)
        return hit * (grad / count), None, None, None, None


def _extreme_of_ranks(value, group, low):
    """What is no number anywhere is none in the result; the wire's own minimum and maximum may lose it."""
    if not value.is_floating_point():
        return c.send_all_reduce(value, group, "min" if low else "max")
    lost = value.isnan()
    both = torch.stack([(-value if low else value).masked_fill(lost, float("-inf")), lost.to(value.dtype)])
    value, lost = c.send_all_reduce(both, group, "max")
    return (-value if low else value).masked_fill(lost > 0, float("nan"))


def _local_extreme(t, dims, low):
    if all(t.shape[d] for d in dims):
        return (torch.amin if low else torch.amax)(t, dims, keepdim=True)
    shape = [1 if d in dims else n for d, n in enumerate(t.shape)]
    info = torch.finfo(t.dtype) if t.dtype.is_floating_point else torch.iinfo(t.dtype)
    empty = (float("inf") if low else float("-inf")) if t.dtype.is_floating_point else (info.max if low else info.min)
    return t.new_full(shape, empty)


@op(aten.any, aten.all)
def truth(func, x, dim=None, keepdim=False):
    dims = reduced_dims(x, dim)
    pending, axes = reduced(x, dims, keepdim)
    which = "max" if func.overloadpacket is aten.any else "min"

    def local(t, *a, **k):
        value = func(t, *a, **k).to(torch.int32)
        for axis in axes:
            value = c.send_all_reduce(value, c.axis_group(x.mesh, axis), which)
        return value.bool()

    return Plan((x,), pending.finished(), local)


@op(torch.softmax, torch.Tensor.softmax, torch.nn.functional.softmax)
def softmax(func, x, dim=None, *args, dtype=None, **kwargs):
    return _normalised(x, dim, dtype, log=False)


@op(torch.log_softmax, torch.Tensor.log_softmax, torch.nn.functional.log_softmax)
def log_softmax(func, x, dim=None, *args, dtype=None, **kwargs):
    return _normalised(x, dim, dtype, log=True)


def _normalised(x, dim, dtype, log):
    """Over an uncut dim the parts' own softmax; over a cut one with the global maximum and sum."""
    axis = x.axis_of(dim)
    plain = torch.log_softmax if log else torch.softmax
    if axis is None:
        return Plan((x,), x, lambda t, *a, **k: plain(t, dim, dtype=dtype))
    group = c.axis_group(x.mesh, axis)

    def local(t, *a, **k):
        t = t.to(dtype or t.dtype)
        top = c.send_all_reduce(_local_extreme(t.detach(), (dim % t.ndim,), False), group, "max")
        shifted = t - top
        total = c.all_reduce(shifted.exp().sum(dim, keepdim=True), group)
        return shifted - total.log() if log else shifted.exp() / total

    return Plan((x,), x, local)


@op(aten._softmax, aten._log_softmax)
def softmax_below(func, x, dim, half_to_float):
    return Plan((x.whole(dim),), x.whole(dim))


@op(aten._softmax_backward_data, aten._log_softmax_backward_data)
def softmax_backward_below(func, grad, output, dim, dtype):
    output = output.whole(dim)
    return Plan((output, output), output)
