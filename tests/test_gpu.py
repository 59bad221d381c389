"""One GPU, or two with NCCL: ``pytest -m gpu``, not selected by a plain ``pytest``.

The rows of the table in fp64; those of attention, norms, convolution and what has kernels in bf16 against fp64 of one
process (:mod:`half` states the bounds, ``test_half.py`` runs some on a CPU); more numbers than 32 bits can count.
"""

import half
import pytest
import torch
from cases import load, run_case
from pool import Pool

from core.kernels import has_kernel

WORLD = min(torch.cuda.device_count(), 2)
ON_MESHES = (("1", "chunk"), ("2", "uneven"), ("2", "empty"))[: 3 if WORLD == 2 else 1]
ROWS = [(name, *on) for name, row in load().items() if row.cuts for on in ON_MESHES]
HALVES = [(f, *on) for f in (*half.WHOLE_FAMILIES, *half.BESIDE) for on in ON_MESHES[:2]]


@pytest.fixture(scope="module")
def gpus():
    pool = Pool(WORLD, device="cuda")
    yield pool
    pool.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name,mesh,split", ROWS, ids=["-".join(r) for r in ROWS])
def test_case(gpus, name, mesh, split):
    gpus.run(run_case, name, mesh, split)


@pytest.mark.gpu
@pytest.mark.parametrize("family,mesh,split", HALVES, ids=["-".join(r) for r in HALVES])
def test_in_bf16(gpus, family, mesh, split):
    most = gpus.run(half.run_half, mesh, split, half.rows(family), timeout=240)
    print({what: f"{max(m[what] for m in most):.2f} eps" for what in half.BOUNDS})


@pytest.mark.gpu
def test_more_numbers_than_32_bits_count():
    """Neighbourhood attention by its kernels, forward and backward; every operand and result has 2.16e9 numbers."""
    shape = 1, 4112, 2048, 4, 64
    assert shape[1] * shape[2] * shape[3] * shape[4] > 2**31 and has_kernel(torch.empty(1, 64).cuda().bfloat16(), 1.0)
    found = half.last_rows("cuda", shape, 5)
    assert max(found) < half.BOUNDS["gradient"], found
