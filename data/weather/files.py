"""Raw files that may be broken: each is named and left out, unless the whole build is to stop at the first."""

from pathlib import Path

from core.errors import InputError


class BrokenFile(InputError):
    """A file that was cut short or damaged: the others are still good."""


def find_files(folder, *patterns):
    """Files below ``folder`` (or the file itself), sorted by name. Raises `InputError` when there is none."""
    folder = Path(folder)
    files = [folder] if folder.is_file() else sorted({f for p in patterns for f in folder.rglob(p)})
    if not files:
        raise InputError(f"holds no file like {' or '.join(patterns)}", file=folder,
                         remedy="Check the folder")  # fmt: skip
    return files


class Attempt:
    """A function of a path whose answer is (value, None), or (None, why) for a `BrokenFile` unless ``strict``."""

    def __init__(self, function, strict):
        self.function, self.strict = function, strict

    def __call__(self, path):
        try:
            return self.function(path), None
        except BrokenFile as error:
            if self.strict:
                raise
            return None, str(error)
