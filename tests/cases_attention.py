"""Rows of attention over everything: masks, positions, heads that share keys, dropped weights, and who holds what."""

import math

import torch
import torch.nn.functional as F
from cases import case
from torch.distributed.tensor import Replicate, Shard
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from core import ShardTensor, rng, set_attention_strategy
from core.ops import block

Q, K = (2, 4, 7, 6), (2, 4, 9, 6)
SEQUENCE, HEADS, BATCH = (2, 2, 2), (1, 1, 1), (0, 0, 0)


def holes(g, shape):
    """A boolean mask; two of its rows see nothing."""
    mask = torch.rand(shape, generator=g) > 0.4
    mask[..., 1, :] = mask[..., -1, :] = False
    return mask


def with_strategy(name, fn):
    def run(*operands, **kwargs):
        set_attention_strategy(name)
        try:
            return fn(*operands, **kwargs)
        finally:
            set_attention_strategy("auto")

    return run


STRATEGIES = ("gather", "ring", "heads", "dealt")


def by_each(fn):
    """Results of all strategies."""
    each = [with_strategy(name, fn) for name in STRATEGIES]
    return lambda *operands: tuple(r for f in each for r in _listed(f(*operands)))


def _listed(out):
    return out if isinstance(out, tuple) else (out,)


def attention(name, shapes, cuts, cuts2=(), wires=None, make=None, around=lambda f: f, **kwargs):
    """A row of all strategies, or one for each if their messages are told."""
    fn = around(lambda q, k, v, m=None: F.scaled_dot_product_attention(q, k, v, m, **kwargs))
    rows = {"cuts2": cuts2, "make": make or {}}
    if wires is None:
        case(f"attention_{name}", by_each(fn), shapes, cuts, **rows)
    else:
        for strategy, wire in zip(STRATEGIES, wires):
            case(f"attention_{name}_{strategy}", with_strategy(strategy, fn), shapes, cuts, wire=wire, **rows)


attention(
    "sequence",
    (Q, Q, Q),
    (SEQUENCE,),
    (((0, 2),) * 3, ((1, 2),) * 3, ((2, 1),) * 3),
    (("all_gather",), ("all_to_all",), ("all_to_all",) * 4, ("all_gather", "all_to_all", "all_to_all")),
)
attention("local", (Q, K, K), (HEADS, BATCH), (((0, 1),) * 3,), ((), (), (), ()))
attention("queries_only", (Q, K, K), ((2, None, None),), (((1, 2), None, None),), ((), (), (), ()))
attention("keys_only", (Q, K, K), ((None, 2, 2), (None, 2, None), (None, None, 2), (1, 2, 2)))
attention(
    "lengths_differ", (Q, K, (2, 4, 9, 3)), (SEQUENCE, (2, 2, 1)), (((1, 2), (1, 2), (1, 2)), ((2, 1), (1, 2), (2, 0)))
)
attention("channels", (Q, K, K), ((3, 3, 3), (2, 3, 1)))
attention("causal", (Q, Q, Q), (SEQUENCE, HEADS, (2, None, None), (None, 2, 2)), (((1, 2),) * 3,), is_causal=True)
attention("causal_more_keys", (Q, K, K), (SEQUENCE,), is_causal=True, scale=0.3)
attention("causal_fewer_keys", (K, Q, Q), (SEQUENCE,), is_causal=True)
attention(
    "bool_mask",
    (Q, K, K, (7, 9)),
    ((2, 2, 2, None), (1, 1, 1, None), (None, 2, 2, None)),
    (((0, 2),) * 3 + (None,),),
    make={3: holes},
)
attention("bool_mask_cut", (Q, K, K, (2, 1, 7, 9)), ((2, 2, 2, 2), (2, 2, 2, 3), (0, 0, 0, 0)), make={3: holes})
attention(
    "bias",
    (Q, K, K, (4, 7, 9)),
    ((2, 2, 2, None), (1, 1, 1, None), (1, 1, 1, 0), (2, 2, 2, 1)),
    (((1, 2),) * 3 + (None,),),
)
attention("bias_of_keys", (Q, K, K, (2, 4, 1, 9)), ((2, 2, 2, None), (None, 2, 2, 3)))
attention(
    "grouped",
    (Q, (2, 2, 9, 6), (2, 2, 9, 6)),
    (SEQUENCE, HEADS, BATCH, (1, None, None)),
    (((1, 2),) * 3,),
    enable_gqa=True,
)
attention("shared_keys", (Q, (1, 1, 9, 6), (1, 1, 9, 6)), (SEQUENCE, (0, None, None), (1, 2, 2)))
attention("three_dims", ((3, 7, 6), (3, 9, 6), (3, 9, 6)), ((1, 1, 1), (0, 0, 0)))
attention(
    "large_scores", (Q, Q, Q), (SEQUENCE,), make={0: lambda g, s: 60 * torch.randn(s, dtype=torch.float64, generator=g)}
)
case(
    "attention_of_transposed",
    lambda x: F.scaled_dot_product_attention(
        *(x.unflatten(-1, (3, 2, 2)).unbind(2)[i].transpose(1, 2) for i in range(3))
    ),
    ((2, 7, 12),),
    ((1,),),
)


