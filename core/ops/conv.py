"""Convolutions: an output row belongs to the rank that owns the input row under the start of its stride.

Output row ``i`` goes with input row ``i * stride`` (rows beyond the last go to the last rank), so a resolution that is
halved is cut at half the rows and a patch embedding sends nothing. Each rank fetches the input rows that its output
rows read, zeros only beyond the edges of the whole, and calls the plain convolution without padding. A transposed
convolution is the same with the roles of input and output changed.

A rank without output rows computes one row of zeros and drops it: its graph then has the same exchanges as others'.
"""

import torch.nn.functional as F

from core import collectives as c
from core.dispatch import Plan, op
from core.errors import ShardingError
from core.ops.halo import fetch


@op(F.conv1d, F.conv2d, F.conv3d)
def conv(func, x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    n = weight.ndim - 2
    first = _first_dim(func, x, n, weight.shape[1] * groups)
    stride, dilation = _each(stride, n), _each(dilation, n)
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:])]
    pads = _pads(func, padding, spans, stride)
    extents = [(x.shape[first + i] + sum(pads[i]) - spans[i]) // stride[i] + 1 for i in range(n)]

    def rows_read(i, start, stop):
        low = start * stride[i] - pads[i][0]
        return (low, low + (stop - start - 1) * stride[i] + spans[i]) if start < stop else (-spans[i], 0)

    x, out, cut = _layout(func, x, first, weight.shape[0], extents, lambda i, row: -(-row // stride[i]), rows_read)
    inner = [0 if i in cut else low for i, (low, _) in enumerate(pads)]
    extra = [p for i in reversed(range(n)) for p in (0, 0 if i in cut else pads[i][1] - pads[i][0])]

    def local(t, weight, bias=None, *args, **kwargs):
        for i, call in cut.items():
            t = fetch(t, first + i, *call)
        t = F.pad(t, extra) if any(extra) else t
        return _own(func(t, weight, bias, stride, inner, dilation, groups), out, first, {i: 0 for i in cut})

    return Plan(_inputs(x, weight, bias), out, local if cut else None)


@op(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def conv_transpose(func, x, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    n = weight.ndim - 2
    first = _first_dim(func, x, n, weight.shape[0])
    stride, padding, dilation, tail = (_each(v, n) for v in (stride, padding, dilation, output_padding))
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:])]
    extents = [(x.shape[first + i] - 1) * stride[i] - 2 * padding[i] + spans[i] + tail[i] for i in range(n)]

    def rows_read(i, start, stop):
        """All rows that reach the output rows, and enough zero rows that the plain result covers them."""
        if start >= stop:
            return -1, 0
        start, stop, s, gap = start + padding[i], stop - 1 + padding[i], stride[i], spans[i] - 1
        return min(-(-(start - gap) // s), start // s), max(stop // s, -(-(stop - gap) // s)) + 1

    channels = weight.shape[1] * groups
    x, out, cut = _layout(func, x, first, channels, extents, lambda i, row: row * stride[i], rows_read)
    inner = [[0 if i in cut else v[i] for i in range(n)] for v in (padding, tail)]
    starts = {}
    for i, (_, ranges, group) in cut.items():
        at = out.local_range(first + i)[0]
        starts[i] = at + padding[i] - ranges[group.rank][0] * stride[i] if out.local_shape()[first + i] else 0

    def local(t, weight, bias=None, *args, **kwargs):
        for i, call in cut.items():
            t = fetch(t, first + i, *call)
        return _own(func(t, weight, bias, stride, *inner, groups, dilation), out, first, starts)

    return Plan(_inputs(x, weight, bias), out, local if cut else None)


def _each(value, n):
    value = (value,) if isinstance(value, int) else tuple(value)
    return value * n if len(value) == 1 else value


def _pads(func, padding, spans, stride):
    """Zero rows before and after, for each dim."""
    if padding == "valid":
        return [(0, 0)] * len(spans)
    if padding == "same":
        if any(s != 1 for s in stride):
            raise ShardingError("padding='same' is not supported for strided convolutions", op=func.__name__)
        return [((s - 1) // 2, s - 1 - (s - 1) // 2) for s in spans]
    return [(p, p) for p in _each(padding, len(spans))]


def _first_dim(func, x, n, channels):
    """The first spatial dim, after a batch dim or none."""
    if x.ndim not in (n + 1, n + 2) or x.shape[-n - 1] != channels:
        raise ShardingError(
            f"the weight takes {channels} channels and {n} spatial dims", op=func.__name__, operands=[x]
        )
    return x.ndim - n


def _layout(func, x, first, channels, extents, place, rows_read):
    """Specs of input and output, and for each cut spatial dim the arguments of :func:`fetch`.

    ``place(i, row)`` is the first output row of a rank whose first input row is ``row``; ``rows_read(i, start, stop)``
    the input rows that output rows read.
    """
    if min(extents) < 1:
        raise ShardingError(f"the output would have extents {extents}", op=func.__name__, operands=[x])
    x, sizes, cut = x.whole(first - 1), {}, {}
    for axis, dim in x.cuts():
        if dim < first:
            continue
        i, ends = dim - first, x.offsets(axis)
        borders = [0, *(min(place(i, row), extents[i]) for row in ends[1:-1]), extents[i]]
        sizes[axis] = tuple(b - a for a, b in zip(borders, borders[1:]))
        ranges = tuple(rows_read(i, a, b) for a, b in zip(borders, borders[1:]))
        cut[i] = x.sizes[axis], ranges, c.axis_group(x.mesh, axis)
    shape = [*x.shape[: first - 1], channels, *extents]
    return x, x.reshaped(shape, {d: d for d in range(x.ndim)}, sizes), cut


def _own(y, out, first, starts):
    for i, start in starts.items():
        y = y.narrow(first + i, start, out.local_shape()[first + i])
    return y


def _inputs(x, weight, bias):
    return (x, weight.replicated(), *((bias.replicated(),) if bias is not None else ()))
