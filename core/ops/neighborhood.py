"""Neighbourhood attention: every grid point attends to a window around it that is pushed inwards at the edges.

Queries are taken in tiles; the windows of one tile lie in one block of keys (:mod:`core.ops.windows`), and attention
runs over all tiles at once with a mask that says which keys of the block are in whose window. Memory grows with the
number of points times (tile + window)^n / tile^n, never with its square; beyond a limit the grid goes piece by piece.

On a GPU a kernel does it in one pass instead (:mod:`core.kernels`), for the usual dtypes: ours, or natten's where that
is installed and faster.

On shards each rank fetches the rows of keys and values that the windows of its own queries reach, and the windows are
those of the whole grid: only its true edges push them. A piece of a grid is computed as a shard is.
"""

from functools import lru_cache, reduce
from math import prod

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function

from core import collectives as c
from core.dispatch import Plan, op
from core.errors import ShardingError
from core.kernels import Neighborhood, has_kernel, natten
from core.once import once_differentiable
from core.ops.around import Around, Halo, factor_of, fetched, in_pieces
from core.ops.block import result_dtype
from core.ops.graph import operator
from core.ops.pointwise import meet, operand
from core.ops.windows import Axis, Tiles, Window
from core.precision import autocast_now

_most_scores = 1 << 25  # of one head, kept at a time


def neighborhood_attention(q, k, v, kernel_size, dilation=1, is_causal=False, scale=None):
    """Softmax attention of every grid point over the window of ``kernel_size`` points around it.

    The window of point ``i`` of a dim with ``N`` points starts at ``clamp(i - kernel_size // 2, 0, N - kernel_size)``,
    so that it always holds ``kernel_size`` points; one of even size reaches one point further back than ahead. With a
    dilation ``d`` it holds every ``d``-th point only, and the same rule counts the points of one class ``i % d``. A
    causal dim has the ``kernel_size`` points up to and with ``i``, and fewer at the start.

    Works on plain tensors and on ShardTensors cut along the batch, the grid or the heads. Source: Hassani et al.,
    Neighborhood Attention Transformer, CVPR 2023; Hassani and Shi, Dilated Neighborhood Attention Transformer, 2022.

    Args:
        q, k, v: (batch, *grid, heads, channels) with a grid of one, two or three dims.
        kernel_size, dilation, is_causal: one for each dim of the grid or one for all.
        scale: factor of the products; ``1 / sqrt(channels)`` when left out.

    Returns:
        (batch, *grid, heads, channels)

    Raises:
        ShardingError: shapes that differ, or a dilated window larger than the grid.
    """
    call = kernel_size, dilation, is_causal, scale
    if torch.compiler.is_dynamo_compiling():
        return _operator(q, k, v, *([x] * (q.ndim - 3) if isinstance(x, int) else x for x in call[:3]), scale)
    if has_torch_function((q, k, v)):
        return handle_torch_function(neighborhood_attention, (q, k, v), q, k, v, *call)
    windows = _windows(q, k, v, kernel_size, dilation, is_causal)
    return _attention(q, k, v, tuple(Axis(w, 0, w.total, 0, w.total) for w in windows), scale)


_operator = operator(
    "neighborhood_attention"
    "(Tensor q, Tensor k, Tensor v, int[] size, int[] dilation, bool[] causal, float? scale) -> Tensor",
    neighborhood_attention,
)


@op(neighborhood_attention)
def rule(func, q, k, v, kernel_size, dilation=1, is_causal=False, scale=None):
    windows, given = _windows(q, k, v, kernel_size, dilation, is_causal), meet([q, k, v])
    x = given.aside(-1)
    cut, axes = [], []
    for dim, window in enumerate(windows, 1):
        axis, (start, stop), (low, high) = x.axis_of(dim), x.local_range(dim), (0, window.total)
        if axis is not None:
            ends, group = x.offsets(axis), c.axis_group(x.mesh, axis)
            reach = [window.reach(a, b) for a, b in zip(ends, ends[1:])]
            cut.append(Halo(dim, x.sizes[axis], tuple(reach), group))
            low, high = reach[group.rank]
        axes.append(Axis(window, start, stop - start, low, high - low))

    def local(q, k, v, *args, **kwargs):
        if cut:
            q, k, v = _alike(q, k, v)
            if in_pieces(q, k, cut, factor_of(q, scale)):
                return Around.apply(q, k, v, cut, _attention, tuple(axes), scale)
            k, v = fetched(k, v, cut).chunk(2, -1)
        return _attention(q, k, v, tuple(axes), scale)

    return Plan(tuple(operand(s, x) for s in (q, k, v)), x, local, given)


