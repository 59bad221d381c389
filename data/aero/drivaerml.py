"""DrivAerML's layout: run_i/boundary_i.vtp, drivaer_i.stl, volume_i.vtu, geo_ref_i.csv, force_mom_i.csv, ...

Two conventions of reference live side by side: force_mom uses the area of each geometry (geo_ref), force_mom_constref
one for all (2.17 m2). Both are kept and never mixed: the run's own in Aref, Lref, center, Cd, Cl; the others under
"constant". Pressures and stresses are kinematic (rho = 1). Source: arXiv 2408.11969v2.
"""

from pathlib import Path

from core.errors import InputError
from data.aero.cells import surface_arrays
from data.aero.files import number, read_row, require, vector
from data.aero.volume import VolumeCells, body_of
from data.aero.vtk_files import DRIVAERML, read_surface
from data.aero.writing import Run
from data.files import sha256

U, RHO, NU = 38.889, 1.0, 1.507e-5
COEFFICIENTS = ("Cd", "Cl", "Clf", "Clr", "Cs")


def run_numbers(root):
    """Numbers i of the folders run_i below ``root``, sorted."""
    root = Path(root)
    if not root.is_dir():
        raise InputError("no such folder", file=root, remedy="Name the folder that holds run_1, run_2, ...")
    found = [folder.name.removeprefix("run_") for folder in root.glob("run_*") if folder.is_dir()]
    if not any(name.isdecimal() for name in found):
        raise InputError("no folder run_<number> in it", file=root, remedy="Name the folder that holds run_1, ...")
    return sorted(int(name) for name in found if name.isdecimal())


def read_run(root, i, *, volume=False, names=DRIVAERML):
    """Run ``i`` with id "run_<i>". Without ``volume`` neither the volume nor the STL file is touched."""
    folder = Path(root) / f"run_{i}"
    boundary = require(folder / f"boundary_{i}.vtp")
    tables = [folder / f"geo_ref_{i}.csv", folder / f"force_mom_{i}.csv"]
    attrs = dict(U=U, rho=RHO, nu=NU) | _reference(*tables, own=True)
    constant, parameters = folder / f"force_mom_constref_{i}.csv", folder / f"geo_parameters_{i}.csv"
    if constant.is_file():
        attrs["constant"] = _reference(tables[0], constant, own=False)
        tables.append(constant)
    if parameters.is_file():
        row = read_row(parameters)
        attrs["parameters"] = {name: number(row, name, parameters) for name in row if name != "run"}
        tables.append(parameters)
    mesh, fields = read_surface(boundary, names)
    surface, facts = surface_arrays(mesh, fields["pressure"], fields["shear"], file=boundary)
    sources, arrays = [boundary, *tables], None
    if volume:
        inside, stl = volume_files(folder, i), require(folder / f"drivaer_{i}.stl")
        arrays = VolumeCells(inside, names, body_of(stl, mesh.points))
        sources += [*inside, stl]
    attrs |= facts | {"sources": {path.name: sha256(path) for path in sources}}
    return Run(f"run_{i}", surface, arrays, attrs)


def volume_files(folder, i):
    """The volume file of a run as a list: whole, or the parts that the public store cuts it into, in their order."""
    return whole_or_parts(Path(folder) / f"volume_{i}.vtu")


def whole_or_parts(whole):
    """The file ``whole`` as a list, or where it is not there the files whole.00.part, whole.01.part, ..."""
    parts = sorted(whole.parent.glob(f"{whole.name}.*.part"))
    numbers = [part.name.removeprefix(f"{whole.name}.").removesuffix(".part") for part in parts]
    if whole.is_file() or not parts:
        return [require(whole)]
    if numbers != [f"{k:02d}" for k in range(len(parts))]:
        raise InputError(f"parts {' '.join(numbers)} only", file=whole, remedy="Fetch the others: they begin at 00")
    return parts


def _reference(geometry, forces, own):
    """Reference values and coefficients of one convention."""
    row, suffix = read_row(geometry), "" if own else "Ref"
    truth = read_row(forces)
    center = row.get(f"forcescor{suffix}".lower())
    try:
        center = vector(center or "")
    except ValueError:
        center = []
    if len(center) != 3:
        raise InputError(
            "no vector of three numbers", file=geometry, variable=f"forcesCoR{suffix}", remedy="Fetch the file again"
        )
    return {name: number(truth, name, forces) for name in COEFFICIENTS} | dict(
        Aref=number(row, f"aRef{suffix}", geometry), Lref=number(row, f"lRef{suffix}", geometry), center=center
    )
