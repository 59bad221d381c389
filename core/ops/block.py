"""Attention of the queries at hand over one block of keys: output, and the logarithm of each row's normaliser.

By these two, blocks of keys merge in any order. Torch's kernel computes them where it can: without a mask or dropped
weights, for blocks that are seen whole or up to the diagonal. Otherwise products in fp32 or wider do, for few queries
at a time; a row that sees no key gives zero, and minus infinity as its logarithm.
"""

from typing import Any, NamedTuple

import torch

from core import collectives as c
from core import rng

aten = torch.ops.aten
ALONE = c.Group("", 1, 0)
_most_scores = 1 << 25  # at a time


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


class Block(NamedTuple):
    """A block of keys for the queries at hand.

    Attributes:
        call: the attention.
        start: first key, counted from the first one at hand.
        mask: None, boolean, or additive; broadcasts to (.., queries, all keys at hand).
        key: of the dropped weights, or None.
    """

    call: Call
    start: int
    mask: Any
    key: Any

    def unseen(self, queries):
        """Whether all of its keys lie after the last query."""
        call = self.call
        return call.causal and call.first_key + self.start >= call.first_query + queries

    # -- the whole block at once -------------------------------------------------------------------------------------
    def forward(self, q, k, v):
        """Output and logarithm (.., queries, 1), in fp32 or wider."""
        wide = torch.promote_types(q.dtype, torch.float32)
        if self._kernel(q, k, v):
            out, total = _fused(*_four(q, k, v), self.call.causal and self._diagonal(q, k), self.call.scale)
            return out.to(wide).view(*q.shape[:-1], -1), total.to(wide).view(*q.shape[:-1], 1)
        out, total = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=wide), q.new_empty(*q.shape[:-1], 1, dtype=wide)
        k, v = served(k, q).to(wide), served(v, q).to(wide)
        for at in _tiles(q, k):
            scores = self._scores(q[..., at, :].to(wide), k, at)
            total[..., at, :] = here = scores.logsumexp(-1, keepdim=True)
            out[..., at, :] = self._dropped(exponentials(scores, here), at) @ v
        return out, total

    def backward(self, grad, q, k, v, out, total, wants_mask):
        """Gradients of q, k, v and of the block's part of the mask, given output and logarithm over *all* keys."""
        wide = total.dtype
        if self._kernel(q, k, v):
            causal = self.call.causal and self._diagonal(q, k)
            four = _four(q, k, v)
            found = _fused_backward(grad, out, total, *four, causal, self.call.scale)
            found = [g.view(*q.shape[:-2], *g.shape[-2:]).to(wide) for g in found]
            return found[0], _shared(found[1], k), _shared(found[2], v), None
        grad, delta = grad.to(wide), (grad.to(wide) * out).sum(-1, keepdim=True)
        grad_q, grad_k, grad_v = (t.new_zeros(t.shape, dtype=wide) for t in (q, k, v))
        part = self._part(slice(None), k)
        grad_mask = part.new_zeros(part.shape, dtype=wide) if wants_mask else None
        keys, values = served(k, q).to(wide), served(v, q).to(wide)
        for at in _tiles(q, keys):
            queries, g = q[..., at, :].to(wide), grad[..., at, :]
            weights = exponentials(self._scores(queries, keys, at), total[..., at, :])
            grad_scores = weights * (self._dropped(g @ values.mT, at) - delta[..., at, :])
            grad_q[..., at, :] = grad_scores @ keys * self.call.scale
            grad_k += _shared(grad_scores.mT @ queries * self.call.scale, k)
            grad_v += _shared(self._dropped(weights, at).mT @ g, v)
            if wants_mask:
                rows = grad_mask[..., at, :] if grad_mask.shape[-2] > 1 else grad_mask
                rows += grad_scores.sum_to_size(rows.shape)
        return grad_q, grad_k, grad_v, grad_mask

    # -- some queries ------------------------------------------------------------------------------------------------
    def _scores(self, q, k, at):
        scores, call = q @ k.mT * self.call.scale, self.call
        mask = self._part(at, k)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        if call.causal:
            query = torch.arange(at.start, at.stop, device=q.device)[:, None] + call.first_query
            key = torch.arange(k.shape[-2], device=q.device) + call.first_key + self.start
            scores = scores.masked_fill(key > query, float("-inf"))
        return scores

    def _part(self, at, k):
        """What of the mask concerns these queries; dims of one element serve all."""
        mask = self.mask
        if mask is None:
            return None
        mask = mask[..., at, :] if mask.shape[-2] > 1 else mask
        return mask[..., self.start : self.start + k.shape[-2]] if mask.shape[-1] > 1 else mask

    def _dropped(self, weights, at):
        call, (queries, keys) = self.call, weights.shape[-2:]
        if call.dropout is None:
            return weights
        first_query, first_key = call.first_query + at.start, call.first_key + self.start
        return weights * call.dropout.factor(self.key, first_query, queries, first_key, keys, weights)

    # -- torch's kernel ----------------------------------------------------------------------------------------------
    def _kernel(self, q, k, v):
        """Whether torch's kernel computes this block."""
        if self.mask is not None or self.call.dropout or not q.numel() or not k.numel() or q.shape[-1] != v.shape[-1]:
            return False
        seen = not self.call.causal or self._diagonal(q, k) or self._before(k)
        return seen and (q.device.type == "cpu" or (q.element_size() == 2 and q.shape[-1] in _WIDTHS))

    def _diagonal(self, q, k):
        """Whether the keys have the positions of the queries."""
        call = self.call
        return call.first_key + self.start == call.first_query and k.shape[-2] == q.shape[-2]

    def _before(self, k):
        """Whether the first query sees every key."""
        return self.call.first_key + self.start + k.shape[-2] <= self.call.first_query + 1


