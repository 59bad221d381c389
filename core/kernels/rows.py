"""Rows of points and of slots inside a Triton kernel: which ones a program works on, and where they lie in memory."""

import triton
import triton.language as tl


@triton.jit
def here(batch_heads, heads, BLOCKS: tl.constexpr):
    """Batch, head, number of both, the block of slots, and the tile or chunk of points; heads follow each other."""
    p = tl.program_id(0)
    bh = p % batch_heads
    p = p // batch_heads
    return (bh // heads).to(tl.int64), (bh % heads).to(tl.int64), bh.to(tl.int64), p % BLOCKS, p // BLOCKS


@triton.jit
def load(X, at, first, stop, ROWS: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr):
    """Rows from ``first`` on of ``at``, (start, step) in units of UNIT numbers; zeros from ``stop`` on and beyond the
    channels. C: (channels, power of two). The units tell the compiler how rows are aligned."""
    row, c = first + tl.arange(0, ROWS), tl.arange(0, C[1])[None, :]
    where = (at[0] + row.to(tl.int64) * at[1])[:, None] * UNIT + c
    return tl.load(X + where, mask=(row < stop)[:, None] & (c < C[0]), other=0.0)


@triton.jit
def store(X, start, step, value, first, stop, ROWS: tl.constexpr, C: tl.constexpr):
    """Rows that are ``step`` rows from each other, the first of all at ``start``."""
    row, c = first + tl.arange(0, ROWS), tl.arange(0, C[1])[None, :]
    where = (start + row.to(tl.int64) * step)[:, None] * C[0] + c
    tl.store(X + where, value.to(X.dtype.element_ty), mask=(row < stop)[:, None] & (c < C[0]))


@triton.jit
def scores(q, k, first, SLOTS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """Binary logarithms of the weights before they are normalised, -inf beyond the slots."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * 1.4426950408889634  # log2(e)
    if SLOTS % BLOCK != 0:
        s = tl.where((first + tl.arange(0, BLOCK) < SLOTS)[None, :], s, float("-inf"))
    return s
