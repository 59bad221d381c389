"""The pool of workers that the cases run on: a death by a signal is tried once more, one that repeats fails, silence
fails; cases start at a seed, which a failure names."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import load, run_splits
from conftest import pytest_runtest_makereport
from ops_table import survey
from pool import CaseFailed, Pool

from core import dispatch


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


CASES_OF_A_READER = """
from torch.overrides import handle_torch_function, has_torch_function_unary
from cases import case
from core import Plan, op

def doubled(x):
    return handle_torch_function(doubled, (x,), x) if has_torch_function_unary(x) else 2 * x

@op(doubled)
def tripled(func, x):
    return Plan((x,), x, lambda t: 3 * t)

case("doubled", doubled, ((6, 2),), ((0,),))
"""


def test_a_wrong_rule_that_a_file_of_cases_declares_fails(tmp_path, monkeypatch):
    """Every time: without its rule the operation would be composed of torch's, and right."""
    (tmp_path / "cases.py").symlink_to(Path(__file__).with_name("cases.py"))
    (tmp_path / "cases_reader.py").write_text(CASES_OF_A_READER)
    monkeypatch.syspath_prepend(tmp_path)  # where workers look for a table, too
    with closing(Pool()) as pool:
        for _ in range(2):
            with pytest.raises(CaseFailed, match="doubled cut .* not close"):
                pool.run(run_splits, "doubled", "2")
        assert ("doubled", "tripled") in pool.run(survey)[0][0]["doubled"][2]


def _tables():
    return dispatch.RULES, dispatch.HANDLERS, dispatch.COMPOSED, dispatch._plans, dispatch.KINDS


def _registers(meshes):
    for table in _tables():
        table["of a case"] = None


def _is_registered(meshes):
    return ["of a case" in table for table in _tables()]


def test_what_a_case_registers_ends_with_it(pool):
    pool.run(_registers)
    assert pool.run(_is_registered) == [[False] * 5] * 4
