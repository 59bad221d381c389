"""Small files around the meshes: one-row CSVs, parameters and the solver's coefficients."""

import csv
import gzip
import json
from pathlib import Path

import numpy as np

from core.errors import InputError


def require(path, remedy="Fetch it, or leave this run out"):
    """The path, or InputError where there is no such file."""
    path = Path(path)
    if not path.is_file():
        raise InputError("no such file", file=path, remedy=remedy)
    return path


def read_row(path):
    """The only data row of a CSV as {name in lower case, no blanks: text}; headers differ in case and blanks."""
    with open(require(path), newline="") as stream:
        rows = [row for row in csv.reader(stream) if row]
    if len(rows) != 2 or len(rows[0]) != len(rows[1]):
        raise InputError(
            f"expected a header and one row of equal length, found {len(rows)} rows",
            file=path,
            remedy="Fetch the file again",
        )
    return {"".join(name.split()).lower(): value.strip() for name, value in zip(*rows)}


def number(row, name, path):
    """Value ``name`` of a row of ``read_row`` as a float."""
    try:
        return float(row[name.lower()])
    except KeyError:
        raise InputError(
            f"no such column; there are {' '.join(row)}", file=path, variable=name, remedy="Fetch the file again"
        ) from None
    except ValueError:
        raise InputError(
            f"not a number: {row[name.lower()]!r}", file=path, variable=name, remedy="Fetch the file again"
        ) from None


def read_parameters(path, names):
    """A JSON object that holds at least the numbers ``names``."""
    try:
        values = json.loads(require(path).read_text())
    except json.JSONDecodeError as error:
        raise InputError(f"no JSON: {error}", file=path, remedy="Write one JSON object") from None
    for name in names:
        if not isinstance(values.get(name), int | float):
            raise InputError("not a number or missing", file=path, variable=name, remedy=f"State all of {names}")
    return values


def read_coefficients(path):
    """OpenFOAM's forceCoeffs output, plain or gzipped: (header {name: text}, last row {column: float})."""
    opener = gzip.open if str(path).endswith(".gz") else open
    try:
        with opener(require(path), "rt") as stream:
            lines = stream.read().splitlines()
        comments = [line.lstrip("# ") for line in lines if line.startswith("#")]
        columns, rows = comments[-1].split(), [line.split() for line in lines if line.strip() and line[0] != "#"]
        last = dict(zip(columns, map(float, rows[-1]), strict=True))
        return {key.strip(): value for key, _, value in (line.partition(":") for line in comments) if value}, last
    except (EOFError, OSError, ValueError, IndexError) as error:
        raise InputError(
            f"not a complete table of coefficients ({error})",
            file=path,
            remedy="Copy it again from postProcessing/forceCoeffs",
        ) from None


def vector(text):
    """Numbers of "1.0" or "(1.4 0 -0.3)" as a list."""
    return np.array(text.strip().strip("()").split(), dtype=np.float64).tolist()
