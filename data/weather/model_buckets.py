"""Single fields out of the large files of HRRR and GFS: the index beside each file says which bytes a field is.

A file of 130 to 500 MB holds hundreds of fields; one of them is some 0.3 MB. The pieces asked for become one small
GRIB2 file. Source: NOAA's archives on AWS; lines of an index are ``number:first byte:d=start:name:level:forecast:``.
"""

import hashlib

import numpy as np

from core.errors import InputError
from data.download import get, retry
from data.weather.bucket import address

HRRR, GFS = (f"https://noaa-{model}-bdp-pds.s3.amazonaws.com" for model in ("hrrr", "gfs"))


def gfs_files(start, end, leads):
    """Keys of the 0.25 degree files of all runs, six-hourly, that start in [start, end), datetime64[s], for leads in
    hours."""
    return [
        f"gfs.{run[:10].replace('-', '')}/{run[11:13]}/atmos/gfs.t{run[11:13]}z.pgrb2.0p25.f{lead:03d}"
        for run in _runs(start, end)
        if int(run[11:13]) % 6 == 0
        for lead in leads
    ]


def hrrr_files(start, end, leads, kind="wrfsfc"):
    """Keys of the surface files of all runs that start in [start, end), datetime64[s], for leads in hours.

    kind: "wrfsfc", one time a file, or "wrfsubh", the quarters of the hour that ends at the lead.
    """
    return [
        f"hrrr.{r[:10].replace('-', '')}/conus/hrrr.t{r[11:13]}z.{kind}f{lead:02d}.grib2"
        for r in _runs(start, end)
        for lead in leads
    ]


def _runs(start, end):
    """The full hours in [start, end) as text."""
    hours = np.arange(start.astype("datetime64[h]"), end.astype("datetime64[h]") + 1).astype("datetime64[h]")
    return [str(hour) for hour in hours if start <= hour < end]


def ranges(index, fields):
    """[(first, last or None), ...]: bytes of the fields ("REFC:entire atmosphere") by the text of an index.

    ``last`` is None for the last field of the file. Raises ValueError for a field that the index does not have.
    """
    lines = [line.split(":") for line in index.splitlines() if line.count(":") >= 5]
    starts = [int(line[1]) for line in lines]
    found = []
    for field in fields:
        at = [i for i, line in enumerate(lines) if f"{line[3]}:{line[4]}" == field]
        if not at:
            raise ValueError(f"the index has no {field}")
        found += [(starts[i], next((s - 1 for s in starts[i:] if s > starts[i]), None)) for i in at]
    return found


def fetch_fields(base, key, fields, path):
    """Bring some fields of one file to ``path``; returns (size, SHA-256 in hex). Raises `InputError`."""
    url = address(base, key)
    index = retry(lambda: get(f"{url}.idx").decode(), f"{url}.idx")
    try:
        wanted = ranges(index, fields)
    except ValueError as error:
        raise InputError(str(error), file=f"{url}.idx", variable="hrrr, gfs",
                         remedy="Name fields as the index does: REFC:entire atmosphere") from error  # fmt: skip
    data = b"".join(retry(lambda r=r: _message(url, *r), url) for r in wanted)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    partial.replace(path)
    return len(data), hashlib.sha256(data).hexdigest()


def _message(url, first, last):
    """One GRIB2 message, whole: its own length and end are checked."""
    data = get(url, f"bytes={first}-{'' if last is None else last}")
    if data[:4] != b"GRIB" or int.from_bytes(data[8:16], "big") != len(data) or data[-4:] != b"7777":
        raise OSError("the bytes that came are no whole GRIB2 message")
    return data
