"""Volumes of cells from their faces, by the divergence theorem: V = 1/3 sum_f S_f . (r_f - r).

S_f is the area vector of a face's fan of triangles around its mean point r_f, so a warped face has one shape for both
of its cells and the volumes of a mesh add up to that of its domain, as in OpenFOAM. VTK's own filter cuts warped
hexahedra without regard to their neighbours, and takes the convex hull of a polyhedron for the polyhedron.
"""

import numpy as np

from data.aero.geometry import Polygons, area_vectors, vertex_mean

POLYHEDRON = 42
_HEXAHEDRON = ((0, 3, 2, 1), (4, 5, 6, 7), (0, 1, 5, 4), (1, 2, 6, 5), (2, 3, 7, 6), (3, 0, 4, 7))
_BY_VOXEL = (0, 1, 3, 2, 4, 5, 7, 6)
# faces of VTK's cell types, all of one winding
FACES = {
    10: ((0, 2, 1), (0, 1, 3), (1, 2, 3), (2, 0, 3)),  # tetrahedron
    11: tuple(tuple(_BY_VOXEL[k] for k in face) for face in _HEXAHEDRON),  # voxel
    12: _HEXAHEDRON,
    13: ((0, 1, 2), (3, 5, 4), (0, 3, 4, 1), (1, 4, 5, 2), (2, 5, 3, 0)),  # wedge
    14: ((0, 3, 2, 1), (0, 1, 4), (1, 2, 4), (2, 3, 4), (3, 0, 4)),  # pyramid
}


def cell_volumes(mesh, types, faces=None):
    """Volumes (n,) m3, fp64, of cells whose points ``mesh`` (Polygons) lists; types (n,): VTK's, of ``FACES`` or 42.

    faces: of the polyhedra, (their number (f,) among the polyhedra, Polygons of their faces), outward or inward alike.
    A type that is not known has the volume NaN.
    """
    center, out = vertex_mean(mesh), np.full(len(mesh), np.nan)
    for kind in np.unique(types):
        cells = np.flatnonzero(types == kind)
        if kind == POLYHEDRON:
            out[cells] = _enclosed(center[cells], *faces)
        elif kind in FACES:
            out[cells] = _enclosed(center[cells], *_faces_of(mesh, cells, FACES[kind]))
    return np.abs(out)


def face_stream(stream, starts):
    """(number of its polyhedron (f,), first entry (f,), points (f,)) of every face in VTK's stream of face lists.

    stream: faces of all polyhedra, each [faces, points of a face, its points, points of the next, ...]; starts: where
    each polyhedron's begins.
    """
    count, at = stream[starts], starts + 1
    owners, firsts, sizes = [], [], []
    for k in range(int(count.max(initial=0))):
        owner = np.flatnonzero(count > k)
        size = stream[at[owner]]
        owners.append(owner), firsts.append(at[owner] + 1), sizes.append(size)
        at[owner] += size + 1
    return tuple(np.concatenate([np.zeros(0, np.int64), *parts]) for parts in (owners, firsts, sizes))


def taken(points, values, firsts, sizes):
    """Polygons of values[firsts[i] : firsts[i] + sizes[i]]."""
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    index = np.arange(offsets[-1]) + np.repeat(firsts - offsets[:-1], sizes)
    return Polygons(points, values[index], offsets)


def _faces_of(mesh, cells, table):
    """As ``faces`` of ``cell_volumes``, of cells that all have the faces of ``table``."""
    start, sizes = np.asarray(mesh.offsets)[cells], [len(face) for face in table]
    corners = mesh.connectivity[start[:, None] + np.concatenate(table)]
    offsets = np.concatenate([[0], np.cumsum(np.tile(sizes, len(cells)))])
    return np.repeat(np.arange(len(cells)), len(table)), Polygons(mesh.points, corners.ravel(), offsets)


def _enclosed(center, owner, faces):
    vectors, middle = area_vectors(faces)[0], vertex_mean(faces)
    parts = np.einsum("ij,ij->i", vectors, middle - center[owner]) / 3
    return np.bincount(owner, parts, len(center))
