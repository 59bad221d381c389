"""Archives of what was observed: each frame from all its sources, by any worker, and how far that has come."""

import hashlib
import json
import time as clock
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from core.errors import InputError
from data.files import sha256
from data.weather.archive import WeatherReader
from data.weather.channels import CHANNELS
from data.weather.sources import regular
from data.weather.splits import choose_splits
from data.weather.writer import versions, write_archive


def build_observations(out, grid, sources, step, splits=None, mode="w-", report=print, each=map, told=None, **options):
    """Write the archive of some `data.weather.sources.Source` on a grid.

    step: timedelta64; told: where static fields come from; splits: see `data.weather.splits`, chosen from the times or
    longitudes when None; mode, each and further options: see `write_archive`. With mode "a" times, splits and static
    fields that are stored already stay as they are.
    Raises `InputError`; then nothing is left at ``out`` that was not there before.
    """
    names = [name for source in sources for name in source.channels]
    times = np.concatenate([source.stamps for source in sources])
    if mode == "a":
        stored = WeatherReader(out)
        last, splits = stored.times[-1].astype("datetime64[ms]"), stored.attrs["splits"]
        told = stored.attrs["provenance"]["static"]
        times = regular(np.append(times[times > last], last), step)
        times = times[times > last]
        if times.size == 0:
            return report(f"nothing is later than {last}")
    else:
        times = regular(times, step)
        splits = splits or choose_splits(times, grid)
    matching = {source.kind: source.matching for source in sources}
    if mode == "a" and stored.attrs["matching"] != matching:
        raise InputError(f"was matched by {stored.attrs['matching']}, not {matching}", file=out, variable="matching",
                         remedy="Append files of the same satellite, with the same tolerances")  # fmt: skip
    report(f"{len(times)} frames of {','.join(names)}, {grid.shape[0]} x {grid.shape[1]} points, splits {splits}")
    about = {
        "title": "radar, satellite and lightning on the HRRR grid",
        "step_minutes": step / np.timedelta64(1, "m"),
        "matching": matching,
        "provenance": {"versions": versions(), "static": told or {}},
    }
    frames = Frames(sources, names, grid.shape, times)
    options |= {"mode": mode, "key": frames.key([matching, told]), "each": partial(_progress, each, report)}
    write_archive(out, grid, [CHANNELS[name] for name in names], times, frames, splits, attrs=about, **options)


@dataclass
class Frames:
    """One frame by its index, and which files went into it; works in any process."""

    sources: list
    names: list
    shape: tuple
    times: np.ndarray
    told: set = field(default_factory=set)  # broken files that this process has named

    def key(self, options):
        """Text that differs where the frames would."""
        files = [str(path) for source in self.sources for path in source.all_files()]
        return hashlib.sha256(json.dumps([files, options, self.names]).encode()).hexdigest()

    def __call__(self, i):
        for source in self.sources:
            source.used, source.model_times = {}, {}
        seen = {name: values for source in self.sources for name, values in source.frame(self.times[i]).items()}
        missing = np.full(self.shape, np.nan, np.float32)
        frame = np.stack([seen.get(name, missing) for name in self.names]).astype(np.float32)
        used = {name: digest for source in self.sources for name, digest in source.used.items()}
        broken = {name: why for source in self.sources for name, why in source.refused.items() if name not in self.told}
        self.told |= set(broken)
        times = {name: pair for source in self.sources for name, pair in source.model_times.items()}
        return frame, {"files": used, "refused": broken, "times": times}


def build_stageiv(out, path, splits=None, mode="w-", report=print):
    """Write the archive of one Stage IV file on its own grid, hourly, odd sizes kept; arguments as above."""
    from data.weather.stageiv import read_stageiv

    grid, times, rain = read_stageiv(path)
    about = {"title": "Stage IV hourly rain", "step_minutes": 60, "provenance": {"versions": versions()}}
    splits, used = splits or choose_splits(times, grid), {"files": {Path(path).name: sha256(path)}}
    each = partial(_progress, map, report)
    write_archive(out, grid, [CHANNELS["rain"]], times, lambda i: (rain[i][None], used), splits, mode=mode, attrs=about,
                  each=each)  # fmt: skip


def _progress(each, report, function, items):
    """``each(function, items)``, saying now and then how far and how fast, and at once which file is broken."""
    told = set()
    for result in counted(each, report, "frames", function, items):
        yield result
        for name, why in result[-1].get("refused", {}).items():
            if name not in told:
                told.add(name)
                report(f"left out: {why}")


def counted(each, report, what, function, items):
    """``each(function, items)``, saying now and then how far and how fast."""
    items, start, said = list(items), clock.monotonic(), clock.monotonic()
    for done, result in enumerate(each(function, items), 1):
        yield result
        now = clock.monotonic()
        if done == len(items) or now - said > 5:
            rate, said = done / max(now - start, 1e-9), now
            left = (len(items) - done) / rate / 60
            report(f"{done}/{len(items)} {what}, {rate:.2f} {what}/s, {left:.0f} min left")
