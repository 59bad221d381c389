"""Folders of raw files as frames on the grid: each source knows its times and gives what it saw near a time.

A frame takes the scan nearest to its time, at most a tolerance away; lightning is counted over the window that ends at
the frame's time, so that no frame knows the future. What no file covers is absent, and stays missing in the archive. A
broken file is named, and the next nearest takes its place.
"""

from collections import defaultdict

import numpy as np

from core.errors import InputError
from data.files import sha256
from data.weather import abi, glm, mrms
from data.weather.channels import CHANNELS
from data.weather.files import Attempt, find_files
from data.weather.packing import COUNTS, ROUNDED, centred
from data.weather.regrid import CellMean

EARLY = np.timedelta64(5, "s")  # a GLM file may hold events from before its start: those of a flash still going on
LONGEST = np.timedelta64(20, "s")  # a GLM file
MANY = 500  # files that are looked through by many workers
_NONE = np.empty(0, "datetime64[ms]")


class Source:
    """Files of one kind. ``channels``: names, in order; ``stamps``: frame times at which there is something.

    `frame` returns {channel: (ny, nx), NaN where missing} for one time; ``used`` collects {file name: sha256},
    ``refused`` {file name: why}, ``model_times`` {channel: (valid, known since)}; ``matching`` says which
    files a frame takes. strict: a broken file is an error.
    """

    kind = "files"
    packing = {}  # {channel: (scale, offset)} of channels that 16 bits can hold

    def __init__(self, grid, step, tolerance=None, strict=False):
        self.grid, self.step = grid, step.astype("timedelta64[ms]")
        self.tolerance = self.step / 2 if tolerance is None else tolerance.astype("timedelta64[ms]")
        self.strict, self.used, self.refused, self.model_times = strict, {}, {}, {}

    @property
    def matching(self):
        return {"rule": "nearest scan", "tolerance_minutes": self.tolerance / np.timedelta64(1, "m")}

    def all_files(self):
        """Paths that a frame may take."""
        raise NotImplementedError

    def _scan(self, function, paths, each):
        """[(path, what its header says)] of the files that can be read."""
        found, each = [], each if len(paths) > MANY else map
        for path, (about, why) in zip(paths, each(Attempt(function, self.strict), paths), strict=True):
            if why:
                self.refused[path.name] = why
            else:
                found.append((path, about))
        if not found:
            raise InputError("no file can be read", file=paths[0].parent, remedy=next(iter(self.refused.values())))
        return found

    def _read(self, function, path):
        """What a function makes of a file, which is then used; None of a broken one, which is then refused."""
        value, why = Attempt(function, self.strict)(path)
        if why:
            self.refused[path.name] = why
        else:
            self.used[path.name] = sha256(path)
        return value


class Scans(Source):
    """Files that each show one moment: the nearest within the tolerance is taken."""

    def _keep(self, entries):
        """entries: (channel, time, path)."""
        by_channel = defaultdict(list)
        for channel, time, path in sorted(entries, key=lambda entry: (entry[1], entry[2])):
            by_channel[channel].append((time.astype("datetime64[ms]"), path))
        self.channels = [name for name in CHANNELS if name in by_channel]
        self.paths = {name: [path for _, path in by_channel[name]] for name in self.channels}
        self.times = {name: np.array([time for time, _ in by_channel[name]]) for name in self.channels}
        self.stamps = np.unique(round_to(np.concatenate([*self.times.values(), _NONE]), self.step))

    def all_files(self):
        return [path for paths in self.paths.values() for path in paths]

    def _near(self, channel, time):
        """Paths of the scans within the tolerance of ``time``, nearest first."""
        times = self.times[channel]
        first, last = (
            np.searchsorted(times, time - self.tolerance),
            np.searchsorted(times, time + self.tolerance, "right"),
        )
        order = first + np.argsort(np.abs(times[first:last] - time), kind="stable")
        return [self.paths[channel][i] for i in order]

    def _nearest(self, channel, time, read):
        """``read`` of the nearest scan that can be read, or None."""
        values = (read(path) for path in self._near(channel, time) if path.name not in self.refused)
        return next((value for value in values if value is not None), None)


