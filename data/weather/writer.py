"""The archive written frame by frame, by one process or many: one Zarr store that appears when it is complete.

Each frame is made, judged and stored by whoever takes it; what is added up (statistics, coverage, which files were
used) comes back in the order of time, so the result does not depend on how many worked, nor on a kill in between.
"""

import hashlib
import json
import time as clock
import warnings
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import zarr

from core.errors import InputError
from data.weather.archive import FILES, TIMES
from data.weather.channels import CHANNELS
from data.weather.layout import create, extend
from data.weather.moments import Moments
from data.weather.packing import pack
from data.weather.splits import cells_in, times_in
from data.weather.workplace import workplace

_NO_TIMES = (np.datetime64("NaT"),) * 2
SAVE = 5.0  # s between states that a killed run can go on from


def write_archive(path, grid, channels, times, frames, splits, *, mode="w-", attrs=None, static=None, packing=None,
                  key="", each=map):  # fmt: skip
    """Write or extend an archive; the store appears under its name only when it is complete.

    grid: `data.weather.grid.Grid`; channels: list of `data.weather.channels.Channel`; times: n strictly ascending
    datetime64; frames: n arrays (channel, y, x) float32, NaN where missing, in an iterable, or a function that makes
    one from its index and returns (frame, {"files": {name: sha256}, "refused": {name: why}, "times": of the fields of
    a weather model {channel: (for when, known since)}});
    splits: see `data.weather.splits`. mode: "w-" refuses an existing path, "w" replaces it, "a" appends later times
    (same grid and channels; the splits stay). attrs: further group attributes, such as provenance. static: {name:
    ((y, x), attributes)}. packing: {channel: (scale, offset)} to store int16. key: text that is equal only for equal
    frames: with it and a function, a run that was killed goes on where it was. each: like map, in order.
    Means and standard deviations come from training dates (or cells) only. Raises `InputError`.
    """
    path, times, attrs = Path(path), np.asarray(times, "datetime64[s]"), attrs or {}
    if mode == "w-" and path.exists():
        raise InputError("exists already", file=path, remedy="Choose another path, or overwrite it")
    names = [c.name for c in channels]
    if resumable := bool(key) and callable(frames):
        where = grid.x.tolist(), grid.y.tolist(), times.astype(int).tolist()
        key = _digest([key, mode, names, where, packing, str(splits)])
    with workplace(path, key if resumable else None, keep=mode == "a") as work:
        state = work.state
        if state is None:
            group = _open(work) if mode == "a" else create(work.path, grid, channels, splits, packing, static or {})
            state = {"first": extend(group, path, grid, channels, times), "done": 0, "moments": _before(group).state()}
            work.save(state)
        group = _open(work)
        job = _Job.of(group, work.path, frames, times, state["first"], grid)
        moments = _run(group, work, job, len(times), state, each)
        _finish(group, moments, attrs, path)


def _open(work):
    return zarr.open_group(work.path, mode="r+", use_consolidated=False)


@dataclass
class _Job:
    """Makes and stores one frame; what it knows can be sent to another process."""

    path: Path
    frames: object
    first: int
    names: list
    packing: dict | None
    cells: np.ndarray | None  # those of the training part, None for all
    train: np.ndarray  # which frames are for training

    @classmethod
    def of(cls, group, path, frames, times, first, grid):
        train, names = group.attrs["splits"]["train"], [str(n) for n in group["channel"][:]]
        cells = cells_in(train, grid.longitude) if isinstance(train, dict) else None
        packing = None
        if "channel_scale" in group:
            packing = dict(zip(names, zip(*(group[f"channel_{k}"][:].tolist() for k in ("scale", "offset")))))
        frames = frames if callable(frames) else _Given(frames)
        return cls(path, frames, first, names, packing, cells, times_in(train, times))

    def __call__(self, i):
        """Returns (share observed of each channel, `Moments` or None, notes of the frame)."""
        frame, notes = self.frames(i)
        frame = np.asarray(frame, np.float32)
        seen, (fields, valid) = np.isfinite(frame), self._arrays
        fields[self.first + i] = pack(frame, self.names, self.packing) if self.packing else frame
        valid[self.first + i] = seen
        moments = Moments.of(self._as_seen(frame)) if self.train[i] else None
        return seen.mean((1, 2)), moments, notes

    def __getstate__(self):
        return {key: value for key, value in vars(self).items() if key != "_arrays"}

    @cached_property
    def _arrays(self):
        group = zarr.open_group(self.path, mode="r+", use_consolidated=False)
        return group["fields"], group["valid"]

    def _as_seen(self, frame):
        """Values (channel, n) for training as a model sees them: log(1 + value) of the channels that are counts."""
        rows = frame[:, self.cells] if self.cells is not None else frame.reshape(len(frame), -1)
        return [np.log1p(row.astype(np.float64)) if CHANNELS[n].log else row for n, row in zip(self.names, rows)]


