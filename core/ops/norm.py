"""Layer, RMS, group and local response norm: over dims that are whole each part's own, a direct call of the plain
function; over cut dims by small all-reduces, or by the channels next to the part's own."""

import math

import torch
import torch.nn.functional as F
from torch.distributed.tensor.placement_types import Shard

from core import collectives as c
from core.alone import alone
from core.dispatch import Plan, op
from core.errors import ShardingError
from core.formulas import LAYER_NORM, RMS_NORM, is_of_rows, like
from core.kernels.column_operators import has_norm_kernel
from core.ops.halo import fetch
from core.ops.normalise import Normalise, Over, OverBlocks
from core.ops.pointwise import operand
from core.ops.reduction import count_of, finish_local
from core.precision import autocasts, widens
from core.spec import PARTIAL

aten = torch.ops.aten


def _result_dtype(x, norm="layer_norm"):
    """Torch's normalisations keep the dtype, except that CUDA's autocast runs those of half precision in fp32."""
    kind = x.device.type
    wide = widens(kind, norm) and autocasts(kind) and x.dtype != torch.float64
    return torch.float32 if wide else x.dtype


def _trailing(func, x, normalized_shape):
    """The last dims, over which layer and RMS norm run, and the axes that cut them."""
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if tuple(x.shape[x.ndim - len(shape) :]) != shape:
        raise ShardingError(f"normalized_shape {shape} is not the end of the shape", op=func.__name__, operands=[x])
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    return dims, [axis for axis, dim in x.cuts() if dim in dims]


def layer_norm_of_parts(t, shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    """``F.layer_norm`` of plain tensors, with weights of any dtype where there is no autocast; by its kernel."""
    if autocasts(t.device.type):
        return torch.layer_norm(t, shape, weight, bias, eps, cudnn_enable)

    def has_kernel():  # the formula wants a weight if there is a bias
        return is_of_rows(t, shape, weight, bias) and has_norm_kernel(t) and (weight is not None or bias is None)

    return alone(LAYER_NORM, _layer_norm, has_kernel, t, shape, weight, bias, eps)


def rms_norm_of_parts(t, shape, weight=None, eps=None):
    """``F.rms_norm`` of plain tensors, alike."""
    if autocasts(t.device.type):
        return torch.rms_norm(t, shape, weight, eps)

    def has_kernel():
        return is_of_rows(t, shape, weight) and has_norm_kernel(t)

    return alone(RMS_NORM, _rms_norm, has_kernel, t, shape, weight, eps)


def _layer_norm(t, shape, weight, bias, eps):
    return torch.layer_norm(t, shape, like(t, weight), like(t, bias), eps)


def _rms_norm(t, shape, weight, eps):
    return torch.rms_norm(t, shape, like(t, weight), eps)


@op(F.layer_norm, torch.layer_norm, names=("input", "normalized_shape", "weight", "bias", "eps"))
def layer_norm(func, x, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    dims, axes = _trailing(func, x, normalized_shape)
    inputs = (x, *(operand(s, x) for s in (weight, bias) if s is not None))
    if not axes:
        formula = LAYER_NORM if weight is not None or bias is None else None
        return Plan(inputs, x, layer_norm_of_parts, formula=formula)
    over = Over(dims, count_of(x, dims), [c.axis_group(x.mesh, a) for a in axes])

    def local(t, shape, weight=None, bias=None, *args, **kwargs):
        return Normalise.apply(t, weight, bias, over, eps, True, _result_dtype(t))[0]

    return Plan(inputs, x, local)


@op(F.rms_norm, torch.rms_norm, names=("input", "normalized_shape", "weight", "eps"))
def rms_norm(func, x, normalized_shape, weight=None, eps=None):
    dims, axes = _trailing(func, x, normalized_shape)
    inputs = (x, *((operand(weight, x),) if weight is not None else ()))
    if not axes:
        formula = RMS_NORM if is_of_rows(x, normalized_shape, weight) else None
        return Plan(inputs, x, rms_norm_of_parts, formula=formula)
    over = Over(dims, count_of(x, dims), [c.axis_group(x.mesh, a) for a in axes])

    def local(t, shape, weight=None, eps=eps):
        eps = torch.finfo(torch.promote_types(t.dtype, torch.float32)).eps if eps is None else eps
        return Normalise.apply(t, weight, None, over, eps, False, _result_dtype(t, "rms_norm"))[0]

    return Plan(inputs, x, local)


@op(F.group_norm, torch.group_norm, names=("input", "num_groups", "weight", "bias", "eps"))
def group_norm(func, x, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True):
    """A group whose channels lie on several ranks has sums of several ranks, as one whose space does."""
    if num_groups < 1 or x.ndim < 2 or x.shape[1] % num_groups:
        raise ShardingError(f"{num_groups} groups do not divide the channels", op="group_norm", operands=[x])
    width, axis = x.shape[1] // num_groups, x.axis_of(1)
    split = axis is not None and any(n % width for n in x.sizes[axis])
    axes = [a for a, dim in x.cuts() if dim > 1 or dim == 1 and split]
    affine = tuple(along_channels(x, s) for s in (weight, bias) if s is not None)
    if axis is None and not axes:
        return Plan((x, *affine), x)
    count, groups = width * math.prod(x.shape[2:]), [c.axis_group(x.mesh, a) for a in axes]
    first, last = x.local_range(1)
    over = Over((2, 3), count, groups)
    if split:
        over = OverBlocks(first, last - first, width, num_groups, count, groups)

    def local(t, num_groups, weight=None, bias=None, *args, **kwargs):
        shape = (last - first,) if split else ((last - first) // width, width)
        affine = [None if s is None else s.view(*shape, 1) for s in (weight, bias)]
        grouped = t.reshape(t.shape[0], *shape, math.prod(t.shape[2:]))
        return Normalise.apply(grouped, *affine, over, eps, True, _result_dtype(t))[0].view(t.shape)

    return Plan((x, *affine), x, local)


def along_channels(x, spec):
    """How a vector of one number a channel must be cut to meet ``x``."""
    axis = x.axis_of(1)
    spec = spec.replicated()
    return spec if axis is None else spec.with_axis(axis, Shard(0), x.sizes[axis])


@op(F.local_response_norm)
def local_response_norm(func, x, size, alpha=1e-4, beta=0.75, k=1.0):
    """Channels that are cut are fetched from both sides; none beyond the edges count as zero, as the plain padding."""
    if x.ndim < 3 or size < 1:
        raise ShardingError(f"size {size}", op="local_response_norm", operands=[x])
    axis = x.axis_of(1)
    if axis is None:
        return Plan((x,), x)
    ends, group = x.offsets(axis), c.axis_group(x.mesh, axis)
    before, after = size // 2, (size - 1) // 2
    ranges = tuple((a - before, b + after) if a < b else (0, 0) for a, b in zip(ends, ends[1:]))

    def local(t, *args, **kwargs):
        wide = fetch(t, 1, x.sizes[axis], ranges, group)
        y = func(wide, size, alpha, beta, k)
        return y.narrow(1, before if t.shape[1] else 0, t.shape[1])

    return Plan((x,), x, local)


# -- below autograd: the same for ShardTensors inside another mesh's DTensors -----------------------------------------
def _statistics(x, dims):
    """Spec of the statistics, one for each row."""
    shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
    return x.reshaped(shape)


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
