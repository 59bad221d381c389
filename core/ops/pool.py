"""Pooling: each rank fetches the rows under its own windows and calls the plain operation on them.

Beyond the edges of the whole stand zeros for averages, which then are scaled by how many rows count, and for maxima
copies of rows of the same window, so that values, ties and gradients are those of the rows inside.
"""

import math
from itertools import product

import torch
import torch.nn.functional as F

from core.dispatch import Plan, op
from core.errors import MissingShardPatch, ShardingError
from core.ops.sliding import at_least_one, dims_of, each, fetch_all, first_dim, layout, middle, placed, trimmed


class Pooling:
    """Where the windows of one call lie and what this rank fetches for them."""

    def __init__(self, func, x, kernel, stride, padding=0, dilation=1, ceil_mode=False, copies=False):
        n = dims_of(func)
        self.first, self.whole, self.ceil_mode = first_dim(func, x, n), x.shape[-n:], bool(ceil_mode)
        self.kernel, self.padding, self.dilation = each(kernel, n), each(padding, n), each(dilation, n)
        self.stride = each(stride, n) if stride or isinstance(stride, int) else self.kernel
        self.span = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel)]
        self._check(func, x)
        lead, extents = x.shape[: self.first], [self._extent(i) for i in range(n)]
        reads = self._rows_inside if copies else self._rows
        place = middle(self.span, self.stride, self.padding)
        self.out, self.cut = layout(func, x, self.first, lead, extents, place, reads)
        self.inner = [0 if i in self.cut else p for i, p in enumerate(self.padding)]

    def _check(self, func, x):
        if min(*self.kernel, *self.stride, *self.dilation) < 1 or min(self.padding) < 0:
            raise ShardingError("kernel, stride and dilation must be positive", op=func.__name__, operands=[x])
        reach = self.span if len(self.span) == 1 else self.kernel
        if any(2 * p > s for p, s in zip(self.padding, reach)):
            raise ShardingError(f"padding {self.padding} is more than half a window", op=func.__name__, operands=[x])

    def _extent(self, i):
        n, s, p = self.whole[i], self.stride[i], self.padding[i]
        extent = (n + 2 * p - self.span[i] + (s - 1 if self.ceil_mode else 0)) // s + 1
        return extent - 1 if self.ceil_mode and (extent - 1) * s >= n + p else extent

    def _rows(self, i, start, stop):
        low = start * self.stride[i] - self.padding[i]
        high = low + (stop - start - 1) * self.stride[i] + self.span[i]
        return (low, high) if start < stop else (-self.span[i], 0)

    def _rows_inside(self, i, start, stop):
        low, high = self._rows(i, start, stop)
        return (max(low, 0), min(high, self.whole[i])) if start < stop else (low, high)

    def own_rows(self, i):
        """Output rows of this rank along cut dim ``i``, half-open."""
        return self.out.local_range(self.first + i)

    def counts(self, i, divided_by_padding):
        """For each own output row the number of rows that its average divides by; None where it is the kernel's."""
        (start, stop), k, n, p = self.own_rows(i), self.kernel[i], self.whole[i], self.padding[i]
        low, high = self._rows(i, start, stop)
        if start >= stop or (high <= n + p if divided_by_padding else low >= 0 and high <= n):
            return None
        lows = [row * self.stride[i] - p for row in range(start, stop)]
        if divided_by_padding:
            return [min(row + k, n + p) - row for row in lows]
        return [min(row + k, n) - max(row, 0) for row in lows]

    def scaled(self, t, factors):
        """``t`` times a factor for each row of the cut dims where there are some."""
        for i, values in factors.items():
            shape = [-1 if d == self.first + i else 1 for d in range(t.ndim)]
            wide = torch.tensor(values, dtype=torch.promote_types(t.dtype, torch.float32), device=t.device)
            t = (t * wide.view(shape)).to(t.dtype)
        return t

    def rows_at_hand(self, i, device):
        """Global rows under the own windows along cut dim ``i``; those beyond the edges are replaced by the nearest
        inside that the same windows read."""
        low, high = self._rows(i, *self.own_rows(i))
        rows, n, d = torch.arange(low, high, device=device), self.whole[i], self.dilation[i]
        return torch.where(rows < 0, rows % d, torch.where(rows < n, rows, n - 1 - (n - 1 - rows) % d))

    def with_copies(self, t):
        """The rows under the own windows, for the rows inside."""
        for i in self.cut:
            (start, stop), n = self.own_rows(i), self.whole[i]
            low, high = self._rows(i, start, stop)
            if start < stop and (low < 0 or high > n):
                low, high = self._rows_inside(i, start, stop)
                t = t.index_select(self.first + i, (self.rows_at_hand(i, t.device) - low).clamp(0, high - low - 1))
        return t

    def global_indices(self, found, extents):
        """Flat positions in the whole, of flat positions among ``extents`` rows at hand."""
        if not self.cut:
            return found
        return flat_positions(found, extents, self.whole, {i: self.rows_at_hand(i, found.device) for i in self.cut})


