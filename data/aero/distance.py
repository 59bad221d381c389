"""Signed distance to a surface of triangles, and which way the surface lies.

The sign is that of the angle-weighted mean normal of all triangles that hold the nearest point, which is right on
faces, edges and corners of a closed surface alike (Baerentzen & Aanaes 2005, Signed Distance Computation Using the
Angle Weighted Pseudonormal). Which side is outside follows from the sign of the enclosed volume, so either winding
serves, as long as it is one. Near the holes of an open surface the sign means little.

From afar the nearest of a million triangles is found among very many, from the surface itself among few. So a point
that is far asks a sparse sample of the triangles first, then those around the place that this leads to, and goes on
from the nearest point on them until it stays where it is.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

BLOCK = 4096  # points at a time: what belongs to them stays in the cache
TIE = 1e-6  # of the diagonal: triangles that are as near as the nearest
SPARSE, FEWEST = 16, 16384  # one triangle in so many is asked first, where there are more than the fewest
AROUND = 24  # triangles that are measured around a place
PLAIN = 0.999  # cosine beyond which the normal of one triangle tells the side


def threads():
    """Threads that a process may use: OMP_NUM_THREADS, which torchrun sets too, else all cores."""
    return int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)


class NearestSurface:
    """The triangles ``corners`` (t, 3, 3), ready to be asked for the nearest point.

    Long triangles are first cut until no edge exceeds 1 % of the diagonal; of the pieces, those with the nearest
    centres are measured exactly. A nearer one is missed where very unlike triangles crowd, or where two parts of the
    surface are about equally near to a far point: by less than a piece's radius, 0.7 % of the diagonal.
    """

    def __init__(self, corners):
        from scipy.spatial import cKDTree

        corners = np.asarray(corners, dtype=np.float64)
        self.diagonal = np.linalg.norm(np.ptp(corners.reshape(-1, 3), axis=0))
        middle = corners.reshape(-1, 3).mean(axis=0)
        six = np.einsum("ij,ij->", corners[:, 0] - middle, np.cross(corners[:, 1] - middle, corners[:, 2] - middle))
        self.pieces = _refined(corners, 0.01 * self.diagonal)
        self.frames = _Frames(self.pieces)
        normal = np.cross(self.frames.u, self.frames.v)
        size = np.linalg.norm(normal, axis=1, keepdims=True)
        self.normals = np.where(size > 0, normal / np.where(size > 0, size, 1), 0) * (-1 if six < 0 else 1)
        centers = self.pieces.mean(axis=1)
        few = max(FEWEST, len(centers) // SPARSE)
        self.first = np.random.default_rng(0).permutation(centers)[:few]
        self.tree, self.sparse = cKDTree(centers), cKDTree(self.first)
        self.near = 4 * np.sqrt(size.sum() / 2 / len(self.first))

    def query(self, points):
        """Of points (n, 3): signed distance (n,), positive outside, and direction (n, 3), both fp64.

        direction is the unit vector along which the distance grows, so the nearest point is
        points - distance * direction; on the surface itself it is the outward normal.
        """
        distance, direction = np.empty(len(points)), np.empty((len(points), 3))

        def fill(first):
            rows = slice(first, first + BLOCK)
            distance[rows], direction[rows] = self._query(np.asarray(points[rows], np.float64))

        with ThreadPoolExecutor(threads()) as pool:  # the tree and numpy let other threads run
            list(pool.map(fill, range(0, len(points), BLOCK)))
        return distance, direction

    def _query(self, points):
        piece, away = self._nearest(points)
        distance, normal = np.linalg.norm(away, axis=1), self.normals[piece]
        apart = distance > TIE * self.diagonal
        unit = away / np.where(apart, distance, 1)[:, None]
        cosine = np.einsum("ij,ij->i", unit, normal)
        doubtful = np.flatnonzero(~(np.abs(cosine) > PLAIN))
        if len(doubtful):
            normal[doubtful] = self._mean_normals(points[doubtful], away[doubtful], distance[doubtful])
            cosine[doubtful] = np.einsum("ij,ij->i", away[doubtful], normal[doubtful])
        sign = np.where(cosine < 0, -1.0, 1.0)
        return sign * distance, np.where(apart[:, None], sign[:, None] * unit, normal)

    def _nearest(self, points):
        """The piece (n,) that is nearest to each point, and the way (n, 3) to the point from there."""
        apart, seed = self.sparse.query(points)
        place = np.where((apart < self.near)[:, None], points, self.first[seed])
        piece, away, least = np.zeros(len(points), np.int64), np.empty_like(points), np.full(len(points), np.inf)
        rows = np.arange(len(points))
        while len(rows):
            reach, found = self._around(place)
            ways = self.frames.away(points[rows], found)
            square = np.einsum("nkd,nkd->nk", ways, ways)
            one = np.arange(len(rows)), square.argmin(axis=1)
            nearer = square[one] < least[rows]
            kept = rows[nearer]
            piece[kept], away[kept], least[kept] = (values[one][nearer] for values in (found, ways, square))
            foot = points[rows] - ways[one]
            on = nearer & (np.linalg.norm(foot - place, axis=1) > reach[:, -1] / 4)
            rows, place = rows[on], foot[on]
        return piece, away

    def _around(self, places):
        """Distances and numbers (n, k) of the pieces whose centres are nearest to ``places``."""
        count = min(AROUND, len(self.pieces))
        return (values.reshape(len(places), count) for values in self.tree.query(places, k=count))

    def _mean_normals(self, points, away, distance):
        """Unit normals (n, 3) at the nearest points: of all pieces that meet there, by their angles."""
        _, near = self._around(points - away)
        ways = self.frames.away(points, near)
        tied = np.linalg.norm(ways, axis=2) <= distance[:, None] + TIE * self.diagonal
        row, k = tied.nonzero()
        angle = _angle_at(points[row] - ways[row, k], self.pieces[near[row, k]], TIE * self.diagonal)
        normal = np.zeros_like(points)
        np.add.at(normal, row, angle[:, None] * self.normals[near[row, k]])  # one at least: the nearest, up to rounding
        return normal / np.maximum(np.linalg.norm(normal, axis=1, keepdims=True), 1e-300)


class _Frames:
    """Triangles as a corner, two edges and their products, so that a nearest point costs a few numbers a pair."""

    def __init__(self, corners):
        self.a, self.u, self.v = corners[:, 0], corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
        pairs = (self.u, self.u), (self.u, self.v), (self.v, self.v)
        self.products = np.stack([np.einsum("ij,ij->i", p, q) for p, q in pairs])

    def away(self, points, number):
        """Vectors (n, k, 3) to points (n, 3) from the nearest point of each of the triangles ``number`` (n, k).

        That point is a + s u + t v: inside, or on one of the edges, whichever of these four is nearest.
        """
        u, v, to = self.u[number], self.v[number], points[:, None] - self.a[number]
        uu, uv, vv = self.products[:, number]
        du, dv = np.einsum("nkd,nkd->nk", to, u), np.einsum("nkd,nkd->nk", to, v)

        def share(part, whole):
            return part / np.where(whole > 0, whole, 1)

        area = uu * vv - uv**2
        s, t = share(vv * du - uv * dv, area), share(uu * dv - uv * du, area)
        inside = (s >= 0) & (t >= 0) & (s + t <= 1) & (area > 0)
        least = np.where(inside, s * (s * uu + 2 * (t * uv - du)) + t * (t * vv - 2 * dv), np.inf)
        along = np.clip(share(dv - du + uu - uv, uu + vv - 2 * uv), 0, 1)
        first, second = np.clip(share(du, uu), 0, 1), np.clip(share(dv, vv), 0, 1)
        for p, q in ((first, 0.0), (0.0, second), (1 - along, along)):
            square = p * (p * uu + 2 * (q * uv - du)) + q * (q * vv - 2 * dv)
            better = square < least
            s, t, least = np.where(better, p, s), np.where(better, q, t), np.where(better, square, least)
        return to - s[..., None] * u - t[..., None] * v


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
