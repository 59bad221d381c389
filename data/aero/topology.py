"""Which way cells wind, and where a surface is open: by the edges that cells share.

Two neighbours wind alike where they run through their common edge in opposite directions. Following that from cell to
cell turns every piece into one winding; a closed piece is outward where it encloses a positive volume. Where more than
two cells meet at an edge there is no telling who is whose neighbour, and such a piece does not count as closed.
"""

from dataclasses import dataclass

import numpy as np

from core.errors import InputError
from data.aero.geometry import area_vectors


@dataclass(frozen=True)
class Winding:
    """turn (n,): 1 or -1, by which a cell's area vector points outward. vectors, centers (n, 3): of the cells as in the
    file. open_edges: edges of one cell only; crowded_edges: of more than two cells; mixed: edges whose two cells wind
    unlike; minority: share of the area that winds against most of its piece; open_share: |sum S| / sum |S| after
    turning, 0 for a closed surface."""

    turn: np.ndarray
    vectors: np.ndarray
    centers: np.ndarray
    open_edges: int
    crowded_edges: int
    mixed: int
    minority: float
    open_share: float

    @property
    def name(self):
        """outward, inward or mixed, of the cells as in the file."""
        return "mixed" if len(np.unique(self.turn)) > 1 else "outward" if self.turn[0] > 0 else "inward"


def winding(mesh, file):
    """Winding of Polygons. Corners at the same place count as one point, so a soup of triangles has edges too.

    A closed piece is turned by its own volume; an open one keeps the winding that most of its area has, and follows
    the sign of the volume of the whole. Raises InputError for a surface with one side only.
    """
    vectors, centers = area_vectors(mesh)
    pairs, unlike, (lone, crowded), loose = _neighbours(mesh)
    turn, piece = _followed(len(mesh), pairs, unlike, file)
    count = piece.max() + 1
    arms = np.einsum("ij,ij->i", vectors, centers - centers.mean(axis=0))
    area = np.linalg.norm(vectors, axis=1)
    volume = np.bincount(piece, turn * arms, count)
    most = np.bincount(piece, turn * area, count)
    majority = np.where(most < 0, -1, 1)
    closed = np.bincount(piece[loose], minlength=count) == 0
    whole = -1 if arms.sum() < 0 else 1
    sign = np.where(closed & (volume != 0), np.where(volume < 0, -1, 1), majority * whole)
    turn = turn * sign[piece]
    share = np.linalg.norm((turn[:, None] * vectors).sum(axis=0)) / max(area.sum(), 1e-300)
    minority = (area.sum() - np.abs(most).sum()) / 2 / max(area.sum(), 1e-300)
    return Winding(turn, vectors, centers, lone, crowded, int(unlike.sum()), float(minority), float(share))


def disagreement(mesh, file):
    """(edges of one cell only, edges whose two cells wind unlike, share of the area that winds against most of its
    piece) of Polygons; errors as of ``winding``, which is asked only where some wind unlike."""
    _, unlike, (lone, _), _ = _neighbours(mesh)
    return lone, int(unlike.sum()), winding(mesh, file).minority if unlike.any() else 0.0


def merged(points):
    """Number of the place of each point (p,), the same for points that coincide exactly."""
    order = np.lexsort(points.T)
    placed = points[order]
    number = np.empty(len(points), dtype=np.int64)
    number[order] = np.cumsum(np.append(0, np.any(placed[1:] != placed[:-1], axis=1)))
    return number


def _neighbours(mesh):
    """Pairs of cells (m, 2) that share an edge with no third, whether they wind unlike (m,), the numbers of edges of
    one cell and of more than two, and the cells at those edges."""
    place = merged(mesh.points)[mesh.connectivity]
    following = np.arange(1, len(place) + 1)
    following[np.asarray(mesh.offsets[1:]) - 1] = mesh.offsets[:-1]
    start, end = place, place[following]
    owner = np.repeat(np.arange(len(mesh)), np.diff(mesh.offsets))
    kept = start != end
    kept &= (np.bincount(owner[kept], minlength=len(mesh)) > 2)[owner]  # a cell that is a line has no sides
    start, end, owner = start[kept], end[kept], owner[kept]
    key = np.minimum(start, end) * (place.max() + 1) + np.maximum(start, end)
    order = np.argsort(key, kind="stable")
    key, owner, forward = key[order], owner[order], (start < end)[order]
    first = np.flatnonzero(np.append(True, key[1:] != key[:-1])) if len(key) else np.empty(0, int)
    count = np.diff(np.append(first, len(key)))
    two = first[count == 2]
    pairs = np.stack([owner[two], owner[two + 1]], axis=1)
    few, many = int((count == 1).sum()), int((count > 2).sum())
    return pairs, forward[two] == forward[two + 1], (few, many), owner[np.repeat(count != 2, count)]


def _followed(cells, pairs, unlike, file):
    """Turn of each cell (n,) that makes neighbours wind alike, and the connected piece (n,) that it belongs to.

    Every cell stands twice in one graph, as it is and turned; an edge joins the two states of its cells that agree.
    """
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    one, other = pairs.T
    shift = np.where(unlike, cells, 0)
    rows = np.concatenate([one, one + cells])
    columns = np.concatenate([other + shift, other + cells - shift])
    graph = coo_matrix((np.ones(len(rows), np.int8), (rows, columns)), shape=(2 * cells, 2 * cells))
    label = connected_components(graph, directed=False)[1]
    plain, turned = label[:cells], label[cells:]
    if np.any(plain == turned):
        raise InputError(
            "has one side only (it turns into itself like a Moebius strip), so no normal points outward",
            file=file,
            remedy="Repair the mesh",
        )
    return np.where(plain < turned, 1, -1), np.unique(np.minimum(plain, turned), return_inverse=True)[1]
