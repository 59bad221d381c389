"""Folders of raw files as frames on the grid: each source knows its times and gives what it saw near a time.

A frame takes the scan nearest to its time, at most half a step away; lightning is counted over the step that ends at
the frame's time, so that no frame knows the future. What no file covers is absent, and stays missing in the archive.
"""

import hashlib
from collections import defaultdict
from pathlib import Path

import numpy as np

from core.errors import InputError
from data.weather import abi, glm, mrms
from data.weather.channels import CHANNELS
from data.weather.regrid import CellMean

EARLY = np.timedelta64(5, "s")  # a GLM file may hold events from before its start: those of a flash still going on
LONGEST = np.timedelta64(20, "s")  # a GLM file
_NONE = np.empty(0, "datetime64[ms]")


def find_files(folder, *patterns):
    """Files below ``folder`` (or the file itself), sorted by name. Raises `InputError` when there is none."""
    folder = Path(folder)
    files = [folder] if folder.is_file() else sorted({f for p in patterns for f in folder.rglob(p)})
    if not files:
        raise InputError(f"holds no file like {' or '.join(patterns)}", file=folder,
                         remedy="Check the folder")  # fmt: skip
    return files


def sha256(path):
    """Hex digest of a file's bytes."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


class Source:
    """Files of one kind. ``channels``: names, in order; ``stamps``: frame times at which there is something.

    `frame` returns {channel: (ny, nx), NaN where missing} for one time; ``used`` collects {file name: sha256};
    ``matching`` says in words which files a frame takes.
    """

    def __init__(self, grid, step):
        self.grid, self.step, self.used = grid, step.astype("timedelta64[ms]"), {}

    def _note(self, path):
        self.used[path.name] = sha256(path)


class _Scans(Source):
    """Files that each show one moment: the nearest within half a step is taken."""

    @property
    def matching(self):
        return f"nearest scan within {self.step / 2 / np.timedelta64(1, 'm'):g} min"

    def _keep(self, entries):
        """entries: (channel, time, path)."""
        by_channel = defaultdict(list)
        for channel, time, path in entries:
            by_channel[channel].append((time.astype("datetime64[ms]"), path))
        self.channels = [name for name in CHANNELS if name in by_channel]
        self.paths = {name: [path for _, path in sorted(by_channel[name])] for name in self.channels}
        self.times = {name: np.array([time for time, _ in sorted(by_channel[name])]) for name in self.channels}
        self.stamps = np.unique(_round(np.concatenate([*self.times.values(), _NONE]), self.step))

    def _nearest(self, channel, time):
        """Path of the scan nearest to ``time``, or None."""
        times = self.times[channel]
        after = np.searchsorted(times, time)
        near = min((i for i in (after - 1, after) if 0 <= i < len(times)), key=lambda i: abs(times[i] - time))
        return self.paths[channel][near] if abs(times[near] - time) <= self.step / 2 else None


class Radar(_Scans):
    """MRMS files, averaged in linear rain rate or Z over each grid cell, then in dBZ."""

    def __init__(self, folder, grid, step, only=None):
        super().__init__(grid, step)
        entries, products = [], {}
        for path in find_files(folder, "*.grib2", "*.grib2.gz"):
            product, time = mrms.scan_mrms(path)
            if products.setdefault(product.channel, product) != product:
                raise InputError(f"{products[product.channel].name} and {product.name} both give {product.channel}",
                                 file=path, variable=product.channel, remedy="Keep one product")  # fmt: skip
            if not only or product.channel in only:
                entries.append((product.channel, time, path))
        self._keep(entries)
        self._means = {}

    def frame(self, time):
        found = {name: self._nearest(name, time) for name in self.channels}
        return {name: self._read(path) for name, path in found.items() if path}

    def _read(self, path):
        radar = mrms.read_mrms(path)
        key = radar.linear.shape, radar.latitude[0], radar.longitude[0]
        if key not in self._means:
            self._means[key] = CellMean(radar.latitude, radar.longitude, self.grid)
        self._note(path)
        return mrms.to_dbz(self._means[key](radar.linear), radar.product.is_rate)


class Abi(_Scans):
    """ABI images, the nearest pixel for each grid point."""

    def __init__(self, folder, grid, step, satellite=None, only=None):
        super().__init__(grid, step)
        files = [(path, abi.scan_abi(path)) for path in find_files(folder, "*ABI-L2*.nc")]
        files = one_satellite(files, satellite)
        self._keep([(c, about.time, path) for path, about in files for c in about.channels if not only or c in only])
        self._pixels = {}

    def frame(self, time):
        by_path = defaultdict(list)
        for name in self.channels:
            by_path[self._nearest(name, time)].append(name)
        by_path.pop(None, None)
        return {name: values for path, names in by_path.items() for name, values in self._read(path, names).items()}

    def _read(self, path, names):
        images, view = abi.read_abi(path, names)
        key = view.longitude, view.x[0], view.y[0], len(view.x), len(view.y)
        if key not in self._pixels:
            self._pixels[key] = abi.NearestPixel(view, self.grid)
        self._note(path)
        return {name: self._pixels[key](image) for name, image in images.items()}


class Lightning(Source):
    """GLM files, events counted over [time - step, time); missing where files cover less than ``coverage`` of it."""

    channels = ["glm"]

    def __init__(self, folder, grid, step, satellite=None, coverage=0.9):
        super().__init__(grid, step)
        self.coverage = coverage
        files = [(path, glm.scan_glm(path)) for path in find_files(folder, "*GLM-L2-LCFA*.nc")]
        files = one_satellite(files, satellite)
        files = {about.start: (path, about) for path, about in files}  # a file issued again replaces the first
        self.starts = np.array(sorted(files))
        self.files = [files[start] for start in self.starts]
        after = self.step / 2 - np.timedelta64(1, "ms")  # rounds up
        ends = [_round(t + after, self.step) for _, f in self.files for t in (f.start + EARLY, f.end)]
        covered = {time: self._covered(time) for time in np.unique(ends)}
        self.stamps = np.array([time for time, share in covered.items() if share >= coverage], "datetime64[ms]")
        if self.stamps.size == 0:
            best = f"{max(covered.values()):.0%}"
            raise InputError(f"files cover at most {best} of a step, {coverage:.0%} is asked", file=folder,
                             variable="glm", remedy="Add the missing files, or lower --glm-coverage")  # fmt: skip

    @property
    def matching(self):
        minutes = self.step / np.timedelta64(1, "m")
        return f"events of the {minutes:g} min that end at the time, where files cover {self.coverage:.0%} of them"

    def _around(self, time):
        """Files that may hold events of the step that ends at ``time``."""
        first, last = np.searchsorted(self.starts, (time - self.step - LONGEST, time + EARLY))
        return self.files[first:last]

    def _covered(self, time):
        """Share of the step before ``time`` that files cover."""
        spans = ((min(f.end, time) - max(f.start, time - self.step)) / self.step for _, f in self._around(time))
        return sum(max(span, 0.0) for span in spans)

    def frame(self, time):
        if self._covered(time) < self.coverage:
            return {}
        total, seen = np.zeros(self.grid.shape), np.zeros(self.grid.shape, bool)
        for path, about in self._around(time):
            total += glm.count_events(glm.read_glm(path), self.grid, time - self.step, time)
            seen |= glm.seen_by(about, self.grid)
            self._note(path)
        return {"glm": np.where(seen, total, np.nan)}


def one_satellite(files, wanted):
    """Keep the files of one satellite; refuses a mixture unless ``wanted`` names one of them."""
    names = sorted({about.satellite for _, about in files})
    if wanted is None and len(names) > 1:
        first = next(path for path, about in files if about.satellite != files[0][1].satellite)
        raise InputError(f"is of another satellite than {files[0][0].name}: the folder mixes {', '.join(names)}",
                         file=first, variable="platform_ID", remedy="Choose one with --satellite")  # fmt: skip
    if wanted is not None and wanted not in names:
        raise InputError(f"no file of {wanted}, only of {', '.join(names)}", file=files[0][0].parent,
                         variable="platform_ID", remedy="Choose one of these with --satellite")  # fmt: skip
    return [(path, about) for path, about in files if about.satellite == (wanted or names[0])]


def _round(times, step):
    """The multiple of ``step`` (counted from 1970) nearest to each time, datetime64[ms]."""
    step = step.astype("timedelta64[ms]").astype("int64")
    count = times.astype("datetime64[ms]").astype("int64")
    return ((count + step // 2) // step * step).astype("datetime64[ms]")


def regular(stamps, step):
    """``stamps`` and every step between them: gaps show as missing frames, but over a day a new sequence starts."""
    stamps = np.unique(stamps)
    breaks = np.flatnonzero(np.diff(stamps) > np.timedelta64(24, "h")) + 1
    return np.concatenate([np.arange(part[0], part[-1] + step, step) for part in np.split(stamps, breaks)])
