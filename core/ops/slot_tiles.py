"""Sums by slot and reading from slots of torch's attention kernels, for every device and dtype.

Sums are just what attention's backward computes as the gradient of its values, and their derivative is that of reading.
Points go in tiles that take the place of heads: few slots alone would leave most of a device idle, and sums of tiles
add up in fp32. All operands have all batches and heads.
"""

import torch

from core.once import once_differentiable
from core.ops import kernel

_TILE = 1 << 14  # points


# -- points in tiles --------------------------------------------------------------------------------------------------
def _pieces(points, tile):
    """(first point, number of tiles, points of a tile): as many whole tiles as there are, and the rest."""
    whole = points // tile
    pieces = [(0, whole, tile), (whole * tile, 1, points - whole * tile)]
    return [p for p in pieces if p[1] * p[2]]


def _tiled(x, first, tiles, size):
    """(B, H, N, C) to (B, H tiles, size, C)"""
    return x.narrow(2, first, tiles * size).unflatten(2, (tiles, size)).flatten(1, 2)


def _each(slots, tiles):
    """(B, H, G, C) to (B, H tiles, G, C)"""
    return slots[:, :, None].expand(-1, -1, tiles, -1, -1).flatten(1, 2)


def _together(found, tiles):
    """Transpose of :func:`_each`, in fp32 or wider."""
    return found.unflatten(1, (-1, tiles)).sum(2, dtype=torch.promote_types(found.dtype, torch.float32))


def _untiled(x, tiles):
    return x.unflatten(1, (-1, tiles)).flatten(2, 3)


class Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        ctx.tile = _TILE
        total = v.new_zeros(*k.shape[:-1], v.shape[-1], dtype=torch.promote_types(v.dtype, torch.float32))
        for piece in _pieces(q.shape[2], ctx.tile):
            total += _together(_sums(_tiled(q, *piece), _each(k, piece[1]), _tiled(v, *piece)), piece[1])
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Read the gradient as values are read: that is the gradient of ``v``, and the rest is that reading's own."""
        q, k, v = ctx.saved_tensors
        grad, grad_k, grads = grad.to(v.dtype), k.new_zeros(k.shape, dtype=grad.dtype), []
        for piece in _pieces(q.shape[2], ctx.tile):
            tile, slots, values = _tiled(q, *piece), _each(k, piece[1]), _each(grad, piece[1])
            out, total = _read(tile, slots, values)
            found = _read_backward(_tiled(v, *piece), tile, slots, values, out, total)
            grad_k += _together(found[1], piece[1])
            grads.append([_untiled(g, piece[1]) for g in (found[0], out)])
        grad_q, grad_v = _joined(grads, q, v)
        return grad_q, grad_k.to(k.dtype), grad_v


class Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, values):
        found, ctx.tile = [], _TILE
        for piece in _pieces(q.shape[2], ctx.tile):
            out, total = _read(_tiled(q, *piece), _each(k, piece[1]), _each(values, piece[1]))
            found.append([_untiled(out, piece[1]), _untiled(total, piece[1])])
        out, total = _joined(found, q.new_empty(*q.shape[:-1], values.shape[-1]), q[..., :1])
        ctx.save_for_backward(q, k, values, out, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, values, out, total = ctx.saved_tensors
        wide = torch.promote_types(k.dtype, torch.float32)
        grad_k, grad_values, grads = torch.zeros_like(k, dtype=wide), torch.zeros_like(values, dtype=wide), []
        for piece in _pieces(q.shape[2], ctx.tile):
            tile = [_tiled(t, *piece) for t in (grad, q, out, total)]
            found = _read_backward(tile[0], tile[1], _each(k, piece[1]), _each(values, piece[1]), *tile[2:])
            grads.append([_untiled(found[0], piece[1])])
            grad_k += _together(found[1], piece[1])
            grad_values += _together(found[2], piece[1])
        return _joined(grads, q)[0], grad_k.to(k.dtype), grad_values.to(values.dtype)


def _joined(pieces, *empty):
    """The pieces of each result one after the other; ``empty`` tells the shapes where there are no points."""
    if not pieces:
        return [torch.empty_like(t) for t in empty]
    return [parts[0] if len(parts) == 1 else torch.cat(parts, 2) for parts in zip(*pieces)]


# -- one tile ---------------------------------------------------------------------------------------------------------
def _read(q, k, values):
    """What the points take, and the logarithms of their normalisers (.., points, 1)."""
    chosen = kernel.choose(q, k, values, False)
    if chosen:
        return kernel.forward(chosen, q, k, values, False, 1.0)
    scores = _scores(q, k)
    total = scores.logsumexp(-1, keepdim=True)
    return ((scores - total).exp() @ values.to(scores.dtype)).to(values.dtype), total


def _read_backward(grad, q, k, values, out, total):
    """Gradients of ``q``, ``k`` and ``values``."""
    chosen = kernel.choose(q, k, values, False)
    if chosen:
        return kernel.backward(chosen, grad, q, k, values, out, total, False, 1.0)
    weights = (_scores(q, k) - total).exp()
    grad, values = grad.to(weights.dtype), values.to(weights.dtype)
    grad_scores = weights * (grad @ values.mT - (grad * out).sum(-1, keepdim=True))
    return grad_scores @ k.to(weights.dtype), grad_scores.mT @ q.to(weights.dtype), weights.mT @ grad


def _sums(q, k, v):
    """The gradient of values under the gradient ``v``; it does not hang on the values, which may be zero."""
    chosen = kernel.choose(q, k, v, False)
    if chosen:
        nothing = v.new_zeros(*k.shape[:-1], v.shape[-1])
        out, total = kernel.forward(chosen, q, k, nothing, False, 1.0)
        return kernel.backward(chosen, v, q, k, nothing, out, total, False, 1.0)[2]
    weights = _scores(q, k).softmax(-1)
    return weights.mT @ v.to(weights.dtype)


def _scores(q, k):
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.to(wide) @ k.to(wide).mT