class Radar(Scans):
    """MRMS files, averaged in linear rain rate or Z over each grid cell, then in dBZ."""

    kind, packing = "radar", ROUNDED

    def __init__(self, folder, grid, step, only=None, tolerance=None, strict=False, each=map):
        super().__init__(grid, step, tolerance, strict)
        entries, products = [], {}
        for path, (product, time) in self._scan(mrms.scan_mrms, find_files(folder, "*.grib2", "*.grib2.gz"), each):
            if products.setdefault(product.channel, product) != product:
                raise InputError(f"{products[product.channel].name} and {product.name} both give {product.channel}",
                                 file=path, variable=product.channel, remedy="Keep one product")  # fmt: skip
            if not only or product.channel in only:
                entries.append((product.channel, time, path))
        self._keep(entries)
        self._means = {}

    def frame(self, time):
        found = {
            name: self._nearest(name, time, lambda path: self._read(self._on_grid, path)) for name in self.channels
        }
        return {name: values for name, values in found.items() if values is not None}

    def _on_grid(self, path):
        radar = mrms.read_mrms(path)
        key = radar.linear.shape, radar.latitude[0], radar.longitude[0]
        if key not in self._means:
            self._means[key] = CellMean(radar.latitude, radar.longitude, self.grid)
        return mrms.to_dbz(self._means[key](radar.linear), radar.product.is_rate)


class Abi(Scans):
    """ABI images, the nearest pixel for each grid point; with ``parallax`` that of the cloud top above the point."""

    kind = "abi"

    def __init__(self, folder, grid, step, satellite=None, only=None, tolerance=None, strict=False, each=map,
                 parallax=False):  # fmt: skip
        super().__init__(grid, step, tolerance, strict)
        files = one_satellite(self._scan(abi.scan_abi, find_files(folder, "*ABI-L2*.nc"), each), satellite)
        self.satellite, self.parallax = files[0][1].satellite, parallax
        self.packing = {c: centred(*steps) for _, about in files[::-1] for c, steps in about.packing.items()}
        read = {*only, "cth"} if only and parallax else only
        self.holds = {path: [c for c in about.channels if not read or c in read] for path, about in files}
        self._keep([(c, about.time, path) for path, about in files for c in self.holds[path]])
        if parallax and "cth" not in self.channels:
            raise InputError("no cloud top heights to correct the parallax with", file=folder, variable="cth",
                             remedy="Add the ACHA files of the same times")  # fmt: skip
        self.channels = [name for name in self.channels if not only or name in only]
        self._opened, self._pixels, self._lines = (None, None), {}, None

    @property
    def matching(self):
        return super().matching | {"satellite": self.satellite, "parallax": "cth" if self.parallax else "none"}

    def frame(self, time):
        lines, found = None, {}
        if self.parallax:
            lines = self._nearest("cth", time, lambda path: self._image(path, "cth"))
            if lines is None:
                return {}  # where clouds belong is unknown
            self._lines = self._lines or abi.CloudTops(lines[1], self.grid)
            lines = self._lines(*lines)
        for name in self.channels:
            image = self._nearest(name, time, lambda path, name=name: self._image(path, name))
            if image is not None:
                found[name] = abi.along(*image, *lines) if lines else self._nearest_pixel(*image)
        return found

    def _image(self, path, name):
        """(values, view) of one channel of a file, or None; its other channels are kept until another is read."""
        if self._opened[0] != path:
            self._opened = path, self._read(lambda path: abi.read_abi(path, self.holds[path], self._crop), path)
        images = self._opened[1]
        return images and (images[0][name], images[1])

    def _crop(self, view):
        key = ("crop", *_key(view))
        if key not in self._pixels:
            self._pixels[key] = abi.around(view, self.grid)
        return self._pixels[key]

    def _nearest_pixel(self, values, view):
        key = _key(view)
        if key not in self._pixels:
            self._pixels[key] = abi.NearestPixel(view, self.grid)
        return self._pixels[key](values)


