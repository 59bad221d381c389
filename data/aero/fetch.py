"""Runs of DrivAerML from its public store: python -m data.aero.fetch --runs 1-10 --out DIR

    --runs 1-10 12 | --split super_scarce     which runs: numbers, ranges, or all runs of a published split
    --what surface stl volume                 surface (0.7 GB a run), stl (0.15 GB), volume (about 50 GB, in parts)
    --dry-run                                 sizes only; nothing is written

What is here and whole stays, what broke off is gone on with: run the same command again. ``fetched.jsonl`` in DIR holds
address, length and SHA-256 of every file. A run that the store does not have, or whose file does not come, is named
and the others go on; the exit status is then 2. Source: arXiv 2408.11969v2 (CC BY-SA 4.0).
"""

import argparse
from concurrent.futures import ThreadPoolExecutor

from core.command import command
from core.errors import InputError
from data.aero.splits import OFFICIAL, official_runs
from data.download import ask, download
from data.fetching import Job, Record, fetch_all, gb

BASE = "https://huggingface.co/datasets/neashton/drivaerml/resolve/main"
WHAT = {
    "surface": (
        "boundary_{i}.vtp",
        "geo_ref_{i}.csv",
        "geo_parameters_{i}.csv",
        "force_mom_{i}.csv",
        "force_mom_constref_{i}.csv",
    ),
    "stl": ("drivaer_{i}.stl",),
    "volume": ("volume_{i}.vtu.00.part", "volume_{i}.vtu.01.part", "volume_{i}.vtu.02.part"),
}
SOMETIMES = (".02.part",)  # ten of the 484 volumes have a third part


def fetch(args, report=print):
    """Do what parsed arguments ask. Raises InputError, at the end, where files did not come."""
    runs = _runs(args)
    names = [f"run_{i}/{name.format(i=i)}" for i in runs for kind in args.what for name in WHAT[kind]]
    with ThreadPoolExecutor(args.parallel) as pool:
        found = list(pool.map(lambda name: ask(f"{args.base.rstrip('/')}/{name}"), names))
    remotes = {name: remote for name, remote in zip(names, found) if remote is not None}
    absent = [name for name in names if name not in remotes and not name.endswith(SOMETIMES)]
    for run in sorted({name.split("/")[0] for name in absent}, key=lambda run: int(run[4:])):
        report(f"missing in the store: {' '.join(name for name in absent if name.startswith(run + '/'))}")
    record, failed = Record(args.out), []
    new = remotes if args.dry_run else {n: r for n, r in remotes.items() if not record.has(n, r)}
    report(f"{len(runs)} runs, {len(remotes)} files, {_size(remotes)}; to fetch {len(new)}, {_size(new)}")
    if args.dry_run:
        for name, remote in remotes.items():
            report(f"{remote.size:>15,}  {name}  {' '.join(f'{k} {v}' for k, v in remote.hashes.items())}")
    elif new:
        failed = fetch_all(
            [_job(name, remote, args.tries) for name, remote in new.items()], record, args.parallel, report
        )
    if absent or failed:
        raise InputError(
            f"{len(absent)} files are not in the store and {len(failed)} did not come",
            file=args.base,
            variable=" ".join([*absent, *failed][:5]),
            remedy="Run the same command again: what is here stays; leave out runs that the store does not have",
        )


def _runs(args):
    if args.split:
        return official_runs(args.split)
    found = []
    for text in args.runs:
        first, _, last = text.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise InputError(f"{text!r} is no run number or range", variable="runs", remedy="Write --runs 1-10 12")
        found += range(int(first), int(last or first) + 1)
    return list(dict.fromkeys(found))


def _job(name, remote, tries):
    def fetch(path, advance):
        return remote.size, download(remote, path, tries=tries, advance=advance)

    return Job(name, remote.url, remote.size, fetch)


def _size(remotes):
    return gb(sum(remote.size for remote in remotes.values()))


def parser():
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m data.aero.fetch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = p.add_mutually_exclusive_group(required=True)
    which.add_argument("--runs", nargs="+", metavar="N", help="run numbers and ranges: 1-10 12")
    which.add_argument("--split", choices=OFFICIAL, help="all runs of a published split")
    p.add_argument("--out", required=True, metavar="DIR", help="folder for run_1, run_2, ...; data.aero.build reads it")
    p.add_argument("--what", nargs="+", choices=tuple(WHAT), default=["surface", "stl"], help="default %(default)s")
    p.add_argument("--base", default=BASE, metavar="URL", help="address that holds run_1, ... (default %(default)s)")
    p.add_argument("--parallel", type=int, default=4, help="files fetched at a time (default %(default)s)")
    p.add_argument("--tries", type=int, default=4, help="of a file whose transfer breaks (default %(default)s)")
    p.add_argument("--dry-run", action="store_true", help="list what there is, with sizes and stated hashes")
    return p


@command
def main(argv=None):
    fetch(parser().parse_args(argv), lambda text: print(text, flush=True))


if __name__ == "__main__":
    main()
