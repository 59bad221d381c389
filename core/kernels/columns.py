"""Sums over all rows of a matrix, and layer and RMS norms of its rows, forward and backward.

torch gives few programs to a matrix of many rows and some hundred columns, and reads it once for each gradient; forward
it gives a block of threads to every row, most of which wait. Here as many programs as fill a GPU share the rows, keep
their sums in fp32, and a second sum goes over the programs: the same call gives the same bits. A norm and all its
gradients take one pass each, because a program has whole rows; heads cut out of wider rows are read where they are.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from core.kernels.column_operators import rows_of

PROGRAMS, ROWS, WIDEST = 512, 32, 128  # programs in all at most, rows that one takes at a time, columns of one


class Cut(NamedTuple):
    """Of either pass of a norm: programs in all at most, numbers of a matrix that one takes at a time (a row at
    least), how many of these each thread has, and tiles that are under way at once."""

    programs: int = 1056
    tile: int = 1024
    each: int = 32
    stages: int = 3

    def of(self, rows, columns):
        """(programs, arguments of their kernel) for a matrix."""
        width = triton.next_power_of_2(columns)
        tall = max(1, self.tile // width)
        warps = min(16, max(1, tall * width // (32 * self.each)))
        programs = min(self.programs, triton.cdiv(rows, tall))
        return programs, dict(ROWS=tall, WIDTH=width, STAGES=self.stages, num_warps=warps)


NORM = Cut()


@triton.jit(do_not_specialize=["rows"])  # parts of other numbers of rows take the same program
def _normed(
    X, SCALE, SHIFT, Y, MEAN, RSTD, rows, columns, eps, per, outer, inner,
    CENTRED: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr, GROUPED: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    part, down, column = tl.program_id(0), tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    at, there = down * columns + column, column < columns
    if SCALED:
        scale = tl.load(SCALE + column, mask=there, other=0.0).to(tl.float32)
    if SHIFTED:
        shift = tl.load(SHIFT + column, mask=there, other=0.0).to(tl.float32)
    for first in tl.range(part.to(tl.int64) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row, start = first + down, first * columns
        mask = (row < rows) & there
        x = tl.load(X + places(row, column, start + at, per, outer, inner, GROUPED), mask=mask, other=0.0)
        off = x.to(tl.float32)
        if CENTRED:
            mean = tl.sum(off, 1, keep_dims=True) / columns
            tl.store(MEAN + row, mean, mask=row < rows)
            off = tl.where(there, off - mean, 0.0)
        rstd = 1 / tl.sqrt(tl.sum(off * off, 1, keep_dims=True) / columns + eps)
        y = off * rstd
        if SCALED:
            y *= scale
        if SHIFTED:
            y += shift
        tl.store(Y + start + at, y.to(Y.dtype.element_ty), mask=mask)
        tl.store(RSTD + row, rstd, mask=row < rows)


@triton.jit
def places(row, column, close, per, outer, inner, GROUPED: tl.constexpr):
    """Of rows in groups; ``close``: of such as lie one behind the other."""
    if not GROUPED:
        return close
    row = row.to(tl.int32)  # there are fewer, and a division costs less
    return (row // per).to(tl.int64) * outer + (row % per).to(tl.int64) * inner + column


def normed(x, weight, bias, eps, centred):
    """Norm over the last dim, as x but contiguous, and of each row the mean and the inverse deviation from it, fp32
    (..., 1); not ``centred``: from 0, and no means, (0,).

    Args:
        x: (..., columns), for which there are `rows_of`; fp16, bf16 or fp32.
        weight, bias: (columns,), contiguous, or None.
    """
    columns, like = x.shape[-1], dict(dtype=torch.float32)
    rows = x.numel() // columns
    y, rstd = x.new_empty(x.shape), x.new_empty(*x.shape[:-1], 1, **like)
    mean = torch.empty_like(rstd) if centred else x.new_empty(0, **like)
    (programs, how), given = NORM.of(rows, columns), [x if t is None else t for t in (weight, bias)]
    with torch.accelerator.device_index(x.device.index):
        _normed[programs,](
            x, *given, y, mean, rstd, rows, columns, eps, *rows_of(x), CENTRED=centred, SCALED=weight is not None,
            SHIFTED=bias is not None, GROUPED=not x.is_contiguous(), **how,
        )  # fmt: skip
    return y, mean, rstd


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


@triton.jit(do_not_specialize=["rows"])  # parts of other numbers of rows take the same program
def _norm(
    G, X, MEAN, RSTD, SCALE, DX, TIMES, SUMS, rows, columns, per, outer, inner,
    CENTRED: tl.constexpr, SCALED: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, GROUPED: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    part, down, column = tl.program_id(0), tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    at, there = down * columns + column, column < columns
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    times = tl.zeros((ROWS, WIDTH), tl.float32)
    if SCALED:
        scale = tl.load(SCALE + column, mask=there, other=0.0).to(tl.float32)
    for first in tl.range(part.to(tl.int64) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row, start = first + down, first * columns
        mask = (row < rows) & there
        g = tl.load(G + start + at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(X + places(row, column, start + at, per, outer, inner, GROUPED), mask=mask, other=0.0)
        x = x.to(tl.float32)
        if CENTRED:
            x -= tl.load(MEAN + row, mask=row < rows, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + row, mask=row < rows, other=0.0).to(tl.float32)
        x *= rstd
        if BIAS:
            total += g
        if WEIGHT:
            times += g * x
        if SCALED:
            g *= scale
        along = tl.sum(g * x, 1, keep_dims=True) / columns
        if CENTRED:
            g -= tl.sum(g, 1, keep_dims=True) / columns
        dx = (g - x * along) * rstd
        tl.store(DX + start + at, dx.to(DX.dtype.element_ty), mask=mask)
    to = part * columns + column
    if WEIGHT:
        tl.store(TIMES + to, tl.sum(times, 0, keep_dims=True), mask=there)
    if BIAS:
        tl.store(SUMS + to, tl.sum(total, 0, keep_dims=True), mask=there)


def norm(grad, x, mean, rstd, weight, wanted):
    """Gradients of a norm over the last dim: of x, contiguous, and those ``wanted`` of weight and bias, in this order,
    fp32 (0 to 2, columns). They are ``rstd * (g - mean(g) - y * mean(g * y))`` with ``g = grad * weight`` and
    ``y = (x - mean) * rstd``, and the sums over the rows of ``grad * y`` and of ``grad``.

    Args:
        grad: (..., columns), contiguous; fp16, bf16 or fp32.
        x: as grad, but `rows_of` it are enough.
        mean, rstd: one number for each row, contiguous; no means (0,): of a norm that took none off, without mean(g).
        weight: (columns,), contiguous, or None for ones.
        wanted: two bools.
    """
    columns = x.shape[-1]
    rows = x.numel() // columns
    programs, how = NORM.of(rows, columns)
    out, parts = x.new_empty(x.shape), x.new_empty(sum(wanted), programs, columns, dtype=torch.float32)
    with torch.accelerator.device_index(x.device.index):
        _norm[programs,](
            grad, x, mean, rstd, x if weight is None else weight, out, parts[:1], parts[-1:],
            rows, columns, *rows_of(x), CENTRED=mean.numel() > 0, SCALED=weight is not None, WEIGHT=wanted[0],
            BIAS=wanted[1], GROUPED=not x.is_contiguous(), **how,
        )  # fmt: skip
    return out, parts.sum(1)
