"""Cells of a VTU file by ranges of rows: their points, centres and volumes.

The points of the mesh are wanted in any order, so they wait in a temporary file that is mapped and, after every range,
forgotten again: what stays in memory does not grow with the mesh.
"""

import mmap
import tempfile

import numpy as np

from core.errors import InputError
from data.aero.cell_volumes import FACES, POLYHEDRON, cell_volumes, face_stream, taken
from data.aero.cells import refuse_not_finite
from data.aero.geometry import Polygons, vertex_mean

BLOCK = 1 << 18
LEAST, MOST = 0.5, 500  # spans of air around a body, in the body's; millimetres are a thousand off


class VtuCells:
    """Cells of ``file`` (data.aero.vtu.VtuFile); span: diagonal of their box, in the file's unit.

    Raises InputError for a file without cells, for points that are not finite, and for cells that name points that do
    not exist or have none.
    """

    def __init__(self, file):
        self.file, self.path = file, file.paths[0]
        if not (file.points and file.cells):
            raise InputError("has no cells", file=self.path, remedy="Export the volume around the body")
        name, ends = file.names("Points")[0], []
        with tempfile.TemporaryFile() as stream:
            for first in range(0, file.points, BLOCK):
                values = file.read("Points", name, first, min(first + BLOCK, file.points))
                refuse_not_finite(values, self.path, "Points", first, "points")
                ends += [values.min(axis=0), values.max(axis=0)]
                stream.write(np.ascontiguousarray(values, values.dtype.newbyteorder("=")).tobytes())
            stream.flush()
            self.map = mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ)
        self.span = float(np.linalg.norm(np.ptp(ends, axis=0)))
        self.points = np.frombuffer(self.map, values.dtype.newbyteorder("=")).reshape(-1, 3)

    def check_around(self, corners, scale=1.0):
        """InputError unless the mesh is as large as the air around a body of triangles ``corners`` (t, 3, 3) m may be.

        scale: metres in a unit of the mesh.
        """
        body = np.linalg.norm(np.ptp(corners.reshape(-1, 3), axis=0))
        if not LEAST < self.span * scale / body < MOST:
            raise InputError(
                f"spans {self.span * scale:.4g} m where the body spans {body:.4g} m: their units are not the same",
                file=self.path,
                variable="Points",
                remedy="Export the volume and the surface in one unit",
            )

    def block(self, first, last):
        """Points of the cells first ... last, as Polygons."""
        before = int(self.file.read("Cells", "offsets", first - 1, first)[0]) if first else 0
        offsets = np.append(before, self.file.read("Cells", "offsets", first, last)).astype(np.int64)
        if not np.all(np.diff(offsets) > 0):
            raise InputError("cells without points", file=self.path, variable="offsets", remedy="Export it again")
        connectivity = self.file.read("Cells", "connectivity", before, int(offsets[-1]))
        return Polygons(self.points, self._known(connectivity), offsets - before)

    def centers(self, first, last):
        """Means of the vertices of the cells first ... last, fp64 (last - first, 3)."""
        found = vertex_mean(self.block(first, last))
        self.map.madvise(mmap.MADV_DONTNEED)
        return found

    def volumes(self, first, last):
        """Volumes of the cells first ... last, fp64 (last - first,), m3.

        Raises InputError for cells that are not tetrahedra, voxels, hexahedra, wedges, pyramids or polyhedra.
        """
        types = self.file.read("Cells", "types", first, last)
        strange = sorted({*np.unique(types).tolist()} - {*FACES, POLYHEDRON})
        if strange:
            raise InputError(
                f"has cells of VTK's types {strange}, which are no linear volume cells",
                file=self.path,
                variable="types",
                remedy="Export the volume around the body, not its surface",
            )
        faces = self._faces(first, last, types) if np.any(types == POLYHEDRON) else None
        found = cell_volumes(self.block(first, last), types, faces)
        self.map.madvise(mmap.MADV_DONTNEED)
        return found

    def _faces(self, first, last, types):
        """Faces of the polyhedra among cells first ... last, by either of VTK's two ways to write them."""
        read, names = self.file.read, self.file.names("Cells")
        if "faces" in names:
            ends = read("Cells", "faceoffsets", first, last)[types == POLYHEDRON].astype(np.int64)
            before = self._stream_end(first)
            stream = read("Cells", "faces", before, int(ends[-1])).astype(np.int64)
            owner, begin, sizes = face_stream(stream, np.append(before, ends[:-1]) - before)
            return owner, self._checked(taken(self.points, stream, begin, sizes))
        before, ends = self._ends("polyhedron_offsets", first, last)
        number = read("Cells", "polyhedron_to_faces", before, int(ends[-1])).astype(np.int64)
        counts = np.diff(ends, prepend=before)[types == POLYHEDRON]
        low, high = int(number.min()), int(number.max()) + 1
        before, ends = self._ends("face_offsets", low, high)
        corners = read("Cells", "face_connectivity", before, int(ends[-1])).astype(np.int64)
        begin, sizes = np.append(before, ends[:-1]) - before, np.diff(ends, prepend=before)
        faces = taken(self.points, corners, begin[number - low], sizes[number - low])
        return np.repeat(np.arange(len(counts)), counts), self._checked(faces)

    def _stream_end(self, first):
        """Where the faces of the last polyhedron before cell ``first`` end; offsets of other cells are -1."""
        while first > 0:
            some = self.file.read("Cells", "faceoffsets", max(0, first - BLOCK), first)
            if some.max() >= 0:
                return int(some.max())
            first = max(0, first - BLOCK)
        return 0

    def _ends(self, name, first, last):
        """The end before row ``first``, and the ends of rows first ... last."""
        before = int(self.file.read("Cells", name, first - 1, first)[0]) if first else 0
        return before, self.file.read("Cells", name, first, last).astype(np.int64)

    def _checked(self, faces):
        self._known(faces.connectivity)
        return faces

    def _known(self, points):
        if len(points) and (points.min() < 0 or points.max() >= len(self.points)):
            raise InputError("cells name points that do not exist", file=self.path, remedy="Fetch the file again")
        return points
