"""Files from NOAA's public buckets: ``python -m data.weather.fetch --start 2024-05-06T18 --end 2024-05-07 --out raw``.

Lists what GOES (imagery, lightning) and MRMS (radar) have for a span of time, keeps the scan nearest to each step and
fetches it. A second run goes on where the first one ended; ``fetched.jsonl`` holds a hash of every file.
"""

import argparse
import json
import re
import shutil
import sys
import threading
import time as clock
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from core.errors import InputError
from data.weather.bucket import Object, fetch_object, list_objects, matches

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
        raise InputError("nothing to fetch", remedy="Name --abi, --mrms or --glm")
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


@dataclass
class Fetched:
    """The record of a folder, ``fetched.jsonl``: a line {name, url, size, sha256} for each file that is whole."""

    folder: Path

    def __post_init__(self):
        self.path, self.lock = self.folder / "fetched.jsonl", threading.Lock()
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.sizes = {}
        if lines and not self.path.read_text().endswith("\n"):  # the last line of a killed run may be torn
            lines = lines[:-1]
            self.path.write_text("".join(f"{line}\n" for line in lines))
        for line in lines:
            entry = json.loads(line)
            self.sizes[entry["name"]] = entry["size"]

    def has(self, name, item: Object):
        """Whether a file is here and whole; one that the record does not know is read and compared."""
        path = self.folder / name
        if not path.exists() or path.stat().st_size != item.size:
            return False
        return self.sizes.get(name) == item.size or matches(path, item)

    def note(self, name, url, size, sha256):
        with self.lock, open(self.path, "a") as file:
            file.write(json.dumps({"name": name, "url": url, "size": size, "sha256": sha256}) + "\n")


def run(args, report=print):
    """Do what parsed arguments ask. Raises `InputError`, at the end, if some files did not come."""
    if args.end <= args.start:
        raise InputError(f"the span ends at {args.end} and starts at {args.start}", variable="end")
    jobs, record = [], Fetched(args.out)
    for stream in streams(args):
        with ThreadPoolExecutor(args.workers) as pool:
            pages = list(pool.map(lambda prefix, base=stream.base: list_objects(base, prefix), stream.prefixes))
        objects = [item for page in pages for item in page]
        chosen, empty = choose(objects, stream, args.start, args.end, args.every, args.every / 2)
        folder = "mrms" if stream.name in RADAR else "glm" if stream.name == "GLM" else "abi"
        wanted = [(stream.base, item, f"{folder}/{item.key}") for item in chosen]
        new = [job for job in wanted if not record.has(job[2], job[1])]
        jobs += new
        report(f"{stream.name}: {len(wanted)} files, {_gb(wanted)}, of which {len(new)} to fetch, {_gb(new)}"
               + (f"; no file for {len(empty)} steps: {_some(empty)}" if empty else ""))  # fmt: skip
    if args.dry_run:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    need, free = sum(item.size for _, item, _ in jobs), shutil.disk_usage(args.out).free
    if need > free:
        raise InputError(f"has {free / 1e9:.1f} GB free, {need / 1e9:.1f} are needed", file=args.out,
                         remedy="Choose another --out or a shorter span")  # fmt: skip
    _fetch_all(jobs, record, args.workers, need, report)


def _fetch_all(jobs, record, workers, need, report):
    begun = said = clock.monotonic()
    moved, failed = [], []

    def fetch(base, item, name):
        digest = fetch_object(base, item, record.folder / name, advance=moved.append)
        record.note(name, f"{base.rstrip('/')}/{item.key}", item.size, digest)

    with ThreadPoolExecutor(workers) as pool:
        waiting = [pool.submit(fetch, *job) for job in jobs]
        for done, job in enumerate(as_completed(waiting), 1):
            if isinstance(error := job.exception(), InputError):
                failed.append(error)
                report(f"failed: {error}")
            elif error:
                raise error
            now = clock.monotonic()
            if done == len(jobs) or now - said > 5:
                said, rate = now, sum(moved) / max(now - begun, 1e-9)
                left = f", {(need - sum(moved)) / rate / 60:.0f} min left" if rate and done < len(jobs) else ""
                report(f"{done}/{len(jobs)} files, {sum(moved) / 1e9:.2f} GB, {rate / 1e6:.1f} MB/s{left}")
    if failed:
        raise InputError(f"{len(failed)} of {len(jobs)} files did not come", file=failed[0].file,
                         remedy="Run the same command again: what is here stays")  # fmt: skip


def _gb(jobs):
    return f"{sum(item.size for _, item, _ in jobs) / 1e9:.2f} GB"


def _some(times):
    return ", ".join(str(t)[:16] for t in times[:4]) + (" ..." if len(times) > 4 else "")


def _parser():
    parser = argparse.ArgumentParser(prog="python -m data.weather.fetch", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--start", required=True, type=_time, help="first time, UTC: 2024-05-06 or 2024-05-06T18:00")
    add("--end", required=True, type=_time, help="end of the span, not included")
    add("--out", required=True, type=Path, help="folder; files go to abi/, mrms/ and glm/ in it")
    add("--abi", nargs="*", default=[], help="imagery: MCMIPC, MCMIPF, CMIPC, CMIPF, ACHAC ...")
    add("--bands", nargs="*", type=int, default=[2, 7, 8, 9, 10, 13], help="of CMIPC and CMIPF, 1 to 16")
    add("--mrms", nargs="*", default=[], choices=RADAR, help="composite and base reflectivity, rain rate")
    add("--glm", action="store_true", help="lightning, all files of the span")
    add("--satellite", default="east", help="east, west or a number: 16, 17, 18, 19")
    add("--every", type=lambda text: int(text) * 60 * SECOND, default=600 * SECOND, metavar="MINUTES",
        help="keep the scan nearest to each step; 0 keeps all (default 10)")  # fmt: skip
    add("--workers", type=int, default=4, help="files fetched at a time")
    add("--dry-run", action="store_true", help="list and count only")
    add("--goes-url", default=GOES, help="base address of the GOES buckets (default %(default)s)")
    add("--mrms-url", default=MRMS, help="base address of the MRMS bucket (default %(default)s)")
    return parser


def _time(text):
    try:
        return np.datetime64(text, "s")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write 2024-05-06T18:00") from None


def main(argv=None):
    args = _parser().parse_args(argv)
    try:
        run(args)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
