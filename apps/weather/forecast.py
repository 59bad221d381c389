"""``python -m apps.weather.forecast``: an ensemble from one time of an archive, step by step, to Zarr or NetCDF.

Under torchrun all ranks share the domain and each writes its own rows.
"""

import sys
from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist

from apps.agree import together
from apps.cli import check_counts, command, option, parse
from apps.weather.dataset import Frames
from apps.weather.product import Product, check_path, provenance
from apps.weather.rollout import load, rollout
from core import DistributedManager, InputError
from data.weather.archive import WeatherReader


@dataclass
class ForecastConfig:
    """Options of a forecast."""

    checkpoint: str = field(metadata={"help": "step_... folder of a training"})
    archive: str = field(metadata={"help": "archive that holds the frames up to --init"})
    init: str = field(metadata={"help": "time of the last frame of the history, such as 2021-06-21T20:00"})
    out: str = field(metadata={"help": "file to write, .zarr or .nc"})
    steps: int = option(6, "steps ahead")
    members: int = option(4, "ensemble members")
    seed: int = option(0, "of the ensemble")
    sampler_steps: int | None = option(None, "steps of the sampler; left out: as in training")
    churn: float = option(0.0, "share by which noise is raised before each step of the sampler; 0: deterministic")
    at_once: int = option(8, "members that the network sees together; fewer need less memory")
    overwrite: bool = option(False, "replace an existing output")


@command
def main(argv=None):
    config = parse(ForecastConfig, argv, __doc__.splitlines()[0])
    DistributedManager.initialize()
    mesh = DistributedManager().initialize_mesh((-1,), ("domain",))
    with together():
        check_path(config.out, config.overwrite)
        check_counts(config, "steps", "members", "sampler_steps", "at_once")
        reader = WeatherReader(config.archive)
    model, process, facts, state = load(config.checkpoint, config.sampler_steps, config.churn)
    with together():
        frames = Frames(reader, facts, mesh, model.config.patch, dtype=model.head.weight.dtype)
        index = find_start(reader, facts, config.init)
        frames.history(index)
    chief = dist.get_rank() == 0
    about = provenance(config.checkpoint, state, reader, process, init=config.init, seed=config.seed) if chief else {}
    with Product(config.out, frames, reader.times[index], config.steps, config.members, about) as product:
        ensemble = rollout(model, process, frames, index, config.steps, config.members, config.seed, config.at_once)
        for lead, members in enumerate(ensemble):
            product.write(lead, members)
            if chief:
                print(f"step {lead + 1}/{config.steps}", file=sys.stderr, flush=True)
    if chief:
        print(f"forecast {config.out}")


def find_start(reader, facts, text):
    """Index of the frame at a time given as text, which must have its history before it.

    Raises:
        InputError: text that is no time, a time that is not in the archive, a gap before it.
    """
    say = dict(file=reader.path, variable="time")
    try:
        time = np.datetime64(text, "s")
    except ValueError:
        raise InputError(f"{text!r} is no time", remedy="Write --init as 2021-06-21T20:00") from None
    found = np.flatnonzero(reader.times == time)
    if len(found) == 0:
        near = reader.times[np.abs(reader.times - time).argmin()]
        raise InputError(f"holds no frame at {time}", remedy=f"The nearest is at {near}", **say)
    index, h = int(found[0]), facts.history
    if index < h - 1 or (np.diff(reader.times[index - h + 1 : index + 1]) != facts.step).any():
        raise InputError(f"lacks some of the {h} frames up to {time}", remedy="Choose a later --init", **say)
    return index


if __name__ == "__main__":
    main()
