"""Rows of random operations: on shards they give the one field of ``core.rng``, from the same draw of the generator."""

import torch
import torch.nn.functional as F
from cases import case

from core import ShardTensor, rng

X = (2, 7, 6)
LOWEST = -1.7580993408473766  # of SELU
ALL, BOTH = ((0,), (1,), (2,)), (((1, 2),), ((2, 0),))


def field(x, values=rng.unit, dtype=None):
    """The whole field under the next key, in plain torch."""
    whole = [(0, n) for n in x.shape]
    return values(rng.bits(rng.draw_key(), x.shape, whole, x.device), dtype or x.dtype)


def probability(g, shape):
    return torch.rand(shape, dtype=torch.float64, generator=g)


def same(name, on_shards, whole, shape=X, cuts=ALL, **kwargs):
    def fn(x):
        return on_shards(x) if isinstance(x, ShardTensor) else whole(x)

    case(f"random_{name}", fn, (shape,), cuts, **{"cuts2": BOTH, "wire": (), **kwargs})


def dropped(x, p):
    return x * (field(x, dtype=torch.float32) >= p) / (1 - p)


def channels(x, p, lead=2):
    """The same channels dropped everywhere."""
    one = torch.ones(x.shape[:lead], dtype=torch.float32, device=x.device)
    return (field(one) >= p).view(*x.shape[:lead], *[1] * (x.ndim - lead))


def saturated(x, keep, p):
    """Alpha dropout as its paper writes it."""
    a = (1 - p) ** -0.5 * (1 + p * LOWEST**2) ** -0.5
    return a * (x * keep + LOWEST * (~keep).to(x.dtype)) - a * p * LOWEST


def softmax_of(x, dim, scale=1.0):
    """Softmax of the logits and the noise of Gumbel's law, which is minus the logarithm of an exponential one's."""
    return (x - (-torch.log1p(-field(x))).log() * scale).softmax(dim)


def whole_numbers(x, low, high):
    return (field(x, lambda bits, dtype: bits) >> 1 & (1 << 63) - 1) % (high - low) + low


same("dropout", lambda x: F.dropout(x, 0.3), lambda x: dropped(x, 0.3))
same("dropout_twice", lambda x: F.dropout(F.dropout(x, 0.3) + 1, 0.5), lambda x: dropped(dropped(x, 0.3) + 1, 0.5))
same(
    "dropouts_in_place",
    lambda x: (
        F.dropout(x * 1, 0.3, inplace=True),
        F.dropout1d(x * 1, 0.3, inplace=True),
        F.alpha_dropout(x * 1, 0.3, True, inplace=True),
    ),
    lambda x: (
        dropped(x, 0.3),
        x * channels(x, 0.3) / 0.7,
        saturated(x, field(x, dtype=torch.float32) >= 0.3, 0.3),
    ),
)
same("dropout_all", lambda x: F.dropout(x, 1.0), lambda x: x * 0)
same("dropout_evaluation", lambda x: F.dropout(x, 0.3, training=False), lambda x: x * 1)
same("dropout_below", lambda x: torch.native_dropout(x, 0.3, True)[0], lambda x: dropped(x, 0.3))
same(
    "alpha_dropout",
    lambda x: F.alpha_dropout(x, 0.3, training=True),
    lambda x: saturated(x, field(x, dtype=torch.float32) >= 0.3, 0.3),
)
same(
    "alpha_dropout_off",
    lambda x: (F.alpha_dropout(x, 0.3), F.alpha_dropout(x, 1.0, training=True), F.feature_alpha_dropout(x, 0.3)),
    lambda x: (x * 1, x * 0, x * 1),
)
same(
    "channels",
    lambda x: (F.dropout1d(x, 0.4), F.dropout2d(x, 0.4), F.feature_alpha_dropout(x, 0.4, training=True)),
    lambda x: (x * channels(x, 0.4) / 0.6, x * channels(x, 0.4) / 0.6, saturated(x, channels(x, 0.4), 0.4)),
)
same(
    "channels_2d",
    lambda x: (F.dropout2d(x, 0.4), F.dropout3d(x, 0.4)),
    lambda x: (x * channels(x, 0.4) / 0.6, x * channels(x, 0.4, 1) / 0.6),
    shape=(2, 5, 7, 3),
    cuts=((0,), (1,), (2,)),
)
same(
    "channels_3d",
    lambda x: F.dropout3d(x, 0.4),
    lambda x: x * channels(x, 0.4) / 0.6,
    shape=(2, 5, 7, 3, 2),
    cuts=((1,), (2,)),
)
same(
    "one_sample",
    lambda x: F.dropout1d(x, 0.4),
    lambda x: x * channels(x, 0.4, 1) / 0.6,
    shape=(9, 7),
    cuts=((0,), (1,)),
    cuts2=(((0, 1),),),
)
same(
    "rrelu",
    lambda x: (F.rrelu(x, 0.1, 0.5, training=True), F.rrelu(x * 1, 0.1, 0.5, training=True, inplace=True)),
    lambda x: tuple(torch.where(x > 0, x, x * (field(x) * 0.4 + 0.1)) for _ in range(2)),
)
same("rrelu_off", lambda x: (F.rrelu(x), F.rrelu(x * 1, inplace=True)), lambda x: (F.rrelu(x), F.rrelu(x)))
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
same(
    "whole_numbers",
    lambda x: (torch.randint_like(x, 9), torch.randint_like(x, -3, 4, dtype=torch.int64), x.new_zeros(X).random_(2, 5)),
    lambda x: (whole_numbers(x, 0, 9).to(x.dtype), whole_numbers(x, -3, 4), whole_numbers(x, 2, 5).to(x.dtype)),
)


