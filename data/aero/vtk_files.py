"""VTP and STL through VTK: native cells, cell data, the winding of the file.

Nothing here is interpolated, re-oriented or triangulated on reading: forces need the polygons that the solver used.
Only commands that build or export import this module; VTK itself is imported inside the functions.
"""

import os
from pathlib import Path

import numpy as np

from core.errors import InputError
from data.aero.files import require
from data.aero.geometry import Polygons

DRIVAERML = {"pressure": "pMeanTrim", "shear": "wallShearStressMeanTrim", "velocity": "UMeanTrim"}
OPENFOAM = {"pressure": "p", "shear": "wallShearStress", "velocity": "U"}


def read_surface(path, names):
    """Polygons of a VTP file and its fields {"pressure": (n,), "shear": (n, 3)} in m2/s2, by cell.

    names: {"pressure": array name in the file, "shear": ...}, as DRIVAERML or OPENFOAM. Raises InputError for files
    that are missing or cut short, arrays that are missing or on points, and cells that are no polygons.
    """
    data = _read(path, [names["pressure"], names["shear"]])
    return _polygons(data, path), _fields(data, names, ("pressure", "shear"))


def read_polygons(path):
    """Polygons of a VTP file without its fields. Errors as of ``read_surface``."""
    return _polygons(_read(path, []), path)


def _polygons(data, path):
    if data.GetNumberOfCells() != data.GetPolys().GetNumberOfCells():
        raise InputError(
            "has vertices, lines or strips besides polygons, so that rows of cell data are not faces",
            file=path,
            remedy="Export the surface as polygons only",
        )
    polygons = data.GetPolys()
    return _cells(data, polygons.GetConnectivityArray(), polygons.GetOffsetsArray(), path)


def read_stl(path):
    """Corners (t, 3, 3) float32 of the triangles of an STL file, ASCII (any number of solids) or binary."""
    import pyvista

    _check_stl(require(path))
    data = pyvista.read(path)
    if not data.n_cells:
        raise InputError("no triangles", file=path, remedy="Export the geometry again")
    return np.asarray(data.points, dtype=np.float32)[data.regular_faces]


def write_surface(path, mesh, fields, facts=None):
    """Write Polygons and {name: values by cell} as a VTP file, points float32 as given; facts {name: numbers of the
    whole} as its field data."""
    import pyvista

    data = pyvista.PolyData(mesh.points, faces=_padded(mesh))
    data.cell_data.update(fields)
    data.field_data.update(facts or {})
    _write(data, path)


def write_points(path, points, fields, facts=None):
    """Write points (n, 3) as vertex cells and {name: values by cell} as a VTP file; facts as of ``write_surface``."""
    import pyvista

    data = pyvista.PolyData(points)
    data.cell_data.update(fields)
    data.field_data.update(facts or {})
    _write(data, path)


def write_hexahedra(path, mesh, fields):
    """Write hexahedra (Polygons of eight points each) and {name: values by cell} as a VTU file."""
    import pyvista

    data = pyvista.UnstructuredGrid(_padded(mesh), np.full(len(mesh), pyvista.CellType.HEXAHEDRON), mesh.points)
    data.cell_data.update(fields)
    _write(data, path)


def write_stl(path, corners, solid="body"):
    """Write triangles (t, 3, 3) as ASCII STL, digits enough for float32."""
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]).astype(np.float64)
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    with open(path, "w") as stream:
        stream.write(f"solid {solid}\n")
        for normal, triangle in zip(normals, corners):
            stream.write("facet normal {:.6g} {:.6g} {:.6g}\nouter loop\n".format(*normal))
            stream.writelines("vertex {:.9g} {:.9g} {:.9g}\n".format(*vertex) for vertex in triangle)
            stream.write("endloop\nendfacet\n")
        stream.write(f"endsolid {solid}\n")


