"""A body from any surface file: polygons as they stand in the file, its parts, and the fields that it may carry.

STL by data.aero.stl; VTP, VTU of surface cells, OBJ, PLY and what else pyvista opens; patches of OpenFOAM cases by
data.aero.foam. Lengths stay in the file's unit.
"""

from dataclasses import dataclass, field

import numpy as np

from core.errors import InputError
from data.aero.cells import refuse_not_finite
from data.aero.files import require
from data.aero.foam import joined, read_patches
from data.aero.geometry import Polygons
from data.aero.stl import read_solids
from data.aero.vtk_files import DRIVAERML, OPENFOAM

SURFACE_CELLS = {5: "triangle", 7: "polygon", 9: "quad"}


@dataclass(frozen=True)
class Body:
    """mesh: Polygons; part (n,): number of each cell's part in ``names``; fields: {"pressure": (n,), "shear": (n, 3)},
    m2/s2, where the file has them."""

    mesh: Polygons
    part: np.ndarray
    names: list
    fields: dict = field(default_factory=dict)


def read_body(path, pressure=None, shear=None, patches=None):
    """Body of a surface file, or with ``patches`` (names or patterns) of an OpenFOAM case, its folder.

    pressure, shear: names of the cell arrays with the true fields; left out, those of DrivAerML or OpenFOAM are taken
    where the file has both. Raises InputError for files that are missing, damaged or without polygons, for points that
    are not finite, and for named arrays that are not there, on points, or not finite.
    """
    if patches is not None:
        return _of_patches(path, pressure, shear, patches)
    path = require(path, "Name the surface file of the body")
    if path.suffix.lower() == ".stl":
        corners, part, names = read_solids(path)
        points = corners.reshape(-1, 3)
        mesh = Polygons(points, np.arange(len(points)), np.arange(len(corners) + 1) * 3)
        _check_points(mesh, path)
        return Body(mesh, part, names)
    data = _open(path)
    mesh = _polygons(data, path)
    _check_points(mesh, path)
    return Body(mesh, np.zeros(len(mesh), np.int32), [path.stem], _fields(data, path, pressure, shear))


def _of_patches(path, pressure, shear, patches):
    parts = read_patches(path, patches, {"pressure": pressure, "shear": shear})
    points, connectivity, offsets, number = joined(list(parts.values()))
    fields = [_fields(part, f"{path}, patch {name}", pressure, shear) for name, part in parts.items()]
    whole = {key: np.concatenate([field[key] for field in fields]) for key in fields[0]}
    return Body(Polygons(points, connectivity, offsets), number, list(parts), whole)


def _open(path):
    import pyvista

    if path.suffix.lower() in (".vtp", ".vtu"):
        with open(path, "rb") as stream:
            stream.seek(max(0, path.stat().st_size - 64))
            if not stream.read().rstrip().endswith(b"</VTKFile>"):
                raise InputError(
                    "cut short or not a VTK XML file: </VTKFile> is not at its end",
                    file=path,
                    remedy="Export or fetch the file again",
                )
    try:
        data = pyvista.read(path)
    except (OSError, ValueError, RuntimeError) as error:
        problem = f"pyvista cannot read it ({error})"
        raise InputError(problem, file=path, remedy="Use STL, VTP, VTU, OBJ or PLY") from None
    if not isinstance(data, pyvista.PolyData | pyvista.UnstructuredGrid) or not data.n_cells:
        raise InputError("damaged, or without surface cells", file=path, remedy="Export the surface of the body")
    return data


def _polygons(data, path):
    import pyvista

    if isinstance(data, pyvista.PolyData):
        if data.n_cells != data.GetPolys().GetNumberOfCells():
            raise InputError(
                "has vertices, lines or strips besides polygons, so that rows of cell data are not faces",
                file=path,
                remedy="Export the surface as polygons only",
            )
        cells = data.GetPolys()
    else:
        strange = sorted(set(np.unique(data.celltypes)) - set(SURFACE_CELLS))
        if strange:
            raise InputError(
                f"has cells of VTK's types {strange}, which are no polygons",
                file=path,
                remedy="Export the surface of the body, not the volume around it",
            )
        cells = data.GetCells()
    connectivity, offsets = (
        pyvista.convert_array(cells.GetConnectivityArray()),
        pyvista.convert_array(cells.GetOffsetsArray()),
    )
    return Polygons(np.asarray(data.points), connectivity.astype(np.int64), offsets.astype(np.int64))


def _check_points(mesh, path):
    bad = np.flatnonzero(~np.isfinite(mesh.points).all(axis=1))
    if len(bad):
        cells = np.flatnonzero(np.add.reduceat(np.isin(mesh.connectivity, bad).astype(int), mesh.offsets[:-1]))
        raise InputError(
            f"{len(cells)} cells have corners that are not finite, the first is cell {cells[0] if len(cells) else '-'}",
            file=path,
            variable="Points",
            remedy="Export the geometry again",
        )


def _fields(data, path, pressure, shear):
    found = {"pressure": pressure, "shear": shear}
    if pressure is None and shear is None:
        for names in (DRIVAERML, OPENFOAM):
            if all(names[key] in data.cell_data for key in found):
                found = {key: names[key] for key in found}
                break
        else:
            return {}
    return {key: _field(data, name, key, path) for key, name in found.items()}


def _field(data, name, key, path):
    shape = (data.n_cells,) if key == "pressure" else (data.n_cells, 3)
    problem = None
    if name is None:
        problem = f"only one of --pressure and --shear is given; {key} is missing"
    elif name not in data.cell_data:
        problem = "only on points" if name in data.point_data else "not in the file"
        problem += f"; cell arrays are: {' '.join(data.cell_data.keys()) or 'none'}"
    elif data.cell_data[name].shape != shape:
        problem = f"shape {data.cell_data[name].shape}, but {key} needs {shape}"
    if problem:
        raise InputError(problem, file=path, variable=name or key, remedy="Export cell data, or name its array")
    values = np.asarray(data.cell_data[name], dtype=np.float64)
    refuse_not_finite(values, path, name)
    return values
