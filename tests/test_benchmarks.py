"""What the benchmarks measure with: a step without its messages is the same step; the largest size is the largest."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from benchmarks import largest, scaling, stream
from benchmarks.measure import forward_and_step
from benchmarks.models import ViT
from benchmarks.wire import Tape
from core import scatter_tensor
from core.gradients import gather_in_buckets


def with_a_tape(meshes):
    """The gradients of a step, those of two more that send nothing, and how many messages were sent again."""
    mesh = meshes["4"]
    model = ViT(32, width=24, depth=2, heads=2, classes=5)
    gather_in_buckets(model)
    _, step = forward_and_step(model, [scatter_tensor(torch.randn(2, 3, 32, 32), None, mesh, [Shard(2)])])
    tape, found = Tape(), []
    with tape.recording():
        step()
    found.append([p.grad.clone() for p in model.parameters()])
    with tape.silent():
        for _ in range(2 * (dist.get_rank() == 0)):  # alone: it would wait for ever for an answer
            step()
            found.append([p.grad.clone() for p in model.parameters()])
    tape.send_again()
    return found, len(tape._sent)


def test_a_step_without_messages_is_the_same_step(pool):
    (first, second, third), count = pool.run(with_a_tape)[0]
    assert count > 4
    for silent in (second, third):
        assert all(torch.equal(a, b) for a, b in zip(first, silent, strict=True))


@pytest.mark.parametrize("status", [0, 3])
def test_the_peer_is_a_process_that_does_not_know_of_ours(monkeypatch, tmp_path, capfd, status):
    """A Python that notes what it was asked, and may end early; what it printed counts."""
    peer, asked = tmp_path / "python", tmp_path / "asked"
    row = '{"case": "attention 64", "ms": [1.5, 4]}'
    peer.write_text(f"#!/bin/sh\necho \"$*; rank $RANK.\" > {asked}\necho hello\necho '{row}'\nexit {status}\n")
    peer.chmod(0o755)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    args = SimpleNamespace(peer_python=str(peer), repeats=3, only="attention", small=True, suite="many")
    assert scaling.peer_rows(args) == {"attention 64": [1.5, 4]}
    told = asked.read_text()
    assert "--nproc-per-node 2" in told and "peer.py --repeats 3 --suite many --only attention --small; rank ." in told
    assert ("ended with 3" in capfd.readouterr().out) == bool(status)


@pytest.mark.parametrize("bend", [0.0, 2e-6, -1e-6])
def test_the_largest_size_is_found(monkeypatch, bend):
    """Memory that grows with the number straight or bent, of which the first two sizes tell nothing."""

    def peak(n):
        return 2**20 + 5000 * n + bend * n * n * 5000

    def tried(name, ranks, numbers, args):
        fit = [n for n in numbers if peak(n) <= args.gib * 2**30]
        return [{"n": n, "shape": (n,), "peak": peak(n)} for n in fit], len(fit) < len(numbers)

    monkeypatch.setattr(largest, "tried", tried)
    args = SimpleNamespace(gib=1.0, small=False)
    found = largest.largest("Transolver", 2, args)
    assert peak(found["n"]) <= 2**30 < peak(1.02 * found["n"])


def test_a_drawn_cloud_is_the_same_by_any_ranges():
    whole = stream.Drawn(0, 9000, torch.empty(0))[:]
    assert whole.shape == (9000, 7) and whole.std() > 0.9
    part = stream.Drawn(3000, 9000, torch.empty(0))
    assert len(part) == 6000 and torch.equal(torch.cat([part[:1096], part[1096:5000], part[5000:6096]]), whole[3000:])
    assert part[6000:6000].shape == (0, 7)