# -- masks that broadcast, and rows that see nothing -------------------------------------------------------------------
def minus_infinity(g, shape):
    """An additive mask; two of its rows and one key see nothing."""
    mask = torch.randn(shape, dtype=torch.float64, generator=g)
    mask[..., 1, :] = mask[..., -1, :] = mask[..., 3] = -math.inf
    return mask


def seen_keys(g, shape):
    """Which keys are no padding; a sample without any."""
    kept = torch.rand(shape, generator=g) > 0.4
    kept[-1] = False
    return kept


attention(
    "additive_holes", (Q, K, K, (7, 9)), ((2, 2, 2, 0), (2, 2, 2, 1), (None, 2, 2, None)), make={3: minus_infinity}
)
attention("key_padding", (Q, K, K, (2, 1, 1, 9)), ((2, 2, 2, None), (2, 2, 2, 3), (None, 2, 2, 3)), make={3: seen_keys})
attention("bias_of_rows", (Q, K, K, (4, 7, 1)), ((2, 2, 2, 1), (None, 2, 2, None), (1, 1, 1, 0)))


def every_mask(q, k, v, *masks):
    return tuple(F.scaled_dot_product_attention(q, k, v, attn_mask=m, scale=0.7) for m in masks)


case(
    "attention_masks_held_elsewhere",
    by_each(every_mask),
    (Q, K, K, (7, 9), (1, 4, 1, 9), (2, 1, 7, 9)),
    ((2, 2, 2, "R", "P", 2), (2, 2, 2, 0, 3, 3), (None, 2, 2, "R", 3, 0), (0, 0, 0, 0, 1, 0)),
    cuts2=(((2, 0), (2, 0), (2, 0), (0, 1), (3, 1), (2, 0)),),
)


# -- who holds what ----------------------------------------------------------------------------------------------------
def apart(q, k, v):
    """Queries cut along one axis and keys along another: a second mesh axis merges, the first one does nothing."""
    if isinstance(q, ShardTensor) and q.device_mesh.ndim == 2:
        q = q.redistribute(placements=[Shard(2), Replicate()])
        k, v = (t.redistribute(placements=[Replicate(), Shard(2)]) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True)


def named_masks(q, k, v):
    both = causal_lower_right(7, 9), causal_upper_left(7, 9)
    return tuple(F.scaled_dot_product_attention(q, k, v, attn_mask=m) for m in both)


case("attention_masks_by_name", named_masks, (Q, K, K), (SEQUENCE, HEADS, (None, 2, 2)))
case("attention_apart", apart, (Q, K, K), (), cuts2=(((2, 1), (1, 2), (1, 2)),))
case(
    "attention_merges",
    F.scaled_dot_product_attention,
    (Q, K, K),
    ((None, 2, 2), ("R", 2, 2)),
    wire=("all_reduce", "all_reduce"),
)
attention(
    "all_sizes_alike",
    ((4, 4, 4, 4),) * 3,
    ((None, 2, 2), (2, None, None), (1, 2, 2), (2, 2, 1)),
    (((1, 2), (2, 1), (1, 2)),),
)
FIVE = (2, 1, 4, 7, 6), (1, 3, 4, 9, 6), (1, 3, 4, 9, 6)
attention("five_dims", FIVE, ((3, 3, 3), (2, 2, 2), (None, 1, 1), (0, None, None)), (((0, 3), (1, 3), (1, 3)),))
attention("flat", ((7, 6), (9, 6), (9, 3)), ((0, 0, 0), (0, None, None), (None, 0, 0), (1, 1, 1)), is_causal=True)
attention("pending", (Q, K, K), (("P", 2, 2), (2, "P", "P"), ("R", "R", "R")))
SHARED = (2, 2, 9, 6)
attention(
    "grouped_elsewhere",
    ((2, 4, 7, 6), SHARED, (2, 1, 9, 3)),
    ((2, 2, 2), (1, 2, 2), (None, 1, None), ("R", 1, 1), (None, 2, None), (1, 1, None)),
    cuts2=(((1, 2),) * 3, ((1, 0),) * 3),
    is_causal=True,
    enable_gqa=True,
)
attention(
    "grouped_mask",
    ((2, 6, 7, 6), (2, 3, 9, 6), (2, 3, 9, 6), (6, 7, 9)),
    ((1, 1, 1, 0), (1, None, None, None), (2, 2, 2, None)),
    make={3: holes},
    enable_gqa=True,
)
attention("grouped_flat", ((4, 7, 6), (2, 9, 6), (2, 9, 6)), ((0, 0, 0), (1, 1, 1), (None, 1, 1)), enable_gqa=True)


