"""Neighbourhood attention: every grid point attends to a window around it that is pushed inwards at the edges.

Queries are taken in tiles; the windows of one tile lie in one block of keys, little larger than the tile, and attention
runs over all tiles at once with a mask that says which keys of the block are in whose window. Memory grows with the
number of points times (tile + window)^n / tile^n, never with its square.

On shards each rank fetches the rows of keys and values that the windows of its own queries reach, and the windows are
those of the whole grid: only its true edges push them.
"""

from bisect import bisect
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from core import collectives as c
from core.dispatch import Plan, op
from core.errors import ShardingError
from core.ops.attention import result_dtype
from core.ops.halo import fetch
from core.ops.pointwise import meet, operand


@torch.compiler.allow_in_graph
def neighborhood_attention(q, k, v, kernel_size, *, scale=None):
    """Softmax attention of every grid point over the window of ``kernel_size`` points around it.

    The window of point ``i`` of a dim with ``N`` points starts at ``clamp(i - kernel_size // 2, 0, N - kernel_size)``,
    so that it always holds ``kernel_size`` points. Works on plain tensors and on ShardTensors cut along the batch, the
    grid or the heads. Source: Hassani et al., Neighborhood Attention Transformer, CVPR 2023.

    Args:
        q, k, v: (batch, *grid, heads, channels) with a grid of one, two or three dims.
        kernel_size: odd number of points, one for each dim of the grid or one for all.
        scale: factor of the products; ``1 / sqrt(channels)`` when left out.

    Returns:
        (batch, *grid, heads, channels)

    Raises:
        ShardingError: shapes that differ, an even window, or a window larger than the grid.
    """
    if has_torch_function((q, k, v)):
        return handle_torch_function(neighborhood_attention, (q, k, v), q, k, v, kernel_size, scale=scale)
    windows = _windows(q, k, v, kernel_size)
    axes = [_Axis(w, n, 0, n, 0, n) for w, n in zip(windows, q.shape[1:-2])]
    return _attend(q, k, v, _tiled(axes), scale)


@op(neighborhood_attention)
def rule(func, q, k, v, kernel_size, *, scale=None):
    windows = _windows(q, k, v, kernel_size)
    x = meet([q, k, v]).whole(-1)
    cut, axes = [], []
    for dim, (window, total) in enumerate(zip(windows, x.shape[1:-2]), 1):
        axis, (start, stop), (low, high) = x.axis_of(dim), x.local_range(dim), (0, total)
        if axis is not None:
            ends, group = x.offsets(axis), c.axis_group(x.mesh, axis)
            reach = [_reach(window, total, a, b) for a, b in zip(ends, ends[1:])]
            cut.append((dim, x.sizes[axis], reach, group))
            low, high = reach[group.rank]
        axes.append(_Axis(window, total, start, stop - start, low, high - low))

    tiles = _tiled(axes)

    def local(q, k, v, *args, **kwargs):
        if cut:
            kv = torch.cat([k, v], -1)
            for call in cut:
                kv = fetch(kv, *call)
            k, v = kv.chunk(2, -1)
        return _attend(q, k, v, tiles, scale)

    return Plan(tuple(operand(s, x) for s in (q, k, v)), x, local)


def _windows(q, k, v, kernel_size):
    n = q.ndim - 3
    windows = (kernel_size,) * n if isinstance(kernel_size, int) else tuple(kernel_size)
    say = {"op": "neighborhood_attention", "operands": [tuple(t.shape) for t in (q, k, v)]}
    if not 1 <= n <= 3 or q.shape != k.shape or q.shape != v.shape:
        raise ShardingError("q, k and v must have one shape (batch, *grid, heads, channels)", **say)
    if len(windows) != n or any(w < 1 or w % 2 == 0 for w in windows):
        raise ShardingError(f"kernel_size {kernel_size} is not one odd number for each of {n} grid dims", **say)
    if any(w > m for w, m in zip(windows, q.shape[1:-2])):
        raise ShardingError(f"a window of {windows} points is larger than the grid {tuple(q.shape[1:-2])}", **say)
    return windows


