"""Attention with all keys at hand: keys and values of a cut sequence come in one message, the kernels of torch compute.

Rows are the outermost dim of the message, so the parts of the ranks follow each other in memory and nothing is copied
when they have come; kernels take keys by any stride. The derivative is written out (:mod:`core.formulas`), without a
graph of our own around it, unless torch was told to use plain products alone.
"""

import torch
from torch.backends import cuda

from core import collectives as c
from core.formulas import Formula
from core.ops import kernel
from core.ops.block import ALONE, Block


def together(k, v, sizes, group):
    """Keys and values of all ranks, in one message where they have the same shape. Differentiable."""
    if group.size == 1:
        return k, v
    gathered = _Gathered.apply if torch.is_grad_enabled() else _gathered
    if k.shape != v.shape:
        return tuple(gathered(t.movedim(-2, 0), sizes, group).movedim(0, -2) for t in (k, v))
    return _apart(gathered(_stacked(k, v), sizes, group))


def _gathered(x, sizes, group):
    return c.send_gather(x, 0, sizes, group)


def _stacked(k, v):
    """(keys, 2, .., channels)"""
    return torch.stack([t.movedim(-2, 0) for t in (k, v)], 1)


def _apart(both):
    return tuple(t.movedim(0, -2) for t in both.unbind(1))


class _Gathered(torch.autograd.Function):
    """All rows. Backward: each rank sums the gradients of its own, in fp32 if they are of half precision."""

    @staticmethod
    def forward(ctx, x, sizes, group):
        ctx.call = sizes, group
        return _gathered(x, sizes, group)

    @staticmethod
    def backward(ctx, grad):
        return _returned(grad, *ctx.call), None, None


def _returned(grad, sizes, group):
    parts = c.all_to_all(grad[None], 1, 0, sizes, (1,) * group.size, group)
    return parts.sum(0, dtype=torch.promote_types(grad.dtype, torch.float32)).to(grad.dtype)


_MOST_KEPT = 2**26  # bytes of keys and values that stay for the backward pass; more come once again


def formula(call, causal):
    """The derivative of attention without mask, dropout and shared heads.

    Args:
        call: a :class:`core.ops.block.Call` whose ring holds the keys.
        causal: whether a query sees the keys up to its own global position.
    """
    whole = Block(call._replace(ring=ALONE), 0, None, None)

    def chosen(q, k, v):
        aligned = not causal or (call.first_query == 0 and q.shape[-2] == k.shape[-2])
        return kernel.choose(q, k, v, causal) if aligned else None

    def forward(q, k, v, *args):
        k, v = together(k, v, call.sizes, call.ring)
        if found := chosen(q, k, v):
            out, total = kernel.forward(found, q, k, v, causal, call.scale)
        elif q.numel() and k.numel():
            out, total = whole.forward(None, q, k, v)
            out = out.to(q.dtype)
        else:
            out, total = q.new_zeros(*q.shape[:-1], v.shape[-1]), None
        again = call.ring.size > 1 and (k.numel() + v.numel()) * k.element_size() > _MOST_KEPT
        return [out, out, total, *((None, None) if again else (k, v))]

    def backward(grad, extra, wanted, q, k, v, *args):
        out, total, kept_k, kept_v = extra
        k, v = together(k, v, call.sizes, call.ring) if kept_k is None else (kept_k, kept_v)
        if found := chosen(q, k, v):
            grads = kernel.backward(found, grad, q, k, v, out, total, causal, call.scale)
        else:
            wide = torch.promote_types(q.dtype, torch.float32)
            grads = [t.new_zeros(t.shape, dtype=wide) for t in (q, k, v)]
            if total is not None:
                whole.backward(grad, q, k, v, out, total, grads, None)
            grads = [g.to(q.dtype) for g in grads]
        del k, v
        if call.ring.size > 1:
            grads[1:] = _home(grads, wanted[1:3], call.sizes, call.ring)
        return [g if w else None for g, w in zip(grads, wanted)]

    return Formula(forward, backward, ((0, 1, 2),) * 3, _fits)


def _home(grads, wanted, sizes, group):
    """The gradients of own keys and values from those of all, which are the last of the list; it gives them up, so that
    they are gone when they have been copied."""
    if not any(wanted):
        return None, None
    if grads[-2].shape == grads[-1].shape:
        return _apart(_returned(_stacked(grads.pop(-2), grads.pop()), sizes, group))
    rows = [g.movedim(-2, 0).contiguous() if w else None for g, w in zip(grads[-2:], wanted)]
    return [None if r is None else _returned(r, sizes, group).movedim(0, -2) for r in rows]


def _fits(q, k, v, *args):
    """Alike on all ranks, whatever parts they have: messages hang on it. Whoever asks torch for attention by plain
    products alone, which can be differentiated twice, gets it."""
    fused = cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled()
    return fused and q.shape[:-2] == k.shape[:-2] == v.shape[:-2] and q.dtype == k.dtype == v.dtype
