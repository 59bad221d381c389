"""Checkpoints are complete or absent, and written while the training goes on."""

import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import Partial, Replicate, Shard

from core import InputError, ShardingError, ShardTensor, checkpoint, scatter_tensor
from core.files import Writer


def everything(model, optimizer, ema):
    """All tensors by name, whole."""
    found = {f"model.{k}": v for k, v in get_model_state_dict(model).items()}
    found |= {f"ema.{k}": v for k, v in ema.items()}
    for name, p in model.named_parameters():
        found |= {f"optimizer.{name}.{k}": v for k, v in optimizer.state.get(p, {}).items()}
    return {k: v.detach().full_tensor() if hasattr(v, "full_tensor") else v.detach().clone() for k, v in found.items()}


def same_bits(a, b):
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


# -- complete or absent ------------------------------------------------------------------------------------------
def small(mesh, seed=0):
    """A plain weight and one cut unevenly over two ranks, with optimizer and EMA."""
    torch.manual_seed(seed)
    model = nn.Linear(6, 3).double()
    model.weight = nn.Parameter(scatter_tensor(model.weight.detach(), None, mesh, [Shard(1)], sizes={0: (5, 1)}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    ema = {name: p.detach().clone() for name, p in model.named_parameters()}
    return model, optimizer, ema


def move(model, optimizer, ema):
    for p in model.parameters():
        p.grad = p.detach() + 1
    optimizer.step()
    with torch.no_grad():
        for name, p in model.named_parameters():
            ema[name].lerp_(p, 0.5)


def _save_small(state, folder, step=1, keep=None):
    return checkpoint.save(folder, step, *state[:2], {"note": "x"}, state[2], keep=keep)


def _interrupted(meshes, folder):
    """A rank that cannot write: all hear of it, the checkpoint before stays the last, and a later save succeeds."""
    state, folder = small(meshes["2"]), Path(folder)
    first = _save_small(state, folder)
    write = Writer.write_data

    def full(self, plan, planner):
        if dist.get_rank() == 2:
            raise OSError("No space left on device")
        return write(self, plan, planner)

    Writer.write_data = full
    try:
        with pytest.raises(InputError, match="step_00000002: cannot be written by rank 2 .*No space left.*has room"):
            _save_small(state, folder, 2)
    finally:
        Writer.write_data = write
    dist.barrier()
    assert (folder / "step_00000002.part").exists() and checkpoint.latest(folder) == first
    dist.barrier()
    assert checkpoint.latest(folder) == first != _save_small(state, folder, 2) == checkpoint.latest(folder)
    assert {p.name for p in folder.iterdir()} == {"step_00000001", "step_00000002"}


def _overwrites(meshes, folder):
    state, folder = small(meshes["2"]), Path(folder)
    _save_small(state, folder)
    move(*state)
    truth = everything(*state)
    again = small(meshes["2"], 1)
    checkpoint.load(_save_small(state, folder), *again)
    same_bits(everything(*again), truth)
    assert [p.name for p in folder.iterdir()] == ["step_00000001"]


def _keeps(meshes, folder):
    state, folder = small(meshes["2"]), Path(folder)
    for step in (1, 2, 3, 10):
        _save_small(state, folder, step, keep=2)
    assert sorted(p.name for p in folder.iterdir()) == ["step_00000003", "step_00000010"]
    dist.barrier()
    _save_small(state, folder, 2, keep=1)  # older than what is there, but the one that was asked for
    assert sorted(p.name for p in folder.iterdir()) == ["step_00000002", "step_00000003", "step_00000010"]


def _renamed_last(meshes, folder):
    """Nothing is visible under the final name before every rank has written, and then all of it."""
    state, folder, seen = small(meshes["2"]), Path(folder), []
    write, replace = Writer.write_data, os.replace

    def slow(self, plan, planner):
        time.sleep(0.2 * dist.get_rank())
        seen.append(checkpoint.latest(folder))
        return write(self, plan, planner)

    def renames(a, b):
        files = json.loads((Path(a) / "state.json").read_text())["files"]
        assert {p.name for p in Path(a).iterdir()} == {*files, "state.json"} and len(files) > 2
        replace(a, b)

    Writer.write_data, os.replace = slow, renames
    try:
        _save_small(state, folder)
    finally:
        Writer.write_data, os.replace = write, replace
    assert seen == [None]


DAMAGES = {
    "flipped": lambda file: file.write_bytes(_flipped(file.read_bytes())),
    "cut": lambda file: os.truncate(file, file.stat().st_size - 10),
    "emptied": lambda file: file.write_bytes(b""),
    "gone": os.unlink,
}


def _flipped(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def _damaged(meshes, folder):
    """Every file, damaged in every way: the same words on every rank, with file and remedy, and nothing is changed."""
    state, folder = small(meshes["2"]), Path(folder)
    path = _save_small(state, folder)
    move(*state)
    truth = everything(*state)
    names = sorted(p.name for p in path.iterdir())
    assert len(names) > 3
    for name in names:
        for kind, damage in DAMAGES.items():
            if (name, kind) == ("state.json", "flipped"):
                continue  # any text that a person may have written
            whole = (path / name).read_bytes()
            dist.barrier()
            if dist.get_rank() == 0:
                damage(path / name)
            dist.barrier()
            words = "no checkpoint" if (name, kind) == ("state.json", "gone") else f"{path / name}.*Use an earlier"
            with pytest.raises(InputError, match=words) as caught:
                checkpoint.load(path, *state)
            heard = [None] * 4
            dist.all_gather_object(heard, str(caught.value))
            assert heard == [heard[0]] * 4, (name, kind)
            if dist.get_rank() == 0:
                (path / name).write_bytes(whole)
            dist.barrier()
    same_bits(everything(*state), truth)
    checkpoint.load(path, *state)


def _other_models(meshes, folder):
    path = _save_small(small(meshes["2"]), folder)
    with pytest.raises(InputError, match=r"variable weight: holds \(3, 6\) .* shape \(4, 6\).*same configuration"):
        checkpoint.load(path, nn.Linear(6, 4).double())
    with pytest.raises(InputError, match="variable 0.weight: holds nothing"):
        checkpoint.load(path, nn.Sequential(nn.Linear(6, 3)).double())


def _averages_and_buffers(meshes, folder):
    """The averaged model has averaged parameters and the buffers of the model."""
    model = nn.BatchNorm1d(3)
    model.running_mean += 1
    ema = {name: p.detach() + 5 for name, p in model.named_parameters()}
    path = checkpoint.save(folder, 1, model, torch.optim.SGD(model.parameters()), {}, ema)
    made = nn.BatchNorm1d(3)
    checkpoint.load(path, made, averaged=True)
    assert torch.equal(made.weight, torch.full((3,), 6.0)) and torch.equal(made.running_mean, torch.ones(3))


def _straight(meshes, folder):
    """torch.distributed.checkpoint itself takes cuts: uneven, along two axes, replicated, empty; no pending sums."""
    whole = torch.arange(60.0).view(5, 12)
    mesh = meshes["2x2"]

    def cuts(x):
        return {
            "once": scatter_tensor(x, None, meshes["4"], [Shard(1)], sizes={0: (0, 7, 0, 5)}),
            "two axes": scatter_tensor(x, None, mesh, [Shard(1), Shard(0)], sizes={0: (1, 11), 1: (5, 0)}),
            "twice": scatter_tensor(x, None, mesh, [Shard(1), Shard(1)], sizes={0: (9, 3), 1: ((2, 7), (3, 0))}),
            "replicated": scatter_tensor(x, None, mesh, [Replicate(), Shard(0)], sizes={1: (1, 4)}),
            "whole": scatter_tensor(x, None, mesh, [Replicate(), Replicate()]),
            "none": scatter_tensor(x[:0], None, meshes["4"], [Shard(1)]),
            "strided": scatter_tensor(x.t().contiguous(), None, meshes["4"], [Shard(0)]).t(),
        }

    dcp.save(cuts(whole), checkpoint_id=folder)
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert [c.sizes[1] for c in stored["once"].chunks] == [7, 5] and len(stored["replicated"].chunks) == 2
    for changed in (False, True):
        target = cuts(torch.zeros(5, 12))
        if changed:  # every tensor is read into the cut of another
            names = [name for name in target if name != "none"]
            target = dict(zip(names, [target[name] for name in [*names[1:], names[0]]]))
        dcp.load(target, checkpoint_id=folder)
        for name, value in target.items():
            assert torch.equal(value.full_tensor(), whole[:0] if name == "none" else whole), name
    pending = ShardTensor.from_local(whole, meshes["4"], [Partial()])
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save({"sum": pending}, checkpoint_id=folder + "/other")
    assert all(
        isinstance(e, ShardingError) and "sum is a pending sum" in str(e) for e, _ in caught.value.failures.values()
    )


# -- while the training goes on ----------------------------------------------------------------------------------
def _background(meshes, folder):
    """Steps that run while the files are written change nothing in them; the next save waits for the one before."""
    state, folder = small(meshes["2"]), Path(folder)
    write, go, started = Writer.write_data, threading.Event(), threading.Event()

    def held(self, plan, planner):
        started.set()
        assert go.wait(30)
        return write(self, plan, planner)

    Writer.write_data = held
    try:
        with checkpoint.Saver(folder, keep=5) as saver:
            assert saver.wait() is None
            move(*state)
            truth, extra = [everything(*state)], {"losses": [1]}
            saver.save(1, *state[:2], extra, state[2])
            assert started.wait(30)
            if dist.get_rank() == 0:  # its writing is done, and waits for that of the others
                go.set()
                time.sleep(0.2)
            for _ in range(3):
                move(*state)
                extra["losses"].append(2)
                dist.all_reduce(torch.ones(2))  # the training sends its own messages meanwhile
            assert checkpoint.latest(folder) is None
            truth.append(everything(*state))
            threading.Timer(0.3, go.set).start()
            saver.save(2, *state[:2], extra, state[2])
            assert (folder / "step_00000001").exists()
            move(*state)
            assert saver.wait() == checkpoint.latest(folder) == folder / "step_00000002"
            saver.save(3, *state[:2], extra, state[2])
        assert checkpoint.latest(folder) == folder / "step_00000003", "the end waits"
    finally:
        Writer.write_data = write
    for step, wanted in enumerate(truth, 1):
        again = small(meshes["2"], 1)
        facts = checkpoint.load(folder / f"step_{step:08d}", *again)
        same_bits(everything(*again), wanted)
        assert facts["losses"] == ([1] if step == 1 else [1, 2, 2, 2])


def _background_error(meshes, folder):
    """What one rank meets in the background all ranks raise: at the next save, or at the end."""
    state, folder = small(meshes["2"]), Path(folder)
    write = Writer.write_data

    def full(self, plan, planner):
        if dist.get_rank() == 1:
            raise OSError("No space left on device")
        return write(self, plan, planner)

    Writer.write_data = full
    try:
        words = "step_00000001: cannot be written by rank 1.*No space left"
        with checkpoint.Saver(folder) as saver:
            saver.save(1, *state[:2], {}, state[2])
            with pytest.raises(InputError, match=words):
                saver.save(2, *state[:2], {}, state[2])
        with pytest.raises(InputError, match="step_00000003"), checkpoint.Saver(folder) as saver:
            saver.save(3, *state[:2], {}, state[2])
        with pytest.raises(ZeroDivisionError), checkpoint.Saver(folder) as saver:
            saver.save(4, *state[:2], {}, state[2])
            raise ZeroDivisionError  # of the training: the person must see this one
    finally:
        Writer.write_data = write
    assert checkpoint.latest(folder) is None


CASES = [
    _interrupted,
    _overwrites,
    _keeps,
    _renamed_last,
    _damaged,
    _other_models,
    _averages_and_buffers,
    _straight,
    _background,
    _background_error,
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__.strip("_"))
def test_checkpoint(pool, case, tmp_path):
    pool.run(case, str(tmp_path))
