"""Blocks that move between channels and space: a cut between blocks stays where it is and sends nothing; one inside a
block moves to its end."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor.placement_types import Shard

from core.dispatch import Plan, op
from core.errors import ShardingError
from core.ops.sliding import at_least_one, each, fetch_all, layout, middle, spread, trimmed


def _in_blocks(x, dim, block):
    """``x`` with the cut of ``dim``, if any, between blocks of rows."""
    axis = x.axis_of(dim)
    if axis is None or all(n % block == 0 for n in x.sizes[axis]):
        return x
    ends = [min(-(-row // block) * block, x.shape[dim]) for row in x.offsets(axis)]
    return x.with_axis(axis, Shard(dim), [b - a for a, b in zip(ends, ends[1:])])


def _scaled(x, shape, factors, dims=None):
    """The spec of a result whose cut dims, at ``dims`` where given, have ``factors[dim]`` times the rows, or a part."""
    sizes = {}
    for axis, dim in x.cuts():
        up, down = factors.get(dim, (1, 1))
        sizes[axis] = tuple(n * up // down for n in x.sizes[axis])
    return x.reshaped(shape, dims, sizes)


def _rearranged(func, x, out):
    """``func`` of a part, unless it has no elements: there torch's own derivative has the wrong shape."""
    return Plan((x,), out, lambda t, n: func(t, n) if t.numel() else t.reshape(out.local_shape()))


@op(torch.pixel_shuffle)
def pixel_shuffle(func, x, upscale_factor):
    r, channels = upscale_factor, x.ndim - 3
    if channels < 0 or r < 1 or x.shape[channels] % r**2:
        raise ShardingError(f"upscale_factor {r}", op="pixel_shuffle", operands=[x])
    x = _in_blocks(x, channels, r**2)
    *lead, c, h, w = x.shape
    factors = {channels: (1, r**2), channels + 1: (r, 1), channels + 2: (r, 1)}
    return _rearranged(func, x, _scaled(x, (*lead, c // r**2, h * r, w * r), factors))


@op(torch.pixel_unshuffle)
def pixel_unshuffle(func, x, downscale_factor):
    r, channels = downscale_factor, x.ndim - 3
    if channels < 0 or r < 1 or x.shape[-1] % r or x.shape[-2] % r:
        raise ShardingError(f"downscale_factor {r}", op="pixel_unshuffle", operands=[x])
    x = _in_blocks(_in_blocks(x, channels + 1, r), channels + 2, r)
    *lead, c, h, w = x.shape
    factors = {channels: (r**2, 1), channels + 1: (1, r), channels + 2: (1, r)}
    return _rearranged(func, x, _scaled(x, (*lead, c * r**2, h // r, w // r), factors))


@op(torch.channel_shuffle, torch.native_channel_shuffle)
def channel_shuffle(func, x, groups):
    """Channels that are cut lie whole meanwhile: every rank needs some of every other's."""
    if x.ndim < 3 or groups < 1 or x.shape[1] % groups:
        raise ShardingError(f"groups {groups}", op="channel_shuffle", operands=[x])
    whole = x.aside(1)
    return Plan((whole,), whole, lambda t, *args: func(t, *args) if t.numel() else t.view_as(t), final=x)


class _Columns:
    """How windows over the two last dims of an image lie, row by row of windows, in the last dim of ``unfold``."""

    def __init__(self, func, x, size, kernel_size, dilation, padding, stride):
        values = [each(v, 2) for v in (kernel_size, dilation, padding, stride)]
        self.kernel, self.dilation, self.padding, self.stride = values
        self.span = [d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation)]
        self.count = [(n + 2 * p - span) // s + 1 for n, p, span, s in zip(size, self.padding, self.span, self.stride)]
        self.elements = self.kernel[0] * self.kernel[1]
        if min(*self.kernel, *self.dilation, *self.stride, *self.count) < 1 or min(self.padding) < 0:
            raise ShardingError(f"windows of {self.span} rows over {tuple(size)}", op=func.__name__, operands=[x])

    def arguments(self, cut):
        """Kernel, dilation, padding and stride for the plain operation, without padding along a cut first dim."""
        return self.kernel, self.dilation, (0 if 0 in cut else self.padding[0], self.padding[1]), self.stride


@op(F.unfold)
def unfold(func, x, kernel_size, dilation=1, padding=0, stride=1):
    """The cut follows the rows of windows. A cut along the last dim is laid over another one, because the columns that
    a rank then makes would not follow each other."""
    if x.ndim not in (3, 4):
        raise ShardingError("takes an image with channels", op="unfold", operands=[x])
    first = x.ndim - 2
    w = _Columns(func, x, x.shape[-2:], kernel_size, dilation, padding, stride)
    x = x.aside(first + 1)
    windows, cut = layout(func, x, first, x.shape[:first], w.count, middle(w.span, w.stride, w.padding), _dense(w))
    shape = (*x.shape[: first - 1], x.shape[first - 1] * w.elements, w.count[0] * w.count[1])
    factors = {first - 1: (w.elements, 1), first: (w.count[1], 1)}
    out = _scaled(windows, shape, factors, {d: d for d in range(first + 1)})

    def local(t, *args, **kwargs):
        t = at_least_one(fetch_all(t, first, cut))
        return trimmed(func(t, *w.arguments(cut)), out.local_shape())

    return Plan((x,), out, local if x.is_sharded() else None)


def _dense(w):
    def rows_read(i, start, stop):
        low = start * w.stride[i] - w.padding[i]
        return (low, low + (stop - start - 1) * w.stride[i] + w.span[i]) if start < stop else (-w.span[i], 0)

    return rows_read


@op(F.fold)
def fold(func, x, output_size, kernel_size, dilation=1, padding=0, stride=1):
    """Rows of windows travel to the image rows that they reach."""
    size = each(output_size, 2)
    w = _Columns(func, x, size, kernel_size, dilation, padding, stride)
    if x.ndim not in (2, 3) or x.shape[-1] != w.count[0] * w.count[1] or x.shape[-2] % w.elements:
        raise ShardingError(f"takes windows of {w.kernel}, {w.count} of them", op="fold", operands=[x])
    first, channels = x.ndim - 1, x.shape[-2] // w.elements
    x = _in_blocks(_in_blocks(x, first - 1, w.elements), first, w.count[1])
    factors = {first - 1: (1, w.elements), first: (1, w.count[1])}
    image = (*x.shape[: first - 1], channels)
    windows = _scaled(x, (*image, *w.count), factors)
    place, rows_read, begins = spread(w.span, w.stride, w.padding)
    out, cut = layout(func, windows, first, image, size, place, rows_read)

    def local(t, *args, **kwargs):
        height, start = size[0], 0
        t = fetch_all(t.unflatten(-1, (-1, w.count[1])), first, cut)
        t = at_least_one(t.unflatten(first - 1, (-1, w.elements))).flatten(first - 1, first)
        if cut:
            height = (t.shape[first] - 1) * w.stride[0] + w.span[0]
            start = begins(0, *out.local_range(first), cut[0][1][cut[0][2].rank][0])
        y = func(t.flatten(-2), (height, size[1]), *w.arguments(cut))
        return trimmed(y.narrow(first, start, y.shape[first] - start), out.local_shape())

    return Plan((x,), out, local if x.is_sharded() else None)
