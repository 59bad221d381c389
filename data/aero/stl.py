"""STL files with their solids, ASCII or binary, without a library: corners as they stand in the file.

VTK merges points, drops triangles without area and forgets the names of solids; forces by part need all three.
"""

import os
import re

import numpy as np

from core.errors import InputError
from data.aero.files import require

_RECORD = np.dtype([("normal", "<f4", 3), ("corners", "<f4", (3, 3)), ("attribute", "<u2")])
_SOLID = re.compile(rb"^[ \t]*solid\b[ \t]*([^\r\n]*)", re.MULTILINE)
_VERTEX = re.compile(rb"vertex\s+(\S+)\s+(\S+)\s+(\S+)")


def read_solids(path):
    """(corners (t, 3, 3) float32, solid of each triangle (t,) int32, names of the solids).

    A binary file is one solid. Raises InputError for files that are missing, cut short, no STL, or without triangles.
    """
    path = require(path, "Name the STL file of the body")
    size = os.path.getsize(path)
    with open(path, "rb") as stream:
        head = stream.read(84)
        if len(head) == 84 and size == 84 + 50 * int.from_bytes(head[80:], "little"):
            records = np.frombuffer(stream.read(), _RECORD)
            corners, solids, names = records["corners"].copy(), np.zeros(len(records), np.int32), [path.stem]
        else:
            corners, solids, names = _read_text(head + stream.read(), path)
    if not len(corners):
        raise InputError("no triangles", file=path, remedy="Export the geometry again")
    return corners, solids, names


def _read_text(text, path):
    starts = list(_SOLID.finditer(text))
    if not starts or text[: starts[0].start()].strip() or b"endsolid" not in text[-256:]:
        raise InputError("cut short or not an STL file", file=path, remedy="Export or fetch the file again")
    ends = [start.start() for start in starts[1:]] + [len(text)]
    parts = [_corners(text[start.end() : end], path) for start, end in zip(starts, ends)]
    names = [start[1].decode(errors="replace").strip() or f"solid {k}" for k, start in enumerate(starts)]
    return np.concatenate(parts), np.repeat(np.arange(len(parts), dtype=np.int32), [len(p) for p in parts]), names


def _corners(text, path):
    found = _VERTEX.findall(text)
    facets = text.count(b"endfacet")
    try:
        values = np.array(found, dtype=np.float32).reshape(-1, 3, 3)
    except ValueError:
        values = np.empty((0, 3, 3), np.float32)
    if len(values) != facets:
        raise InputError(
            f"{facets} facets, but {len(found)} readable vertices: damaged",
            file=path,
            remedy="Export or fetch the file again",
        )
    return values