def _windows(q, k, v, kernel_size, dilation, is_causal):
    n = q.ndim - 3
    say = {"op": "neighborhood_attention", "operands": [tuple(t.shape) for t in (q, k, v)]}
    if not 1 <= n <= 3 or q.shape != k.shape or q.shape != v.shape:
        raise ShardingError("q, k and v must have one shape (batch, *grid, heads, channels)", **say)
    given = {"kernel_size": kernel_size, "dilation": dilation, "is_causal": is_causal}
    each = [(x,) * n if isinstance(x, int) else tuple(x) for x in given.values()]
    for name, value in zip(given, each):
        if len(value) != n or any(x < (name != "is_causal") for x in value):
            raise ShardingError(f"{name} {given[name]} is not one number for each of {n} grid dims", **say)
    windows = [Window(*call, total) for *call, total in zip(*each, q.shape[1:-2])]
    if any(w.size * w.dilation > w.total for w in windows):
        raise ShardingError(f"windows {each[0]} of dilation {each[1]} are larger than the grid", **say)
    return windows


# -- the queries at hand ----------------------------------------------------------------------------------------------
def _attention(q, k, v, axes, scale):
    """Attention of the queries at hand over the keys and values at hand."""
    q, k, v = _alike(q, k, v)
    if q.numel() == 0:
        return _Nothing.apply(q, k, v)
    factor = factor_of(q, scale)
    own = Neighborhood.apply if has_kernel(q, factor) else None
    call = q, k, v, axes, factor
    if natten.preferred(*call, own):
        return natten.attention(*call)
    if own:
        return own(*call)
    pieces = _pieces(axes)
    return _attend(q, k, v, pieces[0], scale) if len(pieces) == 1 else _Pieces.apply(q, k, v, axes, scale)


