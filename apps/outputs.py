"""Files that are whole or absent: written under a temporary name, renamed together when all of them are complete."""

import json
import os
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

from core import InputError


@contextmanager
def on_disk(path):
    """Raises InputError where ``path``, or the file that the error names, cannot be written."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot be written ({error.strerror or error})",
            file=error.filename or path,
            remedy="Choose another --out, or make room there",
        ) from error


def temporary(path):
    """Where to write what is to appear as ``path``; always the same, so that what a kill leaves is written over."""
    return Path(path).with_name(f".partial.{Path(path).name}")


@contextmanager
def written(*paths):
    """Temporary paths to write to, in place of ``paths``, which appear at the end, all that were written or none.

    Raises InputError where the folder cannot be written to.
    """
    paths = [Path(path) for path in paths]
    parts = [temporary(path) for path in paths]
    try:
        with on_disk(paths[0]):
            for path in paths:
                path.parent.mkdir(parents=True, exist_ok=True)
            yield parts
            for part, path in zip(parts, paths):
                if part.exists():
                    os.replace(part, path)
    finally:
        for part in parts:
            with suppress(OSError):
                part.unlink()


def write_json(path, values):
    """A dict as JSON, readable by people."""
    Path(path).write_text(json.dumps(values, indent=1, allow_nan=False) + "\n")


def drawn(draw, path, *args):
    """``draw(path, *args)``, or one line that says that there is no figure where matplotlib is not installed."""
    try:
        draw(path, *args)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print("no figure: matplotlib is not installed", file=sys.stderr)
        return False
    return True
