"""What every rank does in test_weather.py: gradients, a training, a forecast, scores, and a broken archive.

Reads archive.zarr and broken.zarr of a folder, writes into its folder of the number of ranks.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from apps import loop
from apps.weather import evaluate, forecast, train
from apps.weather.config import TrainConfig
from core.parallelize import parallelize, unwrapped

START = "2021-05-28T18:50"


def options(folder, out, **kwargs):
    """The tiny training of the tests: 26 x 21 points, in patches of 4 and so with edges to fill."""
    sizes = dict(history=2, width=32, depth=2, heads=2, kernel=3, cases=2, members=2, sampler_steps=2, sigma_max=20.0)
    steps = dict(steps=10, batch=12, lr=1e-2, warmup=4, log_every=10, checkpoint_every=10, validate_every=10)
    return TrainConfig(archive=f"{folder}/archive.zarr", out=str(out), **(sizes | steps | kwargs))


def gradients(config):
    """All gradients of the first step in fp64, none of them zero: the zeros that the model starts with are shaken."""
    task, mesh = train.prepare(config)
    model = task.build()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    wrapped = parallelize(model, mesh)
    group, each = mesh.get_local_rank("ddp"), config.batch // mesh["ddp"].size()
    samples = [(i % task.count(), i) for i in range(group * each, (group + 1) * each)]
    loss = task.loss(wrapped, samples)
    loss.backward()
    return {name: p.grad for name, p in unwrapped(wrapped).named_parameters()}, task.reader.bytes_read


def training(config):
    """The result of a whole training."""
    task, mesh = train.prepare(config)
    model = task.build()
    return loop.fit(model, task, config, mesh, model.blocks)


def forecast_arguments(folder, checkpoint, out):
    return [
        "--checkpoint",
        str(checkpoint),
        "--archive",
        f"{folder}/archive.zarr",
        "--init",
        START,
        "--steps",
        "2",
        "--members",
        "3",
        "--out",
        str(out),
    ]


def evaluate_arguments(folder, checkpoint, out, figures="--no-figures"):
    """Three cases: with two data groups the last round has one to spare."""
    return ["--checkpoint", str(checkpoint), "--archive", f"{folder}/archive.zarr", "--out", f"{out}/evaluation",
            "--steps", "2", "--members", "2", "--cases", "3", figures]  # fmt: skip


def every_verb(rank, folder, domain):
    """Ends with the status of a command that refuses its archive.

    Forecasts and evaluations have the grid cut along columns, along rows in two data groups, and along both.
    """
    found, nbytes = gradients(options(folder, "unused", domain=domain, precision="fp64"))
    world = dist.get_world_size()
    both_ways = gradients(options(folder, "unused", domain=world, columns=2, precision="fp64"))[0]
    out = Path(folder) / f"ranks{world}"
    out.mkdir(exist_ok=True)
    (out / f"bytes{rank}").write_text(str(nbytes))
    result = training(options(folder, out / "run", domain=domain))
    if rank == 0:
        torch.save([found, both_ways], out / "gradients.pt")
        (out / "result.json").write_text(json.dumps({"losses": result.losses, "scores": result.scores}))
    made = forecast_arguments(folder, result.checkpoint, out / "forecast.zarr")
    ways = {2: ("2", "2", "1", "1"), 4: ("2", "1", "4", "2")}[world]
    forecast.main.__wrapped__([*made, "--domain", ways[0], "--columns", ways[1]])
    scored = evaluate_arguments(folder, result.checkpoint, out)
    evaluate.main.__wrapped__([*scored, "--domain", ways[2], "--columns", ways[3]])
    broken = ["--archive", f"{folder}/broken.zarr", "--out", str(out / "broken"), "--domain", str(domain)]
    train.main([*broken, "--steps", "2", "--batch", "4", "--kernel", "3", "--history", "2"])
