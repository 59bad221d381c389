"""Pressure, wall shear and forces of a run or of a new body: python -m apps.aero.infer --checkpoint PATH ...

--run-id takes a run of an archive; --surface any surface of a new body: STL, or VTP, VTU, OBJ, PLY. All cells are
predicted together, cut over all processes that were started (torchrun --nproc-per-node N), so the answer depends
neither on their number nor on the order of cells. Volumes of any size pass through in chunks. Writes to --out NAME.vtp
(by cell, in the frame and unit of the file, with the true fields and errors where they are known), NAME.json and
NAME.png, of a model of volumes also NAME_volume.vtu, and prints the coefficients with everything that is doubtful about
the body.
"""

from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path

import numpy as np
import torch.distributed as dist

from apps.aero.air import write_air
from apps.aero.body import prepare
from apps.aero.cloud import BodyCloud, RunCloud
from apps.aero.dataset import require_runs
from apps.aero.predict import cells_of, gathered, load_model, outputs, read_cloud, scattered
from apps.aero.solution import Solution, volume_path, write
from apps.aero.states import States
from apps.agree import together
from apps.checkpoints import beside, find
from apps.cli import check_counts, option, parse
from apps.meshes import mesh_of
from apps.outputs import temporary
from core import InputError
from core.command import command
from data.aero.archive import AeroReader
from data.files import sha256

RUN_ONLY = {"archive", "vtp"}
AIR = {"volume", "query"}
CHUNK = 1 << 18
SURFACE_ONLY = {"pressure", "shear", "scale", "flow_axis", "up_axis", "ground", "cells"}
SURFACE_ONLY |= {"aref", "lref", "center", "speed", "density", *AIR}
AXES = ("x", "-x", "y", "-y", "z", "-z")


@dataclass
class InferConfig:
    """Options of python -m apps.aero.infer."""

    checkpoint: str = field(metadata={"help": "folder of a training, or a step of it"})
    out: str | None = option(None, "folder to write to; left out: inference, in the run's folder")
    archive: str | None = option(None, "aero archive that holds the run")
    run_id: str | None = option(None, "run of the archive")
    vtp: str | None = option(None, "with --run-id: surface file that the run was built from, for its polygons")
    surface: str | None = option(None, "surface file of a body: STL, VTP, VTU, OBJ, PLY")
    chunk: int | None = option(None, "cells computed at a time, for less memory and the same answer; left out: all")
    memory: float | None = option(None, "GiB kept between layers when chunked; left out: half of a GPU, 1 on a CPU")
    pressure: str | None = option(None, "cell array of the true pressure in it, m2/s2; left out: the usual names")
    shear: str | None = option(None, "cell array of the true wall shear stress, m2/s2, OpenFOAM's sign")
    volume: str | None = option(
        None, "VTU file, or its .part files, whose cells are predicted too, by a model of volumes"
    )
    query: int | None = option(None, "without a VTU file: about so many points around the body; left out: 100000")
    scale: float | None = option(None, "metres in one unit of the file, as 0.001 for millimetres; left out: 1, checked")
    flow_axis: str = option("x", "where the flow goes in the file; write --flow-axis=-x", choices=AXES)
    up_axis: str = option("z", "what points up in the file", choices=AXES)
    ground: float | None = option(None, "height of the ground in the file, in its unit; left out: as in the training")
    cells: int | None = option(None, "cut the triangles of a coarse file until there are about so many")
    aref: float | None = option(None, "reference area, m2; left out: area of the silhouette along the flow")
    lref: float | None = option(None, "reference length, m; left out: the training's")
    center: tuple[float] | None = option(None, "of moments, m, in the training's frame; left out: the training's")
    speed: float | None = option(None, "inflow, m/s; left out: the training's (DrivAerML: 38.889)")
    density: float | None = option(None, "kg/m3, for forces in N; left out: the training's (DrivAerML: 1, kinematic)")


@command
def main(argv=None):
    """Runs the command; returns the scores on the first rank, None on the others."""
    config = parse(InferConfig, argv, __doc__)
    check_counts(config, "chunk", "cells", "query")
    _check(config)
    mesh = mesh_of()
    config.checkpoint = find(config.checkpoint)
    config.out = config.out or beside(config.checkpoint, "inference")
    model, scalings, state = load_model(config.checkpoint)
    solve = _run if config.surface is None else _surface
    found = solve(config, model, scalings, state["task"], mesh["domain"])
    scores = None
    with together():
        if dist.get_rank() == 0:
            scores = write(config.out, found, config.checkpoint, state)
    return scores


