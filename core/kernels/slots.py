"""Attention between many points and few slots in single passes over the points, which stay where they are.

All kernels weigh by p_ig = softmax over the slots g of q_i . k_g. ``read`` gives sums over slots to points, ``sums``
those over points to slots, and one derivative serves both: with dp_ig = x_i . w_g, where x belongs to points (values,
or the gradient of what was read) and w to slots (the gradient of sums, or values), scores have the gradient
p (dp - sum_g p dp). Programs own a tile of points, or they walk over a chunk of points for a block of slots and leave
a partial sum, which torch adds up: nothing hangs on who comes first. Where all slots fit into one block, a walk needs
nothing but itself: it finds the normalisers, and in the backward pass the gradients of points and slots at once.

Points are (batch, heads, points, channels) and slots (batch, heads, slots, channels) by any strides, zero where one
serves all. Results of points lie as (batch, points, heads, channels), as the layers around want them. Source: Dao et
al., FlashAttention, 2022, for the running sum and for the backward pass from the logarithm of the sum.
"""

from functools import cache
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from core.kernels import close, rows


class Config(NamedTuple):
    """How one kernel is cut: points in a tile, most slots in a block, both powers of two from 16 on."""

    tile: int
    block: int
    warps: int
    stages: int


# (channels at most, bytes of a number) -> read, sums, backward of points, backward of slots
CONFIGS = {
    (64, 2): [Config(128, 64, 4, 2), Config(64, 128, 4, 3), Config(64, 64, 4, 2), Config(128, 128, 8, 2)],
    (128, 2): [Config(128, 64, 8, 2), Config(64, 128, 8, 2), Config(64, 64, 4, 2), Config(64, 128, 8, 1)],
    (256, 2): [Config(64, 64, 4, 2), Config(64, 64, 8, 2), Config(64, 32, 8, 2), Config(64, 64, 8, 1)],
    (64, 4): [Config(64, 64, 4, 2), Config(64, 64, 4, 2), Config(64, 32, 4, 1), Config(32, 64, 8, 1)],
    (128, 4): [Config(64, 32, 8, 1), Config(32, 64, 8, 1), Config(32, 32, 8, 1), Config(32, 32, 8, 1)],
    (256, 4): [Config(32, 16, 8, 1), Config(32, 32, 8, 1), Config(16, 16, 4, 1), Config(16, 32, 8, 1)],
}
PROGRAMS = 8  # that walk, for each multiprocessor
_FREE = ("points", "own", "q0", "q1", "q2", "k0", "k1", "k2", "x0", "x1", "x2", "w0", "w1", "w2")  # compiled for any


