"""NetCDF read without surprises: packed integers unpacked by the rules of the file, every failure named.

HDF5 files go through h5netcdf, because the netCDF4 library crashes when threads share it, and not through xarray, whose
decoding of every variable takes twenty times as long as reading the few that matter. Unpacking is done here, so that
unsigned data in signed integers, fill values and valid ranges are taken in one visible order.
"""

import re
from contextlib import contextmanager
from functools import cached_property

import numpy as np

from core.errors import InputError
from data.weather.files import BrokenFile

_UNITS = {"hour": "h", "minute": "m", "min": "m", "second": "s", "millisecond": "ms", "day": "D"}


class Variable:
    """A stored array: ``values`` as they lie in the file and ``attrs``, a dict of plain strings and numpy values.

    index: the part of it that is read.
    """

    def __init__(self, raw, index=...):
        self._raw, self._index, self.attrs = raw, index, _attributes(raw)

    def part(self, index):
        return Variable(self._raw, index)

    @cached_property
    def values(self):
        values = np.asarray(self._raw[self._index])
        return values.astype(values.dtype.newbyteorder("="), copy=False)


class RawFile:
    """An open NetCDF file: ``attrs``, ``names`` of the variables, and `Variable` by name. Nothing is decoded."""

    def __init__(self, file, path):
        self._file, self._path, self.attrs, self.names = file, path, _attributes(file), set(file.variables)

    def __getitem__(self, name):
        if name not in self.names:
            raise InputError("no such variable", file=self._path, variable=name,
                             remedy="Give a file of the expected product")  # fmt: skip
        return Variable(self._file.variables[name])


def _attributes(of):
    """Attributes of an h5netcdf or a scipy object alike: bytes become str, arrays of one become scalars."""
    found = of.attrs if hasattr(of, "attrs") else of._attributes
    return {key: _plain(value) for key, value in found.items()}


def _plain(value):
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value.ravel()[0] if isinstance(value, np.ndarray) and value.size == 1 else value


@contextmanager
def opened(path):
    """The `RawFile` at a path; whatever fails while it is used becomes `InputError`."""
    try:
        with _open(path) as file:
            yield RawFile(file, path)
    except InputError:
        raise
    except KeyError as error:
        raise InputError("no such attribute", file=path, variable=error.args[0],
                         remedy="Give a file of the expected product") from error  # fmt: skip
    except (OSError, ValueError, TypeError, EOFError, RuntimeError) as error:
        raise BrokenFile(f"cannot be read as NetCDF, truncated or of another format ({_first_line(error)})", file=path,
                         remedy="Download it again or remove it") from error  # fmt: skip


def _open(path):
    with open(path, "rb") as file:
        classic = file.read(3) == b"CDF"
    if classic:
        from scipy.io import netcdf_file

        return netcdf_file(path, "r", mmap=False)
    import h5netcdf

    return h5netcdf.File(path, "r", decode_vlen_strings=True)


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
