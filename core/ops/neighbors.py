"""Neighbours of points by brute force: the nearest ones, or all within a radius.

Each rank searches for its own queries; the points go round the ring, so that no rank holds all of them, and queries are
taken so many at a time that few distances exist at once. What is found is a matter of the points' positions in the
whole, ties included, so every cut gives the same. Distances are differentiable, and the gradient of a point goes back
round the ring to the rank that owns it.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor.placement_types import Shard
from torch.overrides import handle_torch_function, has_torch_function

from core import collectives as c
from core.border import promote
from core.dispatch import Plan, op
from core.errors import ShardingError
from core.ops.block import ALONE
from core.ops.graph import operator
from core.ops.ring import blocks
from core.shard_tensor import ShardTensor
from core.spec import REPLICATE, chunk_sizes

_most_distances = 1 << 24  # at a time


class Neighbors(NamedTuple):
    """Distances and positions of neighbours, and how many each query has."""

    distances: torch.Tensor
    indices: torch.Tensor
    counts: torch.Tensor


def knn(points, queries, k):
    """The ``k`` nearest points of every query, nearest first; of equally near ones that of smaller index.

    Works on plain tensors and on ShardTensors cut along points, queries or batch; the results are cut as the queries,
    or along them where only points are cut.

    Args:
        points: (N, D) or (batch, N, D).
        queries: (M, D) or (batch, M, D).
        k: at most N.

    Returns:
        Distances, differentiable with respect to both operands, and int64 indices: (M, k) or (batch, M, k).

    Raises:
        ShardingError: shapes that do not fit, or fewer than ``k`` points.
    """
    if torch.compiler.is_dynamo_compiling():
        return _operator(points, queries, k)
    if has_torch_function((points, queries)):
        return handle_torch_function(knn, (points, queries), points, queries, k)
    _check("knn", points, queries, k)
    return _nearest(points, queries, k, (points.shape[-2],), ALONE)


_operator = operator("knn(Tensor points, Tensor queries, int k) -> (Tensor, Tensor)", knn)


def radius_search(points, queries, radius, max_neighbors=None):
    """The points within ``radius`` of every query, nearest first; of equally near ones that of smaller index first.

    Args:
        points, queries: as those of :func:`knn`; without ``max_neighbors`` there is no batch.
        max_neighbors: list the nearest so many at most, in rows of this length: (.., M, max_neighbors), filled up with
            the index -1 at an infinite distance. When left out, the lists of all queries are laid end to end.

    Returns:
        ``distances``, differentiable; ``indices``; and ``counts`` (.., M), the lengths of the lists. On ShardTensors
        each rank holds the lists of its own queries.

    Raises:
        ShardingError: shapes that do not fit.
    """
    if max_neighbors is None:
        return Neighbors(*_ragged(points, queries, radius))
    k = min(max_neighbors, points.shape[-2])
    distances, indices = knn(points, queries, k)
    inside = distances <= radius
    distances, indices = torch.where(inside, distances, float("inf")), torch.where(inside, indices, -1)
    if k < max_neighbors:
        fill = (0, max_neighbors - k)
        distances, indices = F.pad(distances, fill, value=float("inf")), F.pad(indices, fill, value=-1)
    return Neighbors(distances, indices, inside.sum(-1))


# -- who holds what ---------------------------------------------------------------------------------------------------
@op(knn)
def rule(func, points, queries, k):
    _check("knn", points, queries, k)
    points, queries, travel = _specs(points, queries)
    out = queries.reshaped((*queries.shape[:-1], k), {d: d for d in range(queries.ndim - 1)})
    return Plan((points, queries), (out, out), lambda p, q, k: _nearest(p, q, k, *travel))


def _check(name, points, queries, k=1):
    say = {"op": name, "operands": [points if hasattr(points, "mesh") else tuple(points.shape)]}
    say["operands"].append(queries if hasattr(queries, "mesh") else tuple(queries.shape))
    shapes = points.shape, queries.shape
    if points.ndim not in (2, 3) or points.ndim != queries.ndim or len({(*s[:-2], s[-1]) for s in shapes}) > 1:
        raise ShardingError("shapes are not (batch, points, D) and (batch, queries, D), or both without batch", **say)
    if not 1 <= k <= points.shape[-2]:
        raise ShardingError(f"{k} neighbours among {points.shape[-2]} points", **say)


def _specs(points, queries):
    """Specs of points and queries, numbers of points of all ranks and the group around which they go."""
    points, queries = points.aside(-1), queries.aside(-1)
    along, batch = points.ndim - 2, points.ndim - 3
    for axis, (p, sizes) in enumerate(zip(points.placements, points.sizes)):
        if isinstance(queries.placements[axis], Shard):
            continue
        if p == Shard(batch) and queries.axis_of(batch) is None:
            queries = queries.with_axis(axis, p, sizes)
        elif p == Shard(along) and queries.axis_of(along) is None:
            queries = queries.with_axis(axis, p, chunk_sizes(queries.shape[along], points.mesh.size(axis)))
    for axis, p in enumerate(queries.placements):
        if p == Shard(batch) and batch == 0:
            points = points.whole(batch).with_axis(axis, p, queries.sizes[axis])
        elif points.placements[axis] != Shard(along):
            points = points.with_axis(axis, REPLICATE)
    axis = points.axis_of(along)
    if axis is None:
        return points, queries, ((points.shape[along],), ALONE)
    return points, queries, (points.sizes[axis], c.axis_group(points.mesh, axis))


def _ragged(points, queries, radius):
    """Lists of unlike lengths: the ranks tell each other how many entries they hold."""
    _check("radius_search", points, queries)
    if points.ndim > 2:
        raise ShardingError("lists of a batch", op="radius_search", remedy="Give max_neighbors, or search one by one.")
    mesh = next((t._spec.mesh for t in (points, queries) if isinstance(t, ShardTensor)), None)
    if mesh is None:
        return _within(points, queries, radius, (points.shape[0],), ALONE)
    points, queries = (t if isinstance(t, ShardTensor) else promote(t, mesh) for t in (points, queries))
    *specs, travel = _specs(*(t._spec.cut_once().finished() for t in (points, queries)))
    locals_ = [t.redistribute_to(s).to_local() for t, s in zip((points, queries), specs)]
    distances, indices, counts = _within(*locals_, radius, *travel)
    placements = specs[1].placements
    sizes = dict(enumerate(specs[1].sizes))
    distances = ShardTensor.from_local(distances, mesh, placements, grad_placements=specs[1].cotangent().placements)
    entries = dict(enumerate(distances._spec.sizes))
    return (
        distances,
        ShardTensor.from_local(indices, mesh, placements, entries),
        ShardTensor.from_local(counts, mesh, placements, sizes),
    )


# -- the queries at hand ----------------------------------------------------------------------------------------------
def _nearest(points, queries, k, sizes, group):
    points, queries, dtype = _wide(points, queries)
    squares = indices = near = None
    for block, start, _ in blocks(points, sizes, group):
        found, at = _closest(block.detach(), queries.detach(), min(k, block.shape[-2]))
        rows = at.flatten(-2)[..., None].expand(*at.shape[:-2], -1, block.shape[-1])
        coordinates = block.gather(-2, rows).view(*at.shape, block.shape[-1])
        if squares is None:
            squares, indices, near = found, at + start, coordinates
            continue
        squares, indices = torch.cat([squares, found], -1), torch.cat([indices, at + start], -1)
        order = _sorted(squares, indices)[..., :k]
        squares, indices = squares.gather(-1, order), indices.gather(-1, order)
        near = torch.cat([near, coordinates], -2)
        near = near.gather(-2, order[..., None].expand(*order.shape, near.shape[-1]))
    return _distances(queries[..., None, :], near).to(dtype), indices


def _within(points, queries, radius, sizes, group):
    points, queries, dtype = _wide(points, queries)
    found = []
    for block, start, _ in blocks(points, sizes, group):
        for first in _starts(queries, block):
            squares = _squares(queries.detach()[first], block.detach())
            row, at = (squares.sqrt() <= radius).nonzero(as_tuple=True)
            found.append((row + first.start, at + start, squares[row, at], block[at]))
    rows, indices, squares, near = (torch.cat(parts) for parts in zip(*found))
    order = _sorted(rows, squares, indices)
    rows, near = rows[order], near[order]
    counts = torch.bincount(rows, minlength=queries.shape[0])
    return _distances(queries[rows], near).to(dtype), indices[order], counts


def _wide(points, queries):
    """Both in one type of at least single precision, and the type of the result."""
    dtype = torch.promote_types(points.dtype, queries.dtype)
    if not dtype.is_floating_point:
        raise ShardingError(f"coordinates of type {dtype}", op="neighbours", remedy="Convert them to floating point.")
    wide = torch.promote_types(dtype, torch.float32)
    return points.to(wide), queries.to(wide), dtype


def _starts(queries, points):
    """Ranges of queries with few enough distances; an empty one if there is no query."""
    rows = max(_most_distances // max(points.shape[:-1].numel(), 1), 1)
    for first in range(0, max(queries.shape[-2], 1), rows):
        yield slice(first, first + rows)


def _squares(queries, points):
    """Squared distances (.., M, N), each the same sum whatever the shapes."""
    total = 0
    for a, b in zip(queries.unbind(-1), points.unbind(-1)):
        total = total + (a[..., :, None] - b[..., None, :]).square()
    return total


def _closest(points, queries, k):
    """Squared distances and places of the ``k`` nearest points: what torch.topk leaves open, ties at the last place, is
    decided by a second pass, in which the certain ones rank first and the ties by their place."""
    found, n = [], points.shape[-2]
    for at in _starts(queries, points):
        squares = _squares(queries[..., at, :], points)
        last = squares.topk(k, largest=False).values[..., -1:]
        place = torch.arange(n, device=points.device)
        rank = torch.where(squares < last, place - n, torch.where(squares == last, place, n))
        places = rank.topk(k, largest=False).indices
        squares = squares.gather(-1, places)
        order = _sorted(squares, places)
        found.append((squares.gather(-1, order), places.gather(-1, order)))
    return (torch.cat(parts, -2) for parts in zip(*found))


def _sorted(*keys):
    """Order by the first key, then the second, and so on."""
    order = None
    for key in reversed(keys):
        here = (key if order is None else key.gather(-1, order)).argsort(stable=True)
        order = here if order is None else order.gather(-1, here)
    return order


def _distances(a, b):
    """Distances of pairs; the gradient of a distance of zero is zero."""
    squares = sum((x - y).square() for x, y in zip(a.unbind(-1), b.unbind(-1)))
    apart = squares > 0
    return torch.where(apart, squares, 1).sqrt() * apart
