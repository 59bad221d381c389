"""Attention by blocks: of keys, which may travel from rank to rank, and of queries, so that few scores exist at a time.

Each block of keys gives an output and the logarithm of its normaliser; blocks merge by these in fp32 or wider, so their
order does not matter, a block that is masked away counts nothing and a row that sees no key at all gives zero. Keys of
a cut sequence go round the ring, and no rank ever holds all of them; or they stay and the ranks, which all have the
same queries, merge what they found. The backward pass computes the weights again, from the total normaliser; blocks go
round once more, each together with its gradient, which ends where it belongs.
"""

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from core import collectives as c
from core import rng

ALONE = c.Group("", 1, 0)
_most_scores = 1 << 25  # in one block of queries and keys


def result_dtype(t):
    """What torch's attention of ``t`` returns, autocast or not."""
    kind = t.device.type
    if t.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return t.dtype
    return torch.get_autocast_dtype(kind)


class Dropout(NamedTuple):
    """Weights fall away by a field over the whole (.., query, key), which knows of no ranks."""

    p: float
    shape: tuple  # of all scores
    lead: tuple  # this rank's range along each leading dim

    def factor(self, key, first_query, queries, first_key, keys, like):
        ranges = (*self.lead, (first_query, first_query + queries), (first_key, first_key + keys))
        kept = rng.unit(rng.bits(key, self.shape, ranges, like.device), torch.float32) >= self.p
        return kept.to(like.dtype) / (1 - self.p) if self.p < 1 else torch.zeros_like(like)


class Call(NamedTuple):
    """One attention, beside its tensors.

    Attributes:
        scale: factor of the products.
        causal: whether a query sees only keys up to its own global position.
        first_query, first_key: global positions of the first ones at hand.
        sizes, ring: numbers of keys of all ranks, and the group around which they go.
        merge: a group of ranks with the same queries and each its own keys, or None.
        dropout: a :class:`Dropout`, or None.
    """

    scale: float
    causal: bool = False
    first_query: int = 0
    first_key: int = 0
    sizes: tuple = (0,)
    ring: c.Group = ALONE
    merge: Any = None
    dropout: Any = None


def block_attention(q, k, v, mask, call):
    """Differentiable attention of the queries at hand.

    Args:
        q: (.., heads, queries, channels).
        k, v: (.., heads, own keys, channels); their heads may be fewer and serve several of ``q``'s each.
        mask: None, boolean, or additive; broadcasts to (.., heads, queries, keys that come by).
    """
    if k.shape[:-1] != v.shape[:-1]:
        lead = torch.broadcast_shapes(*(_served(t, q).shape[:-1] for t in (k, v)))
        k, v = (_served(t, q).expand(*lead, t.shape[-1]) for t in (k, v))
    q = q.expand(*torch.broadcast_shapes(q.shape[:-2], _served(k, q).shape[:-2]), -1, -1)
    key = rng.draw_key() if call.dropout else None
    return _Attention.apply(q, k, v, mask, key, call)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, key, call):
        out, total = forward(q, k, v, mask, key, call)
        ctx.save_for_backward(q, k, v, mask, key, out, total)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        *saved, out, total = ctx.saved_tensors
        return *backward(grad, *saved, out, total, ctx.call, ctx.needs_input_grad[3]), None, None


def forward(q, k, v, mask, key, call):
    """Output, and the logarithm of each row's normaliser (.., queries, 1)."""
    wide, n = torch.promote_types(q.dtype, torch.float32), k.shape[-1]
    out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=wide)
    total = q.new_full((*q.shape[:-1], 1), float("-inf"), dtype=wide)
    with torch.autocast(q.device.type, enabled=False):
        for kv, start, _ in blocks(torch.cat([k, v], -1), call.sizes, call.ring):
            keys, values = (_served(t, q).to(wide) for t in kv.split([n, v.shape[-1]], -1))
            for at in _tiles(q, keys, start, call):
                scores = _scores(q[..., at, :].to(wide), keys, mask, at, start, call)
                before = total[..., at, :]
                merged = torch.logaddexp(before, scores.logsumexp(-1, keepdim=True))
                weights = _dropped(exponentials(scores, merged), key, at, start, call)
                out[..., at, :] = out[..., at, :] * exponentials(before, merged) + weights @ values
                total[..., at, :] = merged
    if call.merge:
        out, total = _merged(out, total, call.merge)
    return out.to(q.dtype), total


def _merged(out, total, group):
    """The outputs of several ranks' keys as that of all keys."""
    top = c.send_all_reduce(total, group, "max")
    share = exponentials(total, top)
    both = c.send_all_reduce(torch.cat([out * share, share], -1), group)
    out, share = both[..., :-1], both[..., -1:]
    return out / share.masked_fill(share == 0, 1), top + share.log()


