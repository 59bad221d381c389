"""The cases of :mod:`benchmarks.models` cut by another library, nvidia-physicsnemo, in a Python that has it.

    python -m benchmarks.scaling --peer-python PATH starts it; alone: torchrun --nproc-per-node 2 benchmarks/peer.py

Prints a line of JSON for each case: milliseconds forward and of a training step, medians, the slowest rank counted, in
bf16; that library works on GPUs only. This file imports it and ``models.py`` beside it, and nothing imports this file.
"""

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist
from models import SUITES
from physicsnemo.distributed import DistributedManager
from physicsnemo.domain_parallel import scatter_tensor
from torch.distributed.tensor import Shard


def median_ms(call, device, repeats):
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    worst = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def measure(module, shapes, dim, mesh, device, repeats):
    """[forward ms, step ms]"""
    dtype, src = torch.bfloat16, dist.get_global_rank(mesh.get_group(), 0)
    module = module.to(device, dtype)
    whole = [torch.randn(s, device=device, dtype=dtype) for s in shapes]

    def cut(wants):
        return [
            scatter_tensor(x, src, mesh, (Shard(dim),), global_shape=x.shape, dtype=dtype, requires_grad=wants)
            for x in whole
        ]

    inputs, leaves = cut(False), cut(True)

    def forward():
        with torch.no_grad():
            return module(*inputs).to_local()

    def step():
        for t in [*leaves, *module.parameters()]:
            t.grad = None
        module(*leaves).float().square().mean().backward()
        assert all(x.grad is not None for x in leaves)

    return [median_ms(call, device, repeats) for call in (forward, step)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--suite", default="usual", choices=list(SUITES))
    parser.add_argument("--only", default="")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = manager.initialize_mesh((1, manager.world_size), ("ddp", "domain"))["domain"]
    torch.backends.cudnn.benchmark = True
    for name, make, shapes, dim in SUITES[args.suite](args.small):
        if args.only in name:
            torch.manual_seed(0)
            # its attention gives fp32 for bf16, which layers with weights in bf16 refuse unless autocast casts it back
            with torch.autocast("cuda", torch.bfloat16, enabled=name.startswith("ViT")):
                ms = measure(make(), shapes, dim, mesh, manager.device, args.repeats)
            if manager.rank == 0:
                print(json.dumps({"case": name, "ms": ms}), flush=True)
    DistributedManager.cleanup()


if __name__ == "__main__":
    main()
