"""The archive written frame by frame: one Zarr v3 store that appears under its name only when it is complete.

A frame is one shard of chunks, each chunk a band of full rows, so that a rank that owns rows can fetch those bytes and
no others. What is missing is NaN and invalid, never filled.
"""

import hashlib
import json
import os
import shutil
import warnings
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import zarr

from core.errors import InputError
from data.weather.archive import SCHEMA
from data.weather.channels import CHANNELS
from data.weather.splits import cells_in, times_in

_EPOCH, _TIME_CHUNK = "seconds since 1970-01-01", 4096


def versions():
    """Versions of what made an archive, {distribution: version}."""
    found = {}
    for name in ("shardfield", "numpy", "xarray", "zarr", "eccodes", "h5netcdf"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def chunk_rows(ny):
    """Rows of one chunk: an eighth of the frame, halved until <= 128, so that cuts into 2, 4, 8 meet chunk borders."""
    rows = -(-ny // 8)
    while rows > 128:
        rows = -(-rows // 2)
    return rows


def write_archive(path, grid, channels, times, frames, splits, *, mode="w-", attrs=None):
    """Write or extend an archive; the store appears under its name only when it is complete.

    grid: `data.weather.grid.Grid`; channels: list of `data.weather.channels.Channel`; times: n strictly ascending
    datetime64; frames: iterable of n arrays (channel, y, x) float32, NaN where missing (read one at a time);
    splits: see `data.weather.splits`. mode: "w-" refuses an existing path, "w" replaces it, "a" appends later times
    (same grid and channels; the splits stay). attrs: further group attributes, such as provenance.
    Means and standard deviations come from training dates (or cells) only. Raises `InputError`.
    """
    path, times = Path(path), np.asarray(times, "datetime64[s]")
    if mode == "w-" and path.exists():
        raise InputError("exists already", file=path, remedy="Choose another path, or overwrite it")
    with _replacing(path, keep=mode == "a") as work:
        group = _reopen(work) if mode == "a" else _create(work, grid, channels, splits)
        first = _extend(group, path, grid, channels, times)
        moments = _Moments.of(group)
        _store(group, moments, frames, times, first, grid)
        _finish(group, moments, attrs or {}, path)


def _reopen(work):
    return zarr.open_group(work, mode="r+", use_consolidated=False)


def _store(group, moments, frames, times, first, grid):
    fields, valid, train = group["fields"], group["valid"], group.attrs["splits"]["train"]
    cells, wanted = cells_in(train, grid.longitude), times_in(train, times)
    names = list(group["channel"][:])
    for step, (frame, use) in enumerate(zip(frames, wanted, strict=True)):
        frame = np.asarray(frame, np.float32)
        fields[first + step] = frame
        valid[first + step] = np.isfinite(frame)
        if use:
            moments.add(_as_seen(frame[:, cells], names))


def _as_seen(values, names):
    """Values (channel, n) as a model sees them: log(1 + value) of the channels that are counts."""
    return np.stack(
        [np.log1p(row.astype(np.float64)) if CHANNELS[name].log else row for name, row in zip(names, values)]
    )


def _create(path, grid, channels, splits):
    group = zarr.open_group(path, mode="w", zarr_format=3)
    ny, nx = grid.shape
    rows = chunk_rows(ny)
    frame, whole = (1, len(channels), rows, nx), (1, len(channels), -(-ny // rows) * rows, nx)
    dims = ("time", "channel", "y", "x")
    for name, dtype, fill in (("fields", "float32", np.nan), ("valid", "bool", False)):
        array = group.create_array(
            name, shape=(0, len(channels), ny, nx), chunks=frame, shards=whole, dtype=dtype, fill_value=fill,
            dimension_names=dims,
        )  # fmt: skip
        array.attrs.update({"grid_mapping": "crs", "coordinates": "latitude longitude channel_units"})
    units = {c.name: c.units for c in channels}
    group["fields"].attrs["long_name"] = "observed fields, NaN where missing; units in channel_units"
    group["valid"].attrs["long_name"] = "true where a value was observed"
    time = group.create_array("time", shape=(0,), chunks=(_TIME_CHUNK,), dtype="int64", dimension_names=("time",))
    time.attrs.update({"standard_name": "time", "units": _EPOCH, "calendar": "proleptic_gregorian"})
    _put(group, "channel", np.array([c.name for c in channels], object), ("channel",), long_name="channel")
    _put(group, "channel_units", np.array([c.units for c in channels], object), ("channel",), long_name="units")
    for name in ("y", "x"):
        about = dict(standard_name=f"projection_{name}_coordinate", units="m", axis=name.upper())
        _put(group, name, np.asarray(getattr(grid, name), np.float64), (name,), **about)
    for name, unit in (("latitude", "degrees_north"), ("longitude", "degrees_east")):
        values = np.asarray(getattr(grid, name), np.float64)
        _put(group, name, values, ("y", "x"), chunks=(rows, nx), standard_name=name, units=unit)
    _put(group, "crs", np.array(0, np.int32), (), **grid.crs)
    group.attrs.update({
        "Conventions": "CF-1.11", "schema": SCHEMA, "splits": splits, "units": units,
        "floor": {c.name: c.floor for c in channels if c.floor is not None},
        "log": [c.name for c in channels if c.log],
        "long_names": {c.name: c.long_name for c in channels},
    })  # fmt: skip
    return group


def _put(group, name, values, dims, chunks="auto", **attrs):
    dtype = "string" if values.dtype == object else values.dtype
    array = group.create_array(name, shape=values.shape, chunks=chunks, dtype=dtype, dimension_names=dims)
    array[...] = values
    array.attrs.update(attrs)


def _extend(group, path, grid, channels, times):
    """Make room for ``times``; returns the index of the first of them."""
    old = group["time"][:]
    new = times.astype("int64")
    if list(group["channel"][:]) != [c.name for c in channels]:
        raise InputError("holds other channels", file=path, variable=",".join(group["channel"][:]))
    if not (np.array_equal(group["y"][:], grid.y) and np.array_equal(group["x"][:], grid.x)):
        raise InputError("lies on another grid", file=path, remedy="Append on the same window and spacing")
    if len(new) == 0 or (np.diff(np.concatenate([old[-1:], new])) <= 0).any():
        raise InputError("needs at least one time, in ascending order, after those stored", file=path, variable="time")
    count = len(old) + len(new)
    for name in ("fields", "valid", "time"):
        group[name].resize((count, *group[name].shape[1:]))
    group["time"][len(old) :] = new
    return len(old)


def _finish(group, moments, attrs, path):
    names = list(group["channel"][:])
    for name, n in zip(names, moments.count):
        if n == 0:
            raise InputError("no valid value in the training part", file=path, variable=name,
                             remedy="Widen the training split, or leave the channel out")  # fmt: skip
    std = np.sqrt(moments.m2 / moments.count)
    statistics = {
        "mean": dict(zip(names, moments.mean.tolist())),
        "std": dict(zip(names, std.tolist())),
        "count": dict(zip(names, moments.count.tolist())),
    }
    text = json.dumps({**statistics, "floor": group.attrs["floor"]}, sort_keys=True)
    group.attrs.update({**attrs, **statistics, "statistics_hash": hashlib.sha256(text.encode()).hexdigest()})
    with warnings.catch_warnings():  # xarray opens consolidated stores in one request; zarr calls that not yet standard
        warnings.filterwarnings("ignore", message="Consolidated metadata")
        zarr.consolidate_metadata(group.store)


class _Moments:
    """Streaming count, mean and squared deviation of each channel (Chan's pairwise update), fp64."""

    def __init__(self, count, mean, m2):
        self.count, self.mean, self.m2 = count, mean, m2

    @classmethod
    def of(cls, group):
        """The moments of an archive so far; zeros for a new one."""
        names = group["channel"][:]
        count, mean, std = (
            np.array([group.attrs.get(key, {}).get(n, 0) for n in names], dtype)
            for key, dtype in (("count", np.int64), ("mean", np.float64), ("std", np.float64))
        )
        return cls(count, mean, std**2 * count)

    def add(self, values):
        """Take in (channel, n) values; NaN is left out."""
        for c, row in enumerate(values):
            row = row[np.isfinite(row)].astype(np.float64)
            if row.size == 0:
                continue
            mean, total = row.mean(), self.count[c] + row.size
            delta = mean - self.mean[c]
            self.m2[c] += ((row - mean) ** 2).sum() + delta**2 * self.count[c] * row.size / total
            self.mean[c] += delta * row.size / total
            self.count[c] = total


@contextmanager
def _replacing(path, keep):
    """A work directory beside ``path`` that takes its place on success and vanishes on failure.

    With ``keep`` it starts as a copy; frames are hard links, because an append never rewrites one.
    """
    if path.exists() and not (path / "zarr.json").is_file():
        raise InputError("is no archive, and is not touched", file=path, remedy="Choose another path")
    path.parent.mkdir(parents=True, exist_ok=True)
    work, old = (path.with_name(f".{path.name}.{kind}-{os.getpid()}") for kind in ("partial", "old"))
    try:
        if keep:
            if not path.exists():
                raise InputError("does not exist", file=path, remedy="Build it first")
            shutil.copytree(path, work, copy_function=partial(_link_frame, path))
        yield work
        _swap(work, path, old)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _swap(work, path, old):
    if path.exists():
        os.replace(path, old)
    try:
        os.replace(work, path)
    except OSError:
        if old.exists():
            os.replace(old, path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _link_frame(root, source, target):
    inside = Path(source).relative_to(root).parts
    try:
        (os.link if inside[0] in ("fields", "valid") and inside[1] == "c" else shutil.copy2)(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
