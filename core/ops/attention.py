"""Attention: cut heads and batches are independent, cut queries stay, and keys go to where the queries are.

Ways for keys and values of a cut sequence (:mod:`core.ops.strategies` chooses): all of them to every rank, where
torch's attention is called, of the own rows or of rows that are dealt anew (:mod:`core.ops.dealt`); round the ring
(:mod:`core.ops.ring`), so that no rank holds more than its part; or the heads are cut instead. Where keys are cut and
queries are not, nothing travels but results: each rank attends to its own keys, and they merge.
"""

import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor.placement_types import Shard
from torch.overrides import handle_torch_function

from core import collectives as c
from core.dispatch import Plan, composed, op
from core.errors import ShardingError
from core.ops import dealt, strategies
from core.ops.block import ALONE, Call, Dropout, result_dtype
from core.ops.gathered import formula, together
from core.ops.pointwise import operand
from core.ops.ring import block_attention
from core.spec import REPLICATE, ShardTensorSpec


@composed(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Torch's masks by name are tensors without content: they are spelled out first."""
    bias = sys.modules.get("torch.nn.attention.bias")  # who has one has loaded this; it would load the compiler
    if bias and isinstance(attn_mask, bias.CausalBias):
        (rows, keys), lower = attn_mask.shape[-2:], attn_mask.variant == bias.CausalVariant.LOWER_RIGHT
        is_causal, attn_mask = is_causal or not lower, None
        if lower:
            attn_mask = torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril(keys - rows)
    tensors = [t for t in (query, key, value, attn_mask) if t is not None]
    return handle_torch_function(
        attention, tensors, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    )


def attention(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa):
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


@op(attention)
def rule(func, q, k, v, mask, dropout_p, is_causal, scale, enable_gqa):
    """A causal mask goes by global positions; a given one is cut as the scores are. Dropped weights (always by blocks)
    are the same for every cut. A row that sees no key gives zero, as torch's does."""
    at = layout(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)
    call, empty = at.call, not at.out.local_shape().numel()
    strategy = strategies.choose(at.scores, q, k, v, mask, is_causal, at.axis) if call.ring.size > 1 else None
    if strategy == "heads":
        turned = [strategies.by_heads(s, at.axis) for s in (q, k, v)]
        return rule(func, *turned, mask, dropout_p, is_causal, scale, enable_gqa)._replace(final=at.out)

    by_blocks = call.merge or call.dropout or strategy == "ring"

    def local(q, k, v, mask, *args):
        q, k, v = _of_one_type(q, k, v)
        if at.pick:
            k, v = (_picked(t, heads) for t, heads in zip((k, v), at.pick))
        if by_blocks:
            return block_attention(q, k, v, mask, call)
        if strategy == "dealt":
            return dealt.attention(q, k, v, at.scores.sizes[at.axis], call)
        if call.ring.size > 1:
            k, v = together(k, v, call.sizes, call.ring)
        if empty:
            return _nothing(at.out.local_shape(), q, k, v, *(() if mask is None else (mask,)))
        if is_causal and call.first_query:  # torch counts queries from the first key on
            last = call.first_query + q.shape[-2]
            k, v = k[..., :last, :], v[..., :last, :]
            return block_attention(q, k, v, None, call._replace(sizes=k.shape[-2:-1], ring=ALONE))
        return func(q, k, v, mask, 0.0, is_causal, scale, enable_gqa and not at.pick)

    own = strategy != "dealt" and not by_blocks and mask is None and not enable_gqa
    written = formula(call, is_causal) if own else None
    return Plan(at.inputs, at.out, local, formula=written, order_of=0)


class Layout(NamedTuple):
    """Who computes what.

    Attributes:
        inputs: specs of queries, keys, values and, if there is one, the mask.
        scores: spec of queries times keys; the last dim is cut where ranks with the same queries merge.
        out: spec of the result.
        axis: which cuts the keys, or None.
        pick: which heads of keys and of values serve the own ones of the queries, where a cut tears heads apart that
            share keys; otherwise None.
        call: the rest.
    """

    inputs: tuple
    scores: ShardTensorSpec
    out: ShardTensorSpec
    axis: int | None
    pick: list | None
    call: Call


def layout(q, k, v, mask, dropout_p, causal, scale, grouped):
    lead = _check(q, k, v, mask, dropout_p, causal, grouped)
    q, k, v = (s.aside(-1) for s in (q, k, v))
    scores = _scores(q, k, v, lead, grouped)
    keys, axis, pick = _keys(scores, k, v, grouped)
    n = scores.ndim
    out = scores.reshaped((*scores.shape[:-1], v.shape[-1]), {d: d for d in range(n - 1)})
    scale = max(q.shape[-1], 1) ** -0.5 if scale is None else scale
    call = Call(scale, causal, scores.local_range(n - 2)[0], sizes=keys[0].local_shape()[-2:-1])
    if axis is not None:
        sizes, group = keys[0].sizes[axis], c.axis_group(k.mesh, axis)
        if scores.axis_of(n - 2) == axis:
            call = call._replace(sizes=sizes, ring=group)
        else:
            call = call._replace(first_key=keys[0].local_range(-2)[0], merge=group)
            scores = scores.with_axis(axis, Shard(n - 1), sizes)
    if dropout_p:
        call = call._replace(dropout=Dropout(dropout_p, scores.shape, [scores.local_range(d) for d in range(n - 2)]))
    inputs = (operand(q, scores.whole(-1)), *keys, *((operand(mask, scores),) if mask is not None else ()))
    return Layout(inputs, scores, out, axis, pick, call)


def _check(q, k, v, attn_mask, dropout_p, is_causal, grouped):
    """The leading dims of the scores, or an error that names what does not fit."""
    say = {"op": "scaled_dot_product_attention", "operands": [q, k, v]}
    if min(s.ndim for s in (q, k, v)) < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ShardingError("shapes are not (.., queries, channels), (.., keys, channels), (.., keys, values)", **say)
    if is_causal and attn_mask is not None:
        raise ShardingError("a mask and is_causal at once", **say)
    if not 0 <= dropout_p <= 1:
        raise ShardingError(f"a probability of {dropout_p}", **say)
    heads = [s.shape[-3] if s.ndim > 2 else 1 for s in (q, k, v)]
    if grouped and any(n == 0 or heads[0] % n for n in heads[1:]):
        raise ShardingError("the heads of keys and values do not divide those of the queries", **say)
    try:
        lead = torch.broadcast_shapes(*(s.shape[: -3 if grouped else -2] for s in (q, k, v)))
        lead = (*lead, heads[0]) if grouped else lead
        scores = (*lead, q.shape[-2], k.shape[-2])
        fits = attn_mask is None or torch.broadcast_shapes(attn_mask.shape, scores) == scores
    except RuntimeError:
        fits = False
    if not fits or (attn_mask is not None and attn_mask.ndim < 2):
        raise ShardingError("leading dims or a mask that do not fit", **say | {"operands": [q, k, v, attn_mask]})
    return lead


def _of_one_type(*tensors):
    """In the type that torch computes in, before anything travels; torch itself would refuse mixed types after."""
    if len({result_dtype(t) for t in tensors}) > 1:
        raise ShardingError(f"types {[t.dtype for t in tensors]} in one attention", op="scaled_dot_product_attention")
    return [t.to(result_dtype(t)) for t in tensors]


def _picked(t, heads):
    return t.index_select(-3, torch.tensor(heads, dtype=torch.int64, device=t.device))


def _scores(q, k, v, lead, grouped):
    """Spec of queries times keys: on each axis cut as the queries, or along a leading dim of another operand."""
    shape = (*lead, q.shape[-2], k.shape[-2])
    n, placements, sizes, taken = len(shape), [], [], {len(shape) - 1}
    for axis in range(q.mesh.ndim):
        choice = (REPLICATE, None)
        for s, free in ((q, n - 1), (k, n - 2), (v, n - 2)):
            p, extents = s.placements[axis], s.sizes[axis]
            dim = p.dim + n - s.ndim if isinstance(p, Shard) else n
            if dim >= free or dim in taken:
                continue
            if grouped and dim == n - 3:
                extents = tuple(e * (shape[dim] // s.shape[p.dim]) for e in extents)
            if sum(extents) == shape[dim]:
                choice = (Shard(dim), extents)
                taken.add(dim)
                break
        placements.append(choice[0])
        sizes.append(choice[1])
    return q.recut(placements, sizes, shape)


def _keys(scores, k, v, grouped):
    """Specs of keys and values, the axis that cuts their sequence, and which of their heads serve the own ones of the
    queries, where a cut tears heads apart that share keys."""
    keys = [operand(s, scores.whole(-2)) for s in (k, v)]
    heads = scores.axis_of(-3) if grouped else None
    pick = None
    if heads is not None:
        groups = [scores.shape[-3] // s.shape[-3] for s in (k, v)]
        if any(n % g for n in scores.sizes[heads] for g in groups):
            keys = [s.with_axis(heads, REPLICATE) for s in keys]
            pick = [[head // g for head in range(*scores.local_range(-3))] for g in groups]
        else:
            parts = [tuple(n // g for n in scores.sizes[heads]) for g in groups]
            keys = [s.with_axis(heads, Shard(s.ndim - 3), n) for s, n in zip(keys, parts)]
    for s in (k, v):
        axis = s.axis_of(-2)
        if axis is not None and scores.placements[axis] in (REPLICATE, Shard(scores.ndim - 2)):
            return [t.with_axis(axis, Shard(t.ndim - 2), s.sizes[axis]) for t in keys], axis, pick
    return keys, None, pick


def _nothing(shape, *tensors):
    """An empty result whose graph holds all operands, so that their exchanges run backward on this rank too."""
    out = tensors[0].new_zeros(shape, dtype=result_dtype(tensors[0]))
    for t in tensors:
        out = out + t.flatten()[:0].sum().to(out.dtype)
    return out