def _reach(window, total, start, stop):
    """Keys in the windows of queries ``start`` to ``stop``."""
    if start >= stop:
        return 0, 0
    low, high = (min(max(i - window // 2, 0), total - window) for i in (start, stop - 1))
    return low, high + window


class _Axis(NamedTuple):
    """One dim of the grid: its window and extent, and which queries and keys are at hand."""

    window: int
    total: int
    first_query: int
    queries: int
    first_key: int
    keys: int


class _Tiles:
    """One dim in ``count`` tiles of ``tile`` queries, each with a block of ``block`` keys that holds their windows.

    A tile has ``size`` queries, or more where half a window is more: small tiles gather many keys again and again,
    large ones mask most products. ``overlap`` is the largest number of blocks that hold one key.
    """

    def __init__(self, axis, size):
        self.axis = axis
        self.tile = min(size * -(-(axis.window // 2 + 1) // size), axis.queries)
        self.count = -(-axis.queries // self.tile)
        self.block = min(self.tile + axis.window - 1, axis.keys)
        starts = [self._start(i * self.tile, min, max) for i in range(self.count)]
        self.overlap = max(i + 1 - bisect(starts, t - self.block) for i, t in enumerate(starts))

    def _start(self, query, least, most):
        """First key of the block of the tile whose first query is ``query``, both counted from what is at hand."""
        a = self.axis
        first = least(most(query + a.first_query - a.window // 2, 0), a.total - a.window) - a.first_key
        return least(first, a.keys - self.block)

    def starts(self, device):
        return self._start(torch.arange(self.count, device=device) * self.tile, torch.clamp_max, torch.clamp_min)

    def keys(self, device):
        """(count, block): the keys of every block."""
        return self.starts(device)[:, None] + torch.arange(self.block, device=device)

    def mask(self, device):
        """(count, tile, block): whether a key is in the window of a query; queries beyond the last do as the last."""
        a = self.axis
        query = torch.arange(self.count * self.tile, device=device).clamp_max(a.queries - 1) + a.first_query
        first = (query - a.window // 2).clamp(0, a.total - a.window) - a.first_key
        ahead = self.keys(device)[:, None, :] - first.view(self.count, self.tile, 1)
        return (ahead >= 0) & (ahead < a.window)

    def holders(self, device):
        """(overlap, keys) each: the blocks that hold a key, where in them it is, and whether there is such a block."""
        starts, keys = self.starts(device), torch.arange(self.axis.keys, device=device)
        last = torch.searchsorted(starts, keys, right=True) - 1
        block = last - torch.arange(self.overlap, device=device)[:, None]
        at = keys - starts[block.clamp_min(0)]
        return block, at, (block >= 0) & (at < self.block)


def _tiled(axes):
    size = {1: 64, 2: 8, 3: 4}[len(axes)]
    return tuple(_Tiles(a, size) for a in axes) if all(a.queries for a in axes) else ()


def _spread(tables, op):
    """Tables (a, b, ..) of all dims combined to one (a1, a2, .., b1, b2, ..) by ``op``."""
    n, out = len(tables), None
    for i, table in enumerate(tables):
        shape = [1] * (n * table.ndim)
        shape[i::n] = table.shape
        out = table.view(shape) if out is None else op(out, table.view(shape), i)
    return out


class _Blocks(torch.autograd.Function):
    """Rows (grid, ..) laid out as blocks (tiles, keys of a block, ..). Backward: every key sums over the blocks that
    hold it, which needs no atomic additions."""

    @staticmethod
    def forward(ctx, rows, tiles):
        ctx.tiles = tiles
        extents = [t.axis.keys for t in tiles]
        at = _spread([t.keys(rows.device) for t in tiles], lambda a, b, i: a * extents[i] + b)
        blocks = rows.index_select(0, at.flatten())
        return blocks.view(prod(t.count for t in tiles), prod(t.block for t in tiles), *rows.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        holders = [t.holders(grad.device) for t in ctx.tiles]
        block, at, there = ([h[part] for h in holders] for part in range(3))
        block = _spread(block, lambda a, b, i: a * ctx.tiles[i].count + b)
        at = _spread(at, lambda a, b, i: a * ctx.tiles[i].block + b)
        there = _spread(there, lambda a, b, i: a & b)
        sources = (block * grad.shape[1] + at).where(there, 0)
        sources, there = (x.reshape(prod(t.overlap for t in ctx.tiles), -1).T.contiguous() for x in (sources, there))
        flat = grad.reshape(grad.shape[0] * grad.shape[1], -1)
        rows = F.embedding_bag(sources, flat, mode="sum", per_sample_weights=there.to(grad.dtype))
        return rows.view(-1, *grad.shape[2:]), None


def _attend(q, k, v, tiles, scale):
    """Attention of the queries at hand over the keys and values at hand."""
    batch, heads, channels, n = q.shape[0], q.shape[-2], q.shape[-1], len(tiles)
    if q.numel() == 0:
        return (q + k.sum() + v.sum()).to(result_dtype(q))
    count, queries = prod(t.count for t in tiles), prod(t.tile for t in tiles)
    rows = [x.movedim(0, n).reshape(-1, batch * heads, channels).contiguous() for x in (k, v)]
    k, v = (_Blocks.apply(x, tiles).transpose(1, 2) for x in rows)
    padding = [p for t in reversed(tiles) for p in (0, t.count * t.tile - t.axis.queries)]
    q = F.pad(q.movedim(0, n), [0, 0, 0, 0, 0, 0, *padding]) if any(padding) else q.movedim(0, n)
    q = q.reshape(*(e for t in tiles for e in (t.count, t.tile)), batch, heads, channels)
    to_tiles = [*range(0, 2 * n, 2), *range(1, 2 * n, 2), 2 * n, 2 * n + 1, 2 * n + 2]
    q = q.permute(to_tiles).reshape(count, queries, batch * heads, channels).transpose(1, 2)
    mask = _spread([t.mask(q.device) for t in tiles], lambda a, b, i: a & b).view(count, 1, queries, -1)
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale).transpose(1, 2)
    out = out.reshape(*(t.count for t in tiles), *(t.tile for t in tiles), batch, heads, channels)
    from_tiles = [e for i in range(n) for e in (i, n + i)] + [2 * n, 2 * n + 1, 2 * n + 2]
    out = out.permute(from_tiles).reshape(*(t.count * t.tile for t in tiles), batch, heads, channels)
    return out[tuple(slice(0, t.axis.queries) for t in tiles)].movedim(n, 0)
