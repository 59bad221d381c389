"""What a model knows of the data that it was trained on: stored with it, and compared with what it is given later."""

from dataclasses import asdict, dataclass

import numpy as np
import torch

from apps.weather.background import PARTS
from core import InputError
from data.weather.archive import WeatherReader

SKY = 4  # conditions beside the history: latitude, longitude, height of the sun now and then


@dataclass(frozen=True)
class Facts:
    """What a model knows of its data; stored with it, and compared with the archive that it is given later."""

    channels: tuple
    mean: tuple
    std: tuple
    log: tuple  # whether mean, std and the model are of log(1 + value), per channel
    floor: tuple  # value of "observed, and nothing there" per channel, or None
    units: tuple
    step_minutes: float
    history: int
    shape: tuple
    x: tuple  # first and last coordinate, m
    y: tuple
    crs: dict
    static: tuple  # fields of the archive that stand still and condition the model
    statistics_hash: str
    background: tuple = ()  # fields of a weather model that condition it, with their statistics
    background_mean: tuple = ()
    background_std: tuple = ()

    @classmethod
    def of(cls, reader: WeatherReader, history, channels=None, background=()):
        """Facts of an archive, by default of all that it observed. Raises `InputError` for a channel that it lacks."""
        channels = tuple(channels or (name for name in reader.channels if name not in reader.background))
        at, beside = ([_channel(reader, name) for name in names] for names in (channels, background))
        (x, y), attrs = reader.axes, reader.attrs
        return cls(
            channels,
            tuple(reader.mean[at].tolist()),
            tuple(reader.std[at].tolist()),
            tuple(reader.log[at].tolist()),
            tuple(attrs["floor"].get(name) for name in channels),
            tuple(attrs["units"][name] for name in channels),
            float(attrs["step_minutes"]),
            history,
            (len(y), len(x)),
            _ends(x),
            _ends(y),
            reader.crs,
            tuple(reader.static),
            attrs["statistics_hash"],
            tuple(background),
            tuple(reader.mean[beside].tolist()),
            tuple(reader.std[beside].tolist()),
        )

    @classmethod
    def from_json(cls, state):
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in state.items()})

    to_json = asdict

    @property
    def conditions(self):
        """Channels that condition the denoiser."""
        return 2 * self.history * len(self.channels) + PARTS * len(self.background) + SKY + len(self.static)

    @property
    def km(self):
        """Between points."""
        return (self.x[1] - self.x[0]) / (self.shape[1] - 1) / 1e3

    @property
    def step(self):
        return np.timedelta64(round(self.step_minutes * 60), "s")

    def check(self, reader: WeatherReader):
        """Refuses an archive on which the model was not trained to forecast.

        Raises:
            InputError: naming the channel, coordinate or step that differs.
        """
        for name in (*self.channels, *self.background):
            _channel(reader, name)
        x, y = reader.axes
        here = {
            "shape": ((len(y), len(x)), self.shape),
            "x": (_ends(x), self.x),
            "y": (_ends(y), self.y),
            "crs": (reader.crs, self.crs),
            "step_minutes": (reader.attrs["step_minutes"], self.step_minutes),
            "static": (tuple(reader.static), self.static),
        }
        for name, (found, wanted) in here.items():
            if found != wanted:
                raise InputError(
                    f"is {found} and the model was trained on {wanted}",
                    file=reader.path,
                    variable=name,
                    remedy="Build the archive on the grid and step of the training archive",
                )


def per_channel(numbers, like):
    """A number per channel, (channel, 1, 1), to meet (..., channel, y, x)."""
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)[:, None, None]


def _ends(values):
    return float(values[0]), float(values[-1])


def _channel(reader, name):
    if name not in reader.channels:
        raise InputError(
            "no such channel in this archive",
            file=reader.path,
            variable=name,
            remedy=f"It holds {', '.join(reader.channels)}",
        )
    return reader.channels.index(name)
