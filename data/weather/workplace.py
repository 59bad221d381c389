"""A directory that takes its name only when it is complete, and that a killed run finds again where it left it.

Work goes on in ``.NAME.partial`` beside the target. Bad input takes it away; what a kill, a full disk or a lost worker
leaves is kept, and the next run with the same key goes on from the last saved state.
"""

import fcntl
import json
import os
import shutil
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from core.errors import InputError

STATE = "resume.json"


class Workplace:
    """``path`` of the work; ``state``: what a killed run saved last, or None at a new start."""

    def __init__(self, path, key, state):
        self.path, self.key, self.state = path, key, state

    def save(self, state):
        """Keep a state (plain values) for a run that goes on after a kill."""
        part = self.path / f"{STATE}.part"
        part.write_text(json.dumps({"key": self.key, "state": state}))
        part.replace(self.path / STATE)


@contextmanager
def workplace(path, key, keep):
    """The `Workplace` that takes the place of ``path`` on success.

    key: text that is equal only for runs of equal results, None for one that cannot go on. With ``keep`` it starts as
    a copy of ``path``, frames being hard links, because an append never rewrites one. Raises `InputError` for a path
    that holds something else, or on which another process works.
    """
    if path.exists() and not (path / "zarr.json").is_file():
        raise InputError("is no archive, and is not touched", file=path, remedy="Choose another path")
    if keep and not path.exists():
        raise InputError("does not exist", file=path, remedy="Build it first")
    path.parent.mkdir(parents=True, exist_ok=True)
    work, old = (path.with_name(f".{path.name}.{kind}") for kind in ("partial", "old"))
    with _only(path):
        try:
            yield _opened(path, work, key, keep)
        except BaseException as error:
            if key is None or isinstance(error, InputError):
                shutil.rmtree(work, ignore_errors=True)
            raise
        (work / STATE).unlink(missing_ok=True)
        _swap(work, path, old)


def _opened(path, work, key, keep):
    if (work / STATE).is_file():
        saved = json.loads((work / STATE).read_text())
        if key and saved["key"] == key:
            return Workplace(work, key, saved["state"])
    shutil.rmtree(work, ignore_errors=True)
    if keep:
        shutil.copytree(path, work, copy_function=partial(_link_frame, path))
    return Workplace(work, key, None)


@contextmanager
def _only(path):
    """One process at a time; the system lets go of the lock when the process ends, however it ends."""
    name = path.with_name(f".{path.name}.lock")
    with open(name, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError("is being written by another process", file=path, remedy="Wait for it") from None
        try:
            yield
        finally:
            name.unlink()


def _swap(work, path, old):
    if path.exists():
        os.replace(path, old)
    try:
        os.replace(work, path)
    except OSError:
        if old.exists():
            os.replace(old, path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _link_frame(root, source, target):
    inside = Path(source).relative_to(root).parts
    try:
        (os.link if inside[0] in ("fields", "valid") and inside[1] == "c" else shutil.copy2)(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
