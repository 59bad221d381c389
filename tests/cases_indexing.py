"""Rows of reads and writes by number and by mask: subscripts, index_select, gather, scatter and their kin."""

import torch
import torch.nn.functional as F
from cases import case, refuse

X = (2, 7, 6)
ROUTED = ("all_to_all", "all_to_all", "all_to_all")  # counts, coordinates, rows


def numbers(low, high):
    """An operand of whole numbers."""
    return lambda g, shape: torch.randint(low, high, shape, generator=g)


def order(n):
    """An operand of distinct numbers below ``n``."""
    return lambda g, shape: (
        torch.stack([torch.randperm(n, generator=g)[: shape[-1]] for _ in range(shape[:-1].numel())]).view(shape)
        if len(shape) > 1
        else torch.randperm(n, generator=g)[: shape[0]]
    )  # noqa: E501


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

# -- rows by number: writing -----------------------------------------------------------------------------------------
ROWS = ((1, None, None), (1, 0, 1), (1, None, 1), (1, 0, None), (0, None, 0), (2, 0, 2), (2, None, 1), (None, None, 1))
ROWS2 = (((1, 2), None, (1, 2)), ((0, 1), None, None), (None, None, (1, 2)))
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
        torch.index_put(x, (torch.arange(2)[:, None], i), s),
        x.index_put((torch.arange(2)[:, None], i), s[:, :, 0].unsqueeze(-1), accumulate=True),
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
    (None, 1, 1),
    (None, 2, 2),
    (1, 1, None),
)
SCATTER2 = (((1, 2), (1, 2), (1, 2)), ((0, 1), None, None), (None, (1, 2), (1, 2)))
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
    lambda p, i: torch.zeros(6, 3, dtype=p.dtype).index_add(0, i, p)[i] - p,
    ((9, 3), (9,)),
    ((0, 0), (0, None), (1, None)),
    cuts2=(((0, 1), None),),
    make={1: numbers(0, 6)},
)

# -- masks -----------------------------------------------------------------------------------------------------------
MASK = dict(make={1: truths})
case(
    "mask_of_rows",
    lambda x, m: (x[:, m], x[:, m, 1], x[0, m], x[:, m, None], x[:, m][..., 2:].sin()),
    (X, (7,)),
    ((1, None), (1, 0), (0, None), (2, None), (None, 0), ("R", 0), (1, "R"), ("P", 0)),
    cuts2=(((1, 2), None), ((0, 1), None), (None, "R")),
    **MASK,
)
case("mask_wire", lambda x, m: x[:, m], (X, (7,)), ((1, None), (1, 0)), wire=("all_gather",), **MASK)
case("mask_uncut", lambda x, m: (x[:, m], x[..., [True, False] * 3]), (X, (7,)), ((0, None),), wire=(), **MASK)
case(
    "mask_of_all",
    lambda x, m: (x[m], x[x.detach() > 0], torch.masked_select(x, m), x.masked_select(m[:, :, :1]), x[m[..., 0]]),
    (X, X),
    ((0, 0), (1, 1), (2, None), (None, 1), (1, 0), (0, None)),
    cuts2=(((1, 2), (1, 2)), ((0, 1), None)),
    **MASK,
)
case(
    "mask_of_one",
    lambda x, m: (x[m], x[:, :, 2][m[..., 0]]),
    ((1, 7, 6), (1, 7, 6)),
    ((1, 1), (1, None), (2, 2)),
    **MASK,
)
case(
    "mask_and_numbers",
    lambda x, m: (x[m[0, :2, 0], 3], x[:, m[0, :, 0], [0]], x[m[..., 0], 2], x[m[:, 0, 0], :, [1]]),
    (X, X),
    ((1, None), (0, 0), (1, 1)),
    **MASK,
)
case(
    "nonzero",
    lambda x, m: (
        m.nonzero(),
        torch.nonzero(m[..., 0], as_tuple=True)[1],
        torch.argwhere(x.detach() > 0),
        *torch.where(m),
        m[0, 0].nonzero().squeeze(1),
    ),
    (X, X),
    ((0, 0), (1, 1), (2, 2), (None, 1)),
    cuts2=(((1, 2), (1, 2)), ((0, 1), (0, 1))),
    **MASK,
    differentiable=(),
)
case(
    "masked_fill",
    lambda x, m: (x.masked_fill(m, 2.0), torch.masked_fill(x, m[:, :, :1], -1), (x * 1).masked_fill_(m[0], x.sum())),
    (X, X),
    ((1, 1), (1, None), (None, 1), (0, 1), (2, 2)),
    cuts2=(((1, 2), None),),
    **MASK,
)
case(
    "masked_scatter",
    lambda x, m, s: (
        torch.masked_scatter(x, m, s),
        x.masked_scatter(m[:, :, :1], s),
        (x * 1).masked_scatter_(m[0], s.view(-1)),
    ),
    (X, X, (2, 45)),
    ((0, 0, None), (1, 1, 0), (2, None, 1), (1, 0, None)),
    cuts2=(((1, 2), None, None),),
    **MASK,
)

# -- subscripts written ----------------------------------------------------------------------------------------------


