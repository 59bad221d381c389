"""Exact inference on a cloud of any size in the memory of a chunk, alone or with torchrun over many processes.

    python -m benchmarks.stream --cells 140000000                 # one GPU, the paper's model, bf16
    python -m benchmarks.stream --cells 100000 --preset tiny --chunk 10000 --memory 0      # a CPU

Points are drawn by their number, a chunk at a time, on the device itself: what is measured is the model's two passes
(apps.aero.states), not reading and distances. Weights are untrained. Prints one line of JSON.
"""

import argparse
import json
import resource
import time

import torch

from apps.aero.config import PRESETS
from apps.aero.model import Transolver
from apps.aero.states import States
from core import DistributedManager

BLOCK = 4096


class Drawn:
    """Features (n, 7) of rows first ... last of a cloud, each block of them from a generator seeded with its number."""

    def __init__(self, first, last, like):
        self.first, self.last, self.like = first, last, like

    def __len__(self):
        return self.last - self.first

    def __getitem__(self, rows):
        first, last, _ = rows.indices(len(self))
        first, last = self.first + first, self.first + last
        blocks = range(first // BLOCK, -(-last // BLOCK))
        found = torch.cat([self.like.new_empty(0, 7), *(self._block(number) for number in blocks)])
        return found[first - blocks.start * BLOCK :][: last - first]

    def _block(self, number):
        generator = torch.Generator(self.like.device).manual_seed(number)
        return torch.randn(BLOCK, 7, generator=generator, device=self.like.device, dtype=torch.float32).to(self.like)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cells", type=int, default=140_000_000)
    p.add_argument("--preset", choices=tuple(PRESETS), default="paper")
    p.add_argument("--chunk", type=int, default=1 << 20)
    p.add_argument("--memory", type=float, help="GiB of hidden states kept between layers; left out: half of a GPU")
    args = p.parse_args(argv)
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh, device = manager.initialize_mesh((-1,), ("domain",))["domain"], manager.device
    config = PRESETS[args.preset][0]
    torch.manual_seed(0)
    model = Transolver(type(config)(**{**vars(config), "features": 7})).eval().to(device)
    model = model.bfloat16() if device.type == "cuda" else model
    rank, ranks = mesh.get_local_rank(), mesh.size()
    own = Drawn(args.cells * rank // ranks, args.cells * (rank + 1) // ranks, next(model.parameters()))
    start = _now(device)
    states = States(model, [own], args.chunk, mesh, args.memory)
    middle, total = _now(device), 0.0
    for first in states.chunks(0):
        total += states.outputs(0, first).double().sum().item()
    end = _now(device)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    told = {"cells": args.cells, "ranks": ranks, "states_s": middle - start, "rows_s": end - middle}
    told |= {"peak_gib": peak / 2**30, "hidden_kept": states.kept is not None, "mean": total / max(1, 4 * len(own))}
    if rank == 0:
        print(json.dumps({name: round(v, 6) if isinstance(v, float) else v for name, v in told.items()}), flush=True)
    DistributedManager.cleanup()
    return told


def _now(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
