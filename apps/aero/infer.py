"""Pressure, wall shear and forces of one run: python -m apps.aero.infer --checkpoint PATH --archive PATH --run ID

Predicts all cells in one forward pass, cut over all processes that were started (torchrun --nproc-per-node N). Writes
to --out RUN.vtp (predicted, true and error, in m2/s2, by cell in the order of the source file), RUN.json (coefficients)
and RUN.png. With --vtp the source file gives the polygons; without it the cells are points at their centres.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch.distributed as dist

from apps.aero import figures
from apps.aero.dataset import Points, require_runs
from apps.aero.forces import reference_of
from apps.aero.metrics import case_scores
from apps.aero.outputs import drawn, write_json, written
from apps.aero.predict import load_model, predict
from apps.agree import together
from apps.cli import command, option, parse
from apps.metrics import reduce
from core import DistributedManager, InputError
from data.aero.archive import AeroReader
from data.aero.files import sha256


@dataclass
class InferConfig:
    """Options of python -m apps.aero.infer."""

    checkpoint: str = field(metadata={"help": "step_... folder that training printed"})
    archive: str = field(metadata={"help": "aero archive that holds the run"})
    run: str = field(metadata={"help": "run id"})
    out: str = option("runs/aero-infer", "folder to write to")
    vtp: str | None = option(None, "surface file that the run was built from, for its polygons")


@command
def main(argv=None):
    """Runs the command; returns the scores of the run."""
    config = parse(InferConfig, argv, __doc__)
    DistributedManager.initialize()
    mesh = DistributedManager().initialize_mesh((1, -1), ("ddp", "domain"))
    model, scaling, state = load_model(config.checkpoint)
    reader = AeroReader(config.archive)
    require_runs(reader, [config.run])
    polygons = _polygons(config, reader)
    surface = predict(model, Points(reader, scaling), config.run, mesh["domain"])
    sums = {key: value.cpu() for key, value in reduce(surface.sums(scaling.field_std), mesh).items()}
    scores = case_scores(sums, reference_of(surface.attrs), surface.attrs)
    arrays = surface.whole()
    with together():
        if dist.get_rank() == 0:
            _write(config, state, surface.attrs, arrays, polygons, scores)
    return scores


def _polygons(config, reader):
    """Polygons of --vtp on the first rank, or None; refused on all ranks where it is not the source of the run."""
    if config.vtp is None:
        return None
    from data.aero.vtk_files import read_polygons

    known = reader.run_attrs(config.run).get("sources", {})
    with together():
        if not Path(config.vtp).is_file():
            raise InputError("no such file", file=config.vtp, remedy="Name the VTP file that the run was built from")
        if known and sha256(config.vtp) not in known.values():
            raise InputError(
                "is not the file that the run was built from (another sha256)",
                file=config.vtp,
                variable=config.run,
                remedy=f"The run was built from {' '.join(known)}",
            )
        mesh = read_polygons(config.vtp) if dist.get_rank() == 0 else None
        rows = reader.shape(f"{config.run}/surface", "area")[0]
        if mesh is not None and len(mesh) != rows:
            raise InputError(
                f"{len(mesh)} polygons, but the run has {rows} cells",
                file=config.vtp,
                variable=config.run,
                remedy="Name the VTP file that the run was built from",
            )
    return mesh


def _write(config, state, attrs, arrays, polygons, scores):
    from data.aero.vtk_files import write_points, write_surface

    order = np.argsort(arrays["cell_id"])
    arrays = {name: values[order] for name, values in arrays.items()}
    paths = [Path(config.out) / f"{config.run}.{kind}" for kind in ("vtp", "json", "png")]
    with written(*paths) as (vtp, table, picture):
        if polygons is None:
            write_points(vtp, arrays["position"].astype(np.float32), cell_fields(arrays))
        else:
            write_surface(vtp, polygons, cell_fields(arrays))
        seen = config.run in state["task"]["train"]
        label = "a training run" if seen else "not in training"
        write_json(table, {"run": config.run, "label": label, "checkpoint": config.checkpoint, "scores": scores})
        drawn(figures.draw_surface, picture, arrays, attrs, f"{config.run} ({label})")
    print(f"{config.run} ({label})", table_of(scores), *paths, sep="\n", flush=True)


def cell_fields(arrays):
    """{name: float32 values by cell} for a VTP file; all in m2/s2, errors are predicted - true."""
    predicted = {"pressure": arrays["predicted"][:, 0], "shear": arrays["predicted"][:, 1:]}
    fields = {"cell_id": arrays["cell_id"]}
    for name, values in predicted.items():
        fields[f"{name}_predicted"] = values.astype(np.float32)
        fields[f"{name}_true"] = arrays[name].astype(np.float32)
        fields[f"{name}_error"] = (values - arrays[name]).astype(np.float32)
    return fields


def table_of(scores):
    """Cd and Cl with their parts, predicted and true, as lines of text."""
    names = [f"{c}{part}" for c in ("Cd", "Cl") for part in ("", "_pressure", "_friction")]
    rows = [["", *names]]
    rows.append(["predicted", *(f"{scores[name]:.5f}" for name in names)])
    rows.append(["true fields", *(f"{scores[f'{name}_true']:.5f}" for name in names)])
    rows.append(["stated", *(f"{scores[f'{n}_stated']:.5f}" if f"{n}_stated" in scores else "" for n in names)])
    text = ["".join(f"{cell:>{12 if i == 0 else 14}}" for i, cell in enumerate(row)).rstrip() for row in rows]
    return "\n".join([*text, f"relative L2: pressure {scores['pressure_l2']:.4f}, shear {scores['shear_l2']:.4f}"])


if __name__ == "__main__":
    main()