def _write(data, path):
    """Write inline base64 without compression, as DrivAerML's files are, under a temporary name; then rename."""
    from vtkmodules import vtkIOXML

    kind = "PolyData" if Path(path).suffix == ".vtp" else "UnstructuredGrid"
    temporary = Path(path).with_name(f".partial.{Path(path).name}")
    writer = getattr(vtkIOXML, f"vtkXML{kind}Writer")(file_name=str(temporary))
    writer.SetInputData(data)
    writer.SetDataModeToBinary()
    writer.SetCompressorTypeToNone()
    writer.SetHeaderTypeToUInt64()
    if not writer.Write():
        temporary.unlink(missing_ok=True)
        raise OSError(f"VTK could not write {path}")
    os.replace(temporary, path)


def _padded(mesh):
    counts = np.diff(mesh.offsets)
    return np.insert(mesh.connectivity, mesh.offsets[:-1], counts)


def _cells(data, connectivity, offsets, path):
    from vtkmodules.util.numpy_support import vtk_to_numpy

    mesh = Polygons(vtk_to_numpy(data.GetPoints().GetData()), vtk_to_numpy(connectivity), vtk_to_numpy(offsets))
    sound = np.all(np.diff(mesh.offsets) > 0) and mesh.offsets[-1] == len(mesh.connectivity)
    if not sound or mesh.connectivity.min() < 0 or mesh.connectivity.max() >= len(mesh.points):
        raise InputError("cells name points that do not exist", file=path, remedy="Fetch the file again")
    return mesh


def _fields(data, names, keys):
    from vtkmodules.util.numpy_support import vtk_to_numpy

    return {key: vtk_to_numpy(data.GetCellData().GetArray(names[key])).astype(np.float32) for key in keys}


def _read(path, names):
    """VTK data set with the cell arrays ``names`` and no others."""
    from vtkmodules import vtkIOXML

    path = require(path)
    _check_end(path)
    kind = "PolyData" if path.suffix == ".vtp" else "UnstructuredGrid"
    reader, errors = getattr(vtkIOXML, f"vtkXML{kind}Reader")(file_name=str(path)), []
    reader.AddObserver("ErrorEvent", lambda _object, _event: errors.append("error"))
    reader.UpdateInformation()
    if errors or reader.GetErrorCode():
        raise InputError(f"no VTK XML file of kind {kind}", file=path, remedy="Fetch the file again")
    _select(reader, names, path)
    reader.Update()
    data = reader.GetOutput()
    if errors or reader.GetErrorCode() or not data.GetNumberOfCells():
        raise InputError("damaged, or without cells", file=path, remedy="Fetch the file again")
    for name in names:
        array = data.GetCellData().GetArray(name)
        if array is None or array.GetNumberOfTuples() != data.GetNumberOfCells():
            raise InputError(
                "its length does not fit the mesh", file=path, variable=name, remedy="Fetch the file again"
            )
    return data


def _select(reader, names, path):
    """Let the reader load only the cell arrays ``names``; InputError for one that is not there."""
    cell = [reader.GetCellArrayName(k) for k in range(reader.GetNumberOfCellArrays())]
    point = [reader.GetPointArrayName(k) for k in range(reader.GetNumberOfPointArrays())]
    for name in names:
        if name not in cell:
            raise InputError(
                f"{'only on points' if name in point else 'not in the file'}; "
                f"cell arrays are: {' '.join(cell) or 'none'}",
                file=path,
                variable=name,
                remedy="Export cell data, or name the array with --pressure, --shear, --velocity",
            )
    for name in cell:
        reader.SetCellArrayStatus(name, name in names)
    for name in point:
        reader.SetPointArrayStatus(name, False)


def _check_end(path):
    with open(path, "rb") as stream:
        stream.seek(max(0, os.path.getsize(path) - 64))
        if not stream.read().rstrip().endswith(b"</VTKFile>"):
            raise InputError(
                "cut short or not a VTK XML file: </VTKFile> is not at its end",
                file=path,
                remedy="Fetch the file again",
            )


def _check_stl(path):
    size = os.path.getsize(path)
    with open(path, "rb") as stream:
        head = stream.read(84)
        stream.seek(max(0, size - 128))
        tail = stream.read()
    binary = len(head) == 84 and size == 84 + 50 * int.from_bytes(head[80:], "little")
    if not binary and not (head.lstrip().startswith(b"solid") and b"endsolid" in tail):
        raise InputError("cut short or not an STL file", file=path, remedy="Fetch the file again")
