"""Attention by blocks of keys, which may travel from rank to rank (:mod:`core.ops.block` computes one).

Blocks merge by the logarithms of their normalisers in fp32 or wider, so their order does not matter. Keys of a cut
sequence go round the ring, and no rank ever holds all of them; or they stay and the ranks, which all have the same
queries, merge what they found. The backward pass computes the weights again, from the total normaliser; blocks go round
once more, each together with its gradient, which ends where it belongs.
"""

from functools import partial

import torch

from core import collectives as c
from core import rng
from core.once import once_differentiable
from core.ops.block import Block, exponentials
from core.ops.kernel import served


def block_attention(q, k, v, mask, call):
    """Differentiable attention of the queries at hand.

    Args:
        q: (.., heads, queries, channels).
        k, v: (.., heads, own keys, channels); their heads may be fewer and serve several of ``q``'s each.
        mask: None, boolean, or additive; broadcasts to (.., heads, queries, keys that come by).
    """
    if k.shape[:-1] != v.shape[:-1]:
        lead = torch.broadcast_shapes(*(served(t, q).shape[:-1] for t in (k, v)))
        k, v = (served(t, q).expand(*lead, t.shape[-1]) for t in (k, v))
    q = q.expand(*torch.broadcast_shapes(q.shape[:-2], served(k, q).shape[:-2]), -1, -1)
    return _Attention.apply(q, k, v, mask, rng.draw_key() if call.dropout else None, call)


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
        return *backward(grad, *ctx.saved_tensors, ctx.call, ctx.needs_input_grad[3]), None, None


def forward(q, k, v, mask, key, call):
    """Output, and the logarithm of each row's normaliser (.., queries, 1)."""
    found, widths = None, [k.shape[-1], v.shape[-1]]
    with torch.autocast(q.device.type, enabled=False):
        for kv, start, _ in blocks(torch.cat([k, v], -1), call.sizes, call.ring):
            found = Block(call, start, mask, key).forward(found, q, *kv.split(widths, -1))
    if found is None:
        wide = torch.promote_types(q.dtype, torch.float32)
        nothing = q.new_full((*q.shape[:-1], 1), float("-inf"), dtype=wide)
        found = q.new_zeros(*q.shape[:-1], widths[1], dtype=wide), nothing
    out, total = found
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
    wide, widths = total.dtype, [k.shape[-1], v.shape[-1]]
    if call.merge:  # the ranks hold terms of the gradient of one result
        grad = c.send_all_reduce(grad, call.merge)
    grad_q, grad_kv = q.new_zeros(q.shape, dtype=wide), k.new_zeros(*k.shape[:-1], sum(widths), dtype=wide)
    grad_mask = mask.new_zeros(mask.shape, dtype=wide) if wants_mask else None
    with torch.autocast(q.device.type, enabled=False):
        for kv, start, send in blocks(torch.cat([k, v], -1), call.sizes, call.ring):
            grads = grad_q, *grad_kv.split(widths, -1)
            Block(call, start, mask, key).backward(grad, q, *kv.split(widths, -1), out, total, grads, grad_mask)
            grad_kv = send(grad_kv)()
    grad_k, grad_v = grad_kv.split(widths, -1)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_mask.to(mask.dtype) if wants_mask else None


def blocks(rows, sizes, group):
    """Rows (.., own, channels) of all ranks, own first: block, its first global row, and what sends its like on. While
    a block is computed with, the next is under way."""
    for step in range(group.size):
        source = (group.rank - step) % group.size
        send = partial(_on, sizes=sizes, group=group, step=step)
        coming = send(rows) if step < group.size - 1 else None
        yield rows, sum(sizes[:source]), send
        rows = coming and coming()


def _on(block, sizes, group, step):
    """Sends a block that has been sent ``step`` times one rank on; what is returned gives the one that comes."""
    lead, width = block.shape[:-2], block.shape[-1]
    held = [sizes[(r - step) % group.size] * lead.numel() * width for r in range(group.size)]
    coming = c.start_shift(block.reshape(-1), held, 1, group)
    return lambda: coming().view(*lead, sizes[(group.rank - step - 1) % group.size], width)
