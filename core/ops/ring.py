"""Ring attention: keys and values travel from rank to rank, and no rank ever holds all of them.

Each block of keys gives an output and the logarithm of its normaliser; blocks merge by these in fp32 or wider, so their
order does not matter, a block that is masked away counts nothing and a row that sees no key at all gives zero. The
backward pass sends the blocks round once more, each together with its gradient, which ends where it belongs.
"""

import torch
from torch.autograd.function import once_differentiable

from core import collectives as c


def ring_attention(q, k, v, mask, scale, causal, first_query, sizes, group):
    """Attention of own queries over the keys of all ranks; holds the scores of one block at a time.

    Args:
        q: (.., heads, queries, channels).
        k, v: (.., heads, own keys, channels); their heads may be fewer and serve several of ``q``'s each.
        mask: None, boolean, or additive; broadcasts to (.., heads, queries, all keys).
        scale: factor of the products.
        causal: whether a query sees only keys up to its own global position, counted from ``first_query``.
        sizes: numbers of keys of all ranks.
    """
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))
        mask = mask.expand(*mask.shape[:-1], sum(sizes))
    return _Ring.apply(q, k, v, mask, (scale, first_query if causal else None, tuple(sizes), group))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, call):
        out, total = 0.0, None
        for kv, start, _ in _blocks(torch.cat([k, v], -1), call):
            scores = _scores(q, kv[..., : k.shape[-1]], mask, start, call)
            here = scores.logsumexp(-1, keepdim=True)
            merged = here if total is None else torch.logaddexp(total, here)
            values = _served(kv[..., k.shape[-1] :], q).to(scores.dtype)
            out = (0.0 if total is None else out * _weights(total, merged)) + _weights(scores, merged) @ values
            total = merged
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, total)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, mask, out, total = ctx.saved_tensors
        scale, n, wide = ctx.call[0], k.shape[-1], total.dtype
        grad, wide_q = grad.to(wide), q.to(wide)
        delta = (grad * out).sum(-1, keepdim=True)
        grad_q = torch.zeros_like(wide_q)
        grad_mask = torch.zeros_like(mask, dtype=wide) if ctx.needs_input_grad[3] else None
        grad_kv = torch.zeros(*k.shape[:-1], n + v.shape[-1], dtype=wide, device=k.device)
        for kv, start, send in _blocks(torch.cat([k, v], -1), ctx.call):
            keys, values = _served(kv[..., :n], q).to(wide), _served(kv[..., n:], q).to(wide)
            weights = _weights(_scores(q, kv[..., :n], mask, start, ctx.call), total)
            grad_scores = weights * (grad @ values.mT - delta)
            grad_q += (grad_scores @ keys * scale).sum_to_size(q.shape)
            grad_keys, grad_values = grad_scores.mT @ wide_q * scale, weights.mT @ grad
            grad_kv += torch.cat([_shared(grad_keys, kv[..., :n]), _shared(grad_values, kv[..., n:])], -1)
            if grad_mask is not None:
                at = slice(start, start + kv.shape[-2])
                grad_mask[..., at] += grad_scores.sum_to_size(mask[..., at].shape)
            grad_kv = send(grad_kv)
        grad_mask = grad_mask.to(mask.dtype) if grad_mask is not None else None
        return grad_q.to(q.dtype), grad_kv[..., :n].to(k.dtype), grad_kv[..., n:].to(v.dtype), grad_mask, None


def _blocks(kv, call):
    """Blocks of all ranks, own first: block, its first global key, and what sends its like to the next rank."""
    _, _, sizes, group = call
    for step in range(group.size):
        source = (group.rank - step) % group.size

        def send(block, step=step):
            width = block.shape[:-2].numel() * block.shape[-1]
            held = [sizes[(r - step) % group.size] * width for r in range(group.size)]
            flat = c.ring_shift(block.reshape(-1), held, 1, group)
            return flat.view(*block.shape[:-2], sizes[(group.rank - step - 1) % group.size], block.shape[-1])

        yield kv, sum(sizes[:source]), send
        kv = send(kv) if step < group.size - 1 else kv


def _scores(q, keys, mask, start, call):
    scale, first_query, _, _ = call
    wide, n = torch.promote_types(q.dtype, torch.float32), keys.shape[-2]
    scores = q.to(wide) @ _served(keys, q).to(wide).mT * scale
    if mask is not None:
        scores = scores + mask[..., start : start + n]
    if first_query is not None:
        query = torch.arange(q.shape[-2], device=q.device)[:, None] + first_query
        scores = scores.masked_fill(torch.arange(n, device=q.device) + start > query, float("-inf"))
    return scores


def _weights(scores, total):
    """``exp(scores - total)``, and zero where the total has no term."""
    return (scores - total.masked_fill(total == float("-inf"), 0)).exp()


def _served(x, q):
    """Keys or values with each head repeated for the heads of ``q`` that it serves."""
    if x.ndim < 3 or x.shape[-3] in (1, q.shape[-3]):
        return x
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], -3)


def _shared(grad, x):
    """Transpose of :func:`_served` and of broadcasting."""
    if grad.ndim > 2 and x.ndim > 2 and x.shape[-3] not in (1, grad.shape[-3]):
        grad = grad.unflatten(-3, (x.shape[-3], -1)).sum(-3)
    return grad.sum_to_size(x.shape)
