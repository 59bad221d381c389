"""Interpolation: an output row is a weighted sum of a few input rows, along each dim by itself.

Along a cut dim each rank takes the output rows that lie over its input rows, works out from global coordinates which
input rows they read and with what weights, fetches those rows and sums. The other dims are left to the plain operation.
Coordinates and weights are computed in the precision and by the formulas of torch's kernels, so that rounding falls the
same way.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from core import collectives as c
from core._torch import no_modes
from core.dispatch import Plan, op
from core.errors import MissingShardPatch, ShardingError
from core.ops.adaptive import adaptive_avg_pool
from core.ops.halo import fetch
from core.ops.sliding import at_least_one, placed, trimmed
from core.ops.windows import kept

_NEAREST = ("nearest", "nearest-exact")
_DIMS = {mode: (1, 2, 3) for mode in _NEAREST} | {
    "linear": (1,),
    "bilinear": (2,),
    "trilinear": (3,),
    "bicubic": (2,),
    "lanczos": (2,),
}


class Resize(NamedTuple):
    """One dim: ``rows`` become ``wanted``; ``scale`` is the user's factor, which torch then takes as it is."""

    rows: int
    wanted: int
    scale: float | None
    mode: str
    align_corners: bool
    antialias: bool
    dims: int  # spatial dims of the tensor: torch's kernels for one, two and three of them differ in the nearest row

    def step(self, dtype):
        """Distance of output rows in input rows."""
        if self.align_corners:
            return torch.tensor((self.rows - 1), dtype=dtype) / max(self.wanted - 1, 1) * (self.wanted > 1)
        if self.scale:
            return torch.tensor(1 / self.scale, dtype=dtype)
        return torch.tensor(self.rows, dtype=dtype) / self.wanted

    def taps(self, double):
        """Input rows and their weights, (output rows, taps) each."""
        dtype = torch.float64 if double else torch.float32
        if self.mode in _NEAREST:
            return self._nearest(dtype)
        if self.rows == self.wanted and (self.antialias or self.mode != "bicubic"):
            return torch.arange(self.rows)[:, None], torch.ones(self.rows, 1, dtype=dtype)
        step, rows = self.step(dtype), torch.arange(self.wanted).to(dtype)[:, None]
        if self.antialias:
            return self._smooth(step, step * (rows + 0.5))
        at = step * rows if self.align_corners else step * (rows + 0.5) - 0.5
        offsets = torch.arange(-1, 3) if self.mode == "bicubic" else torch.arange(2)
        at = at if self.mode == "bicubic" else at.clamp(min=0)
        first = at.floor().long().clamp(max=self.rows - 1)
        past = (at - first).clamp(0, 1)
        weights = _cubic(past - offsets, -0.75) if self.mode == "bicubic" else torch.cat([1 - past, past], 1)
        return (first + offsets).clamp(0, self.rows - 1), weights

    def _nearest(self, dtype):
        """What torch makes of the numbers of the rows: the least rounding would pick another row."""
        numbers = torch.arange(self.rows, dtype=dtype).view(1, 1, -1, *[1] * (self.dims - 1))
        wanted = {"size": [self.wanted, 1, 1][: self.dims]}
        if self.scale:
            wanted = {"scale_factor": [self.scale, 1.0, 1.0][: self.dims]}
        rows = F.interpolate(numbers, mode=self.mode, **wanted).view(-1, 1)
        return rows.long(), torch.ones_like(rows)

    def _smooth(self, step, middle):
        """A filter as wide as the output rows lie apart, cut off at the edges and made to sum up to one."""
        reach, filter = _FILTERS[self.mode]
        width = step.clamp(min=1)
        first = (middle - reach * width + 0.5).long().clamp(min=0)
        last = (middle + reach * width + 0.5).long().clamp(max=self.rows)
        rows = first + torch.arange(int((last - first).max()))
        weights = filter((rows - middle + 0.5) / width).where(rows < last, 0.0)
        return rows.where(rows < last, first), weights / weights.sum(1, keepdim=True)


def _cubic(x, a):
    x = x.abs()
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return near.where(x <= 1, far.where(x < 2, 0.0))


_FILTERS = {
    "bilinear": (1, lambda x: (1 - x.abs()).clamp(min=0)),
    "bicubic": (2, lambda x: _cubic(x, -0.5)),
    "lanczos": (3, lambda x: (torch.sinc(x) * torch.sinc(x / 3)).where(x.abs() < 3, 0.0)),
}


