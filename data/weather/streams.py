"""What lies where in NOAA's buckets: prefixes and names of GOES and MRMS files, and which of them a time span needs."""

import re
from dataclasses import dataclass

import numpy as np

from core.errors import InputError

GOES, MRMS = "https://noaa-goes{satellite}.s3.amazonaws.com", "https://noaa-mrms-pds.s3.amazonaws.com"
RADAR = {
    "refc": "MergedReflectivityQCComposite_00.50",
    "refb": "MergedBaseReflectivityQC_00.50",
    "rate": "PrecipRate_00.00",
}
OWNERS = {  # who looks from a place, since when; source: NOAA OSPO
    "east": [("2017-12-18", "16"), ("2025-04-07", "19")],
    "west": [("2019-02-12", "17"), ("2023-01-04", "18")],
}
SECOND, HOUR, DAY = (np.timedelta64(1, unit) for unit in "shD")


@dataclass(frozen=True)
class Stream:
    """Files of one kind in one bucket: ``prefixes`` to list, ``pattern`` of the names; ``every``: one scan a step."""

    name: str
    base: str
    prefixes: tuple[str, ...]
    pattern: str
    every: bool


def satellite_of(place, start, end):
    """Number of the satellite at a place ("east", "west") in a span, or the number given.

    Raises `InputError` where another one took over within the span: their images do not mix.
    """
    if place not in OWNERS:
        return place
    owners = [(np.datetime64(since), number) for since, number in OWNERS[place]]
    if start < owners[0][0]:
        raise InputError(f"no operational GOES-{place} before {owners[0][0]}", variable="start")
    first, last = ([number for since, number in owners if since <= t][-1] for t in (start, end - SECOND))
    if first != last:
        since = next(since for since, number in owners if number == last)
        raise InputError(f"GOES-{last} followed GOES-{first} on {since}", variable="satellite",
                         remedy=f"Fetch the days before and after apart, or name one: --satellite {first}")  # fmt: skip
    return first


def streams(args):
    """The `Stream` that parsed arguments ask for."""
    satellite = satellite_of(args.satellite, args.start, args.end)
    goes = args.goes_url.format(satellite=satellite)
    found, first, last = [], args.start - args.every, args.end + args.every / 2  # lightning is of the step before
    hours = [str(h) for h in np.arange(first.astype("datetime64[h]"), last, HOUR)]
    for product in args.abi:
        name = f"ABI-L2-{product}"
        bands = "|".join(f"{b:02d}" for b in args.bands) if product.startswith("CMIP") else ""
        pattern = rf"OR_{name}-M\dC({bands})_G" if bands else rf"OR_{name}-M\d"
        found.append(Stream(product, goes, tuple(f"{name}/{_hour(h)}/" for h in hours), pattern, True))
    if args.glm:
        prefixes = tuple(f"GLM-L2-LCFA/{_hour(h)}/" for h in hours)
        found.append(Stream("GLM", goes, prefixes, "OR_GLM-L2-LCFA_G", False))
    days = np.arange(first.astype("datetime64[D]"), last, DAY).astype("datetime64[D]")
    for channel in args.mrms:
        prefixes = tuple(f"CONUS/{RADAR[channel]}/{str(day).replace('-', '')}/" for day in days)
        found.append(Stream(channel, args.mrms_url, prefixes, f"MRMS_{RADAR[channel]}_", True))
    if not found:
        raise InputError("nothing to fetch", remedy="Name --abi, --mrms, --glm, --hrrr or --gfs")
    return found


def _hour(hour):
    """2024-05-06T18 to 2024/127/18, as the GOES buckets are ordered."""
    day = np.datetime64(hour, "D")
    return f"{hour[:4]}/{(day - day.astype('datetime64[Y]')).astype(int) + 1:03d}/{hour[11:13]}"


def stamp(key):
    """Start of the scan from a GOES or MRMS name, datetime64[s]; None for another name."""
    if goes := re.search(r"_s(\d{4})(\d{3})(\d\d)(\d\d)(\d\d)\d_", key):
        year, day, *time = goes.groups()
        return np.datetime64(f"{year}-01-01T{':'.join(time)}", "s") + (int(day) - 1) * DAY
    if radar := re.search(r"_(\d{4})(\d\d)(\d\d)-(\d\d)(\d\d)(\d\d)\.grib2", key):
        return np.datetime64("{}-{}-{}T{}:{}:{}".format(*radar.groups()), "s")
    return None


def choose(objects, stream, start, end, every, reach):
    """Of the `Object` of a stream those in [start - every, end); of scans the nearest to each step, ``reach`` away.

    ``every`` 0 keeps all. Returns (objects, steps in [start, end) without any).
    """
    known = [(stamp(o.key), o) for o in objects if re.match(stream.pattern, o.key.rsplit("/", 1)[-1])]
    known = sorted((pair for pair in known if pair[0] is not None), key=lambda pair: (pair[0], pair[1].key))
    if not (stream.every and every > 0 * SECOND):
        return [o for time, o in known if start - every <= time < end], []
    groups = {}  # bands come in files of their own
    for time, o in known:
        groups.setdefault("".join(re.findall(r"M\dC\d\d_", o.key)), []).append((time, o))
    kept, empty = {}, []
    for step in np.arange(start, end, every):
        near = [min(group, key=lambda pair: abs(pair[0] - step)) for group in groups.values()]
        near = [o for time, o in near if abs(time - step) <= reach]
        kept |= {o.key: o for o in near}
        if not near:
            empty.append(step)
    return list(kept.values()), empty