def _key(view):
    return view.longitude, view.x[0], view.y[0], len(view.x), len(view.y)


class Lightning(Source):
    """GLM files, events counted over [time - window, time); missing where files cover less than ``coverage`` of it."""

    kind, channels, packing = "lightning", ["glm"], COUNTS

    def __init__(self, folder, grid, step, satellite=None, coverage=0.9, window=None, strict=False, each=map):
        super().__init__(grid, step, strict=strict)
        self.coverage, self.window = coverage, self.step if window is None else window.astype("timedelta64[ms]")
        files = one_satellite(self._scan(glm.scan_glm, find_files(folder, "*GLM-L2-LCFA*.nc"), each), satellite)
        self.satellite = files[0][1].satellite
        files = {about.start: (path, about) for path, about in files}  # a file issued again replaces the first
        self.starts = np.array(sorted(files))
        self.files = [files[start] for start in self.starts]
        after = self.step / 2 - np.timedelta64(1, "ms")  # rounds up
        ends = [round_to(t + after, self.step) for _, f in self.files for t in (f.start + EARLY, f.end)]
        covered = {time: self._covered(time) for time in np.unique(ends)}
        self.stamps = np.array([time for time, share in covered.items() if share >= coverage], "datetime64[ms]")
        if self.stamps.size == 0:
            best = f"{max(covered.values()):.0%}"
            raise InputError(f"files cover at most {best} of a step, {coverage:.0%} is asked", file=folder,
                             variable="glm", remedy="Add the missing files, or lower --glm-coverage")  # fmt: skip

    @property
    def matching(self):
        minutes = self.window / np.timedelta64(1, "m")
        return {"rule": "events of the window that ends at the time, where files cover enough of it",
                "window_minutes": minutes, "coverage": self.coverage, "satellite": self.satellite}  # fmt: skip

    def all_files(self):
        return [path for path, _ in self.files]

    def _around(self, time):
        """Files that may hold events of the window that ends at ``time``."""
        first, last = np.searchsorted(self.starts, (time - self.window - LONGEST, time + EARLY))
        return [(path, about) for path, about in self.files[first:last] if path.name not in self.refused]

    def _covered(self, time):
        """Share of the window before ``time`` that files cover."""
        spans = ((min(f.end, time) - max(f.start, time - self.window)) / self.window for _, f in self._around(time))
        return sum(max(span, 0.0) for span in spans)

    def frame(self, time):
        if self._covered(time) < self.coverage:
            return {}
        total, seen = np.zeros(self.grid.shape), np.zeros(self.grid.shape, bool)
        for path, about in self._around(time):
            events = self._read(glm.read_glm, path)
            if events is not None:
                total += glm.count_events(events, self.grid, time - self.window, time)
                seen |= glm.seen_by(about, self.grid)
        if self._covered(time) < self.coverage:  # a file broke
            return {}
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


def round_to(times, step):
    """The multiple of ``step`` (counted from 1970) nearest to each time, datetime64[ms]."""
    step = step.astype("timedelta64[ms]").astype("int64")
    count = times.astype("datetime64[ms]").astype("int64")
    return ((count + step // 2) // step * step).astype("datetime64[ms]")


def regular(stamps, step):
    """``stamps`` and every step between them: gaps show as missing frames, but over a day a new sequence starts."""
    stamps = np.unique(stamps)
    breaks = np.flatnonzero(np.diff(stamps) > np.timedelta64(24, "h")) + 1
    return np.concatenate([np.arange(part[0], part[-1] + step, step) for part in np.split(stamps, breaks)])
