"""Attention of the queries at hand over one block of keys: output, and the logarithm of each row's normaliser.

By these two, blocks of keys merge in any order. Torch's kernels compute them where they can (:mod:`core.ops.kernel`):
without a mask or dropped weights, for blocks that are seen whole or up to the diagonal. Otherwise products in fp32 or
wider do, for few queries at a time; a row that sees no key gives zero, and minus infinity as its logarithm.
"""

from typing import Any, NamedTuple

import torch

from core import collectives as c
from core import rng
from core.ops import kernel
from core.ops.kernel import served, shared
from core.precision import autocasts

ALONE = c.Group("", 1, 0)
_most_scores = 1 << 25  # at a time


def result_dtype(t):
    """What torch's attention of ``t`` returns, autocast or not."""
    kind = t.device.type
    if t.dtype == torch.float64 or not autocasts(kind):
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

    def forward(self, found, q, k, v):
        """Output and logarithm (.., queries, 1), in fp32 or wider, merged with those that other blocks found."""
        for a, b in self._pieces(q, k):
            here = self._replace(start=self.start + a)._forward(q, k[..., a:b, :], v[..., a:b, :])
            found = here if found is None else merged(found, here)
        return found

    def backward(self, grad, q, k, v, out, total, grads, grad_mask):
        """Adds to the gradients of q, k, v and the mask, given output and logarithm over *all* keys."""
        for a, b in self._pieces(q, k):
            piece = self._replace(start=self.start + a)
            parts = grads[0], *(g[..., a:b, :] for g in grads[1:])
            piece._backward(grad, q, k[..., a:b, :], v[..., a:b, :], out, total, parts, grad_mask)

    def _pieces(self, q, k):
        """Ranges of keys that are seen, such that none begins before the first query and ends after it."""
        keys, causal = k.shape[-2], self.call.causal
        first = self.call.first_query - self.call.first_key - self.start
        last = first + q.shape[-2] if causal else keys
        ends = sorted({0, min(keys, last), first if causal and 0 < first < min(keys, last) else 0})
        return list(zip(ends, ends[1:])) if last > 0 else []

    def _forward(self, q, k, v):
        wide = torch.promote_types(q.dtype, torch.float32)
        chosen, causal = self._kernel(q, k, v)
        if chosen:
            out, total = kernel.forward(chosen, q, k, v, causal, self.call.scale)
            return out.to(wide), total.to(wide)
        out, total = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=wide), q.new_empty(*q.shape[:-1], 1, dtype=wide)
        k, v = served(k, q).to(wide), served(v, q).to(wide)
        for at in _tiles(q, k):
            scores = self._scores(q[..., at, :].to(wide), k, at)
            total[..., at, :] = here = scores.logsumexp(-1, keepdim=True)
            out[..., at, :] = self._dropped(exponentials(scores, here), at) @ v
        return out, total

    def _backward(self, grad, q, k, v, out, total, grads, grad_mask):
        wide = total.dtype
        chosen, causal = self._kernel(q, k, v)
        if chosen:
            found = kernel.backward(chosen, grad, q, k, v, out, total, causal, self.call.scale)
            for g, more, t in zip(grads, found, (q, k, v)):
                g += shared(more, t)
            return
        grad, delta = grad.to(wide), (grad.to(wide) * out).sum(-1, keepdim=True)
        keys, values = served(k, q).to(wide), served(v, q).to(wide)
        for at in _tiles(q, keys):
            queries, g = q[..., at, :].to(wide), grad[..., at, :]
            weights = exponentials(self._scores(queries, keys, at), total[..., at, :])
            grad_scores = weights * (self._dropped(g @ values.mT, at) - delta[..., at, :])
            grads[0][..., at, :] += grad_scores @ keys * self.call.scale
            grads[1].add_(shared(grad_scores.mT @ queries * self.call.scale, k))
            grads[2].add_(shared(self._dropped(weights, at).mT @ g, v))
            if grad_mask is not None:
                part = self._part(grad_mask, at, k)
                part += grad_scores.sum_to_size(part.shape)

    def _kernel(self, q, k, v):
        """Which of torch's kernels computes this piece, or None, and whether up to the diagonal."""
        call = self.call
        begin, keys = call.first_key + self.start, k.shape[-2]
        causal = call.causal and begin + keys > call.first_query + 1
        if self.mask is not None or call.dropout or (causal and (begin != call.first_query or keys != q.shape[-2])):
            return None, causal
        return kernel.choose(q, k, v, causal), causal

    # -- some queries ------------------------------------------------------------------------------------------------
    def _scores(self, q, k, at):
        scores, call = q @ k.mT * self.call.scale, self.call
        if self.mask is not None:
            mask = self._part(self.mask, at, k)
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        if call.causal:
            query = torch.arange(at.start, at.stop, device=q.device)[:, None] + call.first_query
            key = torch.arange(k.shape[-2], device=q.device) + call.first_key + self.start
            scores = scores.masked_fill(key > query, float("-inf"))
        return scores

    def _part(self, mask, at, k):
        """What of a mask concerns these queries; dims of one element serve all."""
        mask = mask[..., at, :] if mask.shape[-2] > 1 else mask
        return mask[..., self.start : self.start + k.shape[-2]] if mask.shape[-1] > 1 else mask

    def _dropped(self, weights, at):
        call, (queries, keys) = self.call, weights.shape[-2:]
        if call.dropout is None:
            return weights
        first_query, first_key = call.first_query + at.start, call.first_key + self.start
        return weights * call.dropout.factor(self.key, first_query, queries, first_key, keys, weights)


def merged(one, other):
    """Output and logarithm of two blocks as one."""
    total = torch.logaddexp(one[1], other[1])
    return one[0] * exponentials(one[1], total) + other[0] * exponentials(other[1], total), total


# -- shapes and numbers -----------------------------------------------------------------------------------------------
def _tiles(q, k):
    """Ranges of queries that make no more scores at once than is fit."""
    rows = max(1, _most_scores // max(q.shape[:-2].numel() * k.shape[-2], 1))
    for first in range(0, q.shape[-2], rows):
        yield slice(first, min(first + rows, q.shape[-2]))


def exponentials(scores, total):
    """``exp(scores - total)``, and zero where the total has no term."""
    return (scores - total.masked_fill(total == float("-inf"), 0)).exp()
