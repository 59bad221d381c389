"""ABI images: the satellite's own view of the earth, unpacked, judged by its quality flags, laid on a map.

A target point is projected into the view and takes the nearest pixel, if that lies near enough on the ground. So the
tops of high clouds stay displaced away from the satellite, unless their heights are given (`CloudTops`).
Source: GOES-R Product Definition and Users' Guide, volume 3, section 5.1.2.8 (fixed grid navigation).
"""

from dataclasses import dataclass, replace

import numpy as np

from core.errors import InputError
from data.weather.channels import CHANNELS, abi_channel
from data.weather.grid import EARTH_RADIUS
from data.weather.netcdf import decode_time, opened, unpack

MARGIN = 2e-3  # rad, some 70 km: pixels kept around what a grid needs


@dataclass(frozen=True)
class FixedGrid:
    """The geostationary projection of one image: scan angles ``x`` (nx,), ``y`` (ny,) in rad and the viewing point."""

    x: np.ndarray
    y: np.ndarray
    longitude: float  # of the satellite, degrees
    height: float  # above the ellipsoid, m
    semi_major: float
    semi_minor: float

    @property
    def pitch(self):
        """Distance between pixels at the point below the satellite, m."""
        return abs(float(self.x[1] - self.x[0])) * self.height

    def angles(self, latitude, longitude, height=0.0):
        """Scan angles (x, y) in rad of points in degrees, ``height`` m above ground; NaN where the earth hides them."""
        ratio = (self.semi_minor / self.semi_major) ** 2
        up = np.radians(latitude)
        lat = np.arctan(ratio * np.tan(up))  # geocentric
        lon = np.radians(np.asarray(longitude) - self.longitude)
        radius = self.semi_minor / np.sqrt(1 - (1 - ratio) * np.cos(lat) ** 2)
        orbit = self.height + self.semi_major
        level, north = radius * np.cos(lat) + height * np.cos(up), radius * np.sin(lat) + height * np.sin(up)
        away, east = orbit - level * np.cos(lon), level * np.sin(lon)
        hidden = orbit * (orbit - away) < east**2 + north**2 / ratio + (orbit - away) ** 2
        x, y = np.arcsin(east / np.sqrt(away**2 + east**2 + north**2)), np.arctan(north / away)
        return np.where(hidden, np.nan, x), np.where(hidden, np.nan, y)

    def latlon(self, x, y):
        """Points in degrees at scan angles in rad, the inverse of `angles`; NaN off the earth."""
        ratio, orbit = (self.semi_major / self.semi_minor) ** 2, self.height + self.semi_major
        a = np.sin(x) ** 2 + np.cos(x) ** 2 * (np.cos(y) ** 2 + ratio * np.sin(y) ** 2)
        b = -2 * orbit * np.cos(x) * np.cos(y)
        with np.errstate(invalid="ignore"):
            reach = (-b - np.sqrt(b**2 - 4 * a * (orbit**2 - self.semi_major**2))) / (2 * a)
            east, north = reach * np.sin(x), reach * np.cos(x) * np.sin(y)
            toward = orbit - reach * np.cos(x) * np.cos(y)
            latitude = np.degrees(np.arctan(ratio * north / np.hypot(toward, east)))
            return latitude, np.degrees(np.arctan2(east, toward)) + self.longitude


@dataclass(frozen=True)
class AbiFile:
    """Satellite, mid-scan time and channel names of one file."""

    satellite: str
    time: np.datetime64
    channels: tuple[str, ...]
    packing: dict  # {channel: (scale, offset)} of the counts


def _variables(dataset, path):
    """{channel: (variable, its quality flags)} of a known product."""
    names = dataset.names
    if "CMI_C13" in names or "CMI_C02" in names:
        bands = [band for band in range(1, 17) if f"CMI_C{band:02d}" in names]
        return {abi_channel(b).name: (f"CMI_C{b:02d}", f"DQF_C{b:02d}") for b in bands}
    if "CMI" in names:
        return {abi_channel(int(np.ravel(dataset["band_id"].values)[0])).name: ("CMI", "DQF")}
    if "HT" in names:
        return {"cth": ("HT", "DQF")}
    raise InputError("is no known ABI product", file=path, variable="CMI",
                     remedy="Give ABI-L2 MCMIP, CMIP or ACHA files")  # fmt: skip


def scan_abi(path):
    """The `AbiFile` of an ABI level 2 file. Raises `InputError` for a file that is none."""
    with opened(path) as dataset:
        known = _variables(dataset, path)
        packing = {c: dataset[name].attrs for c, (name, _) in known.items()}
        packing = {c: (float(a.get("scale_factor", 1)), float(a.get("add_offset", 0))) for c, a in packing.items()}
        time = decode_time(dataset["t"].values, dataset["t"].attrs["units"])
        return AbiFile(dataset.attrs["platform_ID"], time, tuple(known), packing)


def read_abi(path, channels, crop=None):
    """Values of some channels and where they lie: ({channel: (ny, nx) float64, NaN where unusable}, `FixedGrid`).

    crop: a function of the whole `FixedGrid` that gives the slices of rows and columns to read, as `around` does.
    Reflectance comes as stored, already times the cosine of the solar zenith angle. Raises `InputError`.
    """
    with opened(path) as dataset:
        known = _variables(dataset, path)
        for name in channels:
            if name not in known:
                raise InputError("is not in the file", file=path, variable=name, remedy=f"It has {', '.join(known)}")
        view, part = _view(dataset, path), ...
        if crop:
            part = crop(view)
            view = replace(view, y=view.y[part[0]], x=view.x[part[1]])
        return {name: _judged(dataset, *known[name], part) for name in channels}, view


