"""The archive read by row band: each rank fetches the chunks that its rows touch, and no other bytes.

Only zarr and numpy are needed, so training runs where no raw-format library is. `data.weather.writer` makes archives.
"""

import json
from functools import cached_property
from pathlib import Path

import numpy as np
import zarr

from core.errors import InputError
from data.archives import open_archive, require_archive
from data.weather.channels import CHANNELS
from data.weather.grid import Grid
from data.weather.packing import unpack
from data.weather.sun import cos_zenith

SCHEMA = "shardfield-weather-2"
TIMES = {  # of the fields of a weather model, where there are some
    "model_valid_time": "time for which the field of a weather model is",
    "model_known_time": "time since when the field of a weather model could be known",
}
FILES = "files.jsonl"  # beside the arrays: which files were used, which were refused and why


class _CountingStore(zarr.storage.WrapperStore):
    """Counts the bytes of chunks that leave the store; metadata is not counted."""

    def __init__(self, store):
        super().__init__(store)
        self.bytes_read = 0

    def _count(self, key, buffer):
        if buffer is not None and not key.endswith(".json"):
            self.bytes_read += len(buffer)
        return buffer

    async def get(self, key, prototype, byte_range=None):
        return self._count(key, await self._store.get(key, prototype, byte_range))

    async def get_partial_values(self, prototype, key_ranges):
        key_ranges = list(key_ranges)
        buffers = await self._store.get_partial_values(prototype, key_ranges)
        return [self._count(key, buffer) for (key, _), buffer in zip(key_ranges, buffers)]


class WeatherReader:
    """A `data.reader.Reader` over an archive. A sample is a time index as a string.

    Names: "fields" float32 and "valid" bool (channel, y, x); "latitude" and "longitude" float64 (y, x), degrees;
    "cos_zenith" (y, x), computed for the time of the sample; and what `static` names, float32 (y, x).
    The store is opened at the first read and is left behind when the reader is pickled. ``bytes_read`` counts the
    (compressed) bytes of chunks fetched. Raises `InputError` for a path that is no archive, an unknown sample or name.
    """

    def __init__(self, path):
        self.path = Path(path)
        require_archive(path, SCHEMA)

    def __getstate__(self):
        return {"path": self.path}

    @cached_property
    def _store(self):
        return _CountingStore(zarr.storage.LocalStore(self.path, read_only=True))

    @cached_property
    def _group(self):
        return open_archive(self.path, self._store, "schema", SCHEMA)

    @property
    def bytes_read(self):
        return self._store.bytes_read

    @cached_property
    def attrs(self):
        """Group attributes: units, floor, mean, std, splits, provenance, statistics_hash."""
        return dict(self._group.attrs)

    @cached_property
    def channels(self):
        return [str(name) for name in self._group["channel"][:]]

    @cached_property
    def times(self):
        """Times of the frames, datetime64[s] (n,)."""
        return self._group["time"][:].astype("datetime64[s]")

    @cached_property
    def crs(self):
        """Attributes of the CF grid mapping."""
        return dict(self._group["crs"].attrs)

    @cached_property
    def axes(self):
        """Map coordinates of the cell centres, x (nx,) and y (ny,), m; reads nothing of two dims."""
        return self._group["x"][:], self._group["y"][:]

    @cached_property
    def grid(self):
        """The whole `Grid`, latitude and longitude included; for a part of those use `read`, for x and y `axes`."""
        return Grid(*self.axes, self._group["latitude"][...], self._group["longitude"][...], self.crs)

    @cached_property
    def coverage(self):
        """Share of the grid that was observed in each frame, float32 (n, channel)."""
        return self._group["coverage"][:]

    @cached_property
    def background(self):
        """Names of the channels that a weather model says."""
        return [name for name in self.channels if CHANNELS[name].model]

    @cached_property
    def background_times(self):
        """For when the fields of a weather model are, and since when they were known, datetime64[s] (n, channel) each.

        NaT where there is none. Raises `InputError` for an archive that does not know.
        """
        for name in TIMES:
            if name not in self._group:
                raise InputError("does not say for when the fields of the weather model are", file=self.path,
                                 variable=name, remedy="Build it again")  # fmt: skip
        return tuple(self._group[name][:].astype("datetime64[s]") for name in TIMES)

    @cached_property
    def static(self):
        """Names of the fields that do not change: topography, radar_proximity, or none."""
        return list(self.attrs["static"])

    @cached_property
    def files(self):
        """Which files the archive was made of, {"files": {name: sha256}, "refused": {name: why}}."""
        found = {"files": {}, "refused": {}}
        for line in (self.path / FILES).read_text().splitlines():
            entry = json.loads(line)
            found[entry["kind"]][entry["name"]] = entry["is"]
        return found

    @property
    def log(self):
        """Channels whose statistics, and whose values in a model, are of log(1 + value); bool (channel,)."""
        return np.array([name in self.attrs["log"] for name in self.channels])

    @property
    def mean(self):
        """Mean of each channel over the training part, (channel,); of log(1 + value) where `log`."""
        return np.array([self.attrs["mean"][name] for name in self.channels])

    @property
    def std(self):
        """Standard deviation of each channel over the training part, (channel,); 1 for a constant channel."""
        std = np.array([self.attrs["std"][name] for name in self.channels])
        return np.where(std == 0, 1.0, std)

    def split(self, name):
        """The limits of one split, for `data.weather.splits.times_in` and `cells_in`."""
        splits = self.attrs["splits"]
        if name not in splits:
            raise InputError("no such split", file=self.path, variable=name, remedy=f"Choose one of {sorted(splits)}")
        return splits[name]

    def shape(self, sample, name):
        array, lead = self._array(sample, "latitude" if name == "cos_zenith" else name)
        return tuple(array.shape[len(lead) :])

    def read(self, sample, name, index):
        if name == "cos_zenith":
            place = (self.read(sample, axis, index) for axis in ("latitude", "longitude"))
            return cos_zenith(*place, self.times[int(sample)])
        array, lead = self._array(sample, name)
        try:
            values = np.asarray(array[lead + tuple(index)])
        except (ValueError, RuntimeError, OSError) as error:
            raise InputError(f"sample {sample} cannot be decoded ({error})", file=self.path, variable=name,
                             remedy="Build the archive again") from error  # fmt: skip
        packed = name == "fields" and values.dtype == np.int16
        return unpack(values, *(part[index[0]] for part in self._packing)) if packed else values

    @cached_property
    def _packing(self):
        return self._group["channel_scale"][:], self._group["channel_offset"][:]

    @cached_property
    def _frames(self):
        return {name: self._group[name] for name in ("fields", "valid")}  # opened once, for they are read all the time

    def _array(self, sample, name):
        if name in ("latitude", "longitude", *self.static):
            return self._group[name], ()
        if name not in ("fields", "valid"):
            known = "fields, valid, cos_zenith, latitude, longitude"
            raise InputError("no such array", file=self.path, variable=name,
                             remedy=f"Choose {', '.join([known, *self.static])}")  # fmt: skip
        array = self._frames[name]
        if not (str(sample).isdigit() and int(sample) < array.shape[0]):
            raise InputError(f"no sample {sample}: the archive has {array.shape[0]} frames", file=self.path)
        return array, (int(sample),)
