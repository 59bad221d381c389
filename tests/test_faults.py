"""A rank that dies ends the others, who name it; a launcher's restart goes on from the last complete checkpoint."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import fault_worker
import pytest
import torch
import torch.distributed as dist
from launch import launch, succeed
from test_loop import ROWS, Toy, make, options

from apps.agree import together
from apps.loop import fit, restarted, start
from apps.loop import launch as launched
from core import DistributedManager, InputError, checkpoint
from core.command import command


# -- the ways to die ---------------------------------------------------------------------------------------------
def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise ZeroDivisionError("of this rank\nand more")


def leave():
    sys.exit(0)


def refuse():
    raise InputError("a chunk is damaged", file="c/0")


def _works(rank, victim, way, busy, backend="gloo"):
    """Messages without end, in which one rank dies; the others meet it in a collective, or are busy elsewhere."""

    def main(argv):
        DistributedManager.initialize(backend=backend)
        for step in range(10_000):
            if step == 20 and rank == victim:
                way()
            if step == 20 and busy:
                time.sleep(120)
            dist.all_reduce(torch.ones(100, device=DistributedManager().device))

    command(main)()


@pytest.mark.parametrize(
    "way, victim, busy, status, words",
    [
        (kill, 2, False, -9, "rank 2 died without a word"),
        (kill, 2, True, -9, "rank 2 died without a word"),
        (kill, 0, False, -9, "rank 0 died without a word"),
        (fail, 1, False, 1, "rank 1 failed: ZeroDivisionError: of this rank"),
        (leave, 2, False, 0, "rank 2 failed: SystemExit: 0"),
        (refuse, 0, True, 2, "rank 0 failed: InputError: file c/0: a chunk is damaged"),
    ],
)
def test_a_death_ends_the_others_by_name(way, victim, busy, status, words):
    outcome = launch(3, _works, victim, way, busy, timeout=60)
    assert outcome[victim][0] == status and "ends because" not in outcome[victim][1]
    for rank in {0, 1, 2} - {victim}:
        assert outcome[rank][0] > 0, outcome[rank]  # not killed for want of time
        assert f"error: rank {rank} ends because {words}" in outcome[rank][1], outcome[rank]


@pytest.mark.gpu
@pytest.mark.parametrize("way, words", [(kill, "died without a word"), (fail, "failed: ZeroDivisionError")])
def test_a_death_ends_the_others_where_collectives_wait_for_ever(way, words):
    outcome = launch(2, _works, 1, way, False, "nccl", timeout=120)
    assert outcome[0][0] > 0 and f"rank 0 ends because rank 1 {words}" in outcome[0][1], outcome


def _ends_apart(rank, alike):
    def main(argv):
        DistributedManager.initialize(backend="gloo")
        dist.all_reduce(torch.ones(2))
        time.sleep(0.3 * rank if not alike else 0)
        if alike:
            raise InputError("the archive is damaged")

    command(main)()


def _leaves_early(rank):
    def main(argv):
        DistributedManager.initialize(backend="gloo")
        if rank == 0:
            dist.all_reduce(torch.ones(2))

    command(main)()


def test_a_rank_that_left_too_early_is_named():
    status, text = launch(2, _leaves_early)[0]
    assert status == 1 and re.search("rank 0 failed: RuntimeError.*; rank 1 had left before", text), text


def test_regular_ends_at_different_times_are_no_deaths():
    succeed(3, _ends_apart, False)


def test_an_error_that_all_meet_is_told_once_by_each():
    for status, text in launch(3, _ends_apart, True):
        assert (status, text.strip()) == (2, "error: the archive is damaged")


def _slow(rank):
    DistributedManager.initialize(backend="gloo")
    torch.ones(1)
    time.sleep(3.5 if rank == 1 else 0)  # longer than any patience
    dist.all_reduce(torch.ones(2))
    DistributedManager.cleanup()


def test_a_slow_rank_is_not_taken_for_a_dead_one():
    succeed(2, _slow)


# -- restarts -----------------------------------------------------------------------------------------------------
def _undisturbed(rank, folder):
    command(lambda argv: fault_worker.train(folder))()


def test_a_restart_ends_in_the_weights_of_an_undisturbed_run(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    succeed(2, _undisturbed, str(whole))
    _leave_an_older_run(whole, broken)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run(
        [sys.executable, *torchrun, fault_worker.__file__, str(broken)],
        capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "exitcode: -9) local_rank: 1" in done.stderr and done.stderr.count("resumed from") == 1, done.stderr
    expected, found = torch.load(whole / "final.pt"), torch.load(broken / "final.pt")
    assert expected.pop("losses") == found.pop("losses")
    assert torch.equal(expected.pop("random"), found.pop("random"))
    assert expected.keys() == found.keys() == {"model", "optimizer", "ema"}
    for part in expected:
        torch.testing.assert_close(found[part], expected[part], rtol=0, atol=0)


def _leave_an_older_run(whole, broken):
    """A restart must not take the checkpoints of another launch in the same folder for its own."""
    shutil.copytree(whole / "checkpoints", broken / "checkpoints")


def test_only_checkpoints_of_this_launch_are_gone_on_from(tmp_path, monkeypatch):
    path = tmp_path / "checkpoints" / "step_00000002"
    path.mkdir(parents=True)
    state = {"step": 2, "ranks": 1, "devices": ["cpu"], "has_ema": False, "files": {}}
    for name, other in (("none", f"process {os.getpid()}"), ("job 7", "job 6")):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
        (path / "state.json").write_text(json.dumps(state | {"launch": launched()}))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        assert not restarted(tmp_path)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert restarted(tmp_path)
        (path / "state.json").write_text(json.dumps(state | {"launch": other}))
        assert not restarted(tmp_path)


# -- numbers that are not finite ----------------------------------------------------------------------------------
class Broken(Toy):
    """From the fourth step on, one row of the data, on rank 3 (of the second data group), is not a number."""

    def _cut(self, t):
        t = t.clone()
        t[..., ROWS - 1, 0] = torch.nan if self.broken and t.shape[-1] == 4 else 0.0
        return super()._cut(t)

    def loss(self, model, samples):
        late = [position for _, position in samples if position >= 3 * 4]
        self.broken = bool(late) and dist.get_rank() >= 2
        return super().loss(model, samples)


class Steep(Toy):
    """From the fourth step on the loss has no finite gradient."""

    def loss(self, model, samples):
        out = super().loss(model, samples)
        return out + (out * 0).sqrt() if samples[0][1] >= 3 * 4 else out


def _together(meshes):
    """An error of one rank, whatever it is, is raised on all of a group, and by nobody else."""
    rank, mesh = dist.get_rank(), meshes["2x2"]
    for error, kind in (
        (InputError("a chunk is damaged", file="c/0"), InputError),
        (PermissionError(13, "Permission denied", "c/0"), OSError),
        (KeyError("bt13"), RuntimeError),
    ):
        with pytest.raises(kind) as caught, together():
            if rank in (1, 2):
                raise error
        words = str(error) if kind is InputError else f"rank 1: {type(error).__name__}: {error}"
        assert str(caught.value) == words and (caught.value.__cause__ is error) == (rank in (1, 2))
    group, mine = mesh.get_group(1), mesh.get_coordinate()[0]
    with pytest.raises(RuntimeError, match="rank 3") if mine else nullcontext(), together(group):
        if rank == 3:
            raise KeyError("bt13")


def test_an_error_of_one_rank_ends_all(pool):
    pool.run(_together)


def _stops(meshes, folder, task, fsdp, words):
    config = options(folder, domain=2, fsdp=fsdp)
    mesh, model = start(config), make()
    with pytest.raises(InputError) as caught:
        fit(model, task(mesh), config, mesh)
    heard = [None] * 4
    dist.all_gather_object(heard, str(caught.value))
    assert heard == [heard[0]] * 4 and re.search(words, heard[0]), heard
    parts = [p.to_local() if fsdp else p for p in model.parameters()]
    assert all(part.isfinite().all() for part in parts), "the step must not be taken"
    assert checkpoint.latest(Path(folder) / "checkpoints").name == "step_00000003"


@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize(
    "task, words",
    [
        (Broken, r"the loss is nan at step 4 on ranks 2, 3; the first output .* is that of the data on rank 3\."),
        (Steep, r"a gradient is not finite at step 4 on ranks 0, 1, 2, 3; the first gradient .* 2\.bias on rank"),
    ],
)
def test_what_is_not_finite_stops_all(pool, tmp_path, task, fsdp, words):
    pool.run(_stops, str(tmp_path), task, fsdp, words)