class _Given:
    """Frames of an iterable, as a function of an index that counts up."""

    def __init__(self, frames):
        self.frames = iter(frames)

    def __call__(self, i):
        frame = next(self.frames, None)
        if frame is None:
            raise InputError(f"only {i} frames were given", variable="frames", remedy="Give one for each time")
        return frame, {}


def _run(group, work, job, count, state, each):
    """Do what is left of ``count`` frames; returns the moments of all of them."""
    done, moments, shares, said = state["done"], Moments(*state["moments"]), [], clock.monotonic()
    times, known = [], [name for name in TIMES if name in group]
    with open(work.path / FILES, "a") as log:
        for share, of_frame, notes in each(job, range(done, count)):
            shares.append(share)
            found = notes.pop("times", {})
            times.append([found.get(name, _NO_TIMES) for name in job.names])
            moments = moments + of_frame if of_frame else moments
            for kind, found in notes.items():
                log.writelines(json.dumps({"kind": kind, "name": n, "is": text}) + "\n" for n, text in found.items())
            if clock.monotonic() - said > SAVE or done + len(shares) == count:
                at = job.first + done
                group["coverage"][at : at + len(shares)] = np.array(shares, np.float32)
                for name, values in zip(known, np.moveaxis(np.array(times, "datetime64[s]"), -1, 0)):
                    group[name][at : at + len(shares)] = values.astype("int64")
                done, shares, times, said = done + len(shares), [], [], clock.monotonic()
                log.flush()
                work.save({"first": state["first"], "done": done, "moments": moments.state()})
    return moments


def _before(group):
    """The moments of an archive so far; zeros for a new one."""
    names, attrs = group["channel"][:], group.attrs
    if "count" not in attrs:
        return Moments.zero(len(names))
    count, mean, std = (np.array([attrs[key][n] for n in names]) for key in ("count", "mean", "std"))
    return Moments(count, mean, std**2 * count)


def _finish(group, moments, attrs, path):
    names = list(group["channel"][:])
    for name, n in zip(names, moments.count):
        if n == 0:
            raise InputError("no valid value in the training part", file=path, variable=name,
                             remedy="Widen the training split, or leave the channel out")  # fmt: skip
    statistics = {
        key: dict(zip(names, values.tolist()))
        for key, values in (("mean", moments.mean), ("std", moments.std), ("count", moments.count))
    }
    text = [statistics, group.attrs["floor"], group.attrs["log"]]
    files = _settle(group.store.root / FILES)
    group.attrs.update({
        **attrs, **statistics, "statistics_hash": _digest(text), "gaps": _gaps(group),
        "provenance": {**attrs.get("provenance", {}), **files},
    })  # fmt: skip
    with warnings.catch_warnings():  # xarray opens consolidated stores in one request; zarr calls that not yet standard
        warnings.filterwarnings("ignore", message="Consolidated metadata")
        warnings.filterwarnings("ignore", message="Object at .*json")  # the list of files
        zarr.consolidate_metadata(group.store)


def _settle(log):
    """The list of files, each once and in order; returns how many there are and a hash of the list."""
    lines = (json.loads(line) for line in log.read_text().splitlines() if line.endswith("}"))
    found = {(entry["kind"], entry["name"]): entry["is"] for entry in lines}
    ordered = [{"kind": kind, "name": name, "is": found[kind, name]} for kind, name in sorted(found)]
    log.write_text("".join(json.dumps(entry) + "\n" for entry in ordered))
    counts = {kind: sum(k == kind for k, _ in found) for kind in ("files", "refused")}
    return counts | {"list": FILES, "list_sha256": hashlib.sha256(log.read_bytes()).hexdigest()}


def _gaps(group):
    """{channel: [[first, last], ...]}: frames of the archive in which nothing at all was observed, as times."""
    times, empty = group["time"][:].astype("datetime64[s]"), group["coverage"][:] == 0
    gaps = {}
    for c, name in enumerate(group["channel"][:]):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], empty[:, c].astype(int), [0]])))
        if edges.size:
            gaps[name] = [[str(times[a]), str(times[b - 1])] for a, b in zip(edges[::2], edges[1::2])]
    return gaps


def _digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def versions():
    """Versions of what made an archive, {distribution: version}."""
    found = {}
    for name in ("shardfield", "numpy", "xarray", "zarr", "eccodes", "h5netcdf"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
