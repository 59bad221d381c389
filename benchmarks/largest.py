"""Weak scaling of memory: the largest image and the largest cloud of points that train on one GPU and on all.

    python -m benchmarks.largest --gib 24         # GPUs: a few minutes; starts the ranks itself
    python -m benchmarks.largest --small          # gloo on a CPU, by the bytes that core.meter counts

Every GPU may take ``--gib``. Two small sizes tell how memory grows, then sizes around the one that should just fit are
tried from below, each by real training steps with AdamW. What runs out of memory ends its process: no rank has to be
told while it waits for a message, for the launcher ends them all, and the last size that was reported counts. Where
many ranks share an image, keys of attention that are gathered weigh more than what ``--strategy heads`` keeps twice.
"""

import argparse
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from apps.aero.model import ModelConfig, Transolver
from benchmarks.models import ViT
from core import DistributedManager, ShardTensor, set_attention_strategy
from core.gradients import gather_in_buckets
from core.meter import Meter
from core.ops import strategies
from core.parallelize import param_groups, shard_spatial_params_


class Case(NamedTuple):
    """What grows: ``make(n)`` is the model and the whole input's shape for about ``n`` tokens or points on some ranks,
    ``first`` the two numbers of a rank that are measured first, ``cut`` the dim that is cut, ``spatial`` the weights
    that are cut with it."""

    make: callable
    first: tuple
    cut: int
    spatial: dict


def vit(small):
    sizes = dict(width=48, depth=3, heads=2) if small else {}

    def make(n, ranks):
        side = max(round(n**0.5 / ranks) * ranks, ranks) * 8
        return lambda: ViT(side, **sizes), (1, 3, side, side)

    return Case(make, (64, 256) if small else (4096, 16384), 2, {"position": [Shard(1)]})


def transolver(small):
    sizes = dict(width=16, heads=2, slices=8) if small else dict(width=256, heads=8, slices=128)
    config = ModelConfig(features=6, outputs=4, layers=4, **sizes)

    def make(n, ranks):
        return lambda: Transolver(config), (1, round(n / ranks) * ranks, 6)

    return Case(make, (200, 800) if small else (40_000, 80_000), 1, {})


CASES = {"ViT": vit, "Transolver": transolver}


# -- one rank ---------------------------------------------------------------------------------------------------------
def peak_of(make, shape, case, mesh, device):
    """Bytes at the peak of three training steps; on several ranks each makes its part of the input."""
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with nullcontext() if cuda else Meter() as meter:
        with device:
            model = make().to(dtype)
        if mesh.size() > 1:
            shard_spatial_params_(model, mesh, case.spatial)
            gather_in_buckets(model)
        part = list(shape)
        part[case.cut] //= mesh.size()
        x = torch.randn(part, device=device, dtype=dtype)
        if mesh.size() > 1:
            x = ShardTensor.from_local(x, mesh, [Shard(case.cut)], "chunk", global_shape=shape)
        optimizer = torch.optim.AdamW(param_groups(model, lr=1e-5))
        for _ in range(3):
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            optimizer.step()
    return torch.cuda.max_memory_allocated() if cuda else meter.peak


def rank(args):
    """Tries numbers one after the other, prints what each took, and ends with an error when one takes too much."""
    DistributedManager.initialize()
    manager, case, limit = DistributedManager(), CASES[args.case](args.small), args.gib * 2**30
    device, mesh = manager.device, manager.initialize_mesh((-1,), ("domain",))
    set_attention_strategy(args.strategy)
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(device).total_memory)
    for n in args.numbers:
        make, shape = case.make(n, mesh.size())
        most = torch.tensor(float(peak_of(make, shape, case, mesh, device)), device=device, dtype=torch.float64)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        if most.item() > limit:  # where nothing else forbids it
            raise torch.OutOfMemoryError(f"{most.item():.0f} bytes of {limit:.0f}")
        if manager.rank == 0:
            print(json.dumps({"n": n, "shape": shape, "peak": most.item()}), flush=True)
    manager.cleanup()


# -- the search -------------------------------------------------------------------------------------------------------
def tried(name, ranks, numbers, args):
    """What was reported of each number until memory ran out, and whether it did."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    flags = ["--case", name, "--gib", str(args.gib), "--strategy", args.strategy, *(["--small"] if args.small else [])]
    flags += ["--numbers", *map(str, numbers)]
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run([*launch, "-m", __spec__.name, *flags], env=env, capture_output=True, text=True)
    if done.returncode and "OutOfMemoryError" not in done.stderr:
        sys.exit(done.stderr[-4000:])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")], bool(done.returncode)


def largest(name, ranks, args):
    """The row of the largest number that trains: {"n", "shape", "peak"}."""
    first = [n * ranks for n in CASES[name](args.small).first]
    (a, b), _ = tried(name, ranks, first, args)
    each = (b["peak"] - a["peak"]) / (first[1] - first[0])
    start, best = 0.96 * (first[0] + (args.gib * 2**30 - a["peak"]) / each), None
    while True:
        rows, failed = tried(name, ranks, [int(start * (1 + 0.015 * i)) for i in range(8)], args)
        best = rows[-1] if rows else best
        if failed and best:
            return best
        start *= 0.88 if failed else 1.12


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--gib", type=float, help="that a GPU may take; 24, or 0.02 where small")
    parser.add_argument("--only", default="", help="part of the case's name")
    parser.add_argument("--strategy", default="auto", choices=strategies.NAMES, help="of attention")
    parser.add_argument("--ranks", type=int, help="all GPUs of this host; 2 where small")
    parser.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--numbers", type=int, nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.gib = args.gib or (0.02 if args.small else 24)
    if args.numbers:
        return rank(args)
    ranks = args.ranks or (2 if args.small else torch.cuda.device_count())
    print(f"at most {args.gib:g} GiB a GPU, attention by {args.strategy}, forward, backward and AdamW")
    for name in (n for n in CASES if args.only in n):
        rows = [largest(name, n, args) for n in (1, ranks)]
        sizes = [torch.Size(row["shape"]).numel() for row in rows]
        for n, row in zip((1, ranks), rows):
            shape = " x ".join(map(str, row["shape"]))
            print(f"{name:<12}{n} GPU(s): {shape:<22} peak {row['peak'] / 2**30:.3f} GiB", flush=True)
        print(f"{name:<12}{sizes[1] / sizes[0]:.2f} times as large on {ranks} as on one", flush=True)


if __name__ == "__main__":
    main()