def seeded():
    return torch.Generator().manual_seed(5)


def of_generator(x, low, high):
    bits = rng.bits(rng.draw_key(seeded()), x.shape, [(0, n) for n in x.shape], x.device)
    return ((bits >> 1 & (1 << 63) - 1) % (high - low) + low).to(x.dtype)


same(
    "whole_numbers_of_a_generator",
    lambda x: (torch.randint_like(x, 9, generator=seeded()), torch.randint_like(x, 2, 9, generator=seeded())),
    lambda x: (of_generator(x, 0, 9), of_generator(x, 2, 9)),
)
same(
    "other_laws",
    lambda x: (x.detach().clone().exponential_(2), x.detach().clone().log_normal_(0.5, 0.3)),
    lambda x: (-torch.log1p(-field(x)) / 2, (field(x, rng.bell) * 0.3 + 0.5).exp()),
)
same(
    "gumbel_softmax",
    lambda x: (F.gumbel_softmax(x, 0.7), F.gumbel_softmax(x, dim=0)),
    lambda x: (softmax_of(x / 0.7, -1, 1 / 0.7), softmax_of(x, 0)),
    wire=None,
)
same(
    "normal_of_each",
    lambda x: (torch.normal(x, 2.0), torch.normal(1.0, x.abs()), torch.normal(x, x.abs()[:, :1])),
    lambda x: (
        x.detach() + 2 * field(x, rng.bell),
        1 + x.detach().abs() * field(x, rng.bell),
        x.detach() + x.detach().abs()[:, :1] * field(x, rng.bell),
    ),
    differentiable=(),
    wire=None,
)
same(
    "bernoulli_of_each",
    lambda x: x.detach().clone().bernoulli_(x.detach()),
    lambda x: (field(x, dtype=torch.float32) < x.detach()).to(x.dtype),
    make={0: probability},
)


def drawn(x, samples, replacement):
    alike = torch.Generator(x.device).manual_seed(int(rng.draw_key()))
    return torch.multinomial(x.detach(), samples, replacement, generator=alike)


same(
    "multinomial",
    lambda x: (torch.multinomial(x.detach(), 5, True), x.detach().multinomial(3)),
    lambda x: (drawn(x, 5, True), drawn(x, 3, False)),
    shape=(4, 7),
    cuts=((0,), (1,)),
    cuts2=(((0, 1),),),
    wire=None,
    make={0: probability},
)
