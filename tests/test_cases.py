"""Every row of the table on every mesh and split; in turns, or at night all of them."""

import pytest
from cases import REFUSED, SPLITS, has_turn, load, run_refused, run_splits

ROWS = [(name, mesh) for name, row in load().items() for mesh in SPLITS if (row.cuts2 if mesh == "2x2" else row.cuts)]
IN_TURN = [row for row in ROWS if has_turn(*row)]
SEVERAL = [row for row in ROWS if len(SPLITS[row[1]]) > 1]


@pytest.mark.parametrize("name,mesh", IN_TURN, ids=["-".join(r) for r in IN_TURN])
def test_case(pool, name, mesh):
    pool.run(run_splits, name, mesh)


@pytest.mark.nightly
@pytest.mark.parametrize("name,mesh", SEVERAL, ids=["-".join(r) for r in SEVERAL])
def test_every_split(pool, name, mesh):
    pool.run(run_splits, name, mesh, True)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(pool, name):
    pool.run(run_refused, name)