def flat_positions(found, extents, whole, rows):
    """Flat positions among ``extents`` as flat positions in the ``whole``; ``rows[i]`` are the global rows of dim
    ``i`` where they differ from those at hand."""
    flat, step = torch.zeros_like(found), 1
    for i in reversed(range(len(whole))):
        at, found = found % extents[i], found // extents[i]
        flat = flat + step * (rows[i][at.clamp(max=len(rows[i]) - 1)] if i in rows else at)
        step *= whole[i]
    return flat


def named(pattern):
    """Torch's functions by this name for 1, 2 and 3 dims, in both of its places."""
    named = [pattern.format(n) for n in (1, 2, 3)]
    return dict.fromkeys(getattr(space, name) for space, name in product((F, torch), named) if hasattr(space, name))


@op(*named("max_pool{}d"), *named("max_pool{}d_with_indices"))
def max_pool(func, x, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
    p = Pooling(func, x, kernel_size, stride, padding, dilation, ceil_mode, copies=True)
    n, indices = dims_of(func), func.__name__.endswith("with_indices")
    plain = getattr(F, f"max_pool{n}d")

    def local(t, *args, **kwargs):
        t = at_least_one(p.with_copies(fetch_all(t, p.first, p.cut)))
        out = plain(t, p.kernel, p.stride, p.inner, p.dilation, p.ceil_mode, indices)
        if not indices:
            return trimmed(out, p.out.local_shape())
        found = trimmed(out[1], p.out.local_shape())
        return trimmed(out[0], found.shape), p.global_indices(found, t.shape[-n:])

    return Plan((x,), (p.out, p.out) if indices else p.out, local if x.is_sharded() else None)


@op(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
def avg_pool(
    func, x, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None
):
    p = Pooling(func, x, kernel_size, stride, padding, 1, ceil_mode)
    counts = {i: p.counts(i, count_include_pad) for i in p.cut} if divisor_override is None else {}
    factors = {i: [p.kernel[i] / n for n in count] for i, count in counts.items() if count}
    rest = (divisor_override,) if dims_of(func) > 1 else ()

    def local(t, *args, **kwargs):
        t = at_least_one(fetch_all(t, p.first, p.cut))
        out = func(t, p.kernel, p.stride, p.inner, p.ceil_mode, count_include_pad, *rest)
        return p.scaled(trimmed(out, p.out.local_shape()), factors)

    return Plan((x,), p.out, local if x.is_sharded() else None)


@op(F.lp_pool1d, F.lp_pool2d, F.lp_pool3d)
def lp_pool(func, x, norm_type, kernel_size, stride=None, ceil_mode=False):
    """torch scales the mean over the rows inside to a whole window, so an incomplete one counts for more."""
    extreme = math.isinf(norm_type)
    p = Pooling(func, x, kernel_size, stride, ceil_mode=ceil_mode, copies=extreme)
    counts = {} if extreme else {i: p.counts(i, True) for i in p.cut}
    factors = {i: [(p.kernel[i] / n) ** (1 / norm_type) for n in count] for i, count in counts.items() if count}

    def local(t, *args, **kwargs):
        t = at_least_one(p.with_copies(fetch_all(t, p.first, p.cut)) if extreme else fetch_all(t, p.first, p.cut))
        kernel = p.kernel if len(p.kernel) > 1 else p.kernel[0]
        return p.scaled(trimmed(func(t, norm_type, kernel, p.stride, p.ceil_mode), p.out.local_shape()), factors)

    return Plan((x,), p.out, local if x.is_sharded() else None)


@op(F.max_unpool1d, F.max_unpool2d, F.max_unpool3d)
def max_unpool(func, x, indices, kernel_size, stride=None, padding=0, output_size=None):
    """The values go to positions that only the indices know, so spatial cuts are laid over other dims meanwhile."""
    n = dims_of(func)
    first, kernel, padding = first_dim(func, x, n), each(kernel_size, n), each(padding, n)
    stride = kernel if stride is None else each(stride, n)
    extents = [(x.shape[first + i] - 1) * stride[i] - 2 * padding[i] + kernel[i] for i in range(n)]
    wanted = extents if output_size is None else list(output_size)[-n:]
    if indices.shape != x.shape or any(not e - s < w < e + s for e, s, w in zip(extents, stride, wanted)):
        raise ShardingError(f"indices or output_size {output_size} do not fit", op=func.__name__, operands=[x, indices])
    final = placed(func, x, first, x.shape[:first], wanted, lambda i, row: row * stride[i])
    x = x.aside(*range(first, x.ndim))
    out = x.reshaped(final.shape)

    def local(t, indices, *args, **kwargs):
        y = func(at_least_one(t), at_least_one(indices), kernel, stride, padding, wanted)
        return trimmed(y, out.local_shape())

    return Plan((x, x), out, local, final)


@op(*named("fractional_max_pool{}d"), *named("fractional_max_pool{}d_with_indices"))
def fractional_max_pool(
    func, x, kernel_size, output_size=None, output_ratio=None, return_indices=False, _random_samples=None
):
    """Windows lie where samples for each image and channel say; cuts of space are laid aside meanwhile. Without samples
    every rank would draw its own."""
    n, samples = dims_of(func), _random_samples
    if samples is None or x.ndim != n + 2 or tuple(samples.shape) != (*x.shape[:2], n):
        raise MissingShardPatch(
            "draws its windows anew on every rank",
            op=func.__name__,
            operands=[x],
            remedy="Give _random_samples of shape (batch, channels, dims), or use adaptive_max_pool.",
        )
    ratio = each(output_ratio, n) if output_size is None else None
    wanted = [int(m * r) for m, r in zip(x.shape[2:], ratio)] if ratio else each(output_size, n)
    if any(m + k - 1 > rows for m, k, rows in zip(wanted, each(kernel_size, n), x.shape[2:])):
        raise ShardingError(f"{wanted} windows of {kernel_size} rows", op=func.__name__, operands=[x])
    final = placed(func, x, 2, x.shape[:2], wanted, lambda i, row: -(-row * wanted[i] // x.shape[2 + i]))
    x, indices = x.aside(*range(2, x.ndim)), func.__name__.endswith("with_indices")
    out = x.reshaped(final.shape)
    plain = getattr(F, f"fractional_max_pool{n}d_with_indices")

    def local(t, *args, _random_samples, **kwargs):
        both = plain(at_least_one(t), kernel_size, wanted, _random_samples=at_least_one(_random_samples))
        both = tuple(trimmed(y, out.local_shape()) for y in both)
        return both if indices else both[0]

    outs = ((out, out), (final, final)) if indices else (out, final)
    return Plan((x, x.reshaped(samples.shape, {0: 0, 1: 1})), outs[0], local, outs[1])
