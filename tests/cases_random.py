"""Rows of random operations: on shards they give the one field of ``core.rng``, from the same draw of the generator."""

import torch
import torch.nn.functional as F
from cases import case

from core import ShardTensor, rng

X = (2, 7, 6)
ALL, BOTH = ((0,), (1,), (2,)), (((1, 2),), ((2, 0),))


def field(x, values=rng.unit, dtype=None):
    """The whole field under the next key, in plain torch."""
    whole = [(0, n) for n in x.shape]
    return values(rng.bits(rng.draw_key(), x.shape, whole, x.device), dtype or x.dtype)


def probability(g, shape):
    return torch.rand(shape, dtype=torch.float64, generator=g)


def same(name, on_shards, whole, **kwargs):
    def fn(x):
        return on_shards(x) if isinstance(x, ShardTensor) else whole(x)

    case(f"random_{name}", fn, (X,), ALL, cuts2=BOTH, wire=(), **kwargs)


def dropped(x, p):
    return x * (field(x, dtype=torch.float32) >= p) / (1 - p)


same("dropout", lambda x: F.dropout(x, 0.3), lambda x: dropped(x, 0.3))
same("dropout_twice", lambda x: F.dropout(F.dropout(x, 0.3) + 1, 0.5), lambda x: dropped(dropped(x, 0.3) + 1, 0.5))
same("dropout_all", lambda x: F.dropout(x, 1.0), lambda x: x * 0)
same("dropout_evaluation", lambda x: F.dropout(x, 0.3, training=False), lambda x: x * 1)
same("dropout_below", lambda x: torch.native_dropout(x, 0.3, True)[0], lambda x: dropped(x, 0.3))
same("rand_like", lambda x: torch.rand_like(x), lambda x: field(x))
same("randn_like", lambda x: x * torch.randn_like(x), lambda x: x * field(x, rng.bell))
same("rand_like_float", lambda x: torch.rand_like(x, dtype=torch.float32), lambda x: field(x, dtype=torch.float32))
same("uniform", lambda x: x.detach().clone().uniform_(-1, 3), lambda x: field(x) * 4 - 1)
same("normal", lambda x: x.detach().clone().normal_(2, 3), lambda x: field(x, rng.bell) * 3 + 2)
same(
    "bernoulli",
    lambda x: torch.bernoulli(x.detach()),
    lambda x: (field(x, dtype=torch.float32) < x.detach()).to(x.dtype),
    make={0: probability},
)
same(
    "bernoulli_number",
    lambda x: x.detach().clone().bernoulli_(0.3) + x.detach().bernoulli(0.6),
    lambda x: (field(x, dtype=torch.float32) < 0.3).to(x.dtype) + (field(x, dtype=torch.float32) < 0.6),
)
