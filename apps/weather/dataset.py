"""Samples of an archive as the model sees them: a window of history, the next frame, and what of both was observed.

Every rank of a domain reads its own rows only. Values are scaled with the statistics of the training data; what was
missing is 0 with validity 0, whatever the archive holds there. The state that is diffused is the change since the last
value seen at each point, so a model that knows nothing forecasts persistence.
"""

from collections import OrderedDict
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import Shard

from apps.weather.baselines import Observed, persistence
from core import InputError, ShardTensor
from data.sharded import read_sharded
from data.weather.archive import WeatherReader
from data.weather.splits import cells_in, times_in
from data.weather.sun import cos_zenith

SKY = 4  # conditions beside the history: latitude, longitude, height of the sun now and then
STATIC_SCALE = {"topography": 1e-3, "radar_proximity": 1.0}
CACHE_BYTES = 256 * 2**20


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

    @classmethod
    def of(cls, reader: WeatherReader, history, channels=None):
        """Facts of an archive. Raises `InputError` for a channel that it lacks."""
        channels = tuple(channels or reader.channels)
        at = [_channel(reader, name) for name in channels]
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
        )

    @classmethod
    def from_json(cls, state):
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in state.items()})

    to_json = asdict

    @property
    def conditions(self):
        """Channels that condition the denoiser."""
        return 2 * self.history * len(self.channels) + SKY + len(self.static)

    @property
    def step(self):
        return np.timedelta64(round(self.step_minutes * 60), "s")

    def check(self, reader: WeatherReader):
        """Refuses an archive on which the model was not trained to forecast.

        Raises:
            InputError: naming the channel, coordinate or step that differs.
        """
        for name in self.channels:
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


def _per_channel(numbers, like):
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


