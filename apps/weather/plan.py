"""Memory, messages and time of a training of the forecaster, predicted: python -m apps.weather.plan --domain 2

Takes the flags of apps.weather.train and the grid, or an archive to take grid and channels from; no GPU is needed.
"""

from dataclasses import dataclass

import torch
from torch.distributed.tensor import Replicate, Shard

from apps.cli import option, parse
from apps.meshes import domain_shape
from apps.planned import Mesh, planned
from apps.weather import diffusion
from apps.weather.background import PARTS
from apps.weather.config import TrainConfig
from apps.weather.dataset import row_sizes
from apps.weather.facts import SKY, Facts
from apps.weather.model import Denoiser
from core import InputError
from core.command import command
from data.weather.archive import WeatherReader


@dataclass
class PlanConfig(Mesh, TrainConfig):
    """Options of python -m apps.weather.plan."""

    grid: tuple[int, ...] | None = option(None, "rows and columns, where there is no --archive (preset)")
    fields: int | None = option(None, "channels to learn, where there is no --archive; left out: 8 bands, 3 of radar "
                                "and lightning, or 4 of both")  # fmt: skip
    beside: int | None = option(None, "channels that are told only, where there is no --archive; left out: 8 for radar")


GRIDS = {"tiny": (64, 96), "storms": (64, 96), "regional": (256, 256), "conus3km": (1024, 1792)}  # others (512, 896)
FIELDS = {"joint": (4, 0), "satellite": (8, 0), "radar": (3, 8)}  # learned, and told


def _sizes(config):
    """Rows, columns, channels to learn, channels seen, and conditions."""
    if config.archive:
        reader = WeatherReader(config.archive)
        told, channels = config.names(reader.channels)
        facts = Facts.of(reader, config.history, told + channels, config.model_fields(reader.channels))
        return *facts.shape, len(channels), len(facts.channels), facts.conditions
    grid = config.grid or GRIDS.get(config.preset, (512, 896))
    if len(grid) != 2:
        raise InputError(f"a grid of {grid}", remedy="Give --grid rows and columns")
    learned, told = (n if own is None else own for n, own in zip(FIELDS[config.part], (config.fields, config.beside)))
    seen, fields = learned + told, len(config.model_fields(config.background or ()))
    return *grid, learned, seen, 2 * config.history * seen + PARTS * fields + SKY


@command
def main(argv=None):
    config = parse(PlanConfig, argv, __doc__.splitlines()[0])
    rows, columns, channels, seen, conditions = _sizes(config)
    model, process = config.model(channels, conditions, seen, (rows, columns)), config.diffusion()
    state, told = (channels, rows, columns), (conditions, rows, columns)
    inputs = [(state, None), (state, torch.bool), (told, None), ((), None), (state, None)]

    def loss(model, clean, valid, conditions, sigma, noise):
        return diffusion.losses(model, clean, valid, conditions, sigma, noise, process).mean()

    domain = domain_shape(config.domain, config.columns)
    cuts = [row_sizes(points, config.patch, ranks) for points, ranks in zip((rows, columns), domain)]

    def dims(ndim):
        return [Shard(2 + axis) if ndim == 4 else Replicate() for axis in range(len(domain))]

    report = planned(config, lambda: Denoiser(model), inputs, dims, loss, cuts)
    print(report)
    return report


if __name__ == "__main__":
    main()
