"""The HRRR grid: a Lambert conformal cone on a sphere, in closed form, so that training needs no projection library.

The cone touches the sphere at 38.5 N; points lie 3 km apart; row 0 is the south. The 1024 x 1792 centre crop is the
canvas of the forecaster and 6 km is every second point of it (a subsample, not a mean).
Source: NOAA HRRR grid definition (GRIB2 template 3.30).
"""

from dataclasses import dataclass

import numpy as np

from core.errors import InputError

EARTH_RADIUS = 6371229.0  # m, the sphere of HRRR
TANGENT, MERIDIAN = 38.5, -97.5  # degrees
X0, Y0, SPACING = -2697520.1425, -1587306.1526, 3000.0  # m: point [0, 0] of the 1059 x 1799 grid
FULL, CROP = (1059, 1799), (1024, 1792)

HRRR_CRS = {
    "grid_mapping_name": "lambert_conformal_conic",
    "standard_parallel": TANGENT,
    "longitude_of_central_meridian": MERIDIAN % 360,
    "latitude_of_projection_origin": TANGENT,
    "earth_radius": EARTH_RADIUS,
    "false_easting": 0.0,
    "false_northing": 0.0,
}


@dataclass(frozen=True)
class Grid:
    """Cell centres of a regular grid in a map projection.

    ``x`` (nx,) and ``y`` (ny,) in m, ascending; ``latitude`` and ``longitude`` (ny, nx) in degrees, longitude in
    [-180, 180); ``crs``: the attributes of a CF grid mapping.
    """

    x: np.ndarray
    y: np.ndarray
    latitude: np.ndarray
    longitude: np.ndarray
    crs: dict

    @property
    def shape(self):
        return len(self.y), len(self.x)

    @property
    def spacing(self):
        """Distance between neighbours on the map, m."""
        return float(self.x[1] - self.x[0])


def _cone():
    n = np.sin(np.radians(TANGENT))
    scale = EARTH_RADIUS * np.cos(np.radians(TANGENT)) / n * _tangent(TANGENT) ** n
    return n, scale, scale / _tangent(TANGENT) ** n


def _tangent(latitude):
    return np.tan(np.pi / 4 + np.radians(latitude) / 2)


def lambert_xy(latitude, longitude):
    """Degrees to metres on the HRRR cone; any shape, fp64."""
    n, scale, rho0 = _cone()
    rho = scale / _tangent(np.asarray(latitude, np.float64)) ** n
    theta = n * np.radians((np.asarray(longitude, np.float64) - MERIDIAN + 180) % 360 - 180)
    return rho * np.sin(theta), rho0 - rho * np.cos(theta)


def lambert_latlon(x, y):
    """Metres on the HRRR cone to degrees: the inverse of `lambert_xy`, longitude in [-180, 180)."""
    n, scale, rho0 = _cone()
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    rho, theta = np.hypot(x, rho0 - y), np.arctan2(x, rho0 - y)
    latitude = 2 * np.degrees(np.arctan((scale / rho) ** (1 / n))) - 90
    return latitude, (np.degrees(theta / n) + MERIDIAN + 180) % 360 - 180


def hrrr_crop(stride=1, rows=slice(None), cols=slice(None)):
    """The 1024 x 1792 crop (``stride=1``, 3 km) or 512 x 896 (``stride=2``, 6 km), or a window of it.

    ``rows`` and ``cols`` are slices of the strided crop, counted from its south-west corner. Raises `InputError` for a
    window under 3 x 3 points.
    """
    anchor_y, anchor_x = ((full - crop) // 2 for full, crop in zip(FULL, CROP))
    y = (Y0 + SPACING * (anchor_y + np.arange(0, CROP[0], stride)))[rows]
    x = (X0 + SPACING * (anchor_x + np.arange(0, CROP[1], stride)))[cols]
    if len(x) < 3 or len(y) < 3:  # what `cell_area` needs
        raise InputError(f"the window has {len(y)} x {len(x)} points", variable="rows, cols",
                         remedy=f"The crop has {CROP[0] // stride} x {CROP[1] // stride}")  # fmt: skip
    latitude, longitude = lambert_latlon(*np.meshgrid(x, y))
    return Grid(x, y, latitude, longitude, dict(HRRR_CRS))


def cell_area(grid):
    """Area of each cell on the sphere in m2, (ny, nx): the Jacobian of latitude and longitude over the indices."""
    lat, lon = np.radians(grid.latitude), np.radians(grid.longitude)
    lat_y, lat_x = np.gradient(lat, edge_order=2)
    lon_y, lon_x = np.gradient(lon, edge_order=2)
    return EARTH_RADIUS**2 * np.cos(lat) * np.abs(lat_y * lon_x - lat_x * lon_y)


def cell_of(latitude, longitude, grid):
    """Index of the cell (row * nx + column) that holds each point, int64; -1 outside. Only for a Lambert `Grid`."""
    x, y = lambert_xy(latitude, longitude)
    with np.errstate(invalid="ignore"):
        col = np.floor((x - grid.x[0]) / grid.spacing + 0.5)
        row = np.floor((y - grid.y[0]) / grid.spacing + 0.5)
        inside = (row >= 0) & (row < len(grid.y)) & (col >= 0) & (col < len(grid.x))
    return np.where(inside, row * len(grid.x) + col, -1).astype(np.int64)
