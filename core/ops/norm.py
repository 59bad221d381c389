"""Normalisation: over dims that are whole it is each part's own; over cut dims two small all-reduces make it global.

Over a cut dim the mean comes first and the squares are centred on it, in fp32 or wider: sums of plain squares lose
everything where the mean is large. Every part counts by the global number of elements, so parts of any size are right.
"""

import math

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.distributed.tensor.placement_types import Shard

from core import collectives as c
from core.dispatch import Plan, op
from core.errors import ShardingError
from core.ops.pointwise import operand
from core.ops.reduction import finish_local
from core.spec import PARTIAL

aten = torch.ops.aten


class _Normalise(torch.autograd.Function):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` with the statistics over ``dims`` of all parts of ``groups``.

    ``weight`` and ``bias`` (or None) broadcast against ``x``; ``count`` is the global number of elements that share a
    statistic. Only ``x`` and the statistics are kept for the backward pass, which sends one all-reduce a group.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, dims, count, eps, groups, centred):
        wide = torch.promote_types(x.dtype, torch.float32)
        mean = _total(x.sum(dims, True, dtype=wide), groups) / count if centred else x.new_zeros((), dtype=wide)
        hat = x.to(wide) - mean
        rstd = torch.rsqrt(_total(hat.square().sum(dims, True), groups) / count + eps)
        hat *= rstd
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.call, ctx.bias = (dims, count, groups, centred), bias
        hat = hat if weight is None else hat * weight
        hat = hat if bias is None else hat + bias
        return hat.to(_result_dtype(x))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, mean, rstd = ctx.saved_tensors
        dims, count, groups, centred = ctx.call
        grad, hat = grad.to(mean.dtype), (x.to(mean.dtype) - mean) * rstd
        grad_weight = _like(grad * hat, weight) if weight is not None else None
        grad_bias = _like(grad, ctx.bias) if ctx.bias is not None else None
        grad = grad if weight is None else grad * weight
        sums = torch.stack([(grad * hat).sum(dims, True), grad.sum(dims, True)])
        along, across = _total(sums, groups) / count
        grad_x = (grad - hat * along - (across if centred else 0)) * rstd
        return grad_x.to(x.dtype), grad_weight, grad_bias, None, None, None, None, None


def _total(value, groups):
    for group in groups:
        value = c.send_all_reduce(value, group)
    return value


def _like(grad, operand):
    return grad.sum_to_size(operand.shape).to(operand.dtype)


def _result_dtype(x):
    """Torch's normalisations keep the dtype, except that CUDA's autocast runs them in fp32."""
    return torch.float32 if x.is_cuda and torch.is_autocast_enabled("cuda") else x.dtype


def _trailing(func, x, normalized_shape):
    """The last dims, over which layer and RMS norm run, and the axes that cut them."""
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if tuple(x.shape[x.ndim - len(shape) :]) != shape:
        raise ShardingError(f"normalized_shape {shape} is not the end of the shape", op=func.__name__, operands=[x])
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    return dims, [axis for axis, dim in x.cuts() if dim in dims]


def _count(x, dims):
    return math.prod(x.shape[d] for d in dims)


@op(F.layer_norm)
def layer_norm(func, x, normalized_shape, weight=None, bias=None, eps=1e-5):
    dims, axes = _trailing(func, x, normalized_shape)
    inputs = (x, *(operand(s, x) for s in (weight, bias) if s is not None))
    if not axes:
        return Plan(inputs, x)
    call = dims, _count(x, dims), eps, [c.axis_group(x.mesh, a) for a in axes], True
    return Plan(inputs, x, lambda t, shape, weight=None, bias=None, eps=eps: _Normalise.apply(t, weight, bias, *call))


@op(F.rms_norm)
def rms_norm(func, x, normalized_shape, weight=None, eps=None):
    dims, axes = _trailing(func, x, normalized_shape)
    inputs = (x, *((operand(weight, x),) if weight is not None else ()))
    if not axes:
        return Plan(inputs, x)
    count, groups = _count(x, dims), [c.axis_group(x.mesh, a) for a in axes]

    def local(t, shape, weight=None, eps=eps):
        eps = torch.finfo(torch.promote_types(t.dtype, torch.float32)).eps if eps is None else eps
        return _Normalise.apply(t, weight, None, dims, count, eps, groups, False)

    return Plan(inputs, x, local)


@op(F.group_norm)
def group_norm(func, x, num_groups, weight=None, bias=None, eps=1e-5):
    """Channels stay cut where the cut falls between groups."""
    if num_groups < 1 or x.ndim < 2 or x.shape[1] % num_groups:
        raise ShardingError(f"{num_groups} groups do not divide the channels", op="group_norm", operands=[x])
    width = x.shape[1] // num_groups
    axis = x.axis_of(1)
    if axis is not None and any(n % width for n in x.sizes[axis]):
        x, axis = x.whole(1), None
    spatial = [a for a, dim in x.cuts() if dim > 1]
    affine = [s for s in (weight, bias) if s is not None]
    if axis is not None:
        affine = [s.replicated().with_axis(axis, Shard(0), x.sizes[axis]) for s in affine]
    inputs = (x, *(affine if axis is not None else (s.replicated() for s in affine)))
    if axis is None and not spatial:
        return Plan(inputs, x)
    count, groups = width * math.prod(x.shape[2:]), [c.axis_group(x.mesh, a) for a in spatial]

    def local(t, num_groups, weight=None, bias=None, eps=eps):
        affine = [None if s is None else s.view(-1, width, 1) for s in (weight, bias)]
        grouped = t.reshape(t.shape[0], t.shape[1] // width, width, math.prod(t.shape[2:]))
        return _Normalise.apply(grouped, *affine, (2, 3), count, eps, groups, True).view(t.shape)

    return Plan(inputs, x, local)


# -- below autograd: the same for ShardTensors inside another mesh's DTensors -----------------------------------------
def _statistics(x, dims):
    """Spec of the statistics, one for each row."""
    shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
    return x.reshaped(shape, {d: d for d in range(x.ndim)})


def _whole_rows(func, x, normalized_shape):
    dims, _ = _trailing(func, x, normalized_shape)
    return x.whole(*dims), dims


@op(aten.native_layer_norm, aten._fused_rms_norm)
def norm_below(func, x, normalized_shape, *rest):
    x, dims = _whole_rows(func, x, normalized_shape)
    statistics = _statistics(x, dims)
    affine = tuple(s.replicated() for s in rest if hasattr(s, "replicated"))
    return Plan((x, *affine), (x, *(statistics,) * (len(func._schema.returns) - 1)))


@op(aten.native_layer_norm_backward, aten._fused_rms_norm_backward)
def norm_backward_below(func, grad, x, normalized_shape, *rest):
    """The gradients of weight and bias are sums over all rows, finished here."""
    x, dims = _whole_rows(func, x, normalized_shape)
    specs = [s for s in rest if hasattr(s, "replicated")]
    statistics = [_statistics(x, dims)] * (2 if func.overloadpacket is aten.native_layer_norm_backward else 1)
    affine = [s.replicated() for s in specs[len(statistics) :]]
    pending = x.replicated()
    for axis, _ in x.cuts():
        pending = pending.with_axis(axis, PARTIAL)

    def local(*args):
        grad_x, *others = func(*args)
        return grad_x, *(finish_local(g, pending) if g is not None else None for g in others)

    return Plan((x, x, *statistics, *affine), (x, *(None,) * (len(func._schema.returns) - 1)), local)
