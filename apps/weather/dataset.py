"""Samples of an archive as the model sees them: a window of history, the next frame, and what of both was observed.

Every rank of a domain reads its own rows only. Values are scaled with the statistics of the training data; what was
missing is 0 with validity 0, whatever the archive holds there. The state that is diffused is the change since the last
value seen at each point, so a model that knows nothing forecasts persistence.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import Shard

from apps.weather.background import Background
from apps.weather.baselines import Observed, persistence
from apps.weather.facts import per_channel
from apps.weather.policy import MASK
from core import DistributedManager, InputError, ShardTensor
from data.kept import Kept
from data.prefetch import Prefetcher
from data.sharded import local_index, read_sharded, spec_of
from data.weather.splits import cells_in, times_in
from data.weather.sun import cos_zenith

STATIC_SCALE = {"topography": 1e-3, "radar_proximity": 1.0}
CACHE_BYTES = {"cpu": 2**28, "cuda": 2**30}  # of frames, and of skies, at least
CACHE_SHARE = 64  # of a GPU's memory, where that is more
WORTH_READING_AHEAD = 2**23  # bytes that a batch lacks on this rank: for fewer no process is started
READ_AHEAD_BYTES = 2**30  # that wait at most


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


def _nbytes(group):
    """Bytes that a group of sharded fields takes on this rank."""
    return sum(field.to_local().nbytes for field in group)


def _cache_bytes(mesh):
    least = CACHE_BYTES[mesh.device_type]
    if mesh.device_type != "cuda":
        return least
    return max(least, torch.cuda.get_device_properties(DistributedManager().device).total_memory // CACHE_SHARE)


class Frames:
    """Frames of an archive, scaled, masked and cut over the ranks of ``mesh``: one axis cuts rows, a second columns.

    split: where it is a region ({"lon_max": ...}), everything beyond it is missing: in history and target alike.
    policy: what is done about frames of which little was observed.
    """

    def __init__(self, reader, facts, mesh, patch, split=None, dtype=torch.float32, policy=MASK):
        facts.check(reader)
        self.reader, self.facts, self.mesh, self.split, self.dtype = reader, facts, mesh, split, dtype
        self.policy = policy
        self.sizes = {axis: row_sizes(facts.shape[axis], patch, mesh.size(axis)) for axis in range(mesh.ndim)}
        self.at = [reader.channels.index(name) for name in (*facts.channels, *facts.background)]
        self.model = Background(reader, facts.step) if facts.background else None
        self.latitude, self.longitude = (self._map(name) for name in ("latitude", "longitude"))
        self._frames, self._skies = (Kept(_cache_bytes(mesh), _nbytes, facts.history + 2) for _ in range(2))
        self._ahead = Prefetcher(reader)

    def _map(self, name):
        """A field that does not depend on time, (y, x)."""
        placements = [Shard(axis) for axis in range(self.mesh.ndim)]
        return read_sharded(self.reader, "0", name, self.mesh, placements, self.sizes)

    def starts(self, leads=1, after=1):
        """Indices of the frames from which a forecast of ``leads`` steps has its history, of ``after`` frames at least,
        and its truth in the split.

        Raises:
            InputError: the first frame and channel of them with too little observed, where the policy refuses.
        """
        times, h = self.reader.times, max(self.facts.history, after)
        inside = times_in(self.split, times) if self.split is not None else np.ones(len(times), bool)
        if self.policy.missing == "refuse":
            self.policy.demand(self.reader, self.facts.channels, np.flatnonzero(inside))
        inside = inside & ~self.policy.poor(self.reader, self.facts.channels).any(1)
        even = np.append(False, np.diff(times) == self.facts.step)
        good = [
            inside[i - h + 1 : i + leads + 1].all() and even[i - h + 2 : i + leads + 1].all()
            for i in range(h - 1, len(times) - leads)
        ]
        return [h - 1 + i for i in np.flatnonzero(good)]

    def expect(self, starts):
        """Begin to read, in other processes, what `batch` of these starts will need, if it is worth it."""
        nbytes = self.latitude.to_local().numel() * len(self.reader.channels) * 5  # of a frame, with its validity
        frames = dict.fromkeys(i + k for i in starts for k in range(1 - self.facts.history, 2))
        lacking = [index for index in frames if index not in self._frames]
        if len(lacking) * nbytes < WORTH_READING_AHEAD and not self._ahead.started:
            return
        for index in lacking[: READ_AHEAD_BYTES // nbytes]:
            for name in ("fields", "valid"):
                spec = spec_of(self.reader.shape(str(index), name), self.mesh, self._placements, self.sizes)
                self._ahead.expect(str(index), name, local_index(spec))

    @property
    def _placements(self):
        """Of (channel, y, x)."""
        return [Shard(1 + axis) for axis in range(self.mesh.ndim)]

    def observed(self, index) -> Observed:
        """One frame, values in standard deviations (1, channel, y, x); kept for a while."""
        frame, count = self._both(index), len(self.facts.channels)
        return Observed(*(part[:, :count] for part in frame)) if self.model else frame

    def _both(self, index):
        """What was observed, and behind it what the weather model says."""
        return self._frames.of(index, lambda: self._read(str(index)))

    def background(self, index, lead=0, names=None):
        """What a weather model says of the frame after ``lead`` others behind ``index``, as far as it was known at
        ``index``, a list of (1, 1, y, x): of each field (of those named) values, validity, hours (`Background`)."""
        parts, own = [], self.facts.background
        for name in own if names is None else names:
            found, hours = self.model.find(name, index, lead)
            channel = len(self.facts.channels) + own.index(name)
            values, valid = (part[:, channel : channel + 1] for part in self._both(found))
            parts += [values, valid.to(self.dtype), hours * valid.to(self.dtype)]
        return parts

    def _read(self, sample):
        values, valid = (
            read_sharded(self._ahead, sample, name, self.mesh, self._placements, self.sizes, dtype)
            for name, dtype in (("fields", self.dtype), ("valid", torch.bool))
        )
        if self.at != list(range(values.shape[0])):
            values, valid = (torch.stack([v[c] for c in self.at]) for v in (values, valid))
        if isinstance(self.split, dict):
            valid = valid & self._region
        values = torch.where(valid, self.scaled(values), 0)
        return Observed(values[None], valid[None])

    def scaled(self, values):
        """Values (..., channel, y, x) in the units of the archive, those of a weather model last, as ours sees them."""
        facts = self.facts
        mean, std = facts.mean + facts.background_mean, facts.std + facts.background_std
        if any(facts.log):
            log = per_channel(facts.log + (False,) * len(facts.background), values)
            values = torch.where(log > 0, torch.log1p(values.clamp(min=0)), values)
        return (values - per_channel(mean, values)) / per_channel(std, values)

    def history(self, index):
        """The `Observed` frames up to ``index``, newest last."""
        return [self.observed(i) for i in range(index - self.facts.history + 1, index + 1)]

    def conditions(self, history, times, background=()):
        """What the denoiser is told: the history with its validity, a weather model's fields, where it is, where the
        sun stands, the ground.

        times: of the last frame of each entry of the batch, or one for all. background: as `background` gives it.
        """
        seen = [part for frame in history for part in (frame.values, frame.valid.to(self.dtype))]
        batch, _, ny, nx = history[0].values.shape
        place = [*background, torch.cat([self._sky(time) for time in np.atleast_1d(times)]), *self._static]
        return torch.cat([*seen, *(field.expand(batch, field.shape[1], ny, nx) for field in place)], 1)

    def batch(self, indices, ages=()) -> Batch:
        """Training samples that end their history at ``indices``; ``ages``: how many steps before them what the weather
        model says was known, at most."""
        columns = zip(*([*self.history(index), self.observed(index + 1)] for index in indices))
        *history, target = (Observed(*(torch.cat(part) for part in zip(*frames))) for frames in columns)
        clean = target.values - persistence(history).values
        background = self._aged(indices, ages or [0] * len(indices)) if self.model else ()
        return Batch(self.conditions(history, self.reader.times[list(indices)], background), clean, target.valid)

    def _aged(self, indices, ages):
        ages = [self.model.age(index, age) for index, age in zip(indices, ages)]
        parts = (self.background(index - age, age) for index, age in zip(indices, ages))
        return [torch.cat(part) for part in zip(*parts)]

    def physical(self, values):
        """Scaled values (..., channel, y, x) in the units of the archive, fp64."""
        values = values.to(torch.float64)
        values = values * per_channel(self.facts.std, values) + per_channel(self.facts.mean, values)
        if any(self.facts.log):
            values = torch.where(per_channel(self.facts.log, values) > 0, torch.expm1(values), values)
        return values

    def at_least_floor(self, values):
        """Scaled values without those below what a channel can be."""
        facts = zip(self.facts.floor, self.facts.log, self.facts.mean, self.facts.std)
        low = [
            -np.inf if floor is None else ((np.log1p(floor) if log else floor) - mean) / std
            for floor, log, mean, std in facts
        ]
        return torch.maximum(values, per_channel(low, values))

    # -- where: constant in time ------------------------------------------------------------------------------------
    @cached_property
    def _region(self):
        return self._mapped(lambda lat, lon: cells_in(self.split, lon))

    @cached_property
    def _static(self):
        """Fields that stand still, a list of (1, 1, y, x): heights in km, nearness of a radar."""
        fields = [self._map(name) for name in self.facts.static]
        return [(f * STATIC_SCALE[name]).to(self.dtype)[None, None] for name, f in zip(self.facts.static, fields)]

    def _sky(self, time):
        """Where each point is and where the sun stands, now and at the next frame, (1, 4, y, x); kept for a while."""

        def sky():
            sun = [self._mapped(lambda lat, lon, t=t: cos_zenith(lat, lon, t)) for t in (time, time + self.facts.step)]
            place = [(self.latitude - 38.5) / 15, (self.longitude + 97.5) / 36]
            return (torch.stack([*place, *sun]).to(self.dtype)[None],)

        return self._skies.of(time, sky)[0]

    def _mapped(self, function):
        """A numpy function of latitude and longitude, on this rank's rows."""
        lat, lon = self.latitude, self.longitude
        local = function(lat.to_local().cpu().numpy(), lon.to_local().cpu().numpy())
        return ShardTensor(torch.from_numpy(local).to(lat.device), lat.spec)