def backward(grad, q, k, v, mask, key, out, total, call, wants_mask=False):
    """Gradients of ``q``, ``k``, ``v`` and ``mask``."""
    n, wide = k.shape[-1], total.dtype
    if call.merge:  # the ranks hold terms of the gradient of one result
        grad = c.send_all_reduce(grad, call.merge)
    grad = grad.to(wide)
    delta = (grad * out).sum(-1, keepdim=True)
    grad_q = q.new_zeros(q.shape, dtype=wide)
    grad_mask = mask.new_zeros(mask.shape, dtype=wide) if wants_mask else None
    grad_kv = k.new_zeros(*k.shape[:-1], n + v.shape[-1], dtype=wide)
    with torch.autocast(q.device.type, enabled=False):
        for kv, start, send in blocks(torch.cat([k, v], -1), call.sizes, call.ring):
            narrow = kv.split([n, v.shape[-1]], -1)
            keys, values = (_served(t, q).to(wide) for t in narrow)
            for at in _tiles(q, keys, start, call):
                wide_q, g = q[..., at, :].to(wide), grad[..., at, :]
                weights = exponentials(_scores(wide_q, keys, mask, at, start, call), total[..., at, :])
                dropped = _dropped(weights, key, at, start, call)
                factor = g @ values.mT
                if call.dropout:
                    factor = _dropped(factor, key, at, start, call)
                grad_scores = weights * (factor - delta[..., at, :])
                grad_q[..., at, :] += grad_scores @ keys * call.scale
                parts = grad_scores.mT @ wide_q * call.scale, dropped.mT @ g
                grad_kv += torch.cat([_shared(p, t) for p, t in zip(parts, narrow)], -1)
                if wants_mask:
                    part = _part(grad_mask, at, start, keys)
                    part += grad_scores.sum_to_size(part.shape)
            grad_kv = send(grad_kv)
    grad_k, grad_v = grad_kv.split([n, v.shape[-1]], -1)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_mask.to(mask.dtype) if wants_mask else None


def blocks(rows, sizes, group):
    """Rows (.., own, channels) of all ranks, own first: block, its first global row, and what sends its like on."""
    for step in range(group.size):
        source = (group.rank - step) % group.size

        def send(block, step=step):
            width = block.shape[:-2].numel() * block.shape[-1]
            held = [sizes[(r - step) % group.size] * width for r in range(group.size)]
            flat = c.ring_shift(block.reshape(-1), held, 1, group)
            return flat.view(*block.shape[:-2], sizes[(group.rank - step - 1) % group.size], block.shape[-1])

        yield rows, sum(sizes[:source]), send
        rows = send(rows) if step < group.size - 1 else rows


def _tiles(q, keys, start, call):
    """Ranges of queries that make no more scores at once than is fit, without those that see none of the keys."""
    rows = max(1, _most_scores // max(q.shape[:-2].numel() * keys.shape[-2], 1))
    for first in range(0, q.shape[-2], rows):
        stop = min(first + rows, q.shape[-2])
        if not call.causal or call.first_key + start < call.first_query + stop:
            yield slice(first, stop)


def _scores(q, keys, mask, at, start, call):
    scores = q @ keys.mT * call.scale
    if mask is not None:
        mask = _part(mask, at, start, keys)
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if call.causal:
        query = torch.arange(at.start, at.stop, device=q.device)[:, None] + call.first_query
        key = torch.arange(keys.shape[-2], device=q.device) + call.first_key + start
        scores = scores.masked_fill(key > query, float("-inf"))
    return scores


def _part(mask, at, start, keys):
    """The part of a mask that concerns a block; dims of one element serve all."""
    mask = mask[..., at, :] if mask.shape[-2] > 1 else mask
    return mask[..., start : start + keys.shape[-2]] if mask.shape[-1] > 1 else mask


def exponentials(scores, total):
    """``exp(scores - total)``, and zero where the total has no term."""
    return (scores - total.masked_fill(total == float("-inf"), 0)).exp()


def _dropped(weights, key, at, start, call):
    if call.dropout is None:
        return weights
    (queries, keys), first = weights.shape[-2:], call.first_key + start
    return weights * call.dropout.factor(key, call.first_query + at.start, queries, first, keys, weights)


def _served(x, q):
    """Keys or values with each head repeated for the heads of ``q`` that it serves."""
    if x.ndim < 3 or q.ndim < 3 or x.shape[-3] in (1, q.shape[-3]) or q.shape[-3] == 1:
        return x
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], -3)


def _shared(grad, x):
    """Transpose of :func:`_served` and of broadcasting."""
    if grad.ndim > 2 and x.ndim > 2 and x.shape[-3] not in (1, grad.shape[-3]):
        grad = grad.unflatten(-3, (x.shape[-3], -1)).sum(-3)
    return grad.sum_to_size(x.shape)
