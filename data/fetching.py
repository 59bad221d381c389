"""Many files into one folder: what is here and whole stays, the rest comes side by side, a record says what came."""

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from core.errors import InputError
from data.download import digests

EVERY = 10  # s between lines of progress


@dataclass(frozen=True)
class Job:
    """One file to bring: ``fetch(path, advance)`` returns its bytes and SHA-256; ``size``: bytes, as far as known."""

    name: str
    url: str
    size: int
    fetch: object


class Record:
    """``fetched.jsonl`` of a folder: a line {name, url, size, sha256} for each file that is whole."""

    def __init__(self, folder):
        self.folder, self.lock = Path(folder), threading.Lock()
        self.path = self.folder / "fetched.jsonl"
        text = self.path.read_text() if self.path.exists() else ""
        if not text.endswith("\n"):  # the last line of a killed run may be torn
            text = text[: text.rfind("\n") + 1]
            if self.path.exists():
                self.path.write_text(text)
        self.files = {entry["name"]: entry for entry in map(json.loads, text.splitlines())}

    def has(self, name, remote):
        """Whether the file of a `Remote` is here and whole; one that the record does not know is read and compared."""
        path, known = self.folder / name, self.files.get(name)
        if not path.is_file() or path.stat().st_size != remote.size:
            return False
        if known and remote.hashes.get("sha256", known["sha256"]) == known["sha256"]:
            return True
        found = digests(path)
        whole = all(found[kind] == value for kind, value in remote.hashes.items())
        if whole:
            self.note(name, remote.url, remote.size, found["sha256"])
        return whole

    def knows(self, name):
        """Whether a file is here with the size that the record says."""
        path = self.folder / name
        return name in self.files and path.is_file() and path.stat().st_size == self.files[name]["size"]

    def note(self, name, url, size, sha256):
        """Add one file."""
        entry = {"name": name, "url": url, "size": size, "sha256": sha256}
        with self.lock, open(self.path, "a") as file:
            self.files[name] = entry
            file.write(json.dumps(entry) + "\n")


def fetch_all(jobs, record, workers, report):
    """Bring all `Job` to the folder of a `Record`, with lines of progress; returns the names that did not come.

    Raises InputError, before anything is fetched, where the disk has no room for them.
    """
    record.folder.mkdir(parents=True, exist_ok=True)
    need, free = sum(job.size for job in jobs), shutil.disk_usage(record.folder).free
    if need > free:
        raise InputError(f"{gb(free)} free, {gb(need)} are needed", file=record.folder, remedy="Choose another --out")
    begun, moved, failed = time.monotonic(), [], []

    def bring(job):
        record.note(job.name, job.url, *job.fetch(record.folder / job.name, moved.append))

    def say(done):
        came, seconds = sum(moved), max(time.monotonic() - begun, 1e-9)
        share = came / need if need else done / len(jobs)
        left = f", {(1 / share - 1) * seconds / 60:.0f} min left" if 0 < share < 1 else ""
        report(f"{done}/{len(jobs)} files, {gb(came)}, {came / seconds / 1e6:.1f} MB/s{left}")

    with ThreadPoolExecutor(workers) as pool:
        waiting = {pool.submit(bring, job): job for job in jobs}
        with _Every(EVERY, lambda: say(sum(job.done() for job in waiting))):
            for job in as_completed(waiting):
                if isinstance(error := job.exception(), InputError):
                    failed.append(waiting[job].name)
                    report(f"{waiting[job].name}: failed: {error}")
                elif error:
                    raise error
    if jobs:
        say(len(jobs))
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


def gb(count):
    """Bytes in words."""
    return f"{count / 1e9:.2f} GB"