class _Nothing(torch.autograd.Function):
    """Of no queries. It is as often differentiable as what others compute meanwhile, who have some."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return q.new_empty(q.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return tuple([t.new_zeros(t.shape) for t in ctx.saved_tensors])


def _alike(*operands):
    """The operands in the dtype that all of them have room in, or that autocast asks of attention."""
    wide = reduce(torch.promote_types, [t.dtype for t in operands])
    return [t.to(result_dtype(t)) for t in [t.to(wide) for t in operands]]


@lru_cache(maxsize=256)
def _pieces(axes):
    """The tiles of every piece of the grid, cut along its first dim."""
    tiles = _tiled(axes)
    scores = prod(t.count * t.tile * t.block for t in tiles)
    rows = max(axes[0].queries * _most_scores // scores, 1)
    if rows >= axes[0].queries:
        return [tiles]
    starts = range(0, axes[0].queries, rows)
    return [_tiled((axes[0].piece(i, min(i + rows, axes[0].queries)), *axes[1:])) for i in starts]


def _tiled(axes):
    size = {1: 64, 2: 8, 3: 4}[len(axes)]
    return tuple(Tiles(a, size) for a in axes)


class _Pieces(torch.autograd.Function):
    """Piece by piece; keeps the operands only, and computes again in the backward pass."""

    @staticmethod
    def forward(ctx, q, k, v, axes, scale):
        ctx.save_for_backward(q, k, v)
        ctx.call, ctx.autocast = (axes, scale), autocast_now(q.device.type)
        return torch.cat([_attend(*_near((q, k, v), tiles, axes), tiles, scale) for tiles in _pieces(axes)], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (axes, scale), operands = ctx.call, ctx.saved_tensors  # once: a checkpoint computes what it gives
        grads = [t.new_zeros(t.shape) for t in operands]
        for tiles in _pieces(axes):
            inputs = [t.detach().requires_grad_() for t in _near(operands, tiles, axes)]
            with torch.enable_grad(), torch.autocast(*ctx.autocast):
                out = _attend(*inputs, tiles, scale)
            found = torch.autograd.grad(out, inputs, *_near((grad,), tiles, axes))
            for total, more in zip(_near(grads, tiles, axes), found):
                total += more
        return *grads, None, None


def _near(tensors, tiles, axes):
    """The rows of queries, keys and values that concern a piece."""
    piece, whole = tiles[0].axis, axes[0]
    queries = piece.first_query - whole.first_query, piece.queries
    keys = piece.first_key - whole.first_key, piece.keys
    return [t.narrow(1, *rows) for t, rows in zip(tensors, (queries, keys, keys))]


def _attend(q, k, v, tiles, scale):
    batch, heads, channels, n = q.shape[0], q.shape[-2], q.shape[-1], len(tiles)
    grid, device = q.shape[1:-2], q.device
    q, k, v = (t.movedim(0, n).reshape(-1, batch * heads, channels).contiguous() for t in (q, k, v))

    places = _flat([t.queries(device) for t in tiles], [t.axis.queries for t in tiles])
    blocks = _flat([t.keys(device) for t in tiles], [t.axis.keys for t in tiles])
    homes, _ = _sources([t.homes(device) for t in tiles], tiles, [t.tile for t in tiles])

    def holders():
        return _sources([t.holders(device) for t in tiles], tiles, [t.block for t in tiles])

    def origins():
        real = _spread([t.real(device) for t in tiles], lambda a, b, i: a & b).reshape(1, -1)
        return places[None], real if real.numel() > homes.numel() else None

    q = _Rows.apply(q, places, lambda: (homes, None))
    k, v = _Rows.apply(k, blocks, holders), _Rows.apply(v, blocks, holders)
    count = prod(t.count for t in tiles)
    q, k, v = (t.unflatten(0, (count, -1)).transpose(1, 2) for t in (q, k, v))
    mask = _spread([t.mask(device) for t in tiles], lambda a, b, i: a & b).view(q.shape[0], 1, q.shape[2], -1)
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale).transpose(1, 2).flatten(0, 1)
    out = _Rows.apply(out, homes[0], origins)
    return out.view(*grid, batch, heads, channels).movedim(n, 0)


class _Rows(torch.autograd.Function):
    """``rows[at]``. Backward: every row sums over where it went, ``back() -> (places, whether there is one)``, each
    (times, rows) or None for always; this needs no atomic additions."""

    @staticmethod
    def forward(ctx, rows, at, back):
        ctx.back = back
        return rows.index_select(0, at)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        places, there = ctx.back()
        flat = grad.reshape(grad.shape[0], -1)
        weights = None if there is None else there.T.contiguous().to(grad.dtype)
        if len(places) > 1:
            rows = F.embedding_bag(places.T.contiguous(), flat, mode="sum", per_sample_weights=weights)
        else:
            rows = flat.index_select(0, places[0])
            rows = rows if weights is None else rows * weights
        return rows.view(-1, *grad.shape[1:]), None, None


def _spread(tables, op):
    """Tables (a, b, ..) of all dims combined to one (a1, a2, .., b1, b2, ..) by ``op``."""
    n, out = len(tables), None
    for i, table in enumerate(tables):
        shape = [1] * (n * table.ndim)
        shape[i::n] = table.shape
        out = table.view(shape) if out is None else op(out, table.view(shape), i)
    return out


def _flat(tables, extents):
    """Indices along all dims as indices of flattened rows."""
    return _spread(tables, lambda a, b, i: a * extents[i] + b).flatten()


def _sources(tables, tiles, lengths):
    """From (tile, place in it, whether there) along each dim: (times, rows) places in the flattened tiles."""
    block, at, there = zip(*tables)
    block = _spread(block, lambda a, b, i: a * tiles[i].count + b)
    at = _spread(at, lambda a, b, i: a * lengths[i] + b)
    there = _spread(there, lambda a, b, i: a & b)
    times = prod(t[0].shape[0] for t in tables)
    return (block * prod(lengths) + at).where(there, 0).reshape(times, -1), there.reshape(times, -1)