@lru_cache(maxsize=1024)
def _reads(resize, borders, rank, double):
    """The input rows that every rank reads, as ranges, and those of this rank with their weights. Real numbers, also
    while torch.compile looks on."""
    with no_modes():
        rows, weights = resize.taps(double)
        parts = [rows[a:b] for a, b in zip(borders, borders[1:])]
        ranges = [(int(p.min()), int(p.max()) + 1) if p.numel() else (0, 0) for p in parts]
        own = slice(borders[rank], borders[rank + 1])
        rows, weights = (rows[own] - ranges[rank][0]).t().tolist(), weights[own].t().tolist()
    return tuple(ranges), Taps(rows, weights, torch.float64 if double else torch.float32)


class Taps:
    """For each tap the rows at hand and their weights, one for each output row."""

    def __init__(self, rows, weights, dtype):
        self.rows, self.weights, self.dtype, self.tables = rows, weights, dtype, {}

    @kept
    def on(self, device):
        """Pairs of tensors."""
        rows = [torch.tensor(row, dtype=torch.long, device=device) for row in self.rows]
        return list(zip(rows, [torch.tensor(w, dtype=self.dtype, device=device) for w in self.weights]))

    def sum(self, t, dim):
        (rows, weight), *more = self.on(t.device)
        if not more:  # one tap has weight one
            return t.index_select(dim, rows)
        shape = [-1 if d == dim else 1 for d in range(t.ndim)]
        total = t.index_select(dim, rows) * weight.view(shape)
        for rows, weight in more:
            total = total + t.index_select(dim, rows) * weight.view(shape)
        return total


def _summed(t, dim, resize, borders, sizes=None, group=None):
    """The own output rows along one dim, which may be cut."""
    wide = torch.promote_types(t.dtype, torch.float32)
    ranges, taps = _reads(resize, borders, group.rank if group else 0, wide == torch.float64)
    return taps.sum(fetch(t, dim, sizes, ranges, group) if group else t, dim)


@op(F.interpolate)
def interpolate(
    func,
    x,
    size=None,
    scale_factor=None,
    mode="nearest",
    align_corners=None,
    recompute_scale_factor=None,
    antialias=False,
):
    n = x.ndim - 2
    size, scales = _sizes(x, n, size, scale_factor, recompute_scale_factor, mode)
    if mode == "area":
        return adaptive_avg_pool(getattr(F, f"adaptive_avg_pool{n}d"), x, size)
    _check(x, n, mode, align_corners, antialias)
    out = placed(func, x, 2, x.shape[:2], size, lambda i, row: -(-row * size[i] // x.shape[2 + i]))
    sums = {}
    for i, (rows, wanted) in enumerate(zip(x.shape[2:], size)):
        axis = x.axis_of(2 + i)
        resize = Resize(rows, wanted, scales and scales[i], mode, bool(align_corners), bool(antialias), n)
        if axis is not None:
            sums[2 + i] = resize, out.offsets(axis), x.sizes[axis], c.axis_group(x.mesh, axis)
        elif antialias:  # torch's own is wrong on a part of one column (2.13, CPU)
            sums[2 + i] = resize, (0, wanted)

    def local(t, *args, **kwargs):
        if mode not in _NEAREST and sums and not t.is_floating_point():
            raise MissingShardPatch(f"mode {mode!r} of {t.dtype}", op="interpolate", operands=[x])
        dtype = t.dtype
        for dim, call in sums.items():
            t = _summed(t, dim, *call)
        if len(sums) < n:
            t = at_least_one(t)
            wanted = {"size": [t.shape[2 + i] if 2 + i in sums else m for i, m in enumerate(size)]}
            if scales:
                wanted = {"scale_factor": [1.0 if 2 + i in sums else s for i, s in enumerate(scales)]}
            t = func(t, **wanted, mode=mode, align_corners=align_corners)
        return trimmed(t, out.local_shape()).to(dtype)

    return Plan((x,), out, local if x.is_sharded() else None)


def _sizes(x, n, size, scale_factor, recompute, mode):
    """Wanted extents, and the factors where torch keeps to them instead of the ratio of extents."""
    given = size if scale_factor is None else scale_factor
    given = list(given) if isinstance(given, (list, tuple)) else [given] * n
    if (size is None) == (scale_factor is None) or len(given) != n or (recompute and scale_factor is None):
        raise ShardingError(f"size {size} and scale_factor {scale_factor}", op="interpolate", operands=[x])
    if scale_factor is None:
        return given, None
    return [int(rows * s) for rows, s in zip(x.shape[2:], given)], None if recompute or mode == "area" else given


def _check(x, n, mode, align_corners, antialias):
    if n not in _DIMS.get(mode, ()):
        problem = f"mode {mode!r} of {n} spatial dims"
    elif align_corners is not None and mode in _NEAREST or align_corners and mode == "lanczos":
        problem = f"align_corners in mode {mode!r}"
    elif antialias and mode not in _FILTERS or mode == "lanczos" and not antialias:
        problem = f"antialias={antialias} in mode {mode!r}"
    else:
        return
    raise ShardingError(problem, op="interpolate", operands=[x])
