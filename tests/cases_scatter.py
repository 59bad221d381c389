"""Rows of writes by number: index_add, index_put, scatter and their kin."""

import torch
from cases import case
from cases_indexing import ROUTED, SELECT, X, numbers, order

# -- rows by number: writing -----------------------------------------------------------------------------------------
ROWS = ((1, None, None), (1, 0, 1), (1, None, 1), (1, 0, None), (0, None, 0), (2, 0, 2), (2, None, 1), ("R", None, 1))
ROWS2 = (((1, 2), None, (1, 2)), ((0, 1), None, None), ("R", None, (1, 2)))
case(
    "index_add",
    lambda x, i, s: (torch.index_add(x, 1, i, s), x.index_add(1, i, s, alpha=2), (x * 1).index_add_(1, i, s)),
    (X, (9,), (2, 9, 6)),
    (*ROWS, ("R", 0, 1), (1, None, 2)),
    cuts2=ROWS2,
    **SELECT,
)
case(
    "index_add_picks",
    lambda x, i, s: x.index_add(1, i, s),
    (X, (9,), (2, 9, 6)),
    ((1, None, None), (2, None, 2), (0, None, 0)),
    wire=(),
    **SELECT,
)  # noqa: E501
case(
    "index_add_routed",
    lambda x, i, s: x.index_add(1, i, s),
    (X, (9,), (2, 9, 6)),
    ((1, 0, 1), (1, None, 1)),
    wire=ROUTED,
    **SELECT,
)  # noqa: E501
case(
    "index_copy_fill",
    lambda x, i, s: (
        torch.index_copy(x, 1, i, s),
        (x * 1).index_copy_(1, i, s),
        x.index_fill(1, i, 3.0),
        x.index_fill(1, i, s.sum()),
        (x * 1).index_fill_(1, i, -1),
    ),
    (X, (4,), (2, 4, 6)),
    ROWS,
    cuts2=ROWS2,
    make={1: order(7)},
)
case(
    "index_reduce",
    lambda x, i, s: (
        tuple(
            x.detach().index_reduce(1, i, s.detach(), how, include_self=own)
            for how in ("prod", "mean", "amax", "amin")
            for own in (True, False)
        )
        + ((x.detach() * 1).index_reduce_(1, i, s.detach(), "amax"),)
    ),
    (X, (9,), (2, 9, 6)),
    ROWS,
    cuts2=ROWS2,
    **SELECT,
    differentiable=(),
)
case(
    "index_put",
    lambda x, i, s: (
        torch.index_put(x, (torch.arange(2, device=i.device)[:, None], i), s),
        x.index_put((torch.arange(2, device=i.device)[:, None], i), s[:, :, 0].unsqueeze(-1), accumulate=True),
        (x * 1).index_put_((i.new_ones(()), i), s[0, 0], accumulate=True),
    ),
    (X, (4,), (2, 4, 6)),
    ROWS,
    cuts2=ROWS2,
    make={1: order(7)},
)
case(
    "index_put_cut_points",
    lambda x, i, j, s: (
        x.index_put((i, j), s, accumulate=True),
        x.new_zeros(7, 6).index_put((i, j), s, accumulate=True),
    ),
    ((7, 6), (20,), (20,), (20,)),
    ((0, 0, 0, 0), (1, 0, 0, 0), (0, None, None, None), (None, 0, 0, 0), (0, None, None, 0), (0, 0, 0, None)),
    cuts2=(((0, 1), None, None, None), ((0, 1), None, None, "R")),
    make={1: numbers(0, 7), 2: numbers(0, 6)},
)
case(
    "put",
    lambda x, i, s: (torch.put(x, i, s), x.put(i, s, accumulate=True), (x * 1).put_(i - 84, s)),
    (X, (5,), (5,)),
    ((0, None, None), (1, None, 0), (2, 0, 0), (1, 0, None)),
    cuts2=(((1, 2), None, None),),
    make={1: order(84)},
)

# -- elements by number: writing -------------------------------------------------------------------------------------
SCATTER = (
    (1, None, None),
    (1, 1, 1),
    (1, 0, 0),
    (1, 2, None),
    (0, 0, 0),
    (2, None, 2),
    ("R", 1, 1),
    ("R", 2, 2),
    (1, 1, None),
)
SCATTER2 = (((1, 2), (1, 2), (1, 2)), ((0, 1), None, None), ("R", (1, 2), (1, 2)))
case(
    "scatter",
    lambda x, i, s: (
        torch.scatter(x, 1, i, s),
        x.scatter(1, i[..., :4], s.detach()),
        (x * 1).scatter_(1, i, s),
        x.scatter(1, i, 3.0),
        (x * 1).scatter_(1, i, value=-1.0),
    ),
    (X, (2, 5, 6), (2, 5, 6)),
    SCATTER,
    cuts2=SCATTER2,
    make={1: lambda g, shape: torch.rand(2, 7, 6, generator=g).argsort(1)[:, :5]},
)
case(
    "scatter_add",
    lambda x, i, s: (
        torch.scatter_add(x, 1, i, s),
        (x * 1).scatter_add_(1, i[:, :8], s[:, :8]),
        x.scatter_add(1, i[:1, :, 1:], s.detach()),
    ),
    (X, (2, 9, 6), (2, 9, 6)),
    SCATTER,
    cuts2=SCATTER2,
    **SELECT,
)
case(
    "scatter_add_picks",
    lambda x, i, s: x.scatter_add(1, i, s),
    (X, (2, 9, 6), (2, 9, 6)),
    ((1, None, None), (0, 0, 0), (2, 2, 2)),
    wire=(),
    **SELECT,
)  # noqa: E501
case(
    "scatter_add_routed",
    lambda x, i, s: x.scatter_add(1, i, s),
    (X, (2, 9, 6), (2, 9, 6)),
    ((1, 1, 1),),
    wire=ROUTED,
    **SELECT,
)  # noqa: E501
case(
    "scatter_reduce",
    lambda x, i, s: tuple(
        x.scatter_reduce(1, i, s, how, include_self=own)
        for how in ("sum", "mean", "amax", "amin")
        for own in (True, False)
    ),
    (X, (2, 9, 6), (2, 9, 6)),
    SCATTER[:6],
    cuts2=SCATTER2[:2],
    **SELECT,
)
case(
    "scatter_product",
    lambda x, i, s: (
        x.scatter_reduce(1, i, s, "prod"),
        (x * 1).scatter_reduce_(1, i, s, reduce="sum"),
        x.detach().scatter(1, i, s.detach(), reduce="add"),
        x.detach().scatter(1, i, 2.0, reduce="multiply"),
        (x.detach() * 1).scatter_(1, i, s.detach(), reduce="multiply"),
        (x.detach() * 1).scatter_(1, i, 2.0, reduce="add"),
    ),
    (X, (2, 9, 6), (2, 9, 6)),
    SCATTER[:6],
    cuts2=SCATTER2[:2],
    **SELECT,
)
case(
    "voxels",  # points of a cloud into a grid and back: values of several ranks add up
    lambda p, i: torch.zeros(6, 3, dtype=p.dtype, device=p.device).index_add(0, i, p)[i] - p,
    ((9, 3), (9,)),
    ((0, 0), (0, None), (1, None)),
    cuts2=(((0, 1), None),),
    make={1: numbers(0, 6)},
)
