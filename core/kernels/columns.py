"""Sums over all rows of a matrix, and of it times the normalised rows of another: gradients of biases and of the
weights of a layer norm.

torch gives few programs to a matrix of many rows and some hundred columns. Here programs take chunks of the rows, so
many that they fill a GPU, keep their sums in fp32, and a second sum goes over the chunks: the same call gives the same
bits.
"""

import torch
import triton
import triton.language as tl

PROGRAMS, ROWS, WIDEST = 512, 32, 128  # programs in all at most, rows that one takes at a time, columns of one


@triton.jit
def _sums(
    G, X, MEAN, RSTD, SUMS, TIMES, rows, columns, chunk,
    BOTH: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    part, column = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = (column < columns)[None, :]
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    times = tl.zeros((ROWS, WIDTH), tl.float32)
    start = part.to(tl.int64) * chunk
    stop = tl.minimum(start + chunk, rows)
    for first in range(start, stop, ROWS):
        row = first + tl.arange(0, ROWS)
        at, mask = row[:, None] * columns + column[None, :], (row < stop)[:, None] & there
        g = tl.load(G + at, mask=mask, other=0.0).to(tl.float32)
        total += g
        if BOTH:
            mean = tl.load(MEAN + row, mask=row < stop, other=0.0).to(tl.float32)[:, None]
            rstd = tl.load(RSTD + row, mask=row < stop, other=0.0).to(tl.float32)[:, None]
            times += g * (tl.load(X + at, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
    to = part * columns + column
    tl.store(SUMS + to, tl.sum(total, 0), mask=column < columns)
    if BOTH:
        tl.store(TIMES + to, tl.sum(times, 0), mask=column < columns)


def sums(grad, x=None, mean=None, rstd=None):
    """Sums of ``grad``, and of ``grad * (x - mean) * rstd`` where those are given: fp32 (1 or 2, columns).

    Args:
        grad, x: (rows, columns), contiguous; fp16, bf16 or fp32.
        mean, rstd: (rows,), contiguous.
    """
    rows, columns = grad.shape
    width = min(WIDEST, triton.next_power_of_2(columns))
    across, both = triton.cdiv(columns, width), x is not None
    chunk = ROWS * max(1, triton.cdiv(rows, ROWS * max(1, PROGRAMS // across)))
    chunks = triton.cdiv(rows, chunk)
    parts = grad.new_empty(1 + both, chunks, columns, dtype=torch.float32)
    beside = (x, mean, rstd) if both else (grad,) * 3
    with torch.accelerator.device_index(grad.device.index):
        _sums[chunks, across](
            grad, *beside, parts[0], parts[-1], rows, columns, chunk, BOTH=both, ROWS=ROWS, WIDTH=width, num_warps=4
        )
    return parts.sum(1)
