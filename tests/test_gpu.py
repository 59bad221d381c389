"""The rows of the table on two GPUs with NCCL: ``pytest -m gpu``. Not selected by a plain ``pytest``."""

import pytest
from cases import load, run_case
from pool import Pool

ROWS = [
    (name, mesh, split)
    for name, row in load().items()
    if row.cuts
    for mesh, split in (("1", "chunk"), ("2", "uneven"), ("2", "empty"))
]


@pytest.fixture(scope="module")
def gpus():
    pool = Pool(world=2, device="cuda")
    yield pool
    pool.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name,mesh,split", ROWS, ids=["-".join(r) for r in ROWS])
def test_case(gpus, name, mesh, split):
    gpus.run(run_case, name, mesh, split)