def around(view, grid):
    """Slices of the rows and columns of a view that may show something above ``grid``, from the ground to 18 km."""
    found = [view.angles(grid.latitude, grid.longitude, height) for height in (0.0, CloudTops.LEVELS[0])]
    slices = []
    for axis, seen in zip((view.y, view.x), zip(*(at[::-1] for at in found))):
        seen = np.stack(seen)
        if not np.isfinite(seen).any():
            return slice(None), slice(None)
        inside = np.flatnonzero((axis >= np.nanmin(seen) - MARGIN) & (axis <= np.nanmax(seen) + MARGIN))
        slices.append(slice(inside[0], max(inside[-1] + 1, inside[0] + 2)) if len(inside) else slice(0, 2))
    return tuple(slices)


def _view(dataset, path):
    about = dataset["goes_imager_projection"].attrs
    if about["grid_mapping_name"] != "geostationary" or about["sweep_angle_axis"] != "x":
        raise InputError(f"{about['grid_mapping_name']} swept along {about['sweep_angle_axis']} is not the GOES view",
                         file=path, variable="goes_imager_projection", remedy="Give GOES ABI files")  # fmt: skip
    keys = ("longitude_of_projection_origin", "perspective_point_height", "semi_major_axis", "semi_minor_axis")
    return FixedGrid(unpack(dataset["x"]), unpack(dataset["y"]), *(float(about[key]) for key in keys))


def _judged(dataset, name, flag_name, part):
    """Values where the flags allow them: imagery 0 good and 1 usable; other products 0, and clear sky as height 0."""
    values, flags = unpack(dataset[name].part(part)), dataset[flag_name].part(part).values
    if name.startswith("CMI"):
        return np.where((flags == 0) | (flags == 1), values, np.nan)
    meanings = str(dataset[flag_name].attrs["flag_meanings"]).split()
    numbers = np.ravel(dataset[flag_name].attrs["flag_values"])
    clear = [number for number, text in zip(numbers, meanings) if "clear_or_probably_clear" in text]
    return np.where(flags == 0, values, np.where(np.isin(flags, clear), CHANNELS["cth"].floor, np.nan))


class NearestPixel:
    """Nearest pixel of a view for each point of ``grid``, none if it lies further than ``limit`` m away.

    The default limit is two grid spacings, or one and a half pixels of a coarse product.
    """

    def __init__(self, view, grid, limit=None):
        limit = limit or max(2 * grid.spacing, 1.5 * view.pitch)
        x, y = view.angles(grid.latitude, grid.longitude)
        cols, rows = _nearest(view.x, x), _nearest(view.y, y)
        latitude, longitude = view.latlon(view.x[cols], view.y[rows])
        distance = _distance(latitude, longitude, grid.latitude, grid.longitude)
        with np.errstate(invalid="ignore"):
            self.near = np.isfinite(x) & (distance <= limit)
        self.rows, self.cols = rows, cols

    def __call__(self, values):
        """Values (ny, nx) of the image on the grid; NaN where no pixel is near."""
        return np.where(self.near, values[self.rows, self.cols], np.nan)


class CloudTops:
    """Which way the satellite looks at what stands above each point of ``grid``: parallax undone by cloud heights.

    A point is asked from 18 km downwards: the first height at which the line of sight meets a cloud as high is the one
    that is seen; a much higher cloud hides what lies behind it, which is then missing. ``view``: any `FixedGrid` of the
    satellite. Heights are resolved to 1 km, which moves a cloud by 1 to 2 km over the United States.
    """

    LEVELS = np.arange(18e3, -1, -1e3)  # m

    def __init__(self, view, grid):
        self.angles = [
            tuple(a.astype(np.float32) for a in view.angles(grid.latitude, grid.longitude, height))
            for height in self.LEVELS
        ]

    def __call__(self, tops, view):
        """Scan angles (x, y) float32 for an image ``tops`` of heights in m; NaN where unknown or hidden."""
        x, y = (np.full(self.angles[0][0].shape, np.nan, np.float32) for _ in "xy")
        open_sky = np.ones(x.shape, bool)
        for height, at in zip(self.LEVELS, self.angles):
            top = along(tops, view, *at)
            met = open_sky & (top >= height - 500)
            seen = met & (top < height + 1500)
            x[seen], y[seen] = at[0][seen], at[1][seen]
            open_sky &= ~met
        return x, y


def along(values, view, x, y):
    """Values of an image at scan angles (rad): the nearest pixel; NaN outside of the image or where angles are NaN."""
    pitch = abs(view.x[1] - view.x[0]), abs(view.y[1] - view.y[0])
    cols, rows = _nearest(view.x, x), _nearest(view.y, y)
    with np.errstate(invalid="ignore"):
        near = (np.abs(view.x[cols] - x) <= 0.75 * pitch[0]) & (np.abs(view.y[rows] - y) <= 0.75 * pitch[1])
    return np.where(near, values[rows, cols], np.nan)


def _nearest(axis, at):
    """Index of the nearest entry of an evenly spaced axis; clipped at its ends."""
    index = np.round((at - axis[0]) / ((axis[-1] - axis[0]) / (len(axis) - 1)))
    return np.clip(np.nan_to_num(index), 0, len(axis) - 1).astype(np.int64)


def _distance(lat_a, lon_a, lat_b, lon_b):
    """Great-circle distance in m between points in degrees."""
    lat_a, lon_a, lat_b, lon_b = (np.radians(v) for v in (lat_a, lon_a, lat_b, lon_b))
    half = np.sin((lat_a - lat_b) / 2) ** 2 + np.cos(lat_a) * np.cos(lat_b) * np.sin((lon_a - lon_b) / 2) ** 2
    return 2 * EARTH_RADIUS * np.arcsin(np.sqrt(half))
