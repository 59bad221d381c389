"""What one empty operation costs in Python: plain torch, ShardTensor and DTensor, in the same run.

    python -m benchmarks.dispatch            # one process, tiny tensors, CPU or GPU

Prints microseconds per call (median of several rounds), with and without grad, forward and forward + backward.
"""

import statistics
import time

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from core import DistributedManager, scatter_tensor


def operations(x, w, b, g):
    return {
        "add": lambda: x + x,
        "gelu": lambda: F.gelu(x),
        "linear": lambda: F.linear(x, w, b),
        "layer_norm": lambda: F.layer_norm(x, (x.shape[-1],), g, b),
        "transpose": lambda: x.transpose(1, 2),
        "reshape": lambda: x.reshape(1, 8, 2, 4),
        "sum": lambda: x.sum(),
    }


def microseconds(call, rounds=7, repeats=200):
    for _ in range(50):
        call()
    times = []
    for _ in range(rounds):
        _wait()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        _wait()
        times.append((time.perf_counter() - start) / repeats * 1e6)
    return statistics.median(times)


def _wait():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _backward(call):
    def run():
        out = call()
        out.backward(torch.ones_like(out))

    return run


def main():
    torch.set_num_threads(1)
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = manager.initialize_mesh((-1,), ("domain",))
    device = manager.device
    x = torch.randn(1, 8, 8, device=device)
    weights = [torch.randn(8, 8, device=device), torch.randn(8, device=device), torch.randn(8, device=device)]

    def shards(grad):
        return scatter_tensor(x, None, mesh, (Shard(1),), requires_grad=grad), [
            w.clone().requires_grad_(grad) for w in weights
        ]

    def dtensors(grad):
        return (
            distribute_tensor(x, mesh, (Shard(1),)).requires_grad_(grad),
            [distribute_tensor(w, mesh, (Replicate(),)).requires_grad_(grad) for w in weights],
        )

    def plain(grad):
        return x.clone().requires_grad_(grad), [w.clone().requires_grad_(grad) for w in weights]

    print(f"{device}, torch {torch.__version__}, microseconds per call: no grad | grad | forward + backward")
    print(f"{'':<12}{'plain':>24}{'ShardTensor':>24}{'DTensor':>24}")
    for name in ("add", "gelu", "linear", "layer_norm", "transpose", "reshape", "sum"):
        row = []
        for make in (plain, shards, dtensors):
            cells = []
            for grad, wrap in ((False, lambda c: c), (True, lambda c: c), (True, _backward)):
                value, ws = make(grad)
                call = wrap(operations(value, *ws)[name])
                with torch.set_grad_enabled(grad):
                    cells.append(microseconds(call))
            row.append(" ".join(f"{c:7.1f}" for c in cells))
        print(f"{name:<12}" + "".join(f"{r:>24}" for r in row))
    manager.cleanup()


if __name__ == "__main__":
    main()
