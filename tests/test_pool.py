"""The pool of workers that the cases run on: a death by a signal is tried once more, one that repeats fails, silence
fails; cases start at a seed, which a failure names."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import load
from conftest import pytest_runtest_makereport
from pool import CaseFailed


def dies(meshes, path):
    """Rank 1 dies, unless the file says that it did."""
    if dist.get_rank() == 1 and not (path and os.path.exists(path)):
        if path:
            open(path, "w").close()
        os.kill(os.getpid(), signal.SIGABRT)
    return dist.get_rank()


def test_a_death_is_told_and_tried_again(pool, tmp_path):
    with pytest.warns(UserWarning, match="rank 1 died with exit code -6"):
        assert pool.run(dies, str(tmp_path / "died")) == [0, 1, 2, 3]


def test_a_death_that_repeats_fails(pool):
    with (
        pytest.warns(UserWarning, match="rank 1 died"),
        pytest.raises(CaseFailed, match="rank 1 died with exit code -6"),
    ):
        pool.run(dies, "")


def draws(meshes):
    torch.rand(1)
    return torch.initial_seed()


def is_silent(meshes):
    time.sleep(60 if dist.get_rank() == 2 else 0)


def test_silence_fails_and_the_next_case_has_new_workers(pool):
    pool.run(draws)  # new workers may take their time
    with pytest.raises(CaseFailed, match=r"no answer within 1 s from ranks \[2\]"):
        pool.run(is_silent, timeout=1)
    assert len(pool.run(draws)) == 4


def test_cases_start_at_the_seed(pool, request):
    for _ in range(2):
        assert pool.run(draws) == [request.config.getoption("seed")] * 4


@pytest.mark.parametrize("failed", [True, False])
def test_a_failure_names_its_seed(request, failed):
    hook = pytest_runtest_makereport(request.node)
    next(hook)
    with pytest.raises(StopIteration) as end:
        hook.send(SimpleNamespace(failed=failed, sections=[]))
    again = f"pytest '{request.node.nodeid}' --seed {request.config.getoption('seed')}"
    assert end.value.value.sections == [("seed", again)] * failed


def _places_of_rows(meshes):
    return list(load())


def test_rows_have_one_place_whatever_was_imported_first(pool):
    """A worker that has met a file of cases in another test would else cut its rows as no other worker does."""
    first = "import cases_views, cases; print(*cases.load())"
    done = subprocess.run([sys.executable, "-c", first], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.stdout.split() == list(load()), done.stderr
    assert all(places == list(load()) for places in pool.run(_places_of_rows))
