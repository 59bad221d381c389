"""Rows of neighbour search, held against sorting all distances."""

import torch
from cases import case, refuse
from torch.distributed.tensor import Replicate, Shard

from core import ShardTensor, knn, radius_search
from core.ops import neighbors

P, Q = (23, 3), (11, 3)


def listed(points, queries):
    """Distances to all points, nearest first, ties by index, and the indices."""
    squares = sum((queries[..., :, None, d] - points[..., None, :, d]).square() for d in range(points.shape[-1]))
    order = squares.detach().argsort(dim=-1, stable=True)
    squares = squares.gather(-1, order)
    return torch.where(squares > 0, squares, 1).sqrt() * (squares > 0), order


def nearest(k):
    def fn(points, queries):
        found = knn(points, queries, k)
        if any(isinstance(t, ShardTensor) for t in (points, queries)):
            return found
        distances, order = listed(points, queries)
        assert torch.equal(found[1], order[..., :k])
        torch.testing.assert_close(found[0], distances[..., :k], atol=0, rtol=0)
        return distances[..., :k], order[..., :k]

    return fn


def within(radius, most=None):
    def fn(points, queries):
        found = radius_search(points, queries, radius, most)
        if any(isinstance(t, ShardTensor) for t in (points, queries)):
            return found
        distances, order = listed(points, queries)
        inside = distances <= radius
        if most is None:
            expected = distances[inside], order[inside], inside.sum(-1)
        else:
            fill = torch.full((*inside.shape[:-1], most), -1, device=order.device)
            inside = inside & (torch.arange(inside.shape[-1], device=order.device) < most)
            distances = torch.cat([torch.where(inside, distances, torch.inf), fill + torch.inf], -1)[..., :most]
            expected = distances, torch.cat([torch.where(inside, order, -1), fill], -1)[..., :most], inside.sum(-1)
        for a, b in zip(found, expected):
            assert torch.equal(a, b)
        return expected

    return fn


def lattice(g, shape):
    """Points with many equal distances, some of them zero."""
    return torch.randint(0, 3, shape, generator=g).double()


def few_at_a_time(fn):
    """The same with one query at a time."""

    def run(*operands):
        most, neighbors._most_distances = neighbors._most_distances, 8
        try:
            return fn(*operands)
        finally:
            neighbors._most_distances = most

    return run


BOTH, EITHER = ((0, 0),), ((0, None), (None, 0), ("R", 0), (0, "R"))
BOTH2 = (((0, 1), (0, 1)), ((1, 0), (0, 1)))
case("knn", nearest(4), (P, Q), BOTH, cuts2=BOTH2, wire=("all_to_all",))
case("knn_one_cut", nearest(4), (P, Q), (*EITHER, (1, 1), ("P", 0)))
case("knn_whole_points", nearest(3), (P, Q), ((None, 0), ("R", 0)), wire=())
case("knn_ties", nearest(7), (P, Q), (*BOTH, *EITHER), cuts2=BOTH2, make={0: lattice, 1: lattice})
case("knn_all_points", nearest(23), (P, Q), (*BOTH, *EITHER), cuts2=BOTH2)
case("knn_of_itself", lambda x: knn(x, x, 3), ((13, 2),), ((0,), (1,)), cuts2=(((0, 1),),))
case("knn_one_query_at_a_time", few_at_a_time(nearest(4)), (P, Q), BOTH, make={0: lattice, 1: lattice})
case(
    "knn_batched",
    nearest(4),
    ((3, *P), (3, *Q)),
    ((1, 1), (0, 0), (0, 1), (1, 0), (0, None), (None, 0)),
    cuts2=(((0, 1), (0, 1)), ((1, 0), (0, 1)), ((1, 2), (1, 0))),
)


def apart(call):
    """Points along one axis, queries along another."""

    def fn(points, queries):
        if isinstance(points, ShardTensor) and points.device_mesh.ndim == 2:
            points = points.redistribute(placements=[Shard(0), Replicate()])
            queries = queries.redistribute(placements=[Replicate(), Shard(0)])
        return call(points, queries)

    return fn


case("knn_apart", apart(nearest(4)), (P, Q), (), cuts2=BOTH2)
case("radius_apart", apart(within(1.1)), (P, Q), (), cuts2=BOTH2)
case("radius", within(1.5), (P, Q), BOTH, cuts2=BOTH2, wire=("all_to_all", "all_gather"))
case("radius_one_cut", within(1.0), (P, Q), (*EITHER, (1, 1), ("P", 0), ("R", "R")))
case("radius_ties", within(1.0), (P, Q), (*BOTH, *EITHER), cuts2=BOTH2, make={0: lattice, 1: lattice})
case("radius_one_query_at_a_time", few_at_a_time(within(1.5)), (P, Q), BOTH)
case("radius_nothing", lambda p, q: radius_search(p, q, -1.0)[1:], (P, Q), BOTH)
case("radius_rows", within(1.5, 5), (P, Q), (*BOTH, *EITHER), cuts2=BOTH2, make={0: lattice})
case("radius_long_rows", within(1.5, 30), ((3, *P), (3, *Q)), ((1, 1), (0, 0), (1, None)), cuts2=(((0, 1), (0, 1)),))
refuse("more neighbours than points", lambda x: knn(x, x, 8), (7, 3), 0)
refuse("no neighbour", lambda x: knn(x, x, 0), (7, 3), 0)
refuse("points of another space", lambda x: knn(x, x[:, :2], 1), (7, 3), 0)
refuse("lists of a batch", lambda x: radius_search(x, x, 1.0), (2, 7, 3), 1)
refuse("whole coordinates", lambda x: knn(x.long(), x.long(), 1), (7, 3), 0)
