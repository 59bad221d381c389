"""NetCDF read without surprises: packed integers unpacked by the rules of the file, every failure named.

HDF5 files go through h5netcdf, because the netCDF4 library crashes when threads share it. Unpacking is done here and
not by xarray, so that unsigned data in signed integers, fill values and valid ranges are taken in one visible order.
"""

import re
from contextlib import contextmanager

import numpy as np
import xarray as xr

from core.errors import InputError

_UNITS = {"hour": "h", "minute": "m", "min": "m", "second": "s", "millisecond": "ms", "day": "D"}


@contextmanager
def opened(path):
    """The raw `xarray.Dataset` of a file, nothing decoded; whatever fails while it is used becomes `InputError`."""
    try:
        with open(path, "rb") as file:
            engine = "scipy" if file.read(3) == b"CDF" else "h5netcdf"
        with xr.open_dataset(path, engine=engine, mask_and_scale=False, decode_times=False) as dataset:
            yield dataset
    except InputError:
        raise
    except KeyError as error:
        name = str(error.args[0]).split("'")[1] if "'" in str(error.args[0]) else str(error.args[0])
        raise InputError("no such variable or attribute", file=path, variable=name,
                         remedy="Give a file of the expected product") from error  # fmt: skip
    except (OSError, ValueError, TypeError, EOFError, RuntimeError) as error:
        raise InputError(f"cannot be read as NetCDF, truncated or of another format ({_first_line(error)})", file=path,
                         remedy="Download it again or remove it") from error  # fmt: skip


def _first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def unpack(variable):
    """Physical values, float64, NaN where filled or out of ``valid_range``.

    Honours ``_Unsigned``, ``_FillValue``, ``missing_value``, ``valid_range``, ``scale_factor``, ``add_offset``, in the
    order that the NetCDF conventions give: all of them but the last two speak of the packed numbers.
    """
    raw, attrs = variable.values, variable.attrs
    if str(attrs.get("_Unsigned", "false")).lower() == "true" and raw.dtype.kind == "i":
        raw = raw.view(f"u{raw.dtype.itemsize}")
    good = np.ones(raw.shape, bool)
    for key in ("_FillValue", "missing_value"):
        if key in attrs:
            good &= raw != _as(attrs[key], raw.dtype)
    if "valid_range" in attrs:
        low, high = _as(attrs["valid_range"], raw.dtype)
        good &= (raw >= low) & (raw <= high)
    values = raw * np.float64(attrs.get("scale_factor", 1)) + np.float64(attrs.get("add_offset", 0))
    return np.where(good, values, np.nan)


def _as(value, dtype):
    """An attribute in the type of the data: -1 of int16 is 65535 of uint16."""
    value = np.asarray(value)
    return value.view(dtype) if value.dtype.itemsize == dtype.itemsize and dtype.kind == "u" else value.astype(dtype)


def decode_time(values, units):
    """Numbers and a CF "unit since date" to datetime64[ms]; knows the spellings that archives use."""
    match = re.fullmatch(r"\s*([a-z]+?)s?\s+since\s+(\S+)(?:[ T](\S+))?\s*", units, re.IGNORECASE)
    if not match or match[1].lower() not in _UNITS:
        raise ValueError(f"time units {units!r} are not understood")
    base = np.datetime64(f"{match[2].rstrip('Z')}T{match[3].rstrip('Z')}" if match[3] else match[2].rstrip("Z"), "ms")
    unit = np.timedelta64(1, _UNITS[match[1].lower()]) / np.timedelta64(1, "ms")
    return base + np.round(np.asarray(values, np.float64) * unit).astype("timedelta64[ms]")
