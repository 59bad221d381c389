"""VTU files written in ranges of rows: appended raw data of known length, so that nothing is held twice."""

import numpy as np

from data.aero.vtu import VtuFile

BLOCK = 1 << 18
NAMES = {"f4": "Float32", "f8": "Float64", "i4": "Int32", "i8": "Int64", "u1": "UInt8", "i1": "Int8"}


class CellFile:
    """The mesh of a VTU file, to be copied by ranges of rows: "Points", and what stands in Cells."""

    def __init__(self, path):
        self.file = VtuFile([path])
        self.points, self.cells = self.file.points, self.file.cells

    def arrays(self):
        """(section, name, dtype, components, rows, function of first and last row) of every array of the mesh."""
        last = self.file.read("Cells", "offsets", self.cells - 1, self.cells)
        rows = {"connectivity": int(last[0]), "offsets": self.cells, "types": self.cells}
        for (section, name), array in self.file.arrays.items():
            if section not in ("Points", "Cells") or (section == "Cells" and name not in rows):
                continue
            count = self.points if section == "Points" else rows[name]
            kind = array.dtype.newbyteorder("<")
            yield section, name, kind, array.components, count, self._range(section, name, kind)

    def _range(self, section, name, kind):
        return lambda first, last: self.file.read(section, name, first, last).astype(kind)


class _Vertices:
    """Points (n, 3) as cells of one vertex each."""

    def __init__(self, points):
        self.values, self.points, self.cells = points, len(points), len(points)

    def arrays(self):
        """As of ``CellFile``."""
        yield "Points", "Points", np.dtype("<f4"), 3, self.points, lambda a, b: self.values[a:b].astype("<f4")
        yield "Cells", "connectivity", np.dtype("<i8"), 1, self.cells, lambda a, b: np.arange(a, b, dtype="<i8")
        yield "Cells", "offsets", np.dtype("<i8"), 1, self.cells, lambda a, b: np.arange(a + 1, b + 1, dtype="<i8")
        yield "Cells", "types", np.dtype("u1"), 1, self.cells, lambda a, b: np.ones(b - a, "u1")


def write_volume(path, mesh, fields):
    """Write ``mesh`` (a CellFile, or points (n, 3)) with {name: float32 values by cell} to ``path``."""
    mesh = mesh if isinstance(mesh, CellFile) else _Vertices(mesh)
    arrays = list(mesh.arrays())
    for name, values in fields.items():
        kind, components = np.dtype("<f4"), values.shape[1] if values.ndim > 1 else 1
        arrays.append(("CellData", name, kind, components, len(values), lambda a, b, v=values: v[a:b].astype("<f4")))
    text, at = {"Points": "", "Cells": "", "CellData": ""}, 0
    for section, name, kind, components, rows, _ in arrays:
        label = NAMES[kind.str[1:]]
        text[section] += f'<DataArray type="{label}" Name="{name}" NumberOfComponents="{components}" '
        text[section] += f'format="appended" offset="{at}"/>\n'
        at += 8 + rows * components * kind.itemsize
    sections = "".join(f"<{name}>\n{body}</{name}>\n" for name, body in text.items())
    with open(path, "wb") as stream:
        stream.write(
            f'<?xml version="1.0"?>\n<VTKFile type="UnstructuredGrid" version="1.0" byte_order="LittleEndian" '
            f'header_type="UInt64">\n<UnstructuredGrid>\n<Piece NumberOfPoints="{mesh.points}" '
            f'NumberOfCells="{mesh.cells}">\n{sections}</Piece>\n</UnstructuredGrid>\n'
            '<AppendedData encoding="raw">\n_'.encode()
        )
        for *_, kind, components, rows, read in arrays:
            stream.write(np.array([rows * components * kind.itemsize], "<u8").tobytes())
            for first in range(0, rows, BLOCK):
                stream.write(np.ascontiguousarray(read(first, min(first + BLOCK, rows))).tobytes())
        stream.write(b"\n</AppendedData>\n</VTKFile>\n")