def _check(config):
    """Refuses options that the chosen source of the body would not listen to."""
    if (config.run_id is None) == (config.surface is None):
        raise InputError("give one of --run-id and --surface", variable="run-id", remedy="See --help")
    meant = RUN_ONLY if config.run_id is None else SURFACE_ONLY
    given = [f.name for f in fields(config) if f.default is not MISSING and getattr(config, f.name) != f.default]
    source = "--surface" if config.run_id is None else "--run-id"
    for name in sorted(set(given) & meant):
        raise InputError(f"means nothing with {source}", variable=name, remedy="Leave it out")


def _run(config, model, scalings, task, domain):
    """Solution of a run of the archive."""
    if config.archive is None:
        raise InputError("no archive given", variable="archive", remedy="Name the archive of the run with --archive")
    reader, run, like = AeroReader(config.archive), config.run_id, next(model.parameters())
    require_runs(reader, [run], tuple(scalings))
    polygons, attrs, arrays, air, surface = _polygons(config, reader), reader.run_attrs(run), None, None, None
    with together():
        if "surface" in scalings:
            surface = read_cloud(reader, scalings["surface"], run, domain, like)
        if "volume" in scalings:
            air = RunCloud(reader, run, scalings["volume"], domain, like)
    output, air = _answered(config, model, scalings, surface and surface[0], air, attrs["U"], domain, run)
    if surface is not None:
        arrays = cells_of(reader, scalings["surface"], run, output, *surface).whole()
        order = np.argsort(arrays["cell_id"])
        arrays = {name: values[order] for name, values in arrays.items()}
    label = "a training run" if run in task["train"] else "not in training"
    return Solution(run, label, attrs, arrays, polygons, air=air)


def _surface(config, model, scalings, task, domain):
    """Solution of the body of a file; None but on the first rank."""
    case, place, surface, air = None, None, None, None
    with together():
        if dist.get_rank() == 0:
            case = prepare(config, next(iter(scalings.values())), task)
            place = case.arrays["position"], case.arrays["normal"], None, case.arrays["area"]
    U = config.speed if config.speed is not None else next(iter(scalings.values())).U
    if "volume" in scalings:
        air = BodyCloud(config, case, scalings["volume"], domain, next(model.parameters()))
    elif any(getattr(config, name) is not None for name in AIR):
        remedy = "Leave it out, or train with --fields joint"
        raise InputError("this model predicts no volume", file=config.checkpoint, variable="volume", remedy=remedy)
    if "surface" in scalings:
        surface = scattered(model, scalings["surface"], place, domain)
    output, air = _answered(config, model, scalings, surface, air, U, domain, case and case.name)
    fields = None if surface is None else gathered(scalings["surface"].fields(output, U), surface)
    if case is None:
        return None
    arrays = None if fields is None else case.arrays | {"predicted": fields}
    more = dict(frame=case.frame, parts=case.parts, notes=case.notes, facts=case.facts, air=air)
    return Solution(case.name, "not in training", case.attrs, arrays, case.mesh, **more)


def _answered(config, model, scalings, surface, cloud, U, domain, name):
    """Outputs (n, 4) of this rank's rows of the surface, and the Air of ``cloud``; None for what is not there.

    surface: features, a ShardTensor; cloud: of apps.aero.cloud; name: of the body, on rank 0.
    """
    if cloud is None:
        return outputs(model, [surface], domain, config.chunk, config.memory)[0], None
    clouds = {"surface": surface if surface is None else surface.to_local(), "volume": cloud}
    states = States(model, [clouds[kind] for kind in scalings], config.chunk or CHUNK, domain, config.memory)
    part = [temporary(volume_path(config.out, name)) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(part, src=0)
    kinds = list(scalings)
    air = write_air(part[0], states, kinds.index("volume"), U)
    return states.whole(kinds.index("surface")) if surface is not None else None, air


def _polygons(config, reader):
    """Polygons of --vtp on the first rank, or None; refused on all ranks where it is not the source of the run."""
    if config.vtp is None:
        return None
    from data.aero.vtk_files import read_polygons

    known = reader.run_attrs(config.run_id).get("sources", {})
    with together():
        if not Path(config.vtp).is_file():
            raise InputError("no such file", file=config.vtp, remedy="Name the VTP file that the run was built from")
        if known and sha256(config.vtp) not in known.values():
            raise InputError(
                "is not the file that the run was built from (another sha256)",
                file=config.vtp,
                variable=config.run_id,
                remedy=f"The run was built from {' '.join(known)}",
            )
        mesh = read_polygons(config.vtp) if dist.get_rank() == 0 else None
        rows = reader.shape(f"{config.run_id}/surface", "area")[0]
        if mesh is not None and len(mesh) != rows:
            raise InputError(
                f"{len(mesh)} polygons, but the run has {rows} cells",
                file=config.vtp,
                variable=config.run_id,
                remedy="Name the VTP file that the run was built from",
            )
    return mesh


if __name__ == "__main__":
    main()
