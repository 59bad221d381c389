"""VTU files of known size, written by any number of processes in ranges of rows: appended raw data at known places."""

import numpy as np

from data.aero.vtu import VtuFile

BLOCK = 1 << 18
KINDS = {"f": "Float", "i": "Int", "u": "UInt"}


class CellFile:
    """The mesh of a VTU file, whole or in parts, to be copied: its points, and all that stands in Cells."""

    copied = True  # the points too

    def __init__(self, paths):
        self.file = VtuFile(paths)
        self.points, self.cells = self.file.points, self.file.cells

    def arrays(self):
        """{(section, name): (dtype, components, rows)} of every array of the mesh."""
        found = {key: a for key, a in self.file.arrays.items() if key[0] in ("Points", "Cells")}
        return {key: (a.dtype, a.components, self.file.rows(*key)) for key, a in found.items()}

    def read(self, section, name, first, last):
        """Rows first ... last of an array."""
        return self.file.read(section, name, first, last)


class Vertices:
    """``count`` points as cells of one vertex each; where they are is written by rows."""

    copied = False

    def __init__(self, count):
        self.points = self.cells = count

    def arrays(self):
        """As of ``CellFile``."""
        cells = {"connectivity": "<i8", "offsets": "<i8", "types": "u1"}
        found = {("Cells", name): (np.dtype(kind), 1, self.cells) for name, kind in cells.items()}
        return {("Points", "Points"): (np.dtype("<f4"), 3, self.points)} | found

    def read(self, section, name, first, last):
        """As of ``CellFile``, of the arrays in Cells."""
        if name == "types":
            return np.ones(last - first, "u1")
        return np.arange(first, last) + (name == "offsets")


class VtuWriter:
    """A file of ``mesh`` (CellFile or Vertices) with ``fields`` {name: (dtype, shape of a row)} by cell.

    One process creates it; then all, with the same arguments, write their rows and copy their share of the mesh.
    """

    def __init__(self, path, mesh, fields):
        self.path, self.mesh, self.places, at = path, mesh, {}, 0
        arrays = mesh.arrays()
        for name, (kind, shape) in fields.items():
            arrays["CellData", name] = kind, int(np.prod(shape)), mesh.cells
        for key, (kind, components, rows) in arrays.items():
            kind = np.dtype(kind).newbyteorder("<")
            self.places[key] = kind, components, rows, at
            at += 8 + rows * components * kind.itemsize
        self.head, self.size = self._header().encode(), at

    def create(self):
        """Make the file, of its full size, without the values."""
        with open(self.path, "wb") as stream:
            stream.write(self.head)
            for kind, components, rows, at in self.places.values():
                stream.seek(len(self.head) + at)
                stream.write(np.array([rows * components * kind.itemsize], "<u8").tobytes())
            stream.seek(len(self.head) + self.size)
            stream.write(b"\n</AppendedData>\n</VTKFile>\n")

    def write(self, section, name, first, values):
        """Write rows of an array, from row ``first`` on."""
        kind, components, _, at = self.places[section, name]
        with open(self.path, "r+b") as stream:
            stream.seek(len(self.head) + at + 8 + first * components * kind.itemsize)
            stream.write(np.ascontiguousarray(values, kind).tobytes())

    def copy(self, rank, ranks):
        """Write this rank's share of the mesh's own arrays."""
        for (section, name), (_, _, rows, _) in self.places.items():
            if section == "Cells" or (section == "Points" and self.mesh.copied):
                begin, end = (rows * k // ranks for k in (rank, rank + 1))
                for first in range(begin, end, BLOCK):
                    values = self.mesh.read(section, name, first, min(first + BLOCK, end))
                    self.write(section, name, first, values)

    def _header(self):
        text = {"Points": "", "Cells": "", "CellData": ""}
        for (section, name), (kind, components, _, at) in self.places.items():
            label = f"{KINDS[kind.kind]}{8 * kind.itemsize}"
            text[section] += f'<DataArray type="{label}" Name="{name}" NumberOfComponents="{components}" '
            text[section] += f'format="appended" offset="{at}"/>\n'
        version = "2.3" if ("Cells", "face_offsets") in self.places else "1.0"  # polyhedra by faces, since VTK 9.4
        sections = "".join(f"<{name}>\n{body}</{name}>\n" for name, body in text.items())
        return (
            f'<?xml version="1.0"?>\n<VTKFile type="UnstructuredGrid" version="{version}" byte_order="LittleEndian" '
            f'header_type="UInt64">\n<UnstructuredGrid>\n<Piece NumberOfPoints="{self.mesh.points}" '
            f'NumberOfCells="{self.mesh.cells}">\n{sections}</Piece>\n</UnstructuredGrid>\n'
            '<AppendedData encoding="raw">\n_'
        )
