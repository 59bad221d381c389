"""Surfaces made of arbitrary polygons: area vectors, centres, volume, forces and distances, in double precision.

A surface is ``points`` (p, 3), ``connectivity`` (point numbers of all polygons, one after the other) and ``offsets``
(n + 1), as VTK stores them. A polygon need not be flat: its area vector is that of the fan around its mean point,
S = 1/2 sum_k (r_k - r) x (r_{k+1} - r), so the area vectors of a closed surface add up to zero exactly.
"""

from typing import NamedTuple

import numpy as np


class Polygons(NamedTuple):
    """points (p, 3), connectivity (m,), offsets (n + 1,): cell i has points connectivity[offsets[i]:offsets[i + 1]]."""

    points: np.ndarray
    connectivity: np.ndarray
    offsets: np.ndarray

    def __len__(self):
        return len(self.offsets) - 1


def vertex_mean(mesh):
    """Mean of the vertices of every cell (n, 3), fp64. Needs only the incidence, so it also serves volume cells."""
    counts = np.diff(mesh.offsets)
    return np.add.reduceat(mesh.points[mesh.connectivity].astype(np.float64), mesh.offsets[:-1]) / counts[:, None]


def _fan(mesh):
    """Fan triangles around the mean points, as (owner polygon, edges from the mean point to r_k and r_{k+1}, mean)."""
    counts = np.diff(mesh.offsets)
    owner = np.repeat(np.arange(len(mesh)), counts)
    following = np.arange(1, len(mesh.connectivity) + 1)
    following[mesh.offsets[1:] - 1] = mesh.offsets[:-1]
    mean = vertex_mean(mesh)
    corners = mesh.points[mesh.connectivity].astype(np.float64) - mean[owner]
    return owner, corners, corners[following], mean


def area_vectors(mesh):
    """Area vectors S (n, 3) by the winding of the file, and face centres (n, 3), both fp64.

    The centre is the area-weighted mean of the centres of the fan triangles, each counted by its part along S, which
    is how OpenFOAM places a face centre; moments agree with the solver's.
    """
    _, a, b, mean = _fan(mesh)
    parts = np.cross(a, b) / 2
    start = mesh.offsets[:-1]
    vectors = np.add.reduceat(parts, start)
    size = np.linalg.norm(vectors, axis=1)
    unit = vectors / np.where(size, size, 1)[:, None]
    weight = np.einsum("ij,ij->i", parts, np.repeat(unit, np.diff(mesh.offsets), axis=0))
    shift = np.add.reduceat(weight[:, None] * (a + b) / 3, start) / np.where(size, size, 1)[:, None]
    return vectors, mean + shift


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


def force_sums(position, normal, area, pressure, shear, *, rho, center):
    """Force and moment that the flow exerts on the cells, as sums that add up over chunks and ranks.

    Arguments are all numpy or all torch, of n cells: position (n, 3) m, unit *outward* normal (n, 3), area (n,) m2,
    kinematic pressure p (n,) and OpenFOAM wall shear stress tau (n, 3), both m2/s2; rho kg/m3; center (3,) m.
    Returns (4, 3) fp64: pressure force, friction force (N), pressure moment, friction moment about center (N m).

    Sign: the pressure pushes against the outward normal, f_p = -rho p n A. OpenFOAM writes tau with the sign of the
    stress that the wall exerts on the fluid (attached flow along +x has tau_x < 0), so the fluid pulls the wall by
    f_tau = -rho tau A. With area vectors that point into the body, S = -n A, this is the familiar rho (p S - tau A).
    Checked against the solver's coefficients of two Ahmed bodies to 1e-5 (tests/test_data_aero.py).
    """
    if isinstance(pressure, np.ndarray):
        xp, (position, normal, area, pressure, shear) = (
            np,
            (np.asarray(v, dtype=np.float64) for v in (position, normal, area, pressure, shear)),
        )
    else:
        import torch as xp

        position, normal, area, pressure, shear = (v.double() for v in (position, normal, area, pressure, shear))
    arm = position - xp.asarray(center, dtype=xp.float64, device=position.device)
    push = -rho * (pressure * area)[:, None] * normal
    drag = -rho * area[:, None] * shear
    return xp.stack([push.sum(0), drag.sum(0), xp.linalg.cross(arm, push).sum(0), xp.linalg.cross(arm, drag).sum(0)])


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
