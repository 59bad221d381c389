"""Stage IV: hourly rain of the United States, analysed from radar and gauges, on its own polar stereographic grid.

The files give latitude and longitude only; the projection is known, so the map coordinates are recovered and checked.
Source: NCEP grid of the national mosaic, 4763 m at 60 N, meridian 105 W, on a sphere of 6371229 m.
"""

import numpy as np

from core.errors import InputError
from data.weather.grid import EARTH_RADIUS, Grid
from data.weather.netcdf import decode_time, opened, unpack

RAIN = "Total_precipitation_surface_1_Hour_Accumulation"
TRUE_LATITUDE, MERIDIAN, SPACING = 60.0, -105.0, 4763.0
CRS = {
    "grid_mapping_name": "polar_stereographic",
    "latitude_of_projection_origin": 90.0,
    "straight_vertical_longitude_from_pole": MERIDIAN,
    "standard_parallel": TRUE_LATITUDE,
    "earth_radius": EARTH_RADIUS,
    "false_easting": 0.0,
    "false_northing": 0.0,
}


def read_stageiv(path):
    """A Stage IV NetCDF file: (`Grid`, times (n,) datetime64[s] at the end of each hour, rain (n, ny, nx) mm float32).

    Negative rain is missing, and so NaN. Raises `InputError` for another product, unit or grid.
    """
    with opened(path) as dataset:
        rain = dataset[RAIN]
        if rain.attrs.get("units") not in ("kg m^-2", "kg m-2", "mm"):
            raise InputError(f"has units {rain.attrs.get('units')}", file=path, variable=RAIN,
                             remedy="Give hourly Stage IV rain in mm")  # fmt: skip
        grid = _grid(unpack(dataset["lat"]), unpack(dataset["lon"]), path)
        times = decode_time(dataset["time"].values, dataset["time"].attrs["units"]).astype("datetime64[s]")
        values = unpack(rain).astype(np.float32)
        return grid, times, np.where(values < 0, np.nan, values)


def stereographic_xy(latitude, longitude):
    """Degrees to metres on the plane of Stage IV, y growing to the north along the meridian 105 W."""
    reach = EARTH_RADIUS * (1 + np.sin(np.radians(TRUE_LATITUDE))) * np.tan(np.pi / 4 - np.radians(latitude) / 2)
    angle = np.radians(np.asarray(longitude) - MERIDIAN)
    return reach * np.sin(angle), -reach * np.cos(angle)


def _grid(latitude, longitude, path):
    x, y = stereographic_xy(latitude, longitude)
    even_x = x[0, 0] + SPACING * np.arange(x.shape[1])
    even_y = y[0, 0] + SPACING * np.arange(x.shape[0])
    if max(np.abs(x - even_x).max(), np.abs(y - even_y[:, None]).max()) > 0.02 * SPACING:
        raise InputError("latitude and longitude do not lie on the Stage IV grid, south-west corner first", file=path,
                         variable="lat, lon", remedy="Give the original grid, not regridded")  # fmt: skip
    return Grid(even_x, even_y, latitude, longitude, dict(CRS))
