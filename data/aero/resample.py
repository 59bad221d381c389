"""Triangles out of polygons, and finer ones out of coarse: the surface stays the same set of points.

A CAD exporter covers a flat roof with two triangles where a flow solver uses thousands of cells. A model that learned
from the latter has to be asked at as many places, so long triangles are halved until there are about as many cells.
"""

import numpy as np

from data.aero.geometry import Polygons

BLOCK = 1 << 19


def fans(mesh):
    """Blocks (corners (t, 3, 3) fp64, cell of each triangle (t,)) of a fan of triangles around each first point."""
    for start in range(0, len(mesh), BLOCK):
        offsets = np.asarray(mesh.offsets[start : start + BLOCK + 1], dtype=np.int64)
        counts = np.maximum(np.diff(offsets) - 2, 0)
        owner = np.repeat(np.arange(len(counts)), counts)
        step = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        first = offsets[owner]
        index = np.stack([first, first + step + 1, first + step + 2], axis=1)
        yield mesh.points[mesh.connectivity[index]].astype(np.float64), owner + start


def resample(mesh, cells):
    """(Polygons of triangles, about ``cells`` of them or more, cell of ``mesh`` that each came from).

    The longest edge is halved until none exceeds a length that is found by trial, so cells are even in size whatever
    the file's were. Triangles that are already finer stay, so a fine mesh keeps its number. Pieces of neighbours need
    not share corners; areas, area vectors and centroids of the surface stay exact.
    """
    corners, owner = (np.concatenate(parts) for parts in zip(*fans(mesh)))
    area = np.linalg.norm(np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]), axis=1) / 2
    longest = 2 * np.sqrt(area.sum() / cells)
    for _ in range(6):
        pieces, piece_owner = _halved(corners, owner, longest)
        if len(pieces) == len(corners) or abs(len(pieces) / cells - 1) < 0.1:
            break
        longest *= np.clip(len(pieces) / cells, 0.25, 4) ** 0.5
    points = pieces.reshape(-1, 3)
    return Polygons(points, np.arange(len(points)), np.arange(len(pieces) + 1) * 3), piece_owner


def _halved(corners, owner, longest):
    done = []
    while len(corners):
        edges = np.linalg.norm(np.roll(corners, -1, axis=1) - corners, axis=2)
        long = edges.max(axis=1) > longest
        done.append((corners[~long], owner[~long]))
        corners, owner, first = corners[long], owner[long], edges[long].argmax(axis=1)
        rows = np.arange(len(corners))
        a, b, c = (corners[rows, (first + k) % 3] for k in range(3))
        middle = (a + b) / 2
        corners = np.concatenate([np.stack([a, middle, c], 1), np.stack([middle, b, c], 1)])
        owner = np.concatenate([owner, owner])
    return tuple(np.concatenate(parts) for parts in zip(*done))
