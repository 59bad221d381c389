"""Meshes of a bent, rounded box: a lattice on the cube's surface, pushed out to the body, and layers around it."""

import numpy as np

from data.aero.geometry import Polygons

LAYERS, OUTER, GROWTH = 8, 3.0, 1.5


def _lattice(cells):
    """Quads (m, 4) on the surface of a box of about ``cells`` squares, outward, and vertices on the cube [-1, 1]^3."""
    sides = np.array([2.4, 1.1, 1.0])
    squares = 2 * (sides[0] * sides[1] + sides[1] * sides[2] + sides[2] * sides[0])
    n = np.maximum(2, np.round(sides * np.sqrt(cells / squares))).astype(int)
    quads = []
    for axis in range(3):
        u, v = (axis + 1) % 3, (axis + 2) % 3
        i, j = (k.ravel() for k in np.meshgrid(np.arange(n[u]), np.arange(n[v]), indexing="ij"))
        for level in (0, n[axis]):
            corners = np.zeros((len(i), 4, 3), dtype=int)
            corners[..., axis] = level
            corners[..., u] = i[:, None] + [0, 1, 1, 0]
            corners[..., v] = j[:, None] + [0, 0, 1, 1]
            quads.append(corners if level else corners[:, ::-1])
    corners = np.concatenate(quads)
    vertices, inverse = np.unique(corners.reshape(-1, 3), axis=0, return_inverse=True)
    return inverse.reshape(-1, 4), 2 * vertices / n - 1


def _round(vertices, power):
    return vertices / (vertices**power).sum(axis=1, keepdims=True) ** (1 / power)


def surface_mesh(place, cells, power, rng):
    """Closed Polygons with inward winding: quads, one in ten of them cut into two triangles; float32 points.

    place maps points of the rounded unit box to space.
    """
    quads, vertices = _lattice(cells)
    quads = quads[:, ::-1]
    cut = rng.random(len(quads)) < 0.1
    pieces = [row for quad, two in zip(quads, cut) for row in ((quad[:3], quad[[0, 2, 3]]) if two else (quad,))]
    offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])])
    return Polygons(place(_round(vertices, power)).astype(np.float32), np.concatenate(pieces), offsets)


def volume_mesh(place, cells, power):
    """Hexahedra in layers around the body, VTK's order of vertices; float32 points."""
    quads, vertices = _lattice(cells)
    radii = 1 + (OUTER - 1) * (GROWTH ** np.arange(LAYERS + 1) - 1) / (GROWTH**LAYERS - 1)
    unit = _round(vertices, power)
    points = np.concatenate([place(r * unit) for r in radii]).astype(np.float32)
    hexes = np.concatenate([np.hstack([quads, quads + len(unit)]) + k * len(unit) for k in range(LAYERS)])
    return Polygons(points, hexes.ravel(), np.arange(len(hexes) + 1) * 8)
