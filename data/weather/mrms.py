"""MRMS radar mosaics: one GRIB2 message on a latitude-longitude grid to linear values that may be averaged.

Products are told apart by their numbers, because their names depend on the table that a library happens to ship. "No
echo" (0, or -99) is an observation and becomes 0 of a linear quantity; "no coverage" (-3, or -999) is missing.
"""

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from core.errors import InputError
from data.weather.channels import RADAR_FLOOR
from data.weather.files import BrokenFile


@dataclass(frozen=True)
class Product:
    name: str
    channel: str
    is_rate: bool  # mm/h; else dBZ


PRODUCTS = {  # (discipline, category, number)
    (209, 6, 1): Product("PrecipRate", "refc", is_rate=True),
    (209, 10, 0): Product("MergedReflectivityQCComposite", "refc", is_rate=False),
    (209, 11, 0): Product("MergedBaseReflectivityQC", "refb", is_rate=False),
}


@dataclass(frozen=True)
class RadarFrame:
    """``linear`` (lat, lon) float32, south first: mm/h or mm6/m3, 0 where no echo, NaN where not covered."""

    product: Product
    time: np.datetime64
    latitude: np.ndarray  # (lat,) degrees, ascending
    longitude: np.ndarray  # (lon,) degrees in [-180, 180), ascending
    linear: np.ndarray


def scan_mrms(path):
    """Product and time of a file, from its message: (`Product`, datetime64[s])."""
    with _message(path) as message:
        return message.product, message.time


def read_mrms(path):
    """Read an MRMS .grib2 or .grib2.gz file to a `RadarFrame`.

    Raises `InputError` for a truncated file, another format, product or grid.
    """
    with _message(path) as message:
        latitude, longitude, order = message.axes()
        linear = to_linear(message.values()[order].astype(np.float32), message.product.is_rate)
        return RadarFrame(message.product, message.time, latitude, longitude, linear)


def to_linear(values, is_rate):
    """Coded values to a quantity that may be averaged: rain rate in mm/h or Z in mm6/m3; NaN where not covered."""
    if is_rate:
        return np.where(values < 0, np.nan, values)
    echo = np.where(values <= -90, -np.inf, values)  # -99 is no echo, -999 is no coverage
    return np.where(values <= -900, np.nan, 10 ** (echo / 10)).astype(np.float32)


def to_dbz(linear, is_rate):
    """Rain rate (mm/h, by Z = 300 R^1.4) or Z (mm6/m3) to dBZ, not below the floor of -10 dBZ; NaN stays NaN."""
    z = 300 * np.maximum(linear, 0) ** 1.4 if is_rate else np.asarray(linear)
    with np.errstate(divide="ignore"):
        return np.maximum(10 * np.log10(z), RADAR_FLOOR)


class _message:
    """The first message of a known product in a file, as a context that releases it."""

    def __init__(self, path):
        self.path = Path(path)

    def __enter__(self):
        import eccodes

        self._eccodes, data, seen = eccodes, _bytes_of(self.path), []
        while data:
            size = self._size(data)
            self._id = eccodes.codes_new_from_message(data[:size])
            key = tuple(self._get(k) for k in ("discipline", "parameterCategory", "parameterNumber"))
            if key in PRODUCTS:
                self.product = PRODUCTS[key]
                return self
            self.__exit__()
            seen.append(key)
            data = data[size:].lstrip(b"\0\n\r")
        wanted = ", ".join(f"{p.name} {key}" for key, p in PRODUCTS.items())
        raise InputError(f"holds no MRMS radar product (discipline, category, number) but {seen}", file=self.path,
                         variable="parameterNumber", remedy=f"Give one of {wanted}")  # fmt: skip

    def __exit__(self, *_):
        self._eccodes.codes_release(self._id)

    def _size(self, data):
        """Length of the first message; checks that all of it is there."""
        if data[:4] != b"GRIB" or data[7:8] != b"\x02":
            raise BrokenFile("is not GRIB edition 2", file=self.path, variable="section 0",
                             remedy="Give MRMS .grib2 or .grib2.gz files only")  # fmt: skip
        size = int.from_bytes(data[8:16], "big")
        if len(data) < size or data[size - 4 : size] != b"7777":
            raise BrokenFile(f"is truncated: {len(data)} of {size} bytes", file=self.path, variable="message",
                             remedy="Download it again or remove it")  # fmt: skip
        return size

    def _get(self, key):
        try:
            return self._eccodes.codes_get(self._id, key)
        except self._eccodes.CodesInternalError as error:
            raise BrokenFile(str(error), file=self.path, variable=key, remedy="Download it again") from error

    @property
    def time(self):
        year, month, day, hour, minute, second = (
            self._get(key) for key in ("year", "month", "day", "hour", "minute", "second")
        )
        return np.datetime64(f"{year:04d}-{month:02d}-{day:02d}T{hour:02d}:{minute:02d}:{second:02d}", "s")

    def axes(self):
        """Latitude (south first), longitude, and the index that brings the values into that order."""
        kind = self._get("gridType")
        if kind != "regular_ll" or self._get("jPointsAreConsecutive"):
            raise InputError(f"lies on a {kind} grid, not on rows of latitude and longitude", file=self.path,
                             variable="gridType", remedy="Give the original MRMS file")  # fmt: skip
        axes = []
        for name, count in (("latitude", "Nj"), ("longitude", "Ni")):
            first, last = (self._get(f"{name}Of{end}GridPointInDegrees") for end in ("First", "Last"))
            axes.append(np.linspace(first, last, self._get(count)))
        latitude, longitude = axes[0], (axes[1] + 180) % 360 - 180
        flips = tuple(slice(None, None, -1 if axis[0] > axis[-1] else 1) for axis in (latitude, longitude))
        return latitude[flips[0]], longitude[flips[1]], flips

    def values(self):
        shape = self._get("Nj"), self._get("Ni")
        try:
            values = self._eccodes.codes_get_values(self._id)
        except self._eccodes.CodesInternalError as error:
            raise BrokenFile(f"cannot be decoded ({error})", file=self.path, variable=self.product.name,
                             remedy="Download it again or remove it") from error  # fmt: skip
        if values.size != shape[0] * shape[1]:
            raise BrokenFile(f"has {values.size} values for {shape[0]} x {shape[1]} points", file=self.path,
                             variable=self.product.name, remedy="Download it again or remove it")  # fmt: skip
        if self._get("bitmapPresent"):
            values[values == self._get("missingValue")] = -999.0
        return values.reshape(shape)


def _bytes_of(path):
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError, zlib.error) as error:
        raise BrokenFile(f"cannot be read ({error})", file=path, variable="message",
                         remedy="Download it again or remove it") from error  # fmt: skip
