"""Fields that stand still, from files of the user: the height of the ground, and how near the next radar is.

What nobody gave is recorded as absent, and a model does not get it: a field of zeros would be a claim.
"""

import csv
from pathlib import Path

import numpy as np

from core.errors import InputError
from data.files import sha256
from data.weather.fields import read_field, resample
from data.weather.grid import EARTH_RADIUS

RANGE = 230e3  # m: how far the base reflectivity of a WSR-88D reaches
HEIGHTS = ("topography", "orog", "elevation", "z", "Band1", "topo")  # of HRRR, ETOPO, GDAL
TOPOGRAPHY = {"standard_name": "surface_altitude", "long_name": "height of the ground", "units": "m"}
PROXIMITY = {"long_name": "nearness of the next radar: 1 at a radar, 0 from 230 km on", "units": "1"}


def static_fields(grid, topography=None, radars=None):
    """({name: ((ny, nx) float32, attributes)}, {name: source or "absent"}) for `data.weather.writer.write_archive`.

    topography: a NetCDF or GRIB file with one field of heights in m, on latitudes and longitudes or on the HRRR grid.
    radars: a CSV file with columns ``latitude`` and ``longitude`` in degrees, a radar a line. Raises `InputError`.
    """
    fields, told = {}, {"topography": "absent", "radar_proximity": "absent"}
    if topography:
        field = read_field(topography, HEIGHTS)
        if field.units not in ("m", "gpm", "metres", "meters"):
            raise InputError(f"has units {field.units!r}", file=topography, variable="topography",
                             remedy="Give heights in m")  # fmt: skip
        height = resample(field, grid, topography)
        if not np.isfinite(height).all():
            raise InputError("does not cover the grid", file=topography, variable="topography",
                             remedy="Give a larger file, with 0 over the sea")  # fmt: skip
        fields["topography"] = height, TOPOGRAPHY
        told["topography"] = f"{Path(topography).name} {sha256(topography)}"
    if radars:
        fields["radar_proximity"] = _proximity(grid, *read_sites(radars)), PROXIMITY
        told["radar_proximity"] = f"{Path(radars).name} {sha256(radars)}"
    return fields, told


def read_sites(path):
    """Latitudes and longitudes (n,) in degrees of a CSV file of radars. Raises `InputError`."""
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        sites = np.array([[float(row["latitude"]), float(row["longitude"])] for row in rows])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"is no list of radars ({error})", file=path, variable="latitude, longitude",
                         remedy="Give a CSV file with columns latitude and longitude") from error  # fmt: skip
    if not len(sites) or np.abs(sites[:, 0]).max() > 90 or np.abs(sites[:, 1]).max() > 360:
        raise InputError("holds no places on earth", file=path, variable="latitude, longitude",
                         remedy="Give degrees, a radar a line")  # fmt: skip
    return sites.T


def _proximity(grid, latitude, longitude):
    """1 - distance / 230 km to the nearest site, not below 0, (ny, nx) float32."""
    from scipy.spatial import cKDTree

    chord, _ = cKDTree(_unit(latitude, longitude)).query(_unit(grid.latitude, grid.longitude))
    return np.clip(1 - 2 * EARTH_RADIUS * np.arcsin(chord / 2) / RANGE, 0, 1).astype(np.float32)


def _unit(latitude, longitude):
    lat, lon = np.radians(latitude), np.radians(longitude)
    return np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)], -1)
