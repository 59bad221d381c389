"""Convolutions: each rank fetches the input rows that its output rows read, and calls the plain convolution.

Zeros stand only beyond the edges of the whole, so the plain convolution needs no padding along cut dims. A transposed
convolution is the same with the roles of input and output changed: a rank's output begins where the window of its first
input row does. A rank without output rows computes one of zeros and drops it, so that its graph has the same exchanges
as others'.
"""

import torch.nn.functional as F

from core.dispatch import Plan, op
from core.errors import ShardingError
from core.ops.sliding import dims_of, each, fetch_all, first_dim, layout, middle, spread


@op(F.conv1d, F.conv2d, F.conv3d)
def conv(func, x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    n, x, first = _operands(func, x, weight, 1, groups)
    stride, dilation = each(stride, n), each(dilation, n)
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:])]
    pads = _pads(func, padding, spans, stride)
    extents = [(x.shape[first + i] + sum(pads[i]) - spans[i]) // stride[i] + 1 for i in range(n)]

    def rows_read(i, start, stop):
        low = start * stride[i] - pads[i][0]
        return (low, low + (stop - start - 1) * stride[i] + spans[i]) if start < stop else (-spans[i], 0)

    place = middle(spans, stride, [low for low, _ in pads])
    out, cut = layout(func, x, first, (*x.shape[: first - 1], weight.shape[0]), extents, place, rows_read)
    inner = [0 if i in cut else low for i, (low, _) in enumerate(pads)]
    extra = [p for i in reversed(range(n)) for p in (0, 0 if i in cut else pads[i][1] - pads[i][0])]

    def local(t, weight, bias=None, *args, **kwargs):
        t = fetch_all(t, first, cut)
        t = F.pad(t, extra) if any(extra) else t
        return _own(func(t, weight, bias, stride, inner, dilation, groups), out, first, {i: 0 for i in cut})

    return Plan(_inputs(x, weight, bias), out, local if cut else None)


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
