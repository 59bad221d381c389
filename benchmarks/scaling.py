"""One GPU against all of them: time, efficiency and memory of whole models, forward and training step.

    torchrun --nproc-per-node 2 -m benchmarks.scaling                    # the tables below, on GPUs, bf16
    torchrun --nproc-per-node 2 -m benchmarks.scaling --compile          # the same, compiled by torch.compile
    torchrun --nproc-per-node 2 -m benchmarks.scaling --small            # the same on gloo and a CPU, toy sizes

Efficiency is (time on one device) / (ranks x time on all), in the same run; "one" is the faster of plain torch with the
whole input and of the same module on shards of one rank. Medians after warm-up, the slowest rank counted.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from apps.aero.model import ModelConfig as TransolverConfig
from apps.aero.model import Transolver
from benchmarks.models import Attention, ConvNet, ViT
from core import DistributedManager, ShardTensor, scatter_tensor
from core.debug import trace


def cases(small):
    """name -> (module, input shapes, dim that is cut)"""
    sizes = (64,) if small else (16384, 65536, 131072)
    for n in sizes:
        yield f"attention {n}", Attention, [(1, 16, n, 64)] * 3, 2
    for s in (32,) if small else (512, 1024, 2048):
        depth = 2 if small else 16
        yield f"ViT {s}", lambda s=s, d=depth: ViT(s, depth=d), [(1, 3, s, s)], 2
    s = 32 if small else 2048
    yield f"conv {s}", ConvNet, [(1, 64, s, s)], 2
    config = TransolverConfig(features=6, outputs=4, width=256, layers=4, heads=8, slices=128)
    for n in (256,) if small else (75_000, 300_000, 1_200_000):
        yield f"Transolver {n}", lambda: Transolver(config), [(1, n, 6)], 1


def median_ms(call, device, repeats):
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        _settle(device)
        start = time.perf_counter()
        call()
        _settle(device)
        times.append(1e3 * (time.perf_counter() - start))
    worst = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def _settle(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(module, inputs, device, repeats):
    """(forward ms, step ms, peak GiB of the step)"""
    shards = [x for x in inputs if isinstance(x, ShardTensor)]

    def forward():
        with torch.no_grad():
            return module(*inputs)

    leaves = [x.detach().requires_grad_() for x in inputs]

    def step():
        for t in [*leaves, *module.parameters()]:
            t.grad = None
        out = module(*leaves)
        out.float().square().mean().backward()

    times = [median_ms(forward, device, repeats)]
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times.append(median_ms(step, device, repeats))
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    assert not shards or all(isinstance(x.grad, ShardTensor) for x in leaves)
    return (*times, peak)


def compare(module, shapes, dim, meshes, args):
    """One row of the table: plain, on shards of one rank, on shards of all."""
    device, dtype = next(module.parameters(), torch.empty(0, device=meshes[0].device_type)).device, torch.bfloat16
    dtype = dtype if device.type == "cuda" else torch.float32
    whole = [torch.randn(s, device=device, dtype=dtype) for s in shapes]
    times = []
    for mesh in (None, *meshes):
        inputs = whole if mesh is None else [scatter_tensor(x, None, mesh, [Shard(dim)]) for x in whole]
        torch._dynamo.reset()
        run = torch.compile(module, fullgraph=True, dynamic=False) if args.compile else module
        times.append(measure(run, inputs, device, args.repeats))
    leaves = [x.detach().requires_grad_() for x in inputs]
    with trace() as wire:
        module(*leaves).float().square().mean().backward()
    plain, one, many = times
    best = [min(a, b) for a, b in zip(plain, one)]
    cells = "".join(f"{f'{t[0]:.2f} / {t[1]:.2f}':>18}" for t in times)
    share = "/".join(f"{o / (meshes[1].size() * m):.2f}" for o, m in zip(best[:2], many[:2]))
    return f"{cells}{share:>14}{plain[2]:>9.2f}{many[2]:>7.2f}  {wire.bytes():,}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="", help="part of the case's name")
    parser.add_argument("--compile", action="store_true", help="compile the module, on one device too")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    DistributedManager.initialize()
    manager = DistributedManager()
    device, ranks = manager.device, manager.world_size
    meshes = [manager.initialize_mesh(shape, ("ddp", "domain"))["domain"] for shape in ((ranks, 1), (1, ranks))]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.backends.cudnn.benchmark = True
    if manager.rank == 0:
        how = "compiled" if args.compile else "eager"
        print(f"{ranks} x {device.type}, {dtype}, {how}, torch {torch.__version__}; ms forward / step")
        print(f"{'':<20}{'plain':>18}{'one rank':>18}{'all':>18}{'efficiency':>14}{'GiB one':>9}{'all':>7}  bytes sent")
    for name, make, shapes, dim in cases(args.small):
        if args.only in name:
            torch.manual_seed(0)
            module = make().to(device, dtype)
            row = compare(module, shapes, dim, meshes, args)
            if manager.rank == 0:
                print(f"{name:<20}{row}", flush=True)
    manager.cleanup()


if __name__ == "__main__":
    main()
