"""Seconds that one frame of a country takes to forecast: the two networks of a preset, through all steps of a sampler.

    torchrun --nproc-per-node 2 -m benchmarks.frames                 # conus6km, on one GPU and on all; bf16
    torchrun --nproc-per-node 2 -m benchmarks.frames --small         # on gloo and a CPU, toy sizes

Weights are untrained and the history is noise; what is timed is :func:`apps.weather.diffusion.sample`, by Heun's method
and by the solver of few steps, on networks that are recorded where there is a GPU. The slowest rank counts.
"""

import argparse
import json
from dataclasses import replace
from functools import partial

import torch
from torch.distributed.tensor import Shard

from apps.weather.config import TrainConfig
from apps.weather.diffusion import sample
from apps.weather.model import Denoiser
from benchmarks.measure import median_ms
from benchmarks.suites import SKY
from core import DistributedManager, capture, scatter_tensor

PARTS = {"satellite": (0, 8), "radar": (8, 2)}  # channels that each is told of, and those that it makes


def networks(args, shape):
    """(part, network, process, inputs) of both models of a preset: the noise and the conditions."""
    device = DistributedManager().device
    for part, (told, made) in PARTS.items():
        config = TrainConfig(part=part, preset="tiny" if args.small else args.preset)
        conditions = 2 * config.history * (told + made) + SKY
        torch.manual_seed(0)
        network = Denoiser(config.model(made, conditions, told + made, shape)).to(device).eval()
        inputs = [torch.randn(1, n, *shape, device=device) for n in (made, conditions)]
        yield part, capture(network), config.diffusion(), inputs


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="conus6km")
    parser.add_argument("--steps", type=int, nargs=2, default=(100, 18), help="of Heun's method, of the other solver")
    parser.add_argument("--small", action="store_true", help="toy sizes")
    args = parser.parse_args(argv)
    DistributedManager.initialize()
    manager = DistributedManager()
    world, shape = manager.world_size, (32, 48) if args.small else (512, 896)
    meshes = [manager.initialize_mesh((world // n, n), ("ddp", "domain"))["domain"] for n in sorted({1, world})]
    seconds = {}
    for part, network, process, inputs in networks(args, shape):
        for mesh in meshes:
            noise, conditions = (scatter_tensor(x, None, mesh, [Shard(2)]) for x in inputs)
            for solver, steps in zip(("heun", "dpm"), args.steps):
                way = replace(process, solver=solver, steps=steps)
                frame = partial(sample, network, noise, conditions, way)
                with torch.autocast(manager.device.type, torch.bfloat16, enabled=manager.device.type == "cuda"):
                    ms = median_ms(frame, manager.device, repeats=1, warm=1)
                label = f"{solver}, {steps} steps, {mesh.size()} ranks"
                seconds[label] = seconds.get(label, 0) + ms / 1e3
                if manager.rank == 0:
                    print(json.dumps({"part": part, "how": label, "seconds": round(ms / 1e3, 4)}), flush=True)
    if manager.rank == 0:
        print(json.dumps({"a frame of both, seconds": {k: round(v, 4) for k, v in seconds.items()}}), flush=True)
    DistributedManager.cleanup()
    return seconds


if __name__ == "__main__":
    main()