def row_sizes(rows, patch, ranks):
    """Rows of every rank in whole patches, the last one's with what is left: no patch then lies on two ranks.

    Raises:
        InputError: more ranks than rows of patches.
    """
    tokens = -(-rows // patch)
    if ranks > tokens:
        raise InputError(
            f"{ranks} ranks cannot share {rows} rows in patches of {patch}",
            remedy=f"Use --domain {tokens} or less, or a smaller --patch",
        )
    ends = [min(tokens * rank // ranks * patch, rows) for rank in range(ranks + 1)]
    return tuple(b - a for a, b in zip(ends, ends[1:]))


class Batch(NamedTuple):
    """Training samples: conditions (batch, conditions, y, x); clean change and its validity (batch, channel, y, x)."""

    conditions: torch.Tensor
    clean: torch.Tensor
    valid: torch.Tensor


class Frames:
    """Frames of an archive, scaled, masked and cut over the ranks of ``mesh`` (one axis) by rows.

    split: where it is a region ({"lon_max": ...}), everything beyond it is missing: in history and target alike.
    """

    def __init__(self, reader, facts, mesh, patch, split=None, dtype=torch.float32):
        facts.check(reader)
        self.reader, self.facts, self.mesh, self.split, self.dtype = reader, facts, mesh, split, dtype
        self.sizes = {0: row_sizes(facts.shape[0], patch, mesh.size())}
        self.at = [reader.channels.index(name) for name in facts.channels]
        self.latitude, self.longitude = (
            read_sharded(reader, "0", name, mesh, [Shard(0)], self.sizes) for name in ("latitude", "longitude")
        )
        self._cache = OrderedDict()

    def starts(self, leads=1):
        """Indices of the frames from which a forecast of ``leads`` steps has its history and its truth in the split."""
        times, h = self.reader.times, self.facts.history
        inside = times_in(self.split, times) if self.split is not None else np.ones(len(times), bool)
        even = np.append(False, np.diff(times) == self.facts.step)
        good = [
            inside[i - h + 1 : i + leads + 1].all() and even[i - h + 2 : i + leads + 1].all()
            for i in range(h - 1, len(times) - leads)
        ]
        return [h - 1 + i for i in np.flatnonzero(good)]

    def observed(self, index) -> Observed:
        """One frame, values in standard deviations (1, channel, y, x); kept for a while."""
        if index in self._cache:
            self._cache.move_to_end(index)
            return self._cache[index]
        frame = self._cache[index] = self._read(str(index))
        nbytes = frame.values.to_local().nbytes * 2
        while len(self._cache) > max(CACHE_BYTES // max(nbytes, 1), self.facts.history + 1):
            self._cache.popitem(last=False)
        return frame

    def _read(self, sample):
        values, valid = (
            read_sharded(self.reader, sample, name, self.mesh, [Shard(1)], self.sizes, dtype)
            for name, dtype in (("fields", self.dtype), ("valid", torch.bool))
        )
        if self.at != list(range(values.shape[0])):
            values, valid = (torch.stack([v[c] for c in self.at]) for v in (values, valid))
        if isinstance(self.split, dict):
            valid = valid & self._region
        values = torch.where(valid, self.scaled(values), 0)
        return Observed(values[None], valid[None])

    def scaled(self, values):
        """Values (..., channel, y, x) in the units of the archive as the model sees them."""
        mean, std = (_per_channel(v, values) for v in (self.facts.mean, self.facts.std))
        if any(self.facts.log):
            values = torch.where(_per_channel(self.facts.log, values) > 0, torch.log1p(values.clamp(min=0)), values)
        return (values - mean) / std

    def history(self, index):
        """The `Observed` frames up to ``index``, newest last."""
        return [self.observed(i) for i in range(index - self.facts.history + 1, index + 1)]

    def conditions(self, history, time):
        """What the denoiser is told: the history with its validity, where it is, where the sun stands, the ground."""
        seen = [part for frame in history for part in (frame.values, frame.valid.to(self.dtype))]
        batch, _, ny, nx = history[0].values.shape
        place = torch.cat([self._sky(time), *self._static], 1)
        return torch.cat([*seen, place.expand(batch, place.shape[1], ny, nx)], 1)

    def batch(self, indices) -> Batch:
        """Training samples that end their history at ``indices``."""
        parts = []
        for index in indices:
            history, target = self.history(index), self.observed(index + 1)
            clean = target.values - persistence(history).values
            parts.append((self.conditions(history, self.reader.times[index]), clean, target.valid))
        return Batch(*(torch.cat(column) for column in zip(*parts)))

    def physical(self, values):
        """Scaled values (..., channel, y, x) in the units of the archive, fp64."""
        values = values.to(torch.float64)
        values = values * _per_channel(self.facts.std, values) + _per_channel(self.facts.mean, values)
        if any(self.facts.log):
            values = torch.where(_per_channel(self.facts.log, values) > 0, torch.expm1(values), values)
        return values

    def at_least_floor(self, values):
        """Scaled values without those below what a channel can be."""
        facts = zip(self.facts.floor, self.facts.log, self.facts.mean, self.facts.std)
        low = [
            -np.inf if floor is None else ((np.log1p(floor) if log else floor) - mean) / std
            for floor, log, mean, std in facts
        ]
        return torch.maximum(values, _per_channel(low, values))

    # -- where: constant in time ------------------------------------------------------------------------------------
    @cached_property
    def _region(self):
        return self._mapped(lambda lat, lon: cells_in(self.split, lon))

    @cached_property
    def _static(self):
        """Fields that stand still, a list of (1, 1, y, x): heights in km, nearness of a radar."""
        fields = [read_sharded(self.reader, "0", name, self.mesh, [Shard(0)], self.sizes) for name in self.facts.static]
        return [(f * STATIC_SCALE[name]).to(self.dtype)[None, None] for name, f in zip(self.facts.static, fields)]

    def _sky(self, time):
        sun = [self._mapped(lambda lat, lon, t=t: cos_zenith(lat, lon, t)) for t in (time, time + self.facts.step)]
        place = [(self.latitude - 38.5) / 15, (self.longitude + 97.5) / 36]
        return torch.stack([*place, *sun]).to(self.dtype)[None]

    def _mapped(self, function):
        """A numpy function of latitude and longitude, on this rank's rows."""
        lat, lon = self.latitude, self.longitude
        local = function(lat.to_local().cpu().numpy(), lon.to_local().cpu().numpy())
        return ShardTensor(torch.from_numpy(local).to(lat.device), lat.spec)
