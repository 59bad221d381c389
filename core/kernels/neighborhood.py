"""Neighbourhood attention in one pass over boxes of keys: nothing larger than operands and results is ever kept.

A program takes a box of queries of one head and walks over boxes of keys that cover the windows of its queries, with a
running maximum and sum; which key is in whose window is arithmetic on their positions. The gradient of queries goes the
same way, that of keys and values the other way round, from a box of keys over the queries whose windows reach it, so
that every program owns what it writes and the same call gives the same bits. Sums are kept in fp32.

Source: Dao et al., FlashAttention, 2022, for the running sum and for the backward pass from the logarithm of the sum.
"""

from math import e, log2, prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from core.kernels import boxes, close


class Config(NamedTuple):
    """How one kernel is cut: points in a box that a program owns and in one that it walks over, powers of two; whether
    48 channels are two parts, 32 and 16, or one that is padded to 64."""

    own: int
    walk: int
    warps: int
    stages: int
    split: bool = False


# (channels at most, bytes of a number) -> forward, gradient of queries, gradients of keys and values
CONFIGS = {
    (64, 2): [Config(64, 64, 4, 3), Config(64, 64, 4, 2), Config(64, 64, 4, 2)],
    (128, 2): [Config(64, 64, 4, 2), Config(64, 64, 4, 2), Config(64, 64, 4, 2)],
    (256, 2): [Config(64, 32, 4, 2), Config(64, 32, 8, 2), Config(64, 32, 8, 2)],
    (64, 4): [Config(64, 32, 4, 2), Config(64, 32, 4, 1), Config(64, 32, 4, 1)],
    (128, 4): [Config(64, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 32, 8, 1)],
    (256, 4): [Config(32, 16, 8, 1), Config(32, 16, 8, 1), Config(32, 16, 8, 1)],
}