_WIDTHS = range(8, 257, 8)  # channels of the kernel on GPUs


def _fused(q, k, v, causal, scale):
    kernel = aten._scaled_dot_product_flash_attention
    return (aten._scaled_dot_product_flash_attention_for_cpu if q.device.type == "cpu" else kernel)(
        q, k, v, 0.0, causal, scale=scale
    )[:2]


def _fused_backward(grad, out, total, q, k, v, causal, scale):
    grad, out = (t.to(q.dtype).reshape(q.shape).contiguous() for t in (grad, out))
    total = total.reshape(q.shape[:-1]).contiguous()
    if q.device.type == "cpu":
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(grad, q, k, v, out, total, 0.0, causal, scale=scale)
    unused, ends = torch.zeros(2, dtype=torch.uint64, device=q.device), (None, None, q.shape[-2], k.shape[-2])
    kernel = aten._scaled_dot_product_flash_attention_backward
    return kernel(grad, q, k, v, out, total, *ends, 0.0, causal, unused, unused, scale=scale)


def _four(q, k, v):
    """Operands as (batch, heads, rows, channels), keys and values with a head for each of the queries."""
    lead = q.shape[:-2]
    heads = lead[-1] if lead else 1
    return [served(t, q).expand(*lead, -1, -1).reshape(-1, heads, *t.shape[-2:]).contiguous() for t in (q, k, v)]


# -- shapes and numbers -----------------------------------------------------------------------------------------------
def _tiles(q, k):
    """Ranges of queries that make no more scores at once than is fit."""
    rows = max(1, _most_scores // max(q.shape[:-2].numel() * k.shape[-2], 1))
    for first in range(0, q.shape[-2], rows):
        yield slice(first, min(first + rows, q.shape[-2]))


def exponentials(scores, total):
    """``exp(scores - total)``, and zero where the total has no term."""
    return (scores - total.masked_fill(total == float("-inf"), 0)).exp()


def served(x, q):
    """Keys or values with each head repeated for the heads of ``q`` that it serves."""
    if x.ndim < 3 or q.ndim < 3 or x.shape[-3] in (1, q.shape[-3]) or q.shape[-3] == 1:
        return x
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], -3)


def _shared(grad, x):
    """Transpose of :func:`served` and of broadcasting."""
    if grad.ndim > 2 and x.ndim > 2 and x.shape[-3] not in (1, grad.shape[-3]):
        grad = grad.unflatten(-3, (x.shape[-3], -1)).sum(-3)
    return grad.sum_to_size(x.shape)
