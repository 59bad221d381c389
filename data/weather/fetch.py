"""Files from NOAA's public buckets: ``python -m data.weather.fetch --start 2024-05-06T18 --end 2024-05-07 --out raw``.

Lists what GOES (imagery, lightning) and MRMS (radar) have for a span of time, keeps the scan nearest to each step and
fetches it; of HRRR it takes single fields. A second run goes on where the first one ended; ``fetched.jsonl`` holds a
hash of every file.
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
from data.weather.hrrr_bucket import HRRR, fetch_fields, hrrr_files
from data.weather.streams import GOES, MRMS, RADAR, SECOND, choose, streams


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

    def knows(self, name):
        """Whether a file is here with the size that the record says."""
        path = self.folder / name
        return path.exists() and path.stat().st_size == self.sizes.get(name)

    def note(self, name, url, size, sha256):
        with self.lock, open(self.path, "a") as file:
            file.write(json.dumps({"name": name, "url": url, "size": size, "sha256": sha256}) + "\n")


def run(args, report=print):
    """Do what parsed arguments ask. Raises `InputError`, at the end, if some files did not come."""
    if args.end <= args.start:
        raise InputError(f"the span ends at {args.end} and starts at {args.start}", variable="end")
    record = Fetched(args.out)
    jobs = _fields(args, record, report)
    for stream in [] if args.hrrr and not (args.abi or args.mrms or args.glm) else streams(args):
        jobs += _listed(args, stream, record, report)
    if args.dry_run:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    need, free = sum(job.size for job in jobs), shutil.disk_usage(args.out).free
    if need > free:
        raise InputError(f"has {free / 1e9:.1f} GB free, {need / 1e9:.1f} are needed", file=args.out,
                         remedy="Choose another --out or a shorter span")  # fmt: skip
    _fetch_all(jobs, record, args.workers, report)


@dataclass(frozen=True)
class _Job:
    """One file to bring: ``fetch(path, advance)`` returns its size and SHA-256; ``size``: bytes, as far as known."""

    name: str
    url: str
    size: int
    fetch: object


def _listed(args, stream, record, report):
    """Jobs for the files of a stream that are not here yet."""
    with ThreadPoolExecutor(args.workers) as pool:
        pages = list(pool.map(lambda prefix: list_objects(stream.base, prefix), stream.prefixes))
    chosen, empty = choose(sum(pages, []), stream, args.start, args.end, args.every, args.every / 2)
    folder = "mrms" if stream.name in RADAR else "glm" if stream.name == "GLM" else "abi"
    new = [item for item in chosen if not record.has(f"{folder}/{item.key}", item)]
    report(f"{stream.name}: {len(chosen)} files, {_gb(chosen)}, of which {len(new)} to fetch, {_gb(new)}"
           + (f"; no file for {len(empty)} steps: {_some(empty)}" if empty else ""))  # fmt: skip

    def job(item):
        def fetch(path, advance):
            return item.size, fetch_object(stream.base, item, path, advance=advance)

        return _Job(f"{folder}/{item.key}", f"{stream.base.rstrip('/')}/{item.key}", item.size, fetch)

    return [job(item) for item in new]


def _fields(args, record, report):
    """Jobs for the HRRR fields that are not here yet."""
    keys = hrrr_files(args.start, args.end, args.hrrr_leads) if args.hrrr else []
    tag = "_".join(re.sub(r"\W+", "-", field) for field in args.hrrr)
    names = {key: f"hrrr/{key.removesuffix('.grib2')}.{tag}.grib2" for key in keys}
    new = [key for key in keys if not record.knows(names[key])]
    if keys:
        report(f"HRRR: {len(keys)} files, of which {len(new)} to fetch")

    def job(key):
        def fetch(path, advance):
            size, digest = fetch_fields(args.hrrr_url, key, args.hrrr, path)
            advance(size)
            return size, digest

        return _Job(names[key], f"{args.hrrr_url.rstrip('/')}/{key}", 0, fetch)

    return [job(key) for key in new]


def _fetch_all(jobs, record, workers, report):
    begun = said = clock.monotonic()
    moved, failed = [], []

    def bring(job):
        record.note(job.name, job.url, *job.fetch(record.folder / job.name, moved.append))

    with ThreadPoolExecutor(workers) as pool:
        waiting = [pool.submit(bring, job) for job in jobs]
        for done, job in enumerate(as_completed(waiting), 1):
            if isinstance(error := job.exception(), InputError):
                failed.append(error)
                report(f"failed: {error}")
            elif error:
                raise error
            now = clock.monotonic()
            if done == len(jobs) or now - said > 5:
                said, rate = now, done / max(now - begun, 1e-9)
                left = f", {(len(jobs) - done) / rate / 60:.0f} min left" if done < len(jobs) else ""
                speed = sum(moved) / max(now - begun, 1e-9) / 1e6
                report(f"{done}/{len(jobs)} files, {sum(moved) / 1e9:.2f} GB, {speed:.1f} MB/s{left}")
    if failed:
        raise InputError(f"{len(failed)} of {len(jobs)} files did not come", file=failed[0].file,
                         remedy="Run the same command again: what is here stays")  # fmt: skip


def _gb(items):
    return f"{sum(item.size for item in items) / 1e9:.2f} GB"


def _some(times):
    return ", ".join(str(t)[:16] for t in times[:4]) + (" ..." if len(times) > 4 else "")


def _parser():
    parser = argparse.ArgumentParser(prog="python -m data.weather.fetch", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--start", required=True, type=_time, help="first time, UTC: 2024-05-06 or 2024-05-06T18:00")
    add("--end", required=True, type=_time, help="end of the span, not included")
    add("--out", required=True, type=Path, help="folder; files go to abi/, mrms/, glm/ and hrrr/ in it")
    add("--abi", nargs="*", default=[], help="imagery: MCMIPC, MCMIPF, CMIPC, CMIPF, ACHAC ...")
    add("--bands", nargs="*", type=int, default=[2, 7, 8, 9, 10, 13], help="of CMIPC and CMIPF, 1 to 16")
    add("--mrms", nargs="*", default=[], choices=RADAR, help="composite and base reflectivity, rain rate")
    add("--glm", action="store_true", help="lightning, all files of the span")
    add(
        "--hrrr",
        nargs="*",
        default=[],
        metavar="NAME:LEVEL",
        help="fields, such as 'REFC:entire atmosphere' 'HGT:500 mb'",
    )
    add(
        "--hrrr-leads",
        nargs="*",
        type=int,
        default=[1, 2],
        help="hours after the start of each hourly run (default 1 2)",
    )
    add("--satellite", default="east", help="east, west or a number: 16, 17, 18, 19")
    add("--every", type=lambda text: int(text) * 60 * SECOND, default=600 * SECOND, metavar="MINUTES",
        help="keep the scan nearest to each step; 0 keeps all (default 10)")  # fmt: skip
    add("--workers", type=int, default=4, help="files fetched at a time")
    add("--dry-run", action="store_true", help="list and count only")
    add("--goes-url", default=GOES, help="base address of the GOES buckets (default %(default)s)")
    add("--hrrr-url", default=HRRR, help="base address of the HRRR bucket (default %(default)s)")
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
