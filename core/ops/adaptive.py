"""Adaptive pooling: output row ``k`` of ``m`` is taken over input rows ``k n / m`` to ``(k + 1) n / m``, ends rounded.

Windows of unequal length are laid out one after the other in slots of equal number, the last row filling what is left
of a window; over slots the plain operation is exact, ties and all. As many output rows as ranks or fewer would mean
windows wider than parts: then every rank pools what it holds of each window, and only those few rows are put together.
"""

import math

import torch
import torch.nn.functional as F

from core import collectives as c
from core.dispatch import Plan, op
from core.errors import ShardingError
from core.ops.pool import flat_positions, named
from core.ops.sliding import at_least_one, dims_of, each, fetch_all, first_dim, layout, trimmed
from core.spec import PARTIAL


class Adaptive:
    """Where the windows of one call lie. ``few`` are the cut dims with fewer output rows than ranks, with their axis;
    ``cut`` the other cut dims, with the arguments of ``fetch``."""

    def __init__(self, func, x, size, n):
        self.first, self.whole, self.x = first_dim(func, x, n), x.shape[-n:], x
        size = each(size, n) if size is not None else (None,) * n
        self.size = [self.whole[i] if m is None else m for i, m in enumerate(size)]
        if min(*self.size, *self.whole) < 1 or len(self.size) != n:
            raise ShardingError(f"output_size {size}", op=func.__name__, operands=[x])
        cuts = [(dim - self.first, axis) for axis, dim in x.cuts() if dim >= self.first]
        self.few = {i: axis for i, axis in cuts if 1 < x.mesh.size(axis) >= self.size[i]}
        kept = x.whole(*(self.first + i for i in self.few))
        self.out, self.cut = layout(func, kept, self.first, x.shape[: self.first], self.size, self._place, self._rows)
        self.windows = {i: self._at_hand(i) for i in (*self.few, *self.cut)}
        self.local_size = [len(self.windows[i]) if i in self.windows else m for i, m in enumerate(self.size)]

    def _place(self, i, row):
        return -(-row * self.size[i] // self.whole[i])

    def _window(self, i, k):
        n, m = self.whole[i], self.size[i]
        return k * n // m, -(-(k + 1) * n // m)

    def _rows(self, i, start, stop):
        return (self._window(i, start)[0], self._window(i, stop - 1)[1]) if start < stop else (-1, 0)

    def _at_hand(self, i):
        """For each output row that is computed here: its window among the rows at hand, and its whole length."""
        if i in self.few:
            (low, high), rows = self.x.local_range(self.first + i), range(self.size[i])
        else:
            rows = range(*self.out.local_range(self.first + i))
            low, high = self._rows(i, rows.start, rows.stop)
        windows = [(k, *self._window(i, k)) for k in rows]
        return [(max(a, low) - low, min(b, high) - low, b - a) for _, a, b in windows] or [(0, 1, 1)]

    def slots(self, i):
        """The row at hand in each slot and how many slots a window has; no rows where they lie so already."""
        windows = self.windows[i]
        longest = max(1, *(b - a for a, b, _ in windows))
        if all((a, b) == (k * longest, (k + 1) * longest) for k, (a, b, _) in enumerate(windows)):
            return None, longest
        return [min(a + s, b - 1) if a < b else 0 for a, b, _ in windows for s in range(longest)], longest

    def first_row(self, i):
        """Global index of the first row at hand."""
        return self.x.local_range(self.first + i)[0] if i in self.few else self.cut[i][1][self.cut[i][2].rank][0]


def _along(values, t, dim, dtype):
    """Values for the rows of ``dim``, to be broadcast against ``t``."""
    return torch.tensor(values, dtype=dtype, device=t.device).view([-1 if d == dim else 1 for d in range(t.ndim)])


@op(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
def adaptive_avg_pool(func, x, output_size):
    p = Adaptive(func, x, output_size, dims_of(func))
    out = p.out
    for axis in p.few.values():
        out = out.with_axis(axis, PARTIAL)
    return Plan((x,), out, (lambda t, *a, **k: _means(t, p, func)) if x.is_sharded() else None)


def _means(t, p, func):
    t, wide = at_least_one(fetch_all(t, p.first, p.cut)), torch.promote_types(t.dtype, torch.float32)
    shares = {}
    for i, windows in p.windows.items():
        dim, (rows, longest) = p.first + i, p.slots(i)
        if rows is None:
            shares[dim] = [(b - a) / length for a, b, length in windows]
            continue
        weights = [longest / length if s < b - a else 0.0 for a, b, length in windows for s in range(longest)]
        t = t.index_select(dim, torch.tensor(rows, device=t.device))
        t = (t * _along(weights, t, dim, wide)).to(t.dtype)
    t = func(t, p.local_size)
    for dim, share in shares.items():
        t = (t * _along(share, t, dim, wide)).to(t.dtype) if min(share) < 1 else t
    return trimmed(t, p.out.local_shape())


@op(*named("adaptive_max_pool{}d"), *named("adaptive_max_pool{}d_with_indices"))
def adaptive_max_pool(func, x, output_size, return_indices=False):
    n = dims_of(func)
    p, plain = Adaptive(func, x, output_size, n), getattr(F, f"adaptive_max_pool{n}d")
    indices = return_indices or func is torch.adaptive_max_pool1d or func.__name__.endswith("with_indices")

    def local(t, *args, **kwargs):
        out = _maxima(t, p, plain)
        return out if indices else out[0]

    return Plan((x,), (p.out, p.out) if indices else p.out, local if x.is_sharded() else None)


def _maxima(t, p, plain):
    t, rows_at_hand = at_least_one(fetch_all(t, p.first, p.cut)), {}
    for i in p.windows:
        rows = torch.tensor(p.slots(i)[0] or range(t.shape[p.first + i]), device=t.device)
        t = t.index_select(p.first + i, rows) if p.slots(i)[0] else t
        rows_at_hand[i] = rows + p.first_row(i)
    value, found = plain(t, p.local_size, return_indices=True)
    found = flat_positions(found, t.shape[p.first :], p.whole, rows_at_hand)
    for i, axis in p.few.items():
        missing = _along([a >= b for a, b, _ in p.windows[i]], value, p.first + i, torch.bool)
        value, found = value.masked_fill(missing, -torch.inf), found.masked_fill(missing, math.prod(p.whole))
        value, found = _best_of_ranks(value, found, c.axis_group(p.x.mesh, axis))
    return trimmed(value, p.out.local_shape()), trimmed(found, p.out.local_shape())


def _best_of_ranks(value, found, group):
    """The largest value and its position: the first of equals, but the last that is no number, as torch scans."""
    value = c.gather(value.unsqueeze(0), 0, (1,) * group.size, group)
    found = c.send_gather(found.unsqueeze(0), 0, (1,) * group.size, group)
    lost = value.detach().isnan()
    none_lost = ~lost.any(0)
    best = torch.where(none_lost, value.detach() == value.detach().amax(0), lost)
    order = torch.where(none_lost, found, -found).masked_fill(~best, found.max() + 1)
    winner = order.argmin(0, keepdim=True)
    return value.gather(0, winner)[0], found.gather(0, winner)[0]
