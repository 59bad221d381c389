"""Convolutions: each rank fetches the input rows that its output rows read, and calls the plain convolution.

Zeros stand only beyond the edges of the whole, so the plain convolution needs no padding along cut dims. Large parts
whose own rows line up with their own outputs stay where they are (:mod:`core.ops.interior`), and no array of own and
foreign rows is made. A transposed convolution is the same with the roles of input and output changed: a rank's
output begins where the window of its first input row does. A rank without output rows computes one of zeros and drops
it, so that its graph has the same exchanges as others'.
"""

from functools import partial

import torch.nn.functional as F

from core.dispatch import Plan, op
from core.errors import ShardingError
from core.ops.block import result_dtype
from core.ops.interior import Convolution, Interior, formula, reaching
from core.ops.sliding import dims_of, each, fetch_all, first_dim, layout, middle, spread

_least = 1 << 18  # elements of a part; below, a copy of it costs less than convolutions of strips


@op(F.conv1d, F.conv2d, F.conv3d)
def conv(func, x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    n, x, first = _operands(func, x, weight, 1, groups)
    w = _Windows(func, weight.shape[2:], each(stride, n), padding, each(dilation, n))
    extents = [w.extent(i, x.shape[first + i]) for i in range(n)]
    place = middle(w.spans, w.stride, [low for low, _ in w.pads])
    out, cut = layout(func, x, first, (*x.shape[: first - 1], weight.shape[0]), extents, place, w.rows_read)
    plan = partial(Plan, _inputs(x, weight, bias), out)
    even = x.ndim == n + 2 and all(low == high for low, high in w.pads)
    if even:
        cut = {i: call for i, call in cut.items() if not w.stays(x, out, i, call)}
    if not cut:
        return plan(None, formula=formula(w.by_halo([], set(), groups)) if even else None)

    def joined(t, weight, bias=None, dims=cut):
        """From one array of own and foreign rows; those along cut dims other than ``dims`` are there already."""
        t = w.padded(fetch_all(t, first, dims), cut)
        return _own(func(t, weight, bias, *w.arguments(cut), groups), out, first, dict.fromkeys(dims, 0))

    halos = w.halos(x, out, cut) if even else {}
    if not halos:
        return plan(lambda t, weight, bias=None, *args, **kwargs: joined(t, weight, bias))
    others = {i: call for i, call in cut.items() if i not in halos}  # along these rows are put together first
    how = w.by_halo(list(halos.items()), set(others), groups)
    how = how._replace(joined=partial(joined, dims={i: cut[i] for i in halos}))

    def interior(t, weight, bias=None, *args, **kwargs):
        if t.is_complex():
            return joined(t, weight, bias)
        t, *weights = (v if v is None else v.to(result_dtype(v)) for v in (t, weight, bias))
        return _own(Interior.apply(fetch_all(t, first, others), *weights, how), out, first, dict.fromkeys(others, 0))

    return plan(interior, formula=None if others else formula(how))


class _Windows:
    """Where the windows of a convolution lie: their spans, the distance between them, zero rows before and after."""

    def __init__(self, func, kernel, stride, padding, dilation):
        self.stride, self.dilation = stride, dilation
        self.spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel)]
        self.pads = _pads(func, padding, self.spans, stride)

    def extent(self, i, rows):
        return (rows + sum(self.pads[i]) - self.spans[i]) // self.stride[i] + 1

    def rows_read(self, i, start, stop):
        low = start * self.stride[i] - self.pads[i][0]
        return (low, low + (stop - start - 1) * self.stride[i] + self.spans[i]) if start < stop else (-self.spans[i], 0)

    def arguments(self, cut):
        """Stride, padding and dilation of the plain operation, without padding along the dims ``cut``."""
        return self.stride, [0 if i in cut else low for i, (low, _) in enumerate(self.pads)], self.dilation

    def padded(self, t, cut):
        """What has more zero rows after than before gets those that are missing, along dims that are not cut."""
        missing = [0 if i in cut else high - low for i, (low, high) in enumerate(self.pads)]
        return F.pad(t, [p for m in reversed(missing) for p in (0, m)]) if any(missing) else t

    def reach(self, x, out, i, call):
        sizes, _, group = call
        ends = out.offsets(x.axis_of(i + 2))
        return reaching(i + 2, sizes, ends, self.spans[i], self.stride[i], self.pads[i][0], group)

    def stays(self, x, out, i, call):
        """Whether every rank has rows, and those that it reads."""
        axis, halo = x.axis_of(i + 2), self.reach(x, out, i, call)
        return halo and all((*x.sizes[axis], *out.sizes[axis])) and not any(a < b for w in halo.wanted for a, b in w)

    def halos(self, x, out, cut):
        """Of the cut dims whose rows line up, if parts are large."""
        if x.shape.numel() < _least * x.mesh.size():
            return {}
        found = {i: self.reach(x, out, i, call) for i, call in cut.items()}
        return {i: halo for i, halo in found.items() if halo is not None}

    def by_halo(self, halos, without, groups):
        """The :class:`Convolution` that takes one halo after the other, without padding along some dims."""
        if not halos:
            return Convolution((*self.arguments(without), False, (0,) * len(self.spans), groups))
        (i, halo), *more = halos
        own, strip = (self.by_halo(more, dims, groups) for dims in (without, {*without, i}))
        return Convolution(halo=halo, own=own, strip=strip)


@op(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def conv_transpose(func, x, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    n, x, first = _operands(func, x, weight, 0, 1)
    stride, padding, dilation, tail = (each(v, n) for v in (stride, padding, dilation, output_padding))
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:])]
    extents = [(x.shape[first + i] - 1) * stride[i] - 2 * padding[i] + spans[i] + tail[i] for i in range(n)]

    place, rows_read, begins = spread(spans, stride, padding)
    lead = (*x.shape[: first - 1], weight.shape[1] * groups)
    out, cut = layout(func, x, first, lead, extents, place, rows_read)
    inner = [[0 if i in cut else v[i] for i in range(n)] for v in (padding, tail)]
    starts = {i: begins(i, *out.local_range(first + i), call[1][call[2].rank][0]) for i, call in cut.items()}

    def local(t, weight, bias=None, *args, **kwargs):
        t = fetch_all(t, first, cut)
        return _own(func(t, weight, bias, stride, *inner, groups, dilation), out, first, starts)

    return Plan(_inputs(x, weight, bias), out, local if cut else None)


def _operands(func, x, weight, dim, groups):
    """The number of spatial dims, the input with whole channels, and its first spatial dim."""
    n = dims_of(func)
    first, channels = first_dim(func, x, n), weight.shape[dim] * groups
    if weight.ndim != n + 2 or x.shape[first - 1] != channels:
        raise ShardingError(
            f"the weight {tuple(weight.shape)} takes {channels} channels", op=func.__name__, operands=[x]
        )
    return n, x.whole(first - 1), first


def _pads(func, padding, spans, stride):
    """Zero rows before and after, for each dim."""
    if padding == "valid":
        return [(0, 0)] * len(spans)
    if padding == "same":
        if any(s != 1 for s in stride):
            raise ShardingError("padding='same' is not supported for strided convolutions", op=func.__name__)
        return [((s - 1) // 2, s - 1 - (s - 1) // 2) for s in spans]
    return [(p, p) for p in each(padding, len(spans))]


def _own(y, out, first, starts):
    for i, start in starts.items():
        y = y.narrow(first + i, start, out.local_shape()[first + i])
    return y


def _inputs(x, weight, bias):
    return (x, weight.replicated(), *((bias.replicated(),) if bias is not None else ()))
