"""Files from NOAA's public buckets: ``python -m data.weather.fetch --start 2024-05-06T18 --end 2024-05-07 --out raw``.

Lists what GOES (imagery, lightning) and MRMS (radar) have for a span of time, keeps the scan nearest to each step and
fetches it; of HRRR and GFS it takes single fields. A second run goes on where the first one ended; ``fetched.jsonl``
holds a hash of every file.
"""

import argparse
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from core.command import command
from core.errors import InputError
from data.download import download
from data.fetching import Job, Record, fetch_all, gb
from data.weather.bucket import address, list_objects
from data.weather.model_buckets import GFS, HRRR, fetch_fields, gfs_files, hrrr_files
from data.weather.streams import GOES, MRMS, RADAR, SECOND, choose, streams


def run(args, report=print):
    """Do what parsed arguments ask. Raises `InputError`, at the end, if some files did not come."""
    if args.end <= args.start:
        raise InputError(f"the span ends at {args.end} and starts at {args.start}", variable="end")
    record = Record(args.out)
    kind = "wrfsubh" if args.hrrr_subhourly else "wrfsfc"
    hrrr, gfs = hrrr_files(args.start, args.end, args.hrrr_leads, kind), gfs_files(args.start, args.end, args.gfs_leads)
    jobs = _fields("hrrr", args.hrrr_url, args.hrrr, hrrr, record, report)
    jobs += _fields("gfs", args.gfs_url, args.gfs, gfs, record, report)
    for stream in [] if (args.hrrr or args.gfs) and not (args.abi or args.mrms or args.glm) else streams(args):
        jobs += _listed(args, stream, record, report)
    if args.dry_run:
        return
    if failed := fetch_all(jobs, record, args.workers, report):
        raise InputError(f"{len(failed)} of {len(jobs)} files did not come", file=args.out / failed[0],
                         remedy="Run the same command again: what is here stays")  # fmt: skip


def _listed(args, stream, record, report):
    """Jobs for the files of a stream that are not here yet."""
    with ThreadPoolExecutor(args.workers) as pool:
        pages = list(pool.map(lambda prefix: list_objects(stream.base, prefix), stream.prefixes))
    chosen, empty = choose(sum(pages, []), stream, args.start, args.end, args.every, args.every / 2)
    folder = "mrms" if stream.name in RADAR else "glm" if stream.name == "GLM" else "abi"
    new = [item for item in chosen if not record.has(f"{folder}/{item.key}", item)]
    report(f"{stream.name}: {len(chosen)} files, {_size(chosen)}, of which {len(new)} to fetch, {_size(new)}"
           + (f"; no file for {len(empty)} steps: {_some(empty)}" if empty else ""))  # fmt: skip

    def job(item):
        def fetch(path, advance):
            return item.size, download(item, path, advance=advance)

        return Job(f"{folder}/{item.key}", item.url, item.size, fetch)

    return [job(item) for item in new]


def _fields(model, base, fields, keys, record, report):
    """Jobs for the files of the fields of a model that are not here yet; none where no field is asked for."""
    if not fields:
        return []
    tag = "_".join(re.sub(r"\W+", "-", field) for field in fields)
    names = {key: f"{model}/{key.removesuffix('.grib2')}.{tag}.grib2" for key in keys}
    new = [key for key in keys if not record.knows(names[key])]
    report(f"{model.upper()}: {len(keys)} files, of which {len(new)} to fetch")

    def job(key):
        def fetch(path, advance):
            size, digest = fetch_fields(base, key, fields, path)
            advance(size)
            return size, digest

        return Job(names[key], address(base, key), 0, fetch)

    return [job(key) for key in new]


def _size(items):
    return gb(sum(item.size for item in items))


def _some(times):
    return ", ".join(str(t)[:16] for t in times[:4]) + (" ..." if len(times) > 4 else "")


def _parser():
    parser = argparse.ArgumentParser(prog="python -m data.weather.fetch", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--start", required=True, type=_time, help="first time, UTC: 2024-05-06 or 2024-05-06T18:00")
    add("--end", required=True, type=_time, help="end of the span, not included")
    add("--out", required=True, type=Path, help="folder; files go to abi/, mrms/, glm/, hrrr/ and gfs/ in it")
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
    add("--gfs", nargs="*", default=[], metavar="NAME:LEVEL", help="fields of the global model, such as 'HGT:500 mb'")
    add("--gfs-leads", nargs="*", type=int, default=list(range(4, 11)),
        help="hours after the start of each six-hourly run (default 4 to 10)")  # fmt: skip
    add("--hrrr-subhourly", action="store_true", help="of the files with the quarters of each hour, which have REFC")
    add("--satellite", default="east", help="east, west or a number: 16, 17, 18, 19")
    add("--every", type=lambda text: int(text) * 60 * SECOND, default=600 * SECOND, metavar="MINUTES",
        help="keep the scan nearest to each step; 0 keeps all (default 10)")  # fmt: skip
    add("--workers", type=int, default=4, help="files fetched at a time")
    add("--dry-run", action="store_true", help="list and count only")
    add("--goes-url", default=GOES, help="base address of the GOES buckets (default %(default)s)")
    add("--gfs-url", default=GFS, help="base address of the GFS bucket (default %(default)s)")
    add("--hrrr-url", default=HRRR, help="base address of the HRRR bucket (default %(default)s)")
    add("--mrms-url", default=MRMS, help="base address of the MRMS bucket (default %(default)s)")
    return parser


def _time(text):
    try:
        return np.datetime64(text, "s")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write 2024-05-06T18:00") from None


@command
def main(argv=None):
    run(_parser().parse_args(argv))


if __name__ == "__main__":
    main()