def few_at_a_time(fn):
    """The same with so few scores at a time that every query is a block."""

    def run(*operands):
        most, block._most_scores = block._most_scores, 20
        try:
            return fn(*operands)
        finally:
            block._most_scores = most

    return run


attention("causal_tiles", (Q, K, K), (SEQUENCE, (None, 2, 2)), (((1, 2),) * 3,), is_causal=True, around=few_at_a_time)
attention("bias_tiles", (Q, K, K, (4, 7, 9)), ((2, 2, 2, 1), (None, 2, 2, None)), around=few_at_a_time)


# -- dropped weights ---------------------------------------------------------------------------------------------------
def dropping(p, **kwargs):
    """Attention on shards, and in plain torch with the whole field under the next key."""

    def fn(q, k, v, mask=None):
        if any(isinstance(t, ShardTensor) for t in (q, k, v)):
            return F.scaled_dot_product_attention(q, k, v, mask, p, **kwargs)
        if kwargs.get("enable_gqa"):
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if kwargs.get("is_causal"):
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        kept = rng.uniform(scores.shape, rng.draw_key(), q.device, torch.float32) >= p
        return scores.softmax(-1).nan_to_num(0) * kept / (1 - p) @ v

    return fn


EVERYWHERE = (SEQUENCE, HEADS, BATCH, (2, None, None), (None, 2, 2), (1, 2, 2), (3, 3, 3))
for _name, _fn in (("", lambda f: f), ("_tiles", few_at_a_time)):
    case(
        f"attention_dropout{_name}",
        _fn(dropping(0.3, is_causal=True)),
        (Q, K, K),
        EVERYWHERE,
        cuts2=(((1, 2),) * 3, ((2, 0),) * 3),
    )
case("attention_dropout_mask", dropping(0.3), (Q, K, K, (7, 9)), ((2, 2, 2, 0), (0, 0, 0, None)), make={3: holes})
case("attention_dropout_grouped", dropping(0.5, enable_gqa=True), (Q, SHARED, SHARED), ((1, 1, 1), (2, 2, 2)))
case(
    "attention_dropout_all",
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=1.0) + q * 0,
    (Q, K, K),
    (SEQUENCE, (None, 2, 2)),
)


# -- below autograd ----------------------------------------------------------------------------------------------------
def fused(causal, p=0.0):
    """Torch's fused operation for CPUs, whose backward is an operation too."""

    def fn(q, k, v, mask=None):
        if q.device.type != "cpu":
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, p, causal, attn_mask=mask)[0]

    return fn


case("attention_fused", fused(False), (Q, K, K), (HEADS, BATCH, (1, None, None)), cuts2=(((0, 1),) * 3,), wire=())
case(
    "attention_fused_sequence",
    lambda *x: (fused(True)(*x), fused(False)(*x)),
    (Q, K, K),
    (SEQUENCE, (2, None, None), (None, 2, 2), (2, 1, 2), (3, 3, 3)),
    cuts2=(((1, 2),) * 3, ((2, 1), (1, 2), (1, 2))),
)
case(
    "attention_fused_all_sizes_alike",
    fused(False),
    ((4, 4, 4, 4),) * 3,
    ((None, 2, 2), (2, None, None), (3, 2, 2)),
)
case(
    "attention_fused_mask",
    fused(False),
    (Q, K, K, (2, 1, 7, 9)),
    ((2, 2, 2, 2), (0, 0, 0, None)),
    differentiable=(0, 1, 2),
)
case(
    "attention_safe_softmax",
    lambda q, k, v: torch.ops.aten._scaled_dot_product_attention_math(q, k, v)[0],
    (Q, K, K),
    (SEQUENCE, HEADS),
)