def _assign(*writes):
    """Each write into a fresh copy."""

    def fn(x, *operands):
        results = []
        for write in writes:
            y = x * 1
            write(y, *operands)
            results.append(y)
        return tuple(results)

    return fn


def _set(subscript, value=lambda v: v):
    def write(y, *operands):
        *indices, v = operands
        y[subscript(*indices) if callable(subscript) else subscript] = value(v)

    return write


case(
    "assign_slices",
    _assign(
        _set((slice(None), slice(1, 5)), lambda v: v[:, :4]),
        _set((..., slice(0, 6, 2)), lambda v: v[..., :1]),
        _set((slice(None), slice(6, None)), lambda v: 3.0),
        _set((1,), lambda v: v[:1]),
        _set((slice(None), None, 3), lambda v: v[0, 0]),
    ),
    (X, X),
    ((1, None), (1, 1), (2, 1), (0, 0), (1, 2)),
    cuts2=(((1, 2), None), ((1, 2), (0, 1))),
)
case(
    "assign_row_of_cut_dim",
    _assign(
        _set((slice(None), 2), lambda v: v[:, 0]),
        _set((slice(None), -1), lambda v: v[0, 0]),
        _set((0, 3, slice(1, 4)), lambda v: v[0, 0, :3]),
        _set((slice(None), 5, 1), lambda v: v[:, 0, 0]),
        _set((slice(None), 4), lambda v: 5),
        _set((1, 2, 3), lambda v: v.sum()),
        _set((slice(None), 0, None), lambda v: v[:, :1]),
    ),
    (X, (2, 1, 6)),
    ((1, None), (1, 0), (1, 2), (2, None), (0, 0)),
    cuts2=(((1, 2), None), ((0, 1), None)),
)
case(
    "assign_row_wire", _assign(_set((slice(None), 2), lambda v: v[:, 0])), (X, (2, 1, 6)), ((1, None), (2, 2)), wire=()
)
case(
    "assign_by_number",
    _assign(
        _set(lambda i: (slice(None), i)),
        _set(lambda i: (0, i), lambda v: v[0]),
        _set(lambda i: (slice(None), i, 2), lambda v: v[:, 0, :1]),
        _set(lambda i: (slice(None), i, slice(1, 3)), lambda v: v[..., :2]),
        _set((slice(None), [0, 3, 6]), lambda v: 7),
        _set(lambda i: (slice(None), i[:3], [0, 1, 2]), lambda v: v[:, 0, :3]),
    ),
    (X, (4,), (2, 4, 6)),
    ((1, None, None), (1, 0, 1), (1, None, 1), (2, None, 2), (0, 0, 0)),
    cuts2=(((1, 2), None, None), ((1, 2), None, (1, 2))),
    make={1: order(7)},
)
case(
    "assign_by_mask",
    _assign(
        _set(lambda m: m, lambda v: 4.0),
        _set(lambda m: m, lambda v: v.sum()),
        _set(lambda m: m[..., 0], lambda v: v[0, 0]),
        _set(lambda m: (slice(None), m[0, :, 0]), lambda v: v[:, :1]),
        _set(lambda m: (0, m[0, :, 0]), lambda v: v[0, 0]),
        _set(lambda m: (m[:, :, 0], 3), lambda v: v[0, 0, :1]),
    ),
    (X, X, X),
    ((1, 1, None), (1, None, 1), (2, 2, 0), (0, 0, 0)),
    cuts2=(((1, 2), None, None), ((1, 2), (1, 2), (1, 2))),
    **MASK,
)


def _rows_by_mask(x, m, v):
    """As many values as are true, in order."""
    m, y, z = m.detach(), x * 1, x * 1
    y[m] = v.reshape(-1)[: int(m.sum())]
    rows = m[0, :, 0]
    z[:, rows] = v[:, : int(rows.sum())]
    return y, z


case(
    "assign_rows_by_mask",
    _rows_by_mask,
    (X, X, X),
    ((1, 1, None), (1, None, 1), (2, 2, 0), (0, 0, 0), (1, 0, 2)),
    cuts2=(((1, 2), None, None), ((1, 2), (1, 2), (1, 2))),
    **MASK,
)
case(
    "assign_through_views",
    _assign(
        lambda y, v: y.transpose(1, 2)[1:].__setitem__((0, 3), v[0, :, 0]),
        lambda y, v: y[:, 1:].mul_(v[:, 1:])[:, :2].add_(1),
        lambda y, v: y.narrow(1, 2, 3).copy_(v[:, :3]),
        lambda y, v: y.unsqueeze(1).squeeze(1)[..., :1].zero_(),
        lambda y, v: y.diagonal(0, 1, 2).copy_(v[:, :6, 0]),
    ),
    (X, X),
    ((0, 0), (1, 1), (2, None)),
    cuts2=(((0, 1), None),),
)
case(
    "scatters_of_parts",
    lambda x, v: (
        torch.select_scatter(x, v[:, 0], 1, 3),
        x.slice_scatter(v[:, :3], 1, 0, 6, 2),
        torch.diagonal_scatter(x, v[:, :5, 0], 1, 1, 2),
    ),
    (X, X),
    ((1, 1), (0, None), (2, 2)),
    cuts2=(((1, 2), None),),
)

