"""Attention over neighbourhoods of which other ranks hold rows: what needs own rows only is computed while they travel.

The own queries are taken in pieces along the first cut dim: those whose windows lie within own rows, and those at the
borders. The first read own keys and values where they are; only for the others foreign rows are laid beside own ones.
On the way back the borders go first, and gradients of foreign rows go home while the rest is computed. A rank keeps the
foreign rows for the backward pass, and no array of these and its own. Rows along a second cut dim come before all that,
and come once more for the backward pass.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch.autograd import Function

from core import collectives as c
from core._torch import compiling
from core.kernels import Neighborhood, has_kernel, natten, numbers_of
from core.once import once_differentiable
from core.ops.halo import fetch
from core.ops.windows import Axis
from core.precision import autocast_now

_most_kept = 2**25  # bytes of keys and values with those of others that torch keeps for the backward pass
_BOX = 8  # rows of the queries of a program of our kernel, on a grid of two dims


class Halo(NamedTuple):
    """What ranks fetch along one cut dim: extents and wanted rows of all, as of :func:`core.ops.halo.fetch`."""

    dim: int
    sizes: tuple
    reach: tuple
    group: object


class Piece(NamedTuple):
    """Some of the queries at hand along the first cut dim, and the keys that they see; ``own``: the own rows."""

    axis: Axis
    own: bool


def factor_of(q, scale):
    """Of the products; where there are no channels, which have none, any."""
    return max(q.shape[-1], 1) ** -0.5 if scale is None else scale


def fetched(k, v, halos):
    """Keys and values at hand and around, (..., 2 channels). Differentiable."""
    kv = torch.cat([k, v], -1)
    for halo in halos:
        kv = fetch(kv, *halo)
    return kv


def in_pieces(q, k, halos, factor):
    """Whether to compute in pieces, alike on all ranks of a domain whatever parts they have: where messages can be
    hidden, and where an array of keys of all ranks around would be large."""
    rows = {halo.dim: max(high - low for low, high in halo.reach) for halo in halos}
    extents = [rows.get(dim, n) for dim, n in enumerate(k.shape)]
    large = torch.is_grad_enabled() and 2 * prod(extents) * k.element_size() > _most_kept
    return (large or has_kernel(q, factor)) and not compiling()


@lru_cache(maxsize=256)
def pieces(axis):
    """The queries at hand along the cut dim, whose rows are the own ones, in at most three pieces."""
    window, start, stop = axis.window, axis.first_query, axis.first_query + axis.queries
    first = 1 + max((i for i in range(start, stop) if window.first(i) < start), default=start - 1)
    last = min((i for i in range(start, stop) if window.last(i) >= stop), default=stop)
    if first >= last:
        return [Piece(axis.piece(0, axis.queries), False)]
    first, last = _on_boxes(first, last, start, stop, _BOX * window.dilation)
    before, after = axis.piece(0, first - start), axis.piece(last - start, axis.queries)
    inner = Piece(Axis(window, first, last - first, start, stop - start), True)
    return [Piece(before, False)] * (first > start) + [inner] + [Piece(after, False)] * (last < stop)


def _on_boxes(first, last, start, stop, rows):
    """The inner rows less those of boxes that would be computed twice, half empty each time; all where none is left."""
    low = start + -(-(first - start) // rows) * rows
    high = last if last == stop else start + (last - start) // rows * rows
    return (low, high) if low < high else (first, last)


class Around(Function):
    """(q, k, v, halos, attend, axes, scale) -> attention of own queries over own keys and those around.

    attend: (q, k, v, axes, scale) -> attention of tensors at hand, for where no kernel of ours computes; the backward
    pass then computes it again.
    """

    @staticmethod
    def forward(ctx, q, k, v, halos, attend: Callable, axes, scale):
        factor = factor_of(q, scale)
        cut = _Cut(halos[0], axes)
        own = _beside(k, v, halos)
        coming = c.start_exchange(own, *cut.message)
        parts, train = cut.pieces() if q.numel() else [], any(ctx.needs_input_grad)

        def attended(p, k, v):
            return _attended(cut.queries(q, p), k, v, cut.along(p), factor, attend, train)

        found = {p: attended(p, *own) for p in parts if p.own}
        foreign = coming()
        found |= {p: attended(p, *cut.laid(own, foreign, p)) for p in parts if not p.own}
        outs, sums, how = ([found[p][i] for p in parts] for i in range(3))
        out = torch.cat(outs, cut.dim) if len(outs) > 1 else outs[0] if outs else q.new_empty(q.shape)
        ctx.save_for_backward(q, k, v, out, *foreign, *sums)
        ctx.call = halos, cut, parts, factor, how, autocast_now(q.device.type)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (q, k, v, out, *kept), (halos, cut, parts, factor, how, autocast) = ctx.saved_tensors, ctx.call
        foreign, sums = kept[:2], kept[2:]
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (k, v)]
            near = _beside(*leaves, halos)
        own = [t.detach() for t in near]

        def gradients(i, k, v):
            at = [cut.queries(t, parts[i]) for t in (grad, q, out)]
            return _gradients(*at, k, v, sums[i], cut.along(parts[i]), factor, how[i], autocast)

        to_queries, borders, home = {}, [], [torch.zeros_like(t) for t in foreign]
        for i, p in enumerate(parts):
            if not p.own:
                to_queries[i], *strips = gradients(i, *cut.laid(own, foreign, p))
                cut.add(strips, home, p, True)
                borders.append((strips, p))
        coming, inner = c.start_return(home, *cut.message), [i for i, p in enumerate(parts) if p.own]
        to_own = [torch.zeros_like(t) for t in own] if not inner else None
        for i in inner:
            to_queries[i], *to_own = gradients(i, *own)
        for strips, p in borders:
            cut.add(strips, to_own, p, False)
        coming(to_own)
        dq = [to_queries[i] for i in range(len(parts))] or [torch.zeros_like(q)]
        dq = torch.cat(dq, cut.dim) if len(dq) > 1 else dq[0]
        dk, dv = torch.autograd.grad(near, leaves, to_own) if halos[1:] else to_own
        return dq, dk, dv, None, None, None, None


class _Cut:
    """The first cut dim as this rank sees it: own rows, and foreign ones, which lie before and after them."""

    def __init__(self, halo, axes):
        self.dim, self.axes = halo.dim, axes
        at, wanted = (0, *accumulate(halo.sizes)), []
        for (low, high), start, stop in zip(halo.reach, at, at[1:]):
            wanted.append(((low, max(low, min(high, start))), (min(high, max(low, stop)), high)))
        self.message = halo.dim, halo.sizes, tuple(wanted), halo.group
        (low, start), (stop, high) = wanted[halo.group.rank]
        self.runs = (True, low, start, 0), (False, start, stop, 0), (True, stop, high, start - low)

    def pieces(self):
        return pieces(self.axes[self.dim - 1])

    def along(self, piece):
        """The axes of a piece."""
        return (*self.axes[: self.dim - 1], piece.axis, *self.axes[self.dim :])

    def queries(self, t, piece):
        return t.narrow(self.dim, piece.axis.first_query - self.axes[self.dim - 1].first_query, piece.axis.queries)

    def laid(self, own, foreign, piece):
        """The keys and values that a piece sees."""
        runs = self._overlaps(piece)
        return [torch.cat([(o, f)[far].narrow(self.dim, at, n) for far, at, n, _ in runs], self.dim)
                for o, f in zip(own, foreign)]  # fmt: skip

    def add(self, strips, totals, piece, far):
        """Adds what lies in :meth:`laid` of the foreign or of the own rows to them."""
        for strip, total in zip(strips, totals):
            for there, at, n, place in self._overlaps(piece):
                if there == far:
                    total.narrow(self.dim, at, n).add_(strip.narrow(self.dim, place, n))

    def _overlaps(self, piece):
        """Of the keys of a piece, run by run: whether they are foreign, where there, how many, where in the piece."""
        low, high = piece.axis.first_key, piece.axis.first_key + piece.axis.keys
        runs = [(far, max(low, a), min(high, b), at - a) for far, a, b, at in self.runs]
        return [(far, a + shift, b - a, a - low) for far, a, b, shift in runs if a < b]


def _beside(k, v, halos):
    """Keys and values with those of the other cut dims."""
    return [k, v] if len(halos) == 1 else list(fetched(k, v, halos[1:]).chunk(2, -1))


def _attended(q, k, v, axes, factor, attend, train):
    """Results, what our kernel keeps for its backward pass or None, and what computes without it."""
    own = Neighborhood.apply if has_kernel(q, factor) else None
    if natten.preferred(q, k, v, axes, factor, own, again=train):
        attend = natten.attention
    elif own:
        return *torch.ops.core.neighborhood_forward(q, k, v, numbers_of(axes), factor), attend
    return attend(q, k, v, axes, factor), None, attend


def _gradients(grad, q, out, k, v, sums, axes, factor, attend, autocast):
    if sums is not None:
        return torch.ops.core.neighborhood_backward(grad, q, k, v, out, sums, numbers_of(axes), factor)
    near = [t.detach().requires_grad_() for t in (q, k, v)]
    with torch.enable_grad(), torch.autocast(*autocast):
        again = attend(*near, axes, factor)
    return torch.autograd.grad(again, near, grad)
