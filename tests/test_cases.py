"""Every row of the table on every mesh and split."""

import pytest
from cases import REFUSED, SPLITS, load, run_case, run_refused

ROWS = [
    (name, mesh, split)
    for name, row in load().items()
    for mesh, splits in SPLITS.items()
    for split in splits
    if (row.cuts2 if mesh == "2x2" else row.cuts)
]


@pytest.mark.parametrize("name,mesh,split", ROWS, ids=["-".join(r) for r in ROWS])
def test_case(pool, name, mesh, split):
    pool.run(run_case, name, mesh, split)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(pool, name):
    pool.run(run_refused, name)
