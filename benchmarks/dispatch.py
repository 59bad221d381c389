"""What one empty operation costs in Python: plain torch, ShardTensor and DTensor, in the same run.

    python -m benchmarks.dispatch            # one process, tiny tensors, CPU or GPU

Prints microseconds per call (median of several rounds), with and without grad, forward and forward + backward.
"""

import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn
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
    for make in (plain, shards, dtensors):  # what is slow once in a process is not part of the first row
        microseconds(_backward(operations(make(True)[0], *make(True)[1])["linear"]), rounds=1)
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
    model = Blocks().to(device)
    steps = [microseconds(_step(model, v), rounds=5, repeats=20) for v in (plain(True)[0], shards(True)[0])]
    print(f"4-block transformer, forward + backward: plain {steps[0]:.0f}, ShardTensor {steps[1]:.0f} microseconds")
    manager.cleanup()


class Blocks(nn.Module):
    """Four blocks of attention and a two-layer network, with 8 channels."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = (nn.ModuleList(nn.Linear(8, n) for _ in range(4)) for n in (24, 8))
        self.up, self.down = (nn.ModuleList(nn.Linear(*n) for _ in range(4)) for n in ((8, 16), (16, 8)))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(8))

    def forward(self, x):
        for i in range(4):
            q, k, v = self.qkv[i](self.norms[2 * i](x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
            x = x + self.out[i](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = x + self.down[i](F.gelu(self.up[i](self.norms[2 * i + 1](x))))
        return x


def _step(model, x):
    def run():
        model.zero_grad()
        model(x).sum().backward()

    return run


if __name__ == "__main__":
    main()
