"""One solver run in one folder, as OpenFOAM's foamToVTK and forceCoeffs leave it.

body.vtp, body.stl, internal.vtu or internal.vtu.gz, params.json (U, rho, nu, Aref, L), coefficient.dat or .gz: the
last row of the solver's coefficients is the truth, its header gives the centre of moments.
"""

from pathlib import Path

import numpy as np

from core.errors import InputError
from data.aero.cells import surface_arrays
from data.aero.files import read_coefficients, read_parameters, require, vector
from data.aero.volume import VolumeCells, body_of
from data.aero.vtk_files import OPENFOAM, read_surface
from data.aero.writing import Run
from data.files import sha256


def read_run(directory, *, volume=False, names=OPENFOAM):
    """Run of the folder; its id is the folder's name. Without ``volume`` no volume file is touched."""
    directory = Path(directory)
    if not directory.is_dir():
        raise InputError("no such folder", file=directory, remedy="Name the folder of one run")
    body, parameters = directory / "body.vtp", directory / "params.json"
    given = read_parameters(parameters, ["U", "rho", "nu", "Aref", "L"])
    sources = [body, parameters]
    attrs = {key: given[key] for key in ("U", "rho", "nu", "Aref")}
    attrs |= dict(Lref=given["L"], center=[0.0, 0.0, 0.0], parameters=given)
    coefficients = _either(directory, "coefficient.dat")
    if coefficients is not None:
        attrs |= _truth(coefficients, given)
        sources.append(coefficients)
    mesh, fields = read_surface(body, names)
    surface, facts = surface_arrays(mesh, fields["pressure"], fields["shear"], file=body)
    arrays = None
    if volume:
        inside = _either(directory, "internal.vtu") or require(directory / "internal.vtu")
        stl = require(directory / "body.stl", "The volume needs it for distances to the surface")
        sources += [inside, stl]
        arrays = VolumeCells([inside], names, body_of(stl, mesh.points))
    attrs |= facts | {"sources": {path.name: sha256(path) for path in sources}}
    return Run(directory.resolve().name, surface, arrays, attrs)


def _either(directory, name):
    """The file, plain or gzipped, or None."""
    return next((path for path in (directory / name, directory / f"{name}.gz") if path.is_file()), None)


def _truth(path, given):
    header, last = read_coefficients(path)
    try:
        area, length, center = float(header["Aref"]), float(header["lRef"]), vector(header["CofR"])
        truth = {name: last[name] for name in ("Cd", "Cl", "Cs", "CmPitch")}
    except KeyError as error:
        raise InputError(
            "not in the table of coefficients",
            file=path,
            variable=error.args[0],
            remedy="Write it with forceCoeffs of OpenFOAM v1912 or later",
        ) from None
    if not np.isclose(area, given["Aref"], rtol=1e-5):
        raise InputError(
            f"{area} m2, but params.json says {given['Aref']}",
            file=path,
            variable="Aref",
            remedy="Use one reference area in both",
        )
    return truth | dict(Lref=length, center=center)
