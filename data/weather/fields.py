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

    ``valid``: for when it is; ``known``: since when it could be known, the start of a forecast; None where not told.
    """

    values: np.ndarray
    latitude: np.ndarray
    longitude: np.ndarray
    units: str
    valid: np.datetime64 | None
    known: np.datetime64 | None


def read_field(path, names, level=None, values=True):
    """The `Field` of a file that has one of some names, at a level in hPa where given.

    With ``values=False`` it has none, and no axes. Raises `InputError`; `BrokenFile` for a damaged file.
    """
    from eccodes import CodesInternalError

    try:
        with _open(path, names, level) as data:
            return _field(data, names, level, path, values)
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


def _field(data, names, level, path, with_values):
    name = next((n for n in data.data_vars if n in names), None)
    if name is None:
        raise InputError("no such field", file=path, variable=" or ".join(sorted(names)),
                         remedy=f"It holds {', '.join(data.data_vars) or 'none of these'}")  # fmt: skip
    field = _at_level(data[name], level, path).squeeze(drop=False)
    valid, start = (_time(field, axes) for axes in (("valid_time", "time"), ("time", "forecast_reference_time")))
    units = str(field.attrs.get("units", ""))
    known = start if "step" in field.coords or "forecast_reference_time" in field.coords else None
    if not with_values:
        return Field(None, None, None, units, valid, known)
    axes = [next((a for a in (n, n[:3]) if a in field.coords), None) for n in ("latitude", "longitude")]
    if None in axes or field.ndim != 2:
        raise InputError(f"is no field of latitude and longitude but of {field.dims}", file=path, variable=name,
                         remedy="Give one time and one level a file")  # fmt: skip
    latitude, longitude = (np.asarray(field[a].values, np.float64) for a in axes)
    if latitude.ndim == 1:
        field = field.transpose(*(field[a].dims[0] for a in axes))
    return Field(np.asarray(field.values, np.float64), latitude, longitude, units, valid, known)


def _at_level(field, level, path):
    for axis in ("isobaricInhPa", "level", "pressure_level", "plev"):
        if axis in field.dims:
            at = level and (level * 100 if field[axis].attrs.get("units") == "Pa" else level)
            if at not in field[axis].values:
                raise InputError(f"no level {level} hPa", file=path, variable=field.name,
                                 remedy=f"It has {field[axis].values.tolist()}")  # fmt: skip
            field = field.sel({axis: at})
    return field


def _time(field, names):
    """The one time of a field, datetime64[ms], or None."""
    found = [field[n].values for n in names if n in field.coords and field[n].size == 1]
    return np.ravel(found[0])[0].astype("datetime64[ms]") if found else None


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
