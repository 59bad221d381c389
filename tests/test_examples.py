"""The examples run as they stand, alone and on two ranks, and say the same."""

import runpy
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist
from launch import succeed

from core import DistributedManager

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_all(rank, folder):
    """Every example's ``main``, in one process group; what it returns is kept for each number of ranks."""
    DistributedManager.initialize()
    ranks, found = dist.get_world_size(), {}
    with patch.object(DistributedManager, "cleanup"):
        for name in ("segment", "operation", "volume"):
            found[name] = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
        peak, result = runpy.run_path(str(EXAMPLES / "larger_than_one_rank.py"))["main"](folder, rows=256)
    for report in (found["operation"], found["volume"]):
        assert not report.wrong and max(report.differences.values()) < 1e-10
        assert bool(report.forward.count()) == bool(report.backward.count()) == (ranks > 1)
    if rank == 0:
        np.savez(Path(folder) / f"{ranks}.npz", losses=found["segment"], peak=peak, result=result[:])
    DistributedManager.cleanup()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    for ranks in (1, 2):
        succeed(ranks, run_all, str(folder))
    return [np.load(folder / f"{ranks}.npz") for ranks in (1, 2)]


def test_losses_are_those_of_one_rank(found):
    one, two = (f["losses"] for f in found)
    np.testing.assert_allclose(one, two, rtol=1e-5)
    assert one[-1] < 0.8 * one[0]


def test_what_does_not_fit_one_rank_is_cut(found):
    one, two = found
    np.testing.assert_allclose(one["result"], two["result"], atol=1e-5)
    assert one["result"].std() > 0.01 and two["peak"] < 0.6 * one["peak"]