# -- tables, bins and counts -----------------------------------------------------------------------------------------
TABLE = dict(make={0: numbers(0, 7)})
case(
    "embedding",
    lambda i, w: (
        F.embedding(i, w),
        F.embedding(i, w, padding_idx=3),
        F.embedding(weight=w, input=i[0], padding_idx=-1),
    ),
    ((2, 9), (7, 6)),
    ((1, None), (0, None), (1, 0), (None, 0), (None, 1), (0, 1), ("R", None)),
    cuts2=(((0, 1), None), (None, (0, 1))),
    **TABLE,
)
case(
    "embedding_wire",
    lambda i, w: (F.embedding(i, w), F.one_hot(i, 8)),
    ((2, 9), (7, 6)),
    ((1, None), (0, None)),
    wire=(),
    **TABLE,
)
case("embedding_rows", F.embedding, ((2, 9), (7, 6)), ((1, 0), (None, 0)), wire=ROUTED, **TABLE)
case(
    "embedding_bag",
    lambda i, w: (
        F.embedding_bag(i, w, mode="sum"),
        F.embedding_bag(i, w),
        F.embedding_bag(i, w, mode="sum", per_sample_weights=w[:2, :1].expand(2, 9), padding_idx=2),
    ),
    ((2, 9), (7, 6)),
    ((0, None), (1, None), (0, 0), (None, 1)),
    cuts2=(((0, 1), None), ((0, 1), (0, 1))),
    **TABLE,
)
case(
    "one_hot",
    lambda i: (F.one_hot(i, 8), F.one_hot(i), F.one_hot(i[0, 0], 7)),
    ((2, 9),),
    ((1,), (0,), ("R",)),
    cuts2=(((0, 1),),),
    **TABLE,
)
case(
    "bins",
    lambda x, e: (
        torch.bucketize(x, e.sort()[0]),
        torch.searchsorted(e.sort()[0], x, right=True),
        torch.isin(x.round(), e.round()),
        torch.isin((x * 2).int(), 1, invert=True),
    ),
    (X, (5,)),
    ((1, None), (0, None), (2, None), ("R", None)),
    cuts2=(((1, 2), None),),
    wire=(),
    differentiable=(),
)
case(
    "bins_cut",
    lambda x, e: (
        torch.bucketize(x, e[0, 0].sort()[0]),
        torch.searchsorted(e.sort(-1)[0], x),
        torch.isin(x.round(), e.round()),
        torch.searchsorted(e, x, sorter=e.argsort(-1)),
        torch.searchsorted(e[0, 0].sort()[0], 0.5),
        torch.bucketize(-0.5, e[0, 0].sort()[0]),
        torch.isin(1, (e * 2).int()),
    ),
    (X, (2, 7, 4)),
    ((None, 2), (1, 1), (0, 2), (2, 0), (2, 1), (None, 1)),
    cuts2=(((1, 2), (0, 1)), (None, (1, 2))),
    differentiable=(),
)
case(
    "counts",
    lambda i, w: (torch.bincount(i), torch.bincount(i, w, minlength=9), i.bincount(minlength=2)),
    ((9,), (9,)),
    ((0, 0), (0, None), (None, 0), ("R", None)),
    cuts2=(("R", "R"),),
    **TABLE,
    differentiable=(),
)
case(
    "histograms",
    lambda x: (
        torch.histc(x, 5),
        x.histc(4, min=-1, max=1),
        *torch.histogram(x, 5),
        *torch.histogram(x, 4, range=(-1.0, 2.0), weight=x.square(), density=True),
        *torch.histogram(x, torch.tensor([-1.0, 0.0, 0.5, 2.0], dtype=x.dtype)),
    ),
    (X,),
    ((0,), (1,), (2,)),
    cuts2=(((1, 2),),),
    differentiable=(),
)

# -- refused ---------------------------------------------------------------------------------------------------------
refuse("gather of other dims", lambda x: x.gather(1, torch.zeros(2, 3, dtype=torch.int64)))
refuse(
    "scatter beyond its source",
    lambda x: x[..., 0, 0].scatter(1, torch.zeros(2, 9, 8, dtype=torch.int64), x[..., 0, 0]),
)
refuse("rows that do not fit", lambda x: x.index_add(1, torch.zeros(2, dtype=torch.int64), x))
refuse("values that do not fit", lambda x: x.index_put((torch.tensor([0, 1]),), torch.ones(3, dtype=x.dtype)))
refuse("norms of embeddings", lambda x: F.embedding(torch.tensor([1]), x[0, :, :, 0, 0], max_norm=1.0))
refuse("sparse gradients of embeddings", lambda x: F.embedding(torch.tensor([1]), x[0, :, :, 0, 0], sparse=True))
refuse("rows of another length", lambda x: x.__setitem__((slice(None), slice(0, 3)), x[:, :4]))
refuse("a longer value by mask", lambda x: x.__setitem__(x[..., 0] > 9, torch.ones(5, dtype=x.dtype)))
