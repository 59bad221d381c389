"""Sliding windows over cut dims: which rank makes an output row, and which input rows it reads for that.

An output row belongs to the rank that owns the row in the middle of its window. A window of odd width that keeps the
extent then keeps the cut, whether it pads by itself or its input was padded before; windows that tile the rows send
nothing where the cut falls between them, and an extent that is halved is cut at half the rows.
"""

import torch.nn.functional as F

from core import collectives as c
from core.errors import ShardingError
from core.ops.halo import fetch


def each(value, n):
    """One number for each of ``n`` dims."""
    value = (value,) if isinstance(value, int) else tuple(value)
    return value * n if len(value) == 1 else value


def dims_of(func):
    """The number of spatial dims in a function's name."""
    return int(next(letter for letter in func.__name__ if letter.isdigit()))


def first_dim(func, x, n):
    """The first of ``n`` spatial dims, after channels and a batch dim or none."""
    if x.ndim not in (n + 1, n + 2):
        raise ShardingError(f"takes {n} spatial dims after channels", op=func.__name__, operands=[x])
    return x.ndim - n


def middle(span, stride, padding):
    """``place`` of :func:`placed` for windows of ``span`` rows, ``stride`` apart: the first whose middle is ``row``
    or later."""
    return lambda i, row: -(-(row + padding[i] - (span[i] - 1) // 2) // stride[i])


def placed(func, x, first, lead, extents, place):
    """Spec of the output.

    Args:
        first: first spatial dim.
        lead: extents of the output before its spatial dims, which have ``extents``.
        place: ``place(i, row)`` is the first output row of a rank whose first input row is ``row``.
    """
    if min(extents) < 1:
        raise ShardingError(f"the output would have extents {tuple(extents)}", op=func.__name__, operands=[x])
    sizes = {}
    for axis, dim in x.cuts():
        if dim >= first:
            i, ends = dim - first, x.offsets(axis)
            borders = [0, *(max(min(place(i, row), extents[i]), 0) for row in ends[1:-1]), extents[i]]
            sizes[axis] = tuple(b - a for a, b in zip(borders, borders[1:]))
    return x.reshaped([*lead, *extents], sizes=sizes)


def layout(func, x, first, lead, extents, place, rows_read):
    """As :func:`placed`, and for each spatial dim that ranks share the arguments of :func:`core.ops.halo.fetch`.

    ``rows_read(i, start, stop)`` gives the input rows that output rows read; for none of them as many as one row reads,
    all before the first, so that every rank has something to compute.
    """
    out, cut = placed(func, x, first, lead, extents, place), {}
    for axis, dim in x.cuts():
        if dim >= first and x.mesh.size(axis) > 1:
            ends = out.offsets(axis)
            ranges = tuple(rows_read(dim - first, a, b) for a, b in zip(ends, ends[1:]))
            cut[dim - first] = x.sizes[axis], ranges, c.axis_group(x.mesh, axis)
    return out, cut


def spread(span, stride, padding):
    """``place`` and ``rows_read`` of transposed windows, where an input row reaches ``span`` output rows, and where the
    output begins in the plain result without padding."""

    def place(i, row):
        return row * stride[i] - padding[i] + (span[i] - stride[i] + 1) // 2

    def rows_read(i, start, stop):
        """All rows that reach the output rows, and enough zero rows that the plain result covers them."""
        if start >= stop:
            return -1, 0
        start, stop, s, gap = start + padding[i], stop - 1 + padding[i], stride[i], span[i] - 1
        return min(-(-(start - gap) // s), start // s), max(stop // s, -(-(stop - gap) // s)) + 1

    def begins(i, start, stop, first_read):
        return start + padding[i] - first_read * stride[i] if start < stop else 0

    return place, rows_read, begins


def fetch_all(t, first, cut):
    """The rows that this rank's windows read, along every cut dim."""
    for i, call in cut.items():
        t = fetch(t, first + i, *call)
    return t


def at_least_one(t):
    """One row of zeros along every dim that has none here, for operations that want some."""
    return F.pad(t, [p for n in reversed(t.shape) for p in (0, int(n == 0))]) if 0 in t.shape else t


def trimmed(t, shape):
    """The first rows along every dim, without those that were computed only to compute something."""
    for dim, n in enumerate(shape):
        t = t.narrow(dim, 0, n) if t.shape[dim] != n else t
    return t
