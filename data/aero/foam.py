"""Patches of an OpenFOAM case, constant/polyMesh and the last time, through VTK: faces and values as the solver has.

A field's value on a patch is the one that OpenFOAM wrote there, not the cell's beside it. Faces point out of the mesh,
into the body.
"""

from fnmatch import fnmatch
from pathlib import Path

import numpy as np

from core.errors import InputError

MESH = ("points", "faces", "owner", "boundary")


def read_patches(case, patches, names):
    """{patch: pyvista.PolyData} of the patches of a case that ``patches``, names or patterns as wheel*, fit.

    case: folder, or a file in it (case.foam). names: arrays to read, {"pressure": "p", ...}. Raises InputError for a
    folder that is no case, and for patches or arrays that are not there.
    """
    import pyvista
    from vtkmodules.vtkCommonExecutionModel import vtkStreamingDemandDrivenPipeline
    from vtkmodules.vtkIOGeometry import vtkOpenFOAMReader

    folder = _folder(case)
    reader, errors = vtkOpenFOAMReader(), []
    reader.AddObserver("ErrorEvent", lambda _object, _event: errors.append("error"))
    reader.SetFileName(str(folder / "case.foam"))  # need not be there: the folder is what counts
    reader.CreateCellToPointOff()
    reader.UpdateInformation()
    wanted = _select(reader, folder, patches, names.values())
    times = reader.GetTimeValues()
    if times is not None and times.GetNumberOfValues():
        last = times.GetRange()[1]
        reader.GetOutputInformation(0).Set(vtkStreamingDemandDrivenPipeline.UPDATE_TIME_STEP(), last)
        reader.UpdateTimeStep(last)
    reader.Update()
    blocks = pyvista.wrap(reader.GetOutput())
    boundary = blocks["boundary"] if "boundary" in blocks.keys() else {}  # noqa: SIM118 (iterates over blocks, not names)
    out = {name: boundary[name] for name in wanted if name in boundary.keys()}  # noqa: SIM118
    if errors or not sum(part.n_cells for part in out.values()):
        raise InputError("damaged, or without faces on these patches", file=folder, remedy="Copy the case again")
    return out


def sources_of(case, names):
    """Files of a case that its patches come from: the mesh, and the arrays ``names`` of the last time."""
    folder = _folder(case)
    times = [path for path in folder.iterdir() if path.is_dir() and _number(path.name) is not None]
    last = max(times, key=lambda path: _number(path.name), default=folder)
    paths = [folder / "constant" / "polyMesh" / name for name in MESH] + [last / name for name in names if name]
    both = (path.with_name(path.name + end) for path in paths for end in ("", ".gz"))
    return [path for path in both if path.is_file()]


def _number(name):
    try:
        return float(name)
    except ValueError:
        return None


def _select(reader, folder, patches, names):
    """Lets the reader load the wanted patches and arrays and no others; returns the names of the patches, sorted."""
    known = [reader.GetPatchArrayName(k) for k in range(reader.GetNumberOfPatchArrays())]
    found = [name.removeprefix("patch/") for name in known if name.startswith("patch/")]
    wanted = {name for name in found for pattern in patches if fnmatch(name, pattern)}
    for pattern in patches:
        if not any(fnmatch(name, pattern) for name in found):
            raise InputError(
                f"no such patch; there are {' '.join(found) or 'none'}",
                file=folder,
                variable=pattern,
                remedy="Name the patches of the body",
            )
    for name in known:
        reader.SetPatchArrayStatus(name, name.removeprefix("patch/") in wanted)
    for name in [reader.GetCellArrayName(k) for k in range(reader.GetNumberOfCellArrays())]:
        reader.SetCellArrayStatus(name, name in names)
    return sorted(wanted)


def _folder(case):
    case = Path(case)
    folder = case if case.is_dir() else case.parent
    _check(folder)
    return folder


def _check(folder):
    mesh = folder / "constant" / "polyMesh"
    for name in MESH:
        if not any((mesh / f"{name}{end}").is_file() for end in ("", ".gz")):
            parallel = " (it has processor folders)" if any(folder.glob("processor*")) else ""
            raise InputError(
                f"no OpenFOAM case: there is no constant/polyMesh/{name}{parallel}",
                file=folder,
                remedy="Name the folder of the case; run reconstructPar where it is still in parts",
            )


def joined(parts):
    """(points, connectivity, offsets, number of its part (n,)) of all PolyData one after the other."""
    import pyvista

    points, connectivity, sizes = [], [], []
    for part in parts:
        cells = part.GetPolys()
        shift = sum(map(len, points))
        points.append(np.asarray(part.points))
        connectivity.append(pyvista.convert_array(cells.GetConnectivityArray()).astype(np.int64) + shift)
        sizes.append(np.diff(pyvista.convert_array(cells.GetOffsetsArray())))
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
    part = np.repeat(np.arange(len(parts), dtype=np.int32), [len(s) for s in sizes])
    return np.concatenate(points), np.concatenate(connectivity), offsets, part
