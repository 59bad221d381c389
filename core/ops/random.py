"""Random operations: the field of :mod:`core.rng` under a key from torch's generator, the same for every cut.

The key is one draw from the default generator of the CPU (or from the one given), so ``torch.manual_seed`` governs it
and a checkpoint that recomputes draws it again. Ranks of a domain must be seeded alike.
"""

import torch
import torch.nn.functional as F

from core import rng
from core.dispatch import Plan, op
from core.errors import MissingShardPatch, ShardingError

aten = torch.ops.aten


@op(F.dropout)
def dropout(func, input, p=0.5, training=True, inplace=False):
    if not 0 <= p <= 1:
        raise ShardingError(f"a probability of {p}", op="dropout")
    if inplace and training and p:
        raise MissingShardPatch("in place", op="dropout", operands=[input], remedy="Use inplace=False.")

    def local(t, *args, **kwargs):
        return _dropped(t, input, p)[0] if training and p else t.view_as(t)

    return Plan((input,), input, local)


@op(aten.native_dropout)
def native_dropout(func, input, p, train):
    """What :func:`dropout` is inside the DTensors of another mesh."""
    drops = train is not False and p
    return Plan((input,), (input, input), lambda t, *a: _dropped(t, input, p if drops else 0.0))


def _dropped(t, spec, p):
    keep = rng.unit(rng.own_bits(rng.draw_key(), spec, t.device), torch.float32) >= p
    return t * keep * (1 / (1 - p) if p < 1 else 0.0), keep


def _like(values):
    def rule(func, x, *, dtype=None, device=None, generator=None, **kwargs):
        out = x.finished()
        return Plan((out,), out, lambda t, **k: _values(t, values, out, k.get("generator"), dtype))

    return rule


def _values(t, values, spec, generator, dtype=None):
    return values(rng.own_bits(rng.draw_key(generator), spec, t.device), dtype or t.dtype)


op(aten.rand_like)(_like(rng.unit))
op(aten.randn_like)(_like(rng.bell))


@op(aten.uniform_)
def uniform_(func, x, low=0.0, high=1.0, *, generator=None):
    def local(t, *args, generator=None):
        return t.copy_(_values(t, rng.unit, x, generator) * (high - low) + low)

    return Plan((x,), x, local)


@op(aten.normal_)
def normal_(func, x, mean=0.0, std=1.0, *, generator=None):
    def local(t, *args, generator=None):
        return t.copy_(_values(t, rng.bell, x, generator) * std + mean)

    return Plan((x,), x, local)


@op(aten.bernoulli)
def bernoulli(func, x, p=None, *, generator=None):
    """One where a uniform value is below the probability: the element's own, or ``p`` for all."""

    def local(t, *args, generator=None):
        return (_values(t, rng.unit, x, generator, torch.float32) < (t if p is None else p)).to(t.dtype)

    return Plan((x,), x, local)


@op(aten.bernoulli_.float)
def bernoulli_(func, x, p=0.5, *, generator=None):
    def local(t, *args, generator=None):
        return t.copy_(_values(t, rng.unit, x, generator, torch.float32) < p)

    return Plan((x,), x, local)
