"""Every row of the table on every mesh and split."""

import pytest
from cases import REFUSED, SPLITS, load, run_refused, run_splits

ROWS = [(name, mesh) for name, row in load().items() for mesh in SPLITS if (row.cuts2 if mesh == "2x2" else row.cuts)]


@pytest.mark.parametrize("name,mesh", ROWS, ids=["-".join(r) for r in ROWS])
def test_case(pool, name, mesh):
    pool.run(run_splits, name, mesh)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(pool, name):
    pool.run(run_refused, name)
