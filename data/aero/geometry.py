"""Surfaces made of arbitrary polygons: area vectors, centres, volume and distances, in double precision.

A surface is ``points`` (p, 3), ``connectivity`` (point numbers of all polygons, one after the other) and ``offsets``
(n + 1), as VTK stores them. A polygon need not be flat: its area vector is that of the fan around its mean point,
S = 1/2 sum_k (r_k - r) x (r_{k+1} - r), so the area vectors of a closed surface add up to zero exactly.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Polygons:
    """points (p, 3), connectivity (m,), offsets (n + 1,): cell i has points connectivity[offsets[i]:offsets[i + 1]]."""

    points: np.ndarray
    connectivity: np.ndarray
    offsets: np.ndarray

    def __len__(self):
        return len(self.offsets) - 1


BLOCK = 1 << 20


def _blocks(mesh):
    """The mesh in blocks of cells, so that temporaries stay small on meshes of 1e8 cells."""
    for start in range(0, len(mesh), BLOCK):
        offsets = np.asarray(mesh.offsets[start : start + BLOCK + 1], dtype=np.int64)
        yield Polygons(mesh.points, mesh.connectivity[offsets[0] : offsets[-1]], offsets - offsets[0])


def vertex_mean(mesh):
    """Mean of the vertices of every cell (n, 3), fp64. Needs only the incidence, so it also serves volume cells."""
    return np.concatenate([_vertex_mean(block) for block in _blocks(mesh)])


def _vertex_mean(mesh):
    counts = np.diff(mesh.offsets)
    return np.add.reduceat(mesh.points[mesh.connectivity].astype(np.float64), mesh.offsets[:-1]) / counts[:, None]


def _fan(mesh):
    """Fan triangles around the mean points: owner polygon, edges from the mean point to r_k and r_{k+1}, mean point."""
    owner = np.repeat(np.arange(len(mesh)), np.diff(mesh.offsets))
    following = np.arange(1, len(mesh.connectivity) + 1)
    following[mesh.offsets[1:] - 1] = mesh.offsets[:-1]
    mean = _vertex_mean(mesh)
    corners = mesh.points[mesh.connectivity].astype(np.float64) - mean[owner]
    return owner, corners, corners[following], mean


def area_vectors(mesh):
    """Area vectors S (n, 3) by the winding of the file, and face centres (n, 3), both fp64.

    The centre is the mean of the centres of the fan triangles, each counted by its area along S, which is how
    OpenFOAM places a face centre; moments agree with the solver's.
    """
    vectors, centers = zip(*(_area_vectors(block) for block in _blocks(mesh)))
    return np.concatenate(vectors), np.concatenate(centers)


def _area_vectors(mesh):
    owner, a, b, mean = _fan(mesh)
    parts = np.cross(a, b) / 2
    start = mesh.offsets[:-1]
    vectors = np.add.reduceat(parts, start)
    size = np.linalg.norm(vectors, axis=1)
    size = np.where(size > 0, size, 1)
    weight = np.einsum("ij,ij->i", parts, (vectors / size[:, None])[owner])
    shift = np.add.reduceat(weight[:, None] * (a + b) / 3, start)
    return vectors, mean + shift / size[:, None]


def signed_volume(vectors, centers):
    """Enclosed volume, m3: positive where the area vectors of a closed surface point outward (divergence theorem)."""
    return float(np.einsum("ij,ij->", vectors, centers - centers.mean(0)) / 3)


def triangles(mesh):
    """Corners (t, 3, 3), fp64, of triangles that cover the polygons: triangles as they are, others as fans."""
    counts = np.diff(mesh.offsets)
    simple = counts == 3
    direct = mesh.points[mesh.connectivity[mesh.offsets[:-1][simple, None] + np.arange(3)]].astype(np.float64)
    owner, a, b, mean = _fan(mesh)
    rest = ~simple[owner]
    centre = mean[owner[rest]]
    return np.concatenate([direct, np.stack([centre, centre + a[rest], centre + b[rest]], axis=1)])


def distance_to_surface(points, corners, *, candidates=16):
    """Distance (n,) fp64 from points (n, 3) to the triangles ``corners`` (t, 3, 3); positive on both sides.

    Long triangles are first cut until no edge exceeds 1 % of the surface's diagonal; of the pieces, the
    ``candidates`` with the nearest centres are measured exactly. A nearer piece can be missed only where more than
    that many centres crowd within one piece's radius, so the error stays below that radius, 0.7 % of the diagonal.
    """
    from scipy.spatial import cKDTree

    diagonal = np.linalg.norm(np.ptp(corners.reshape(-1, 3), axis=0))
    pieces = _refine(np.asarray(corners, dtype=np.float64), 0.01 * diagonal)
    tree = cKDTree(pieces.mean(axis=1))
    found = np.empty(len(points))
    for start in range(0, len(points), 65536):
        block = np.asarray(points[start : start + 65536], dtype=np.float64)
        _, near = tree.query(block, k=min(candidates, len(pieces)))
        near = near.reshape(len(block), -1)
        found[start : start + 65536] = np.min([_to_triangle(block, pieces[k]) for k in near.T], axis=0)
    return found


def _refine(corners, longest):
    """Halve the longest edge of every triangle until none is longer than ``longest``."""
    done = []
    while len(corners):
        edges = np.linalg.norm(np.roll(corners, -1, axis=1) - corners, axis=2)
        long = edges.max(axis=1) > longest
        done.append(corners[~long])
        corners, first = corners[long], edges[long].argmax(axis=1)
        rows = np.arange(len(corners))
        a, b, c = (corners[rows, (first + k) % 3] for k in range(3))
        middle = (a + b) / 2
        corners = np.concatenate([np.stack([a, middle, c], 1), np.stack([middle, b, c], 1)])
    return np.concatenate(done)


def _to_triangle(points, corners):
    """Distance of each point (n, 3) to its own triangle (n, 3, 3)."""
    a, b, c = corners[:, 0], corners[:, 1], corners[:, 2]
    edges = [_to_segment(points, u, v) for u, v in ((a, b), (b, c), (c, a))]
    normal = np.cross(b - a, c - a)
    size = np.linalg.norm(normal, axis=1)
    normal /= np.where(size, size, 1)[:, None]
    sides = [np.einsum("ij,ij->i", np.cross(v - u, points - u), normal) >= 0 for u, v in ((a, b), (b, c), (c, a))]
    above = np.abs(np.einsum("ij,ij->i", points - a, normal))
    return np.where(np.all(sides, axis=0) & (size > 0), above, np.min(edges, axis=0))


def _to_segment(points, a, b):
    along = b - a
    length = np.einsum("ij,ij->i", along, along)
    t = np.einsum("ij,ij->i", points - a, along) / np.where(length, length, 1)
    return np.linalg.norm(points - a - np.clip(t, 0, 1)[:, None] * along, axis=1)
