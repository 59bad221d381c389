"""Attention: cut heads and batches are independent, cut queries stay, and keys go to where the queries are.

Two ways for keys and values of a cut sequence: ``gather`` brings them all to every rank and calls torch's attention
(exact as that, and simple); ``ring`` sends them round (:mod:`core.ops.ring`), so that no rank holds more than its part.
"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor.placement_types import Shard

from core import collectives as c
from core.dispatch import Plan, op
from core.errors import MissingShardPatch, ShardingError
from core.ops.pointwise import operand
from core.ops.ring import ring_attention
from core.spec import REPLICATE

_strategy = "gather"


def set_strategy(name):
    """How keys of a cut sequence reach the queries: ``"gather"`` (fastest while they fit) or ``"ring"``."""
    global _strategy
    if name not in ("gather", "ring"):
        raise ShardingError(f"unknown strategy {name!r}", op="attention", remedy="Use 'gather' or 'ring'.")
    _strategy = name


@op(F.scaled_dot_product_attention, names=("query", "key", "value"))
def attention(func, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """A causal mask goes by global positions; a given one is cut as the queries are."""
    _check(q, k, v, attn_mask, dropout_p, is_causal)
    scores = _scores(q, () if enable_gqa else (k, v), k.shape[-2])
    scores, keys, axis = _keys(scores, k, v, enable_gqa)
    n = scores.ndim
    out = scores.reshaped((*scores.shape[:-1], v.shape[-1]), {d: d for d in range(n - 1)})
    inputs = (operand(q, scores), *keys, *((operand(attn_mask, scores),) if attn_mask is not None else ()))
    first, scale = scores.local_range(n - 2)[0], q.shape[-1] ** -0.5 if scale is None else scale
    travel = (keys[0].sizes[axis], c.axis_group(k.mesh, axis)) if axis is not None else None

    def local(q, k, v, attn_mask=None, *args, **kwargs):
        if travel and _strategy == "ring":
            return ring_attention(q, k, v, attn_mask, scale, is_causal, first, *travel)
        if travel:
            k, v = _gathered(k, v, *travel)
        if not out.local_shape().numel():
            return _nothing(out.local_shape(), q, k, v, *(() if attn_mask is None else (attn_mask,)))
        if is_causal:
            last = first + q.shape[-2]
            k, v = k[..., :last, :], v[..., :last, :]
            attn_mask = _up_to(first, last, k.shape[-2], q.device) if first else None
        return func(q, k, v, attn_mask, 0.0, is_causal and not first, scale=scale, enable_gqa=enable_gqa)

    return Plan(inputs, out, local)


def _check(q, k, v, attn_mask, dropout_p, is_causal):
    say = {"op": "scaled_dot_product_attention", "operands": [q, k, v]}
    if min(s.ndim for s in (q, k, v)) < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ShardingError("shapes are not (.., queries, channels), (.., keys, channels), (.., keys, values)", **say)
    if is_causal and attn_mask is not None:
        raise ShardingError("a mask and is_causal at once", **say)
    if dropout_p:
        raise MissingShardPatch("dropout of weights", remedy="Use dropout_p=0 and drop elements of the output.", **say)


def _scores(q, others, keys):
    """Spec of queries times keys: on each axis cut as the queries, or along a leading dim of another operand."""
    lead = torch.broadcast_shapes(q.shape[:-2], *(s.shape[:-2] for s in others))
    shape = (*lead, q.shape[-2], keys)
    n, placements, sizes, taken = len(shape), [], [], {len(shape) - 1}
    for axis, (p, extents) in enumerate(zip(q.placements, q.sizes)):
        choice = (REPLICATE, None)
        for s, free in ((q, n - 1), *((s, n - 2) for s in others)):
            p, extents = s.placements[axis], s.sizes[axis]
            dim = p.dim + n - s.ndim if isinstance(p, Shard) else n
            if dim < free and dim not in taken and s.shape[p.dim] == shape[dim]:
                choice = (Shard(dim), extents)
                taken.add(dim)
                break
        placements.append(choice[0])
        sizes.append(choice[1])
    return q._new(placements, sizes, shape)


def _keys(scores, k, v, grouped):
    """Specs of keys and values, and the axis that cuts their sequence; ``scores`` with whole heads where groups of
    heads that share keys would be torn apart."""
    heads = scores.axis_of(-3) if grouped else None
    if heads is not None and any(n * s.shape[-3] % scores.shape[-3] for n in scores.sizes[heads] for s in (k, v)):
        scores, heads = scores.whole(-3), None
    keys = [operand(s, scores.whole(-2)) for s in (k, v)]
    if heads is not None:
        parts = [tuple(n * s.shape[-3] // scores.shape[-3] for n in scores.sizes[heads]) for s in (k, v)]
        keys = [s.with_axis(heads, Shard(s.ndim - 3), n) for s, n in zip(keys, parts)]
    for s in (k, v):
        axis = s.axis_of(-2)
        if axis is not None and scores.placements[axis] in (REPLICATE, Shard(scores.ndim - 2)):
            return scores, [t.with_axis(axis, Shard(t.ndim - 2), s.sizes[axis]) for t in keys], axis
    return scores, keys, None


def _gathered(k, v, sizes, group):
    """Keys and values in one message where they have the same shape but for the last dim."""
    if k.shape[:-1] != v.shape[:-1] or k.dtype != v.dtype:
        return tuple(c.gather(t, t.ndim - 2, sizes, group) for t in (k, v))
    return c.gather(torch.cat([k, v], -1), k.ndim - 2, sizes, group).split([k.shape[-1], v.shape[-1]], -1)


def _up_to(first, last, keys, device):
    return torch.arange(keys, device=device) <= torch.arange(first, last, device=device)[:, None]


def result_dtype(t):
    """What torch's attention of ``t`` returns, autocast or not."""
    kind = t.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else t.dtype


def _nothing(shape, *tensors):
    """An empty result whose graph holds all operands, so that their exchanges run backward on this rank too."""
    out = tensors[0].new_zeros(shape, dtype=result_dtype(tensors[0]))
    for t in tensors:
        out = out + t.flatten()[:0].sum().to(out.dtype)
    return out