@triton.jit
def _forward(
    Q, K, V, O, L, axes, tiles, heads, scale,
    CHANNELS: tl.constexpr, PARTS: tl.constexpr, WINDOWS: tl.constexpr, OWN: tl.constexpr, WALK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Results, and the binary logarithms of the sums of exponentials."""
    here, start, stop, low, high, length, q_at, k_at = boxes.program(axes, tiles, heads, False, WINDOWS, OWN)
    count = boxes.steps(low, high, WALK)
    if count <= 0:  # nothing is owned
        return
    queries = boxes.box(start, OWN)
    q = boxes.load(Q, boxes.offsets(Q, here, queries, stop, q_at, WINDOWS), CHANNELS, PARTS)
    most = tl.full((OWN[0] * OWN[1] * OWN[2],), -1e30, tl.float32)  # finite: differences are defined from the start
    total = tl.full((OWN[0] * OWN[1] * OWN[2],), 0, tl.float32)
    out = boxes.zeros(OWN, PARTS)
    at = low
    for _ in range(count):
        keys = boxes.box(at, WALK)
        k = boxes.load(K, boxes.offsets(K, here, keys, high, k_at, WINDOWS), CHANNELS, PARTS)
        v = boxes.load(V, boxes.offsets(V, here, keys, high, k_at, WINDOWS), CHANNELS, PARTS)
        s = boxes.products(q, k, PRECISION) * scale
        s = boxes.seen(s, 0.0, boxes.as_rows(queries), boxes.as_columns(keys), length, OWN, WALK, WINDOWS)
        more = tl.maximum(most, tl.max(s, 1))
        p = tl.exp2(s - more[:, None])
        shrink = tl.exp2(most - more)
        total = total * shrink + tl.sum(p, 1)
        out = boxes.added(boxes.times(out, shrink[:, None]), p, v, PRECISION)
        most = more
        at = boxes.next_box(at, low, high, WALK)
    there = boxes.before(queries, stop)
    out = boxes.times(out, 1 / total[:, None])
    boxes.store(O, boxes.offsets(O, here, queries, stop, q_at, WINDOWS), there, out, CHANNELS, PARTS)
    tl.store(L[0] + boxes.offsets(L, here, queries, stop, q_at, WINDOWS), most + tl.log2(total), mask=there)


@triton.jit
def _backward_queries(
    Q, K, V, O, G, L, D, DQ, axes, tiles, heads, scale, factor,
    CHANNELS: tl.constexpr, PARTS: tl.constexpr, WINDOWS: tl.constexpr, OWN: tl.constexpr, WALK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of queries, and the products of results with their gradients, which the other kernel needs too."""
    here, start, stop, low, high, length, q_at, k_at = boxes.program(axes, tiles, heads, False, WINDOWS, OWN)
    count = boxes.steps(low, high, WALK)
    if count <= 0:  # nothing is owned
        return
    queries = boxes.box(start, OWN)
    there = boxes.before(queries, stop)
    q = boxes.load(Q, boxes.offsets(Q, here, queries, stop, q_at, WINDOWS), CHANNELS, PARTS)
    o = boxes.load(O, boxes.offsets(O, here, queries, stop, q_at, WINDOWS), CHANNELS, PARTS)
    g = boxes.load(G, boxes.offsets(G, here, queries, stop, q_at, WINDOWS), CHANNELS, PARTS)
    d = tl.full((OWN[0] * OWN[1] * OWN[2],), 0, tl.float32)
    for i in tl.static_range(len(PARTS)):
        d += tl.sum(o[i].to(tl.float32) * g[i].to(tl.float32), 1)
    ones = boxes.offsets(L, here, queries, stop, q_at, WINDOWS)
    sums = tl.load(L[0] + ones)
    ones = boxes.offsets(D, here, queries, stop, q_at, WINDOWS)
    tl.store(D[0] + ones, sums, mask=there)
    tl.store(D[0] + ones + 1, d, mask=there)
    dq = boxes.zeros(OWN, PARTS)
    at = low
    for _ in range(count):
        keys = boxes.box(at, WALK)
        k = boxes.load(K, boxes.offsets(K, here, keys, high, k_at, WINDOWS), CHANNELS, PARTS)
        v = boxes.load(V, boxes.offsets(V, here, keys, high, k_at, WINDOWS), CHANNELS, PARTS)
        s = boxes.products(q, k, PRECISION) * scale
        ds = boxes.products(g, v, PRECISION) - d[:, None]
        s = boxes.seen(s, sums[:, None], boxes.as_rows(queries), boxes.as_columns(keys), length, OWN, WALK, WINDOWS)
        dq = boxes.added(dq, tl.exp2(s) * ds, k, PRECISION)
        at = boxes.next_box(at, low, high, WALK)
    dq = boxes.times(dq, factor)
    boxes.store(DQ, boxes.offsets(DQ, here, queries, stop, q_at, WINDOWS), there, dq, CHANNELS, PARTS)


@triton.jit
def _backward_keys(
    Q, K, V, G, D, DK, DV, axes, tiles, heads, scale, factor,
    CHANNELS: tl.constexpr, PARTS: tl.constexpr, WINDOWS: tl.constexpr, OWN: tl.constexpr, WALK: tl.constexpr,
    PRECISION: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values."""
    here, start, stop, low, high, length, q_at, k_at = boxes.program(axes, tiles, heads, True, WINDOWS, OWN)
    keys = boxes.box(start, OWN)
    there = boxes.before(keys, stop)
    count, to = boxes.steps(low, high, WALK), boxes.offsets(DK, here, keys, stop, k_at, WINDOWS)
    dk, dv = boxes.zeros(OWN, PARTS), boxes.zeros(OWN, PARTS)
    if count <= 0:  # no query sees these; that a loop runs at all lets the compiler overlap its products
        boxes.store(DK, to, there, dk, CHANNELS, PARTS)
        boxes.store(DV, to, there, dv, CHANNELS, PARTS)
        return
    k = boxes.load(K, boxes.offsets(K, here, keys, stop, k_at, WINDOWS), CHANNELS, PARTS)
    v = boxes.load(V, boxes.offsets(V, here, keys, stop, k_at, WINDOWS), CHANNELS, PARTS)
    column = tl.arange(0, COLUMNS)[None, :]
    at = low
    for _ in range(count):
        queries = boxes.box(at, WALK)
        q = boxes.load(Q, boxes.offsets(Q, here, queries, high, q_at, WINDOWS), CHANNELS, PARTS)
        g = boxes.load(G, boxes.offsets(G, here, queries, high, q_at, WINDOWS), CHANNELS, PARTS)
        two = D[0] + boxes.offsets(D, here, queries, high, q_at, WINDOWS)[:, None] + column % 2
        two = tl.load(two, mask=boxes.before(queries, high)[:, None], other=1e30)  # no weight beyond
        sums = tl.sum(tl.where(column == 0, two, 0), 1)
        d = tl.sum(tl.where(column == 1, two, 0), 1)
        s = boxes.products(k, q, PRECISION) * scale
        ds = boxes.products(v, g, PRECISION) - d[None, :]  # before any sum is in flight
        s = boxes.seen(s, sums[None, :], boxes.as_columns(queries), boxes.as_rows(keys), length, WALK, OWN, WINDOWS)
        p = tl.exp2(s)
        ds *= p
        dv = boxes.added(dv, p, g, PRECISION)
        dk = boxes.added(dk, ds, q, PRECISION)
        at = boxes.next_box(at, low, high, WALK)
    boxes.store(DK, to, there, boxes.times(dk, factor), CHANNELS, PARTS)
    boxes.store(DV, to, there, dv, CHANNELS, PARTS)


# -- launches ---------------------------------------------------------------------------------------------------------
def forward(q, k, v, out, sums, axes, scale):
    """Attention of the queries at hand.

    Args:
        q: (batch, *grid of queries, heads, channels).
        k, v: (batch, *grid of keys, heads, channels), of q's dtype: fp16, bf16 or fp32.
        out: takes the results, as q.
        sums: takes the binary logarithms of the sums of exponentials, fp32 (batch, heads, *grid).
        axes: one ``core.ops.windows.Axis`` for each dim of the grid.
        scale: factor of the products, positive.
    """
    _launch(_forward, 0, (q, k, v, out, _ones(sums)), axes, (scale * log2(e),))


def backward_queries(grad, q, k, v, out, sums, both, dq, axes, scale):
    """The gradient of q from that of the results, into ``dq``.

    Args:
        both: fp32 (batch, heads, *grid, 2); takes what `backward_keys` needs.
    """
    tensors = q, k, v, out, grad, _ones(sums), both.movedim(1, -2), dq
    _launch(_backward_queries, 1, tensors, axes, (scale * log2(e), scale))


def backward_keys(grad, q, k, v, both, dk, dv, axes, scale):
    """The gradients of k and v from that of the results, into ``dk`` and ``dv``."""
    _launch(_backward_keys, 2, (q, k, v, grad, both.movedim(1, -2), dk, dv), axes, (scale * log2(e), scale))


def _ones(sums):
    return sums.movedim(1, -1)[..., None]


def _launch(kernel, number, tensors, axes, scales):
    q, keys_own = tensors[0], kernel is _backward_keys
    batch, *_, heads, channels = q.shape
    config, filled = config_of(channels, q.dtype)[number], 3 - len(axes)
    points = ((1, 0, 1, 0, 1),) * filled + tuple((a.window.total, *a[1:]) for a in axes)
    windows = ((1, 1, False),) * filled + tuple(tuple(a.window[:3]) for a in axes)
    longest = [[-(-a[side] // w[1]) for a, w in zip(points, windows)] for side in (2, 4)]
    own, walk = box_of(config.own, longest[keys_own]), box_of(config.walk, longest[not keys_own])
    tiles = tuple(-(-n // size) for n, size in zip(longest[keys_own], own))
    programs = prod(tiles) * prod(w[1] for w in windows) * heads * batch
    more = {"COLUMNS": max(2, 32 * config.warps // config.walk)} if keys_own else {}
    with torch.accelerator.device_index(q.device.index):
        kernel[(programs,)](
            *((t, _strides(t, filled)) for t in map(close, tensors)), points, tiles, heads, *scales,
            CHANNELS=channels, PARTS=parts_of(channels, config.split), WINDOWS=windows, OWN=own, WALK=walk,
            PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32", **more,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip


def config_of(channels, dtype):
    return CONFIGS[min(most for most, size in CONFIGS if most >= channels and size == dtype.itemsize), dtype.itemsize]


def box_of(points, extents):
    """A box of so many points, a power of two along each dim: near a cube, as far as the extents want it."""
    box = [1, 1, 1]
    while prod(box) < points:
        free = [i for i in (2, 1, 0) if box[i] < extents[i]] or [2]
        box[min(free, key=box.__getitem__)] *= 2
    return tuple(box)


def parts_of(channels, split):
    """(first, width) of the parts of channels: powers of two from 16 on, two where that pads less than one."""
    whole = max(16, 1 << (channels - 1).bit_length())
    rest = max(16, 1 << max(channels - whole // 2 - 1, 0).bit_length())
    return ((0, whole // 2), (whole // 2, rest)) if split and 16 <= rest < whole // 2 else ((0, whole),)


def _strides(t, filled):
    """(batch, head, three dims)."""
    batch, *grid, head, _ = t.stride()
    return batch, head, *(0,) * filled, *grid
