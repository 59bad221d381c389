"""Fields of a weather model (HRRR, GFS, ERA5) beside what was observed: what a forecaster could have known at a time.

A frame takes the field valid nearest to it, of the latest forecast that had started at least a delay before; so it may
look ahead of its time, but never knows an observation that was not made yet. A reanalysis has no start and no delay.
Beside it stands for when it is valid and since when it could be known, for those who forecast from an earlier frame.
"""

from functools import partial

import numpy as np

from core.errors import InputError
from data.weather.channels import RADAR_FLOOR
from data.weather.fields import read_field, read_times, resample
from data.weather.files import find_files
from data.weather.sources import Source

GRAVITY = 9.80665  # m s-2, of geopotential metres
FIELDS = {  # channel: names in files, level in hPa
    "z500": (("gh", "z"), 500),
    "u500": (("u",), 500),
    "v500": (("v",), 500),
    "cape": (("cape",), None),
    "nwp_refc": (("refc",), None),
}


class Model(Source):
    """Files of one model, each with one start. ``stamps`` is empty: fields of a model are no reason for a frame."""

    kind, stamps = "nwp", np.empty(0, "datetime64[ms]")

    def __init__(self, folder, grid, step, channels, tolerance=None, delay=None, strict=False, each=map):
        super().__init__(grid, step, np.timedelta64(30, "m") if tolerance is None else tolerance, strict)
        self.delay = (np.timedelta64(1, "h") if delay is None else delay).astype("timedelta64[ms]")
        if not channels:
            raise InputError("no field is named", file=folder, variable="nwp-fields",
                             remedy=f"Choose among {', '.join(FIELDS)}")  # fmt: skip
        self.channels = list(channels)
        names, level = FIELDS[self.channels[0]]
        paths = find_files(folder, "*.grib2", "*.grb2", "*.nc")
        found = self._scan(_Times(names, level), paths, each)
        for path, times in found:
            if any(valid is None for valid, _ in times):
                raise InputError("has no time", file=path, variable="time", remedy="Give files that tell it")
        entries = ((valid, known, path) for path, times in found for valid, known in times)
        self.entries = sorted(entries, key=lambda entry: entry[0])
        self.valid = np.array([valid for valid, _, _ in self.entries])

    @property
    def matching(self):
        minutes = np.timedelta64(1, "m")
        return {"rule": "valid time nearest, of the latest start that is a delay old; no delay of a reanalysis",
                "tolerance_minutes": self.tolerance / minutes, "delay_minutes": self.delay / minutes}  # fmt: skip

    def all_files(self):
        return list(dict.fromkeys(path for _, _, path in self.entries))

    def _candidates(self, time):
        first = np.searchsorted(self.valid, time - self.tolerance)
        last = np.searchsorted(self.valid, time + self.tolerance, "right")
        near = [
            (abs(valid - time), -(known or valid).astype(int), path, valid, known)
            for valid, known, path in self.entries[first:last]
            if known is None or known + self.delay <= time
        ]
        return [entry[2:] for entry in sorted(near, key=lambda entry: entry[:3])]

    def frame(self, time):
        found = {}
        for name in self.channels:
            for path, valid, known in self._candidates(time):
                read = partial(self._on_grid, name=name, times=(valid, known))
                values = None if path.name in self.refused else self._read(read, path)
                if values is not None:
                    found[name] = values
                    self.model_times[name] = valid, valid if known is None else known + self.delay
                    break
        return found

    def _on_grid(self, path, name, times):
        field = read_field(path, *FIELDS[name], times)
        values = resample(field, self.grid, path)
        if name == "z500" and field.units in ("gpm", "m"):
            return values * np.float32(GRAVITY)
        return np.maximum(values, RADAR_FLOOR) if name == "nwp_refc" else values


class _Times:
    """Reads the times of a file only."""

    def __init__(self, names, level):
        self.names, self.level = names, level

    def __call__(self, path):
        return read_times(path, self.names, self.level)
