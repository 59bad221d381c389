"""Surfaces made of arbitrary polygons: area vectors, centres and volume, in double precision.

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
