"""Runs of DrivAerML from its public store: python -m data.aero.fetch --runs 1-10 --out DIR

    --runs 1-10 12 | --split super_scarce     which runs: numbers, ranges, or all runs of a published split
    --what surface stl volume                 surface (0.7 GB a run), stl (0.15 GB), volume (about 50 GB, in parts)
    --dry-run                                 sizes only; nothing is written

What is here and whole stays, what broke off is gone on with: run the same command again. ``fetched.json`` in DIR holds
address, length and SHA-256 of every file. A run that the store does not have, or whose file does not come, is named
and the others go on; the exit status is then 2. Source: arXiv 2408.11969v2 (CC BY-SA 4.0).
"""

import argparse
import json
import os
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from core.errors import InputError
from data.aero.download import ask, digests, download
from data.aero.splits import OFFICIAL, official_runs

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


class Record:
    """``fetched.json`` of a folder: {name: {"url", "bytes", "sha256"}} of files that are whole; rewritten whole."""

    def __init__(self, folder):
        self.folder, self.path, self.lock = Path(folder), Path(folder) / "fetched.json", threading.Lock()
        self.files = json.loads(self.path.read_text()) if self.path.exists() else {}

    def has(self, name, remote):
        """Whether the file is here and whole; one that the record does not know is read and compared."""
        path, known = self.folder / name, self.files.get(name)
        if not path.is_file() or path.stat().st_size != remote.size:
            return False
        if known is None:
            found = digests(path)
            if any(found[kind] != value for kind, value in remote.hashes.items()):
                return False
            self.note(name, remote, found["sha256"])
            return True
        return remote.hashes.get("sha256", known["sha256"]) == known["sha256"]

    def note(self, name, remote, sha256):
        """Add one file."""
        with self.lock:
            self.files[name] = {"url": remote.url, "bytes": remote.size, "sha256": sha256}
            temporary = self.path.with_name(f".{os.getpid()}.{self.path.name}")
            temporary.write_text(json.dumps(self.files, indent=1, sort_keys=True) + "\n")
            os.replace(temporary, self.path)


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
    record = Record(args.out)
    jobs = remotes if args.dry_run else {n: r for n, r in remotes.items() if not record.has(n, r)}
    need = sum(remote.size for remote in jobs.values())
    report(f"{len(runs)} runs, {len(remotes)} files, {_gb(sum(r.size for r in remotes.values()))}", end="")
    report(f"; to fetch {len(jobs)}, {_gb(need)}")
    failed = []
    if args.dry_run:
        for name, remote in remotes.items():
            report(f"{remote.size:>15,}  {name}  {' '.join(f'{k} {v}' for k, v in remote.hashes.items())}")
    elif jobs:
        _check_room(args.out, need)
        failed = _fetch_all(jobs, record, args, need, report)
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


def _check_room(out, need):
    Path(out).mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out).free
    if need > free:
        raise InputError(f"{_gb(free)} free, {_gb(need)} are needed", file=out, remedy="Choose another --out")


def _fetch_all(jobs, record, args, need, report):
    """Fetches jobs {name: Remote}, with a line a file and every ten seconds; returns the names that did not come."""
    begun = time.monotonic()
    moved, failed = [], []

    def fetch_one(name, remote):
        record.note(name, remote, download(remote, record.folder / name, tries=args.tries, advance=moved.append))

    def rate():
        came, seconds = sum(moved), max(time.monotonic() - begun, 1e-9)
        left = max(need - came, 0) / max(came, 1) * seconds
        return f"{_gb(came)} of {_gb(need)}, {came / seconds / 1e6:.1f} MB/s, {left / 60:.0f} min left"

    with ThreadPoolExecutor(args.parallel) as pool, _Every(10, lambda: report(rate())):
        waiting = {pool.submit(fetch_one, *job): job[0] for job in jobs.items()}
        for done, job in enumerate(as_completed(waiting), 1):
            name, error = waiting[job], job.exception()
            if error is not None and not isinstance(error, InputError | FileNotFoundError):
                raise error
            if error is not None:
                failed.append(name)
            report(f"{done}/{len(jobs)} {name}: {f'failed: {error}' if error else rate()}")
    return failed


class _Every:
    """Calls ``action`` every ``seconds`` from a thread, until left."""

    def __init__(self, seconds, action):
        self.seconds, self.action, self.over = seconds, action, threading.Event()

    def __enter__(self):
        self.thread = threading.Thread(target=self._turn, daemon=True)
        self.thread.start()

    def _turn(self):
        while not self.over.wait(self.seconds):
            self.action()

    def __exit__(self, *error):
        self.over.set()
        self.thread.join()


def _gb(count):
    return f"{count / 1e9:.2f} GB"


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


def main(argv=None):
    """Fetch; returns the exit status."""
    args = parser().parse_args(argv)
    try:
        fetch(args, lambda *text, end="\n": print(*text, end=end, flush=True))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