@triton.jit(do_not_specialize=_FREE)
def _read(
    Q, K, W, O, L, points, batch_heads, heads,
    q0: tl.int64, q1: tl.int64, q2: tl.int64, k0: tl.int64, k1: tl.int64, k2: tl.int64,
    w0: tl.int64, w1: tl.int64, w2: tl.int64,
    C: tl.constexpr, V: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr, PRECISION: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """What points take, and the binary logarithms of the sums of exponentials; the latter alone without VALUES."""
    b, h, bh, _, tile = rows.here(batch_heads, heads, 1)
    first = tile * TILE
    q = rows.load(Q, (b * q0 + h * q1, q2), first, points, TILE, C, UNIT)
    most = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.full((TILE,), 0, tl.float32)
    out = tl.full((TILE, V[1]), 0, tl.float32)
    for g in range(0, SLOTS, BLOCK):
        k = rows.load(K, (b * k0 + h * k1, k2), g, SLOTS, BLOCK, C, UNIT)
        s = rows.scores(q, k, g, SLOTS, BLOCK, PRECISION)
        more = tl.maximum(most, tl.max(s, 1))
        p = tl.exp2(s - more[:, None])
        shrink = tl.exp2(most - more)
        total = total * shrink + tl.sum(p, 1)
        if VALUES:
            w = rows.load(W, (b * w0 + h * w1, w2), g, SLOTS, BLOCK, V, UNIT)
            out = tl.dot(p.to(w.dtype), w, out * shrink[:, None], input_precision=PRECISION)
        most = more
    row = first + tl.arange(0, TILE)
    tl.store(L + bh * points + row, most + tl.log2(total), mask=row < points)
    if VALUES:
        rows.store(O, b * points * heads + h, heads, out / total[:, None], first, points, TILE, V)


@triton.jit(do_not_specialize=_FREE)
def _sums(
    Q, K, X, L, S, points, own, batch_heads, heads,
    q0: tl.int64, q1: tl.int64, q2: tl.int64, k0: tl.int64, k1: tl.int64, k2: tl.int64,
    x0: tl.int64, x1: tl.int64, x2: tl.int64,
    C: tl.constexpr, V: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sum over a chunk of ``own`` points. L is given, or taken where all slots are in the block."""
    BLOCKS: tl.constexpr = (SLOTS + BLOCK - 1) // BLOCK
    b, h, bh, block, chunk = rows.here(batch_heads, heads, BLOCKS)
    k = rows.load(K, (b * k0 + h * k1, k2), block * BLOCK, SLOTS, BLOCK, C, UNIT)
    total = tl.full((BLOCK, V[1]), 0, tl.float32)
    for first in range(chunk * own, tl.minimum(chunk * own + own, points), TILE):
        q = rows.load(Q, (b * q0 + h * q1, q2), first, points, TILE, C, UNIT)
        x = rows.load(X, (b * x0 + h * x1, x2), first, points, TILE, V, UNIT)
        s = rows.scores(q, k, block * BLOCK, SLOTS, BLOCK, PRECISION)
        row = first + tl.arange(0, TILE)
        at = L + bh * points + row
        if BLOCKS == 1:
            most = tl.max(s, 1)
            p = tl.exp2(s - most[:, None])
            norm = tl.sum(p, 1)
            p *= (1 / norm)[:, None]
            tl.store(at, most + tl.log2(norm), mask=row < points)
        else:
            p = tl.exp2(s - tl.load(at, mask=row < points, other=0.0)[:, None])
        total = tl.dot(tl.trans(p.to(x.dtype)), x, total, input_precision=PRECISION)
    rows.store(S, (chunk * batch_heads + bh) * SLOTS, 1, total, block * BLOCK, SLOTS, BLOCK, V)


@triton.jit(do_not_specialize=_FREE)
def _backward_points(
    Q, K, X, W, L, D, DQ, O, points, batch_heads, heads,
    q0: tl.int64, q1: tl.int64, q2: tl.int64, k0: tl.int64, k1: tl.int64, k2: tl.int64,
    x0: tl.int64, x1: tl.int64, x2: tl.int64, w0: tl.int64, w1: tl.int64, w2: tl.int64,
    C: tl.constexpr, V: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr, PRECISION: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """The gradient of q, and D = sum_g p dp, which the other kernel needs; with READ what points take from w, too."""
    b, h, bh, _, tile = rows.here(batch_heads, heads, 1)
    first = tile * TILE
    row = first + tl.arange(0, TILE)
    q = rows.load(Q, (b * q0 + h * q1, q2), first, points, TILE, C, UNIT)
    x = rows.load(X, (b * x0 + h * x1, x2), first, points, TILE, V, UNIT)
    level = tl.load(L + bh * points + row, mask=row < points, other=0.0)[:, None]
    d = tl.full((TILE,), 0, tl.float32)
    out = tl.full((TILE, V[1]), 0, tl.float32)
    for g in range(0, SLOTS, BLOCK):
        k = rows.load(K, (b * k0 + h * k1, k2), g, SLOTS, BLOCK, C, UNIT)
        w = rows.load(W, (b * w0 + h * w1, w2), g, SLOTS, BLOCK, V, UNIT)
        p = tl.exp2(rows.scores(q, k, g, SLOTS, BLOCK, PRECISION) - level)
        if READ:
            out = tl.dot(p.to(w.dtype), w, out, input_precision=PRECISION)
        else:
            d += tl.sum(p * tl.dot(x, tl.trans(w), input_precision=PRECISION), 1)
    if READ:
        d = tl.sum(x.to(tl.float32) * out, 1)
        rows.store(O, b * points * heads + h, heads, out, first, points, TILE, V)
    tl.store(D + bh * points + row, d, mask=row < points)
    dq = tl.full((TILE, C[1]), 0, tl.float32)
    for g in range(0, SLOTS, BLOCK):
        k = rows.load(K, (b * k0 + h * k1, k2), g, SLOTS, BLOCK, C, UNIT)
        w = rows.load(W, (b * w0 + h * w1, w2), g, SLOTS, BLOCK, V, UNIT)
        p = tl.exp2(rows.scores(q, k, g, SLOTS, BLOCK, PRECISION) - level)
        ds = p * (tl.dot(x, tl.trans(w), input_precision=PRECISION) - d[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    rows.store(DQ, b * points * heads + h, heads, dq, first, points, TILE, C)


@triton.jit(do_not_specialize=_FREE)
def _backward_slots(
    Q, K, X, W, L, D, DQ, O, DK, S, points, own, batch_heads, heads,
    q0: tl.int64, q1: tl.int64, q2: tl.int64, k0: tl.int64, k1: tl.int64, k2: tl.int64,
    x0: tl.int64, x1: tl.int64, x2: tl.int64, w0: tl.int64, w1: tl.int64, w2: tl.int64,
    C: tl.constexpr, V: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr, PRECISION: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """The gradient of k, of a chunk of ``own`` points; without READ the sums of x, too. Where all slots are in the
    block it does the work of the kernel above on the way, otherwise D is given."""
    BLOCKS: tl.constexpr = (SLOTS + BLOCK - 1) // BLOCK
    b, h, bh, block, chunk = rows.here(batch_heads, heads, BLOCKS)
    k = rows.load(K, (b * k0 + h * k1, k2), block * BLOCK, SLOTS, BLOCK, C, UNIT)
    w = rows.load(W, (b * w0 + h * w1, w2), block * BLOCK, SLOTS, BLOCK, V, UNIT)
    dk = tl.full((BLOCK, C[1]), 0, tl.float32)
    total = tl.full((BLOCK, V[1]), 0, tl.float32)
    for first in range(chunk * own, tl.minimum(chunk * own + own, points), TILE):
        q = rows.load(Q, (b * q0 + h * q1, q2), first, points, TILE, C, UNIT)
        x = rows.load(X, (b * x0 + h * x1, x2), first, points, TILE, V, UNIT)
        row = first + tl.arange(0, TILE)
        at = bh * points + row
        level = tl.load(L + at, mask=row < points, other=0.0)[:, None]
        p = tl.exp2(rows.scores(q, k, block * BLOCK, SLOTS, BLOCK, PRECISION) - level)
        dp = tl.dot(x, tl.trans(w), input_precision=PRECISION)
        if BLOCKS == 1:
            ds = (p * (dp - tl.sum(p * dp, 1)[:, None])).to(q.dtype)
            dq = tl.dot(ds, k, input_precision=PRECISION)
            rows.store(DQ, b * points * heads + h, heads, dq, first, points, TILE, C)
            if READ:
                out = tl.dot(p.to(w.dtype), w, input_precision=PRECISION)
                rows.store(O, b * points * heads + h, heads, out, first, points, TILE, V)
        else:
            ds = (p * (dp - tl.load(D + at, mask=row < points, other=0.0)[:, None])).to(q.dtype)
        dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)
        if not READ:
            total = tl.dot(tl.trans(p.to(x.dtype)), x, total, input_precision=PRECISION)
    to = (chunk * batch_heads + bh) * SLOTS
    rows.store(DK, to, 1, dk, block * BLOCK, SLOTS, BLOCK, C)
    if not READ:
        rows.store(S, to, 1, total, block * BLOCK, SLOTS, BLOCK, V)


# -- launches ---------------------------------------------------------------------------------------------------------
def read(q, k, w, out, level):
    """What points take from slots.

    Args:
        q: (batch, heads, points, channels), of fp16, bf16 or fp32 as all.
        k: (batch or 1, heads or 1, slots, channels).
        w: (batch or 1, heads or 1, slots, values).
        out: takes it, (batch, points, heads, values).
        level: takes the binary logarithms of the sums of exponentials, fp32 (batch, heads, points).
    """
    call = Call(q, k, w)
    config, tiles = call.cut(0)
    call.launch(_read, config, tiles, (q, k, w), (out, level), VALUES=True)


def sums(q, k, x, level):
    """Sums of x (batch, heads, points, values) by slot, fp32 (batch, heads, slots, values); ``level`` as above."""
    call = Call(q, k, x)
    config, chunks, own = call.chunks(1)
    if call.slots > config.block:
        tiled, tiles = call.cut(0)
        call.launch(_read, tiled, tiles, (q, k, k), (level, level), VALUES=False)
    found = level.new_empty(chunks, *q.shape[:2], call.slots, x.shape[-1])
    call.launch(_sums, config, chunks, (q, k, x), (level, found), own)
    return found.sum(0)


def backward(q, k, x, w, level, dq, out):
    """Derivatives of both, where x (batch, heads, points, values) belongs to points and w to slots.

    Args:
        dq: takes the gradient of q, (batch, points, heads, channels).
        out: takes what points take from w, (batch, points, heads, values); None where it is not wanted.

    Returns:
        fp32 (chunks, batch, heads, slots, channels) and (.., values): gradients of k, and where ``out`` is None sums of
        x by slot, both to be summed over the chunks.
    """
    call, given, wanted = Call(q, k, x), (q, k, x, w), out is not None
    config, chunks, own = call.chunks(3)
    made = level, level, dq, dq if out is None else out
    if call.slots > config.block:
        made = level, torch.empty_like(level), *made[2:]
        tiled, tiles = call.cut(2)
        call.launch(_backward_points, tiled, tiles, given, made, READ=wanted)
    found = level.new_empty(chunks, *q.shape[:2], call.slots, q.shape[-1])
    total = found if wanted else level.new_empty(*found.shape[:-1], x.shape[-1])
    call.launch(_backward_slots, config, chunks, given, (*made, found, total), own, READ=wanted)
    return found, None if wanted else total


class Call:
    """Sizes of one call, and how it is cut."""

    def __init__(self, q, k, values):
        self.batch, self.heads, self.points, self.channels = q.shape
        self.slots, self.values, self.dtype, self.device = k.shape[2], values.shape[-1], q.dtype, q.device

    def cut(self, number):
        """Config of a kernel, and the number of tiles of points."""
        most = max(self.channels, self.values)
        table = CONFIGS[next(key for key in CONFIGS if key[0] >= most and key[1] == self.dtype.itemsize)]
        config = table[number]
        config = config._replace(block=min(config.block, power(self.slots)))
        return config, -(-self.points // config.tile)

    def chunks(self, number):
        """Config of a kernel whose programs walk, how many chunks of points there are, and the points of one."""
        config, tiles = self.cut(number)
        blocks = self.batch * self.heads * -(-self.slots // config.block)
        each = -(-tiles // -(-programs(self.device) // blocks))
        return config, -(-tiles // each), each * config.tile

    def launch(self, kernel, config, parts, given, made, *own, **flags):
        """``parts``: tiles or chunks of points; only the latter walk, and are launched for each block of slots."""
        given, blocks = [close(t) for t in given], -(-self.slots // config.block) if own else 1
        steps = [0 if n == 1 else s for t in given for n, s in zip(t.shape[:3], t.stride())]
        unit, batch_heads = gcd(16 // self.dtype.itemsize, *steps), self.batch * self.heads
        width = power(max(self.channels, self.values))  # of both: products of one shape, which the benchmark checks
        with torch.accelerator.device_index(self.device.index):
            kernel[(batch_heads * blocks * parts,)](
                *given, *made, self.points, *own, batch_heads, self.heads, *(s // unit for s in steps),
                C=(self.channels, width), V=(self.values, width), SLOTS=self.slots,
                TILE=config.tile, BLOCK=config.block, UNIT=unit,
                PRECISION="tf32x3" if self.dtype == torch.float32 else "tf32", **flags,
                num_warps=config.warps, num_stages=config.stages,
            )  # fmt: skip


def power(n):
    """The power of two that a block needs for so many."""
    return max(16, 1 << (n - 1).bit_length())


@cache
def programs(device):
    """How many programs that walk keep a device busy."""
    count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    return PROGRAMS * count
