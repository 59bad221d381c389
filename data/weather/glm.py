"""GLM lightning: the events of 20-second files, counted per grid cell and time step.

An event is one camera pixel in one 2 ms frame. Group and flash flags for "too many" and "too long" mark real lightning
that the ground processing cut into pieces, up to 44 % of the flashes of a storm, so those events stay; only events of
groups out of time order or of an abnormal flash (flag 1) are left out. A file without any event is a quiet sky.
"""

from dataclasses import dataclass

import numpy as np

from core.errors import InputError
from data.weather.grid import cell_of
from data.weather.netcdf import decode_time, opened, unpack

OUT_OF_ORDER = 1


@dataclass(frozen=True)
class GlmFile:
    """Satellite and time span [start, end) of one file, and the box that the camera sees, degrees."""

    satellite: str
    start: np.datetime64
    end: np.datetime64
    south_north: tuple[float, float]
    west_east: tuple[float, float]


@dataclass(frozen=True)
class Events:
    """Time (n,) datetime64[ms], latitude and longitude (n,) in degrees of the events of one file."""

    time: np.ndarray
    latitude: np.ndarray
    longitude: np.ndarray


def scan_glm(path):
    """The `GlmFile` of a GLM L2 LCFA file. Raises `InputError` for a file that is none."""
    with opened(path) as dataset:
        return _about(dataset, path)


def _about(dataset, path):
    attrs = dataset.attrs
    if "event_lat" not in dataset.names or "LCFA" not in str(attrs.get("dataset_name", "")):
        raise InputError("is no GLM L2 LCFA file", file=path, variable="event_lat",
                         remedy="Give OR_GLM-L2-LCFA_*.nc files only")  # fmt: skip
    start, end = (np.datetime64(attrs[f"time_coverage_{k}"].rstrip("Z"), "ms") for k in ("start", "end"))
    south_north, west_east = (
        tuple(sorted(float(v) for v in dataset[f"{axis}_field_of_view_bounds"].values)) for axis in ("lat", "lon")
    )
    return GlmFile(attrs["platform_ID"], start, end, south_north, west_east)


def read_glm(path):
    """The `Events` of a GLM L2 LCFA file, those of badly ordered groups left out. Raises `InputError`."""
    with opened(path) as dataset:
        _about(dataset, path)
        latitude, longitude = unpack(dataset["event_lat"]), unpack(dataset["event_lon"])
        offset = dataset["event_time_offset"]
        time = decode_time(unpack(offset), offset.attrs["units"])
        bad = dataset["group_id"].values[dataset["group_quality_flag"].values == OUT_OF_ORDER]
        good = ~np.isin(dataset["event_parent_group_id"].values, bad) & np.isfinite(latitude + longitude)
        return Events(time[good], latitude[good], (longitude[good] + 180) % 360 - 180)


def count_events(events, grid, start, end):
    """Events in each cell of ``grid`` within [start, end), (ny, nx) float64."""
    now = (events.time >= start) & (events.time < end)
    cell = cell_of(events.latitude[now], events.longitude[now], grid)
    return np.bincount(cell[cell >= 0], minlength=np.prod(grid.shape)).reshape(grid.shape).astype(np.float64)


def seen_by(about, grid):
    """Cells within the camera's field of view, bool (ny, nx)."""
    (south, north), (west, east) = about.south_north, about.west_east
    latitude, longitude = grid.latitude, grid.longitude
    return (latitude >= south) & (latitude <= north) & (longitude >= west) & (longitude <= east)
