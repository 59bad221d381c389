"""An operation of your own: a running mean along the last dim, right on any cut, with the proof.

    python examples/operation.py
    torchrun --nproc-per-node 3 examples/operation.py

Built from torch's operations it would work as it is; with a rule it sends only the few numbers beyond its borders.
"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard
from torch.overrides import handle_torch_function, has_torch_function_unary

import core
from core import DistributedManager, Plan, collectives
from core.ops.halo import fetch
from core.testing import check_sharded


def running_mean(x, reach=2):
    """Mean of each number and its ``reach`` neighbours on both sides, zeros beyond the ends. x: (.., n)"""
    if has_torch_function_unary(x):  # torch's own protocol: a tensor subclass may answer instead
        return handle_torch_function(running_mean, (x,), x, reach)
    return _mean(F.pad(x, (reach, reach)), reach)


def _mean(padded, reach):
    return padded.unfold(-1, 2 * reach + 1, 1).mean(-1)


@core.op(running_mean)
def running_mean_on_shards(func, x, reach=2):
    """The rule sees specs: who holds which numbers. It asks for ``reach`` more on both sides."""
    dim = x.ndim - 1
    axis = x.axis_of(dim)
    if axis is None:
        return Plan((x,), x)
    borders, group = x.offsets(axis), collectives.axis_group(x.mesh, axis)
    wanted = tuple((a - reach, b + reach) if a < b else (a, a) for a, b in zip(borders, borders[1:]))
    return Plan((x,), x, lambda part, reach=2: _mean(fetch(part, dim, x.sizes[axis], wanted, group), reach))


def main():
    DistributedManager.initialize()
    mesh = DistributedManager().initialize_mesh((-1,), ("domain",))
    torch.manual_seed(0)  # every rank draws the same
    x = torch.randn(4, 50, dtype=torch.float64, device=DistributedManager().device)
    sizes = {0: [50 - 3 * (mesh.size() - 1)] + [3] * (mesh.size() - 1)}  # parts of unlike length
    report = check_sharded(running_mean, [x], [[Shard(1)]], mesh, sizes=[sizes])
    if DistributedManager().rank == 0:
        print(report)  # differences of values and gradients, and every message
    DistributedManager.cleanup()
    return report


if __name__ == "__main__":
    main()
