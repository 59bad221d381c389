"""Random operations: the field of :mod:`core.rng` under a key from torch's generator, the same for every cut.

The key is one draw from the default generator of the CPU (or from the one given), so ``torch.manual_seed`` governs it
and a checkpoint that recomputes draws it again. Ranks of a domain must be seeded alike.
"""

import math

import torch
import torch.nn.functional as F

from core import rng
from core.arguments import tensors_in
from core.dispatch import TARGET, Plan, op
from core.errors import ShardingError
from core.ops.factory import in_format
from core.ops.pointwise import meet, operand
from core.writes import mutates

aten = torch.ops.aten


def _bits(spec, device, generator=None):
    return rng.own_bits(rng.draw_key(generator), spec, device)


# -- fields shaped like a tensor --------------------------------------------------------------------------------------
def _like(values):
    def rule(func, x, *bounds, dtype=None, device=None, memory_format=torch.preserve_format, **kwargs):
        out = in_format(x.finished(), memory_format)

        def local(t, *bounds, generator=None, **kwargs):
            drawn = values(_bits(out, t.device, generator), dtype or t.dtype, *bounds)
            like = torch.empty_like(t, dtype=drawn.dtype, memory_format=memory_format)
            return drawn if like.is_contiguous() else like.copy_(drawn)

        return Plan((x,), out, local)

    return rule


def _written(values):
    """Rule of an operation that fills its first argument."""

    def rule(func, x, *args, generator=None, **kwargs):
        def local(t, *args, generator=None, **kwargs):
            return t.copy_(values(_bits(x, t.device, generator), t.dtype, *args, **kwargs))

        return Plan((x,), TARGET, local)

    return rule


def _integer(bits, dtype, *bounds):
    """Whole numbers from the first bound (zero if there is one bound only) up to and without the last."""
    low, high = (0, *bounds)[-2:] if bounds else (0, None)
    if high is None:  # all that the dtype can tell apart
        high = torch.iinfo(dtype).max if not dtype.is_floating_point else round(1 / torch.finfo(dtype).eps)
    return ((bits >> 1 & (1 << 63) - 1) % (high - low) + low).to(dtype)


def _exponential(bits, dtype, rate=1.0):
    """Never zero: its logarithm is what people are after."""
    return torch.log1p(-rng.unit(bits, dtype)).clamp_(max=-torch.finfo(dtype).tiny) / -rate


op(aten.rand_like, pending=True)(_like(rng.unit))
op(aten.randn_like, pending=True)(_like(rng.bell))
op(aten.randint_like.default, aten.randint_like.generator, pending=True)(_like(_integer))
op(aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype, pending=True)(_like(_integer))
op(aten.random_)(_written(_integer))
op(aten.uniform_)(_written(lambda bits, dtype, low=0.0, high=1.0: rng.unit(bits, dtype) * (high - low) + low))
op(aten.normal_)(_written(lambda bits, dtype, mean=0.0, std=1.0: rng.bell(bits, dtype) * std + mean))
op(aten.log_normal_)(_written(lambda bits, dtype, mean=1.0, std=2.0: (rng.bell(bits, dtype) * std + mean).exp_()))
op(aten.exponential_)(_written(_exponential))
op(aten.bernoulli_.float)(_written(lambda bits, dtype, p=0.5: rng.unit(bits, torch.float32) < p))


# -- parameters that vary with the element ----------------------------------------------------------------------------
@op(aten.bernoulli, aten.bernoulli_.Tensor)
def bernoulli(func, x, p=None, *, generator=None):
    """One where a uniform value is below the probability: the element's own, or ``p``."""
    inputs = (x, operand(p, x)) if hasattr(p, "placements") else (x,)

    def local(t, p=None, *, generator=None):
        drawn = rng.unit(_bits(x, t.device, generator), torch.float32) < (t if p is None else p)
        return t.copy_(drawn) if mutates(func) else drawn.to(t.dtype)

    return Plan(inputs, TARGET if mutates(func) else x, local)


