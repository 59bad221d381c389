"""Signed distance to a surface of triangles, and which way the surface lies.

The sign is that of the angle-weighted mean normal of all triangles that hold the nearest point, which is right on
faces, edges and corners of a closed surface alike (Baerentzen & Aanaes 2005, Signed Distance Computation Using the
Angle Weighted Pseudonormal). Which side is outside follows from the sign of the enclosed volume, so either winding
serves, as long as it is one. Near the holes of an open surface the sign means little.
"""

import numpy as np

BLOCK = 65536
TIE = 1e-6  # of the diagonal: triangles that are as near as the nearest


class NearestSurface:
    """The triangles ``corners`` (t, 3, 3), ready to be asked for the nearest point.

    Long triangles are first cut until no edge exceeds 1 % of the diagonal; of the pieces, the ``candidates`` with the
    nearest centres are measured exactly. A nearer piece can be missed only where more than that many centres crowd
    within one piece's radius, so the error stays below that radius, 0.7 % of the diagonal.
    """

    def __init__(self, corners, candidates=16):
        from scipy.spatial import cKDTree

        corners = np.asarray(corners, dtype=np.float64)
        self.diagonal = np.linalg.norm(np.ptp(corners.reshape(-1, 3), axis=0))
        middle = corners.reshape(-1, 3).mean(axis=0)
        six = np.einsum("ij,ij->", corners[:, 0] - middle, np.cross(corners[:, 1] - middle, corners[:, 2] - middle))
        self.pieces = _refined(corners, 0.01 * self.diagonal)
        normal = np.cross(self.pieces[:, 1] - self.pieces[:, 0], self.pieces[:, 2] - self.pieces[:, 0])
        size = np.linalg.norm(normal, axis=1, keepdims=True)
        self.normals = np.where(size > 0, normal / np.where(size > 0, size, 1), 0) * (-1 if six < 0 else 1)
        self.tree, self.candidates = cKDTree(self.pieces.mean(axis=1)), min(candidates, len(self.pieces))

    def query(self, points):
        """Of points (n, 3): signed distance (n,), positive outside, and direction (n, 3), both fp64.

        direction is the unit vector along which the distance grows, so the nearest point is
        points - distance * direction; on the surface itself it is the outward normal.
        """
        parts = [self._query(np.asarray(points[k : k + BLOCK], np.float64)) for k in range(0, len(points), BLOCK)]
        if not parts:
            return np.zeros(0), np.zeros((0, 3))
        return tuple(np.concatenate(part) for part in zip(*parts))

    def _query(self, points):
        near = self.tree.query(points, k=self.candidates)[1].reshape(len(points), -1).T
        found = np.stack([_nearest_on_triangle(points, self.pieces[k]) for k in near])
        away = points - found
        distance = np.linalg.norm(away, axis=2)
        best = distance.argmin(axis=0), np.arange(len(points))
        tied = distance <= distance[best] + TIE * self.diagonal
        normal = np.zeros_like(points)
        for k in range(len(near)):
            rows = np.flatnonzero(tied[k])
            angle = _angle_at(found[k, rows], self.pieces[near[k, rows]], TIE * self.diagonal)
            normal[rows] += angle[:, None] * self.normals[near[k, rows]]
        normal /= np.maximum(np.linalg.norm(normal, axis=1, keepdims=True), 1e-300)
        least, away = distance[best], away[best]
        sign = np.where(np.einsum("ij,ij->i", away, normal) < 0, -1.0, 1.0)
        apart = least > TIE * self.diagonal
        direction = np.where(apart[:, None], away * (sign / np.where(apart, least, 1))[:, None], normal)
        return sign * least, direction


def _nearest_on_triangle(points, corners):
    """The point (n, 3) of each triangle (n, 3, 3) that is nearest to its own point (n, 3)."""
    a, b, c = corners[:, 0], corners[:, 1], corners[:, 2]
    edges = np.stack([_nearest_on_segment(points, u, v) for u, v in ((a, b), (b, c), (c, a))])
    best = np.linalg.norm(points - edges, axis=2).argmin(axis=0)
    normal = np.cross(b - a, c - a)
    square = np.einsum("ij,ij->i", normal, normal)
    sides = [np.einsum("ij,ij->i", np.cross(v - u, points - u), normal) >= 0 for u, v in ((a, b), (b, c), (c, a))]
    height = np.einsum("ij,ij->i", points - a, normal) / np.where(square > 0, square, 1)
    within = np.all(sides, axis=0) & (square > 0)
    return np.where(within[:, None], points - height[:, None] * normal, edges[best, np.arange(len(points))])


def _nearest_on_segment(points, a, b):
    along = b - a
    length = np.einsum("ij,ij->i", along, along)
    t = np.einsum("ij,ij->i", points - a, along) / np.where(length > 0, length, 1)
    return a + np.clip(t, 0, 1)[:, None] * along


def _angle_at(points, corners, near):
    """Angle that each triangle fills around a point on it: its corner's, half a turn on an edge, a turn inside."""
    to = corners - points[:, None]
    at = np.linalg.norm(to, axis=2) <= near
    one = at.argmax(axis=1)[:, None]
    rows = np.arange(len(points))[:, None]
    corner, others = corners[rows, one], corners[rows, (one + [1, 2]) % 3]
    u, v = np.moveaxis(others - corner, 1, 0)
    sharp = np.arctan2(np.linalg.norm(np.cross(u, v), axis=1), np.einsum("ij,ij->i", u, v))
    following = np.roll(corners, -1, axis=1)
    edge = np.stack([_nearest_on_segment(points, corners[:, k], following[:, k]) for k in range(3)], axis=1)
    on_edge = (np.linalg.norm(points[:, None] - edge, axis=2) <= near).any(axis=1)
    return np.where(at.any(axis=1), sharp, np.where(on_edge, np.pi, 2 * np.pi))


def _refined(corners, longest):
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
