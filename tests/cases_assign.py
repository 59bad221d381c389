"""Rows of masks, read and written, and of subscripts that are written."""

import torch
from cases import case
from cases_indexing import X, order, truths

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
    ((1, 1), (1, None), ("R", 1), (0, 1), (2, 2)),
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
