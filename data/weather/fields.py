"""Gridded fields of models and maps, from NetCDF or GRIB, onto the cells of a map.

Two kinds of grid are known: rows of latitude and longitude (GFS, ERA5, elevation models), taken bilinearly or, where
they are finer than the map, as the mean over each cell; and the Lambert grid of HRRR, of which the map is a part.
"""

from dataclasses import dataclass

import numpy as np

from core.errors import InputError
from data.weather.files import BrokenFile
from data.weather.grid import SPACING, lambert_xy
from data.weather.regrid import CellMean


@dataclass(frozen=True)
class Field:
    """``values`` (ny, nx) float64; ``latitude`` and ``longitude``: axes, or (ny, nx) of a projected grid, degrees.

    ``times``: for when it is, and since when it could be known, the start of a forecast; each None where not told.
    """

    values: np.ndarray
    latitude: np.ndarray
    longitude: np.ndarray
    units: str
    times: tuple


def read_field(path, names, level=None, times=None):
    """The `Field` of a file that has one of some names, at a level in hPa where given.

    times: which of those of `read_times`, if it has many. Raises `InputError`, `BrokenFile` for a damaged file.
    """
    return _read(path, names, level, lambda field: _field(field, times, path))


def read_times(path, names, level=None):
    """For when the fields of a file are and since when they could be known: [(valid, known)], datetime64[ms] or None.

    An hourly file of HRRR has one, a subhourly one four. Raises as `read_field`.
    """
    return _read(path, names, level, lambda field: [pair for pair, _ in _by_time(field, path)])


def _read(path, names, level, use):
    from eccodes import CodesInternalError

    try:
        with _open(path, names, level) as data:
            return use(_named(data, names, level, path))
    except InputError:
        raise
    except (OSError, ValueError, EOFError, KeyError, RuntimeError, CodesInternalError) as error:
        raise BrokenFile(f"cannot be read ({(str(error).splitlines() or [''])[0][:120]})", file=path,
                         remedy="Download it again or remove it") from error  # fmt: skip


def _open(path, names, level):
    import xarray

    with open(path, "rb") as file:
        if file.read(4) != b"GRIB":
            return xarray.open_dataset(path)
    keys = {"typeOfLevel": "isobaricInhPa", "level": level} if level else {}
    for name in names:
        found = xarray.open_dataset(path, engine="cfgrib", backend_kwargs={
            "filter_by_keys": keys | {"cfVarName": name}, "indexpath": "", "errors": "raise"})  # fmt: skip
        if found.data_vars:
            break
    return found


def _named(data, names, level, path):
    name = next((n for n in data.data_vars if n in names), None)
    if name is None:
        raise InputError("no such field", file=path, variable=" or ".join(sorted(names)),
                         remedy=f"It holds {', '.join(data.data_vars) or 'none of these'}")  # fmt: skip
    return _at_level(data[name], level, path).squeeze(drop=False)


def _field(field, times, path):
    found = _by_time(field, path)
    if times is None and len(found) > 1:
        raise InputError(f"has {len(found)} times", file=path, variable=field.name, remedy="Give one time a file")
    times, field = found[0] if times is None else next((pair for pair in found if pair[0] == times), (times, None))
    if field is None:
        raise InputError(f"has no field for {times[0]}", file=path, variable="time", remedy="Download it again")
    units = str(field.attrs.get("units", ""))
    axes = [next((a for a in (n, n[:3]) if a in field.coords), None) for n in ("latitude", "longitude")]
    if None in axes or field.ndim != 2:
        raise InputError(f"is no field of latitude and longitude but of {field.dims}", file=path, variable=field.name,
                         remedy="Give one level and one start a file")  # fmt: skip
    latitude, longitude = (np.asarray(field[a].values, np.float64) for a in axes)
    if latitude.ndim == 1:
        field = field.transpose(*(field[a].dims[0] for a in axes))
    return Field(np.asarray(field.values, np.float64), latitude, longitude, units, times)


def _at_level(field, level, path):
    for axis in ("isobaricInhPa", "level", "pressure_level", "plev"):
        if axis in field.dims:
            at = level and (level * 100 if field[axis].attrs.get("units") == "Pa" else level)
            if at not in field[axis].values:
                raise InputError(f"no level {level} hPa", file=path, variable=field.name,
                                 remedy=f"It has {field[axis].values.tolist()}")  # fmt: skip
            field = field.sel({axis: at})
    return field


def _by_time(field, path):
    """[((valid, known), the field of that time)]."""
    dims = [dim for dim in field.dims if dim in ("step", "time", "valid_time")]
    if len(dims) > 1:
        raise InputError("holds many starts, each with many steps", file=path, variable=field.name,
                         remedy="Give one start a file")  # fmt: skip
    parts = [field.isel({dims[0]: i}) for i in range(field.sizes[dims[0]])] if dims else [field]
    return [((_time(part, "valid_time", "time"), _start(part)), part) for part in parts]


def _start(field):
    told = {"step", "forecast_reference_time"} & set(field.coords)
    return _time(field, "forecast_reference_time", "time") if told else None


def _time(field, *names):
    """The first of these times that a field has, datetime64[ms], or None."""
    name = next((n for n in names if n in field.coords), None)
    return None if name is None else np.ravel(field[name].values)[0].astype("datetime64[ms]")


def resample(field, grid, path=None):
    """Values (ny, nx) float32 on ``grid`` of a `Field`; NaN outside of it and where it is NaN."""
    values, latitude, longitude = field.values, field.latitude, field.longitude
    if latitude.ndim == 2:
        return _from_hrrr(values, latitude, longitude, grid, path).astype(np.float32)
    longitude = (longitude + 180) % 360 - 180
    rows, cols = np.argsort(latitude), np.argsort(longitude)
    values, latitude, longitude = values[np.ix_(rows, cols)], latitude[rows], longitude[cols]
    if np.radians(latitude[1] - latitude[0]) * 6.4e6 < grid.spacing / 2:
        return CellMean(latitude, longitude, grid)(values).astype(np.float32)
    from scipy.interpolate import RegularGridInterpolator

    at = RegularGridInterpolator((latitude, longitude), values, bounds_error=False)
    return at((grid.latitude, grid.longitude)).astype(np.float32)


def _from_hrrr(values, latitude, longitude, grid, path):
    x, y = lambert_xy(latitude, longitude)
    even = x[0, 0] + SPACING * np.arange(x.shape[1]), y[0, 0] + SPACING * np.arange(x.shape[0])
    if max(np.abs(x - even[0]).max(), np.abs(y - even[1][:, None]).max()) > 0.05 * SPACING:
        raise InputError("lies neither on rows of latitude and longitude nor on the HRRR grid", file=path,
                         variable="latitude, longitude", remedy="Give HRRR, GFS or ERA5 files")  # fmt: skip
    cols, rows = (np.rint((a - b[0]) / SPACING).astype(int) for a, b in zip((grid.x, grid.y), even))
    out = np.full(grid.shape, np.nan)
    good = np.ix_((rows >= 0) & (rows < len(even[1])), (cols >= 0) & (cols < len(even[0])))
    out[good] = values[np.ix_(rows[good[0].ravel()], cols[good[1].ravel()])]
    return out
