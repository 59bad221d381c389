"""bf16 on a CPU by the functions that judge it on GPUs (``test_gpu.py``): some rows of every family."""

from unittest.mock import patch

import half
import pytest
import torch

FEW = [name for family in (*half.WHOLE_FAMILIES, *half.BESIDE) for name in half.rows(family)[::7]]


def test_rows_in_bf16(pool):
    most = pool.run(without_onednn, FEW)
    assert all(max(m[what] for m in most) > 0.2 for what in half.BOUNDS), most  # it is bf16 that is measured


def without_onednn(meshes, names):
    """Its gradient of a transposed convolution of one column is wrong in bf16 (torch 2.13, plain tensors)."""
    with torch.backends.mkldnn.flags(enabled=False):
        return half.run_half(meshes, "2", "uneven", names)


def test_a_wrong_row_is_seen(pool):
    """Bounds that an error of 2 % would pass are none."""
    with pytest.raises(AssertionError, match="result 0 is off by"):
        pool.run(off_by_a_little, "conv2d_3x3")


def off_by_a_little(meshes, name):
    row = half.load()[name]
    with patch.object(row, "fn", lambda x, *rest, fn=row.fn: fn(x * (1 + (x.dtype == torch.bfloat16) / 50), *rest)):
        half.run_half(meshes, "2", "uneven", [name])


def test_the_end_of_a_grid_is_compared():
    """As on a GPU beyond 2^31 numbers."""
    assert max(half.last_rows("cpu", (1, 40, 11, 2, 8), 3)) < half.BOUNDS["gradient"]
