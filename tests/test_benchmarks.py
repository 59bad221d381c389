"""What the benchmarks measure with: a step without its messages is the same step."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from benchmarks.models import ViT
from benchmarks.scaling import forward_and_step
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
