"""HRRR as a baseline: reflectivity of the latest run that was there when a forecast started, at equal valid times.

A run is there ``delay`` after its start, about an hour for the first hours ahead, so a forecast of 12:00 may not take
the run of 12:00. Files hold one time each (wrfsfc, hourly) or the quarters of an hour (wrfsubh); leads between have no
HRRR and no score of it.
"""

import numpy as np

from core import InputError
from data.weather.fields import read_field, read_times, resample
from data.weather.files import find_files

REFLECTIVITY, CHANNELS = ("refc",), ("refc",)


class Hrrr:
    """Files ``*.grib2`` of a folder; ``delay`` in minutes. Raises `InputError`: none, or one without reflectivity."""

    def __init__(self, folder, delay):
        self.delay, self.entries = np.timedelta64(round(delay * 60), "s"), []
        for path in find_files(folder, "*.grib2", "*.grb2", "*.nc"):
            for valid, known in read_times(path, REFLECTIVITY):
                if valid is None or known is None:
                    raise InputError("tells no start and valid time", file=path, variable="time",
                                     remedy="Give forecasts, as HRRR's files are")  # fmt: skip
                self.entries.append((known, valid, path))

    def find(self, start, valid):
        """(file, (valid, known)) of the run that a forecast of ``start`` could know, for ``valid``, or None."""
        known = [known for known, _, _ in self.entries if known + self.delay <= start]
        found = [path for known_, valid_, path in self.entries if known and known_ == max(known) and valid_ == valid]
        return (found[0], (valid, max(known))) if found else None

    def forecast(self, start, times, grid, floor):
        """Reflectivity at ``times``, (time, y, x) fp64 in dBZ, NaN for a time without a file."""
        fields = []
        for valid in times:
            found = self.find(start, valid)
            field = found and resample(read_field(found[0], REFLECTIVITY, times=found[1]), grid, found[0])
            fields.append(np.full(grid.shape, np.nan) if field is None else np.maximum(field, floor))
        return np.stack(fields).astype(np.float64)
