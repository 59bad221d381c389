"""Rows of reads by number: subscripts, index_select, take, gather and their kin."""

import torch
from cases import case

X = (2, 7, 6)
ROUTED = ("all_to_all", "all_to_all", "all_to_all")  # counts, coordinates, rows


def numbers(low, high):
    """An operand of whole numbers."""
    return lambda g, shape: torch.randint(low, high, shape, generator=g)


def order(n):
    """A vector of distinct numbers below ``n``."""
    return lambda g, shape: torch.randperm(n, generator=g)[: shape[0]]


def truths(g, shape):
    return torch.rand(shape, generator=g) > 0.4


# -- rows by number: reading -----------------------------------------------------------------------------------------
SELECT = dict(make={1: numbers(0, 7)})
case(
    "index_select",
    lambda x, i: (torch.index_select(x, 1, i), x.index_select(dim=1, index=i), x[:, i], x[:, i - 7]),
    (X, (9,)),
    ((1, None), (1, 0), (2, 0), ("R", 0), (None, 0), (1, "R"), ("P", None)),
    cuts2=(((1, 2), None), ((0, 1), None), ((1, 2), "R")),
    **SELECT,
)
case(
    "index_routed",
    lambda x, i: (x.index_select(1, i), x[:, i]),
    (X, (9,)),
    ((1, None), (1, 0), (1, "R")),
    wire=ROUTED * 2,
    **SELECT,
)
case(
    "index_uncut",
    lambda x, i: (x.index_select(1, i), x[:, i], x[:, [0, 3, -1]], x[..., [1]]),
    (X, (9,)),
    ((0, None), (None, 0)),
    cuts2=(((0, 2), None),),
    wire=(),
    **SELECT,
)
case(
    "index_matrix",
    lambda x, i: (x[:, i], x[:, i, 2], x[0, i], x[None, :, i], x[..., i, :], x[1:, i]),
    (X, (3, 4)),
    ((1, None), (1, 0), (1, 1), (0, 1), (2, 0)),
    cuts2=(((1, 2), (0, 1)), ((1, 2), None)),
    **SELECT,
)
case(
    "index_two_dims",
    lambda x, i, j: (x[:, i, j], x[i % 2, :, j], x[i % 2, i], x[i % 2, i, j], x[:, i[:, None], j]),
    (X, (5,), (5,)),
    ((1, None, None), (2, 0, None), (2, None, 0), (0, 0, 0), (None, 0, 0)),
    cuts2=(((1, 2), None, None), ((0, 2), None, None)),
    make={1: numbers(-7, 7), 2: numbers(0, 6)},
)
case(
    "index_of_points",
    lambda x, i, j: (x[..., i, j], x[:, 0, i, j]),
    ((2, 3, 7, 6), (20,), (20,)),
    ((2, None, None), (3, 0, 0)),
    cuts2=(((2, 3), None, None), ((3, 2), None, None), ((1, 2), None, None)),
    make={1: numbers(0, 7), 2: numbers(0, 6)},
)
case(
    "index_lists",
    lambda x: (
        x[[0, 1]],
        x[:, [2, -1, 2]],
        x[:, [[0], [6]], [1, 2, 3]],
        x[:, (4, 5)],
        x[:, []],
        x[[1], :, [3]],
        x[:, range(3)],
    ),
    (X,),
    ((0,), (1,), (2,)),
    cuts2=(((1, 2),),),
)
case(
    "index_mixed",
    lambda x, i: (
        x[:, i, None],
        x[1, i, ::2],
        x[None, ..., i % 6],
        x[:, 1:6, i % 6],
        x[:, ::2][:, i % 4],
        x[:, i][..., 2:],
    ),
    (X, (5,)),
    ((1, None), (1, 0), (2, None)),
    cuts2=(((1, 2), None),),
    **SELECT,
)
case(
    "index_number_tensor",
    lambda x: (x[torch.tensor(1)], x[:, torch.tensor(-2)], x[torch.tensor(True)], x[:, None, False], x[True]),
    (X,),
    ((0,), (1,), ("R",)),
)
case(
    "take",
    lambda x, i: (torch.take(x, i), x.take(i - 84), torch.take(x, i.view(2, 6))),
    (X, (12,)),
    ((0, None), (1, None), (2, 0), (None, 0)),
    cuts2=(((1, 2), None),),
    make={1: numbers(0, 84)},
)


def _by_name(x, i, w):
    """Forms that only torch itself uses: derivatives, decompositions, tables inside tensors of another mesh."""
    aten = torch.ops.aten
    return (
        torch.embedding(w, i),
        torch.embedding(w, i, padding_idx=3),
        aten._unsafe_index(x.detach(), [None, i]),
        aten._index_put_impl_(x.detach() * 1, [None, i], x.detach()[:, :1], True, True),
    )


case(
    "index_by_name",
    _by_name,
    (X, (9,), (7, 6)),
    ((1, None, None), (1, 0, None), (0, 0, 0), (2, 0, 1)),
    cuts2=(((1, 2), None, None), (None, "R", (0, 1))),
    **SELECT,
)

# -- elements by number ----------------------------------------------------------------------------------------------
GATHER = ((1, None), (1, 1), (1, 0), (1, 2), (0, 0), (2, None), (None, 1), ("R", 2), (2, 1))
case(
    "gather",
    lambda x, i: (torch.gather(x, 1, i), x.gather(dim=1, index=i[:, :3]), x.gather(-2, i[:, :, :4])),
    (X, (2, 9, 6)),
    GATHER,
    cuts2=(((1, 2), (1, 2)), ((1, 2), None), ((0, 1), (0, 2)), (None, (1, 2))),
    **SELECT,
)
case(
    "gather_uncut",
    lambda x, i: x.gather(1, i),
    (X, (2, 9, 6)),
    ((0, 0), (2, 2), (0, None), (2, None)),
    wire=(),
    **SELECT,
)
case("gather_routed", lambda x, i: x.gather(1, i), (X, (2, 9, 6)), ((1, None), (1, 1)), wire=ROUTED, **SELECT)
case(
    "index_numbers_of_any_size",
    lambda x, i: tuple(
        f(y)
        for dtype in (torch.uint8, torch.bool, torch.bfloat16, torch.int32)
        for y in (x.detach().to(dtype),)
        for f in (lambda y: y[:, i], lambda y: y.index_put((i % 2, i), y.new_ones(())), lambda y: y[y != 0])
    ),
    (X, (9,)),
    ((1, None), (0, 0)),
    **SELECT,
    differentiable=(),
)
case("gather_vector", lambda x, i: (x.gather(0, i), x[i]), ((7,), (9,)), ((0, None), (0, 0), (None, 0)), **SELECT)
case(
    "take_along_dim",
    lambda x, i: (
        torch.take_along_dim(x, i, 1),
        x.take_along_dim(i[:1], dim=1),
        x[..., :1].take_along_dim(i, 1),
        torch.take_along_dim(x, i.view(-1)[:5]),
        x.take_along_dim(x.detach().argsort(1), 1),
    ),
    (X, (2, 5, 6)),
    ((1, None), (1, 1), (0, 0), (2, None)),
    cuts2=(((1, 2), None),),
    **SELECT,
)