@op(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def normal(func, *args, generator=None):
    specs = tensors_in(args)
    target = meet(specs)

    def local(mean, std=1.0, *, generator=None):
        like = mean if isinstance(mean, torch.Tensor) else std
        return mean + std * rng.bell(_bits(target, like.device, generator), like.dtype)

    return Plan(tuple(operand(s, target) for s in specs), target, local)


@op(aten.multinomial)
def multinomial(func, x, samples, replacement=False, *, generator=None):
    """Rows of weights are drawn from whole, by a generator that all ranks seed with the key."""

    def local(t, samples, replacement=False, *, generator=None):
        alike = torch.Generator(t.device).manual_seed(int(rng.draw_key(generator)))
        return func(t, samples, replacement, generator=alike)

    whole = x.whole(-1)
    if whole.is_sharded():
        whole = whole.replicated()
    return Plan((whole,), whole.recut(whole.placements, whole.sizes, (*x.shape[:-1], samples)), local)


@op(aten.rrelu_with_noise, aten.rrelu_with_noise_)
def rrelu(func, x, noise, lower=1 / 8, upper=1 / 3, training=False, generator=None):
    """Negative values are scaled by ``noise``, which is drawn here and kept for the derivative."""
    if not training:
        return Plan((x, noise), TARGET if mutates(func) else x)

    def local(t, noise, *args):
        slope = rng.unit(_bits(x, t.device, generator), t.dtype) * (upper - lower) + lower
        noise.copy_(slope.masked_fill_(t > 0, 1))
        return t.mul_(noise) if mutates(func) else t * noise

    return Plan((x, operand(noise, x)), TARGET if mutates(func) else x, local)


# -- dropout ----------------------------------------------------------------------------------------------------------
@op(F.dropout)
def dropout(func, input, p=0.5, training=True, inplace=False):
    return _dropping(func, _zeroed, input, input, p, training, inplace)


@op(F.dropout1d, F.dropout2d, F.dropout3d)
def feature_dropout(func, input, p=0.5, training=True, inplace=False):
    """Channels as wholes; one sample without its batch dim has them first."""
    allowed = {F.dropout1d: (2, 3), F.dropout2d: (3, 4), F.dropout3d: (4, 5)}[func]
    if input.ndim not in allowed:
        raise ShardingError(f"wants {allowed[0]} or {allowed[1]} dims", op=func.__name__, operands=[input])
    lead = 1 if input.ndim == allowed[0] and func is not F.dropout2d else 2
    return _dropping(func, _zeroed, input, _channels(input, lead), p, training, inplace)


@op(F.alpha_dropout)
def alpha_dropout(func, input, p=0.5, training=False, inplace=False):
    return _dropping(func, _saturated, input, input, p, training, inplace)


@op(F.feature_alpha_dropout)
def feature_alpha_dropout(func, input, p=0.5, training=False, inplace=False):
    return _dropping(func, _saturated, input, _channels(input, 2), p, training, inplace)


def _dropping(func, drop, x, mask, p, training, inplace):
    if not 0 <= p <= 1:
        raise ShardingError(f"a probability of {p}", op=func.__name__)
    if not (training and p > 0):
        return Plan((x,), x, lambda t, *args, **kwargs: t.view_as(t))
    return Plan((x,), x, lambda t, *a, **k: drop(t, _kept(mask, p, t.device), p), TARGET if inplace else None)


def _kept(spec, p, device):
    return rng.unit(_bits(spec, device), torch.float32) >= p


def _channels(x, lead):
    """Spec of one value a channel: the first ``lead`` dims, the others of extent one."""
    shape = (*x.shape[:lead], *[1] * (x.ndim - lead))
    return x.reshaped(shape, {d: d for d in range(lead)})


def _zeroed(t, keep, p):
    return t * keep * (1 / (1 - p) if p < 1 else 0.0)


def _saturated(t, keep, p):
    """Dropped values become SELU's lowest; scale and shift restore mean zero and variance one."""
    if p == 1:
        return t * 0
    lowest = -1.7580993408473766
    scale = 1 / math.sqrt((1 - p) * (1 + p * lowest**2))
    return t.masked_fill(~keep, lowest) * scale - scale * lowest * p


@op(aten.native_dropout)
def native_dropout(func, input, p, train):
    """What :func:`dropout` is inside the DTensors of another mesh."""
    p = p if train is not False else 0.0

    def local(t, *args):
        keep = _kept(input, p, t.device)
        return _zeroed(t, keep, p), keep

    return Plan((input,), (input, input), local)
