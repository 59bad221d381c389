"""Memory, messages and time of a training of the forecaster, predicted: python -m apps.weather.plan --domain 2

Takes the flags of apps.weather.train and the grid, or an archive to take grid and channels from; no GPU is needed.
"""

from dataclasses import dataclass

import torch
from torch.distributed.tensor import Shard

from apps.cli import option, parse
from apps.planned import Mesh, planned
from apps.weather import diffusion
from apps.weather.config import TrainConfig
from apps.weather.dataset import SKY, Facts, row_sizes
from apps.weather.model import Denoiser
from core import InputError
from core.command import command
from data.weather.archive import WeatherReader


@dataclass
class PlanConfig(Mesh, TrainConfig):
    """Options of python -m apps.weather.plan."""

    grid: tuple[int, ...] = option((512, 896), "rows and columns, where there is no --archive; the country at 6 km")
    fields: int = option(2, "channels to learn, where there is no --archive; 8 bands, or 3 of radar and lightning")
    beside: int = option(0, "channels that are told only, where there is no --archive; the 8 bands for radar")


def _sizes(config):
    """Rows, columns, channels to learn, channels seen, and conditions."""
    if config.archive:
        reader = WeatherReader(config.archive)
        told, channels = config.names(reader.channels)
        facts = Facts.of(reader, config.history, told + channels)
        return *facts.shape, len(channels), len(facts.channels), facts.conditions
    if len(config.grid) != 2:
        raise InputError(f"a grid of {config.grid}", remedy="Give --grid rows and columns")
    seen = config.fields + config.beside
    return *config.grid, config.fields, seen, 2 * config.history * seen + SKY


@command
def main(argv=None):
    config = parse(PlanConfig, argv, __doc__.splitlines()[0])
    rows, columns, channels, seen, conditions = _sizes(config)
    model, process = config.model(channels, conditions, seen, (rows, columns)), config.diffusion()
    state, told = (channels, rows, columns), (conditions, rows, columns)
    inputs = [(state, None), (state, torch.bool), (told, None), ((), None), (state, None)]

    def loss(model, clean, valid, conditions, sigma, noise):
        return diffusion.loss(model, clean, valid, conditions, sigma, noise, process)

    cut = row_sizes(rows, config.patch, config.domain)
    report = planned(config, lambda: Denoiser(model), inputs, lambda ndim: [Shard(2)] if ndim == 4 else None, loss, cut)
    print(report)
    return report


if __name__ == "__main__":
    main()
