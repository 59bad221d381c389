"""Pairs of channels turned by angles, in one pass: torch takes six, of halves of rows, which it reads slowly."""

import torch
import triton
import triton.language as tl

from core.kernels.column_operators import rows_of
from core.kernels.columns import NORM, places


@triton.jit(do_not_specialize=["rows"])  # parts of other numbers of rows take the same program
def _turned(
    X, COS, SIN, Y, rows, half, heads, tokens, per, outer, inner,
    BACK: tl.constexpr, GROUPED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    part, down, column = tl.program_id(0), tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    at = 2 * down * half + column
    for first in tl.range(part.to(tl.int64) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row, start = first + down, 2 * first * half
        mask = (row < rows) & (column < half)
        x = X + places(row, column, start + at, per, outer, inner, GROUPED)
        a, b = (tl.load(x, mask=mask, other=0.0).to(tl.float32), tl.load(x + half, mask=mask, other=0.0).to(tl.float32))
        turn = (row.to(tl.int32) // heads) % tokens * half + column
        cos = tl.load(COS + turn, mask=mask, other=0.0).to(tl.float32)
        sin = tl.load(SIN + turn, mask=mask, other=0.0).to(tl.float32)
        if BACK:
            sin = -sin
        tl.store(Y + start + at, (a * cos - b * sin).to(Y.dtype.element_ty), mask=mask)
        tl.store(Y + start + at + half, (b * cos + a * sin).to(Y.dtype.element_ty), mask=mask)


def turned(x, cos, sin, back):
    """(..., heads, channels), contiguous, with channels i and i + channels / 2 turned by an angle, ``back`` against it.

    Args:
        x: (..., heads, channels), for which there are `rows_of`; fp16, bf16 or fp32.
        cos, sin: (tokens..., 1, channels / 2), contiguous, of the last of the dims before the heads.
    """
    heads, channels = x.shape[-2:]
    rows, half = x.numel() // channels, channels // 2
    y, (programs, how) = x.new_empty(x.shape), NORM.of(rows, half)
    with torch.accelerator.device_index(x.device.index):
        _turned[programs,](
            x, cos, sin, y, rows, half, heads, cos.numel() // half, *rows_of(x),
            BACK=back, GROUPED=not x.is_contiguous(), **how,
        )  # fmt: skip
    return y
