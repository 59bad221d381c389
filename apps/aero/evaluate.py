"""Scores of all runs of a split: python -m apps.aero.evaluate --checkpoint PATH --archive PATH --split test --out DIR

Writes results.json (relative L2 with equal and with area weights, absolute errors, Cd and Cl with their R2 over cases;
by run and in summary), parity.png, and pictures of the first runs. --split heldout judges training runs on the cells
that the archive holds back, which is interpolation within known flows, and is labelled so.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from apps.aero import figures
from apps.aero.dataset import Points, require_runs, runs_of
from apps.aero.metrics import summary
from apps.aero.outputs import drawn, write_json, written
from apps.aero.predict import judge, load_model, predict
from apps.agree import together
from apps.cli import command, option, parse
from core import DistributedManager
from data.aero.archive import AeroReader

LABELS = {
    "heldout": "interpolation: held-out cells of training runs",
    "train": "training runs: how well the model fits, not how well it predicts",
    "valid": "validation runs, not trained on",
    "test": "test runs, not trained on",
}
FIGURE_ROWS = 40_000
UNITS = "pressure and shear errors m2/s2; relative L2 as shares; coefficients by each run's own Aref"


@dataclass
class EvaluateConfig:
    """Options of python -m apps.aero.evaluate."""

    checkpoint: str = field(metadata={"help": "step_... folder that training printed"})
    archive: str = field(metadata={"help": "aero archive"})
    split: str = option("test", "which runs", choices=tuple(LABELS))
    out: str = option("runs/aero-evaluate", "folder to write to")
    domain: int = option(1, "ranks that share one surface; the rest of the world takes other runs")
    pictures: int = option(3, "runs to draw")


@command
def main(argv=None):
    """Runs the command; returns the results as written to results.json."""
    config = parse(EvaluateConfig, argv, __doc__)
    DistributedManager.initialize()
    mesh = DistributedManager().initialize_mesh((-1, config.domain), ("ddp", "domain"))
    model, scaling, state = load_model(config.checkpoint)
    reader = AeroReader(config.archive)
    runs = runs_of(reader, config.split)
    require_runs(reader, runs)
    cases = judge(model, reader, scaling, runs, mesh, only_held_out=config.split == "heldout")
    results = _results(config, state, reader, cases)
    drawings = [_drawing(model, reader, scaling, run, mesh) for run in runs[: config.pictures]]
    with together():
        if dist.get_rank() == 0:
            _write(config, results, drawings)
    return results


def _results(config, state, reader, cases):
    task = state["task"]
    trained = sorted(set(cases) & set(task["train"]))
    return {
        "split": config.split,
        "label": LABELS[config.split],
        "runs_that_were_trained_on": trained,
        "checkpoint": config.checkpoint,
        "archive": config.archive,
        "same_statistics_as_training": reader.attrs["statistics_hash"] == task["statistics_hash"],
        "units": UNITS,
        "summary": summary(cases),
        "runs": cases,
    }


def _drawing(model, reader, scaling, run, mesh):
    surface = predict(model, Points(reader, scaling), run, mesh["domain"])
    return run, surface.whole(FIGURE_ROWS), surface.attrs


def _write(config, results, drawings):
    out, label = Path(config.out), results["label"]
    pictures = [out / f"{run}.png" for run, _, _ in drawings]
    with written(out / "results.json", out / "parity.png", *pictures) as (table, parity, *parts):
        write_json(table, results)
        drawn(figures.draw_parity, parity, results["runs"], label)
        for part, (run, arrays, attrs) in zip(parts, drawings):
            drawn(figures.draw_surface, part, arrays, attrs, f"{run} ({label})")
    print(label)
    for name, value in results["summary"].items():
        print(f"{name:24} {'-' if value is None else f'{value:.5g}'}")
    print(out / "results.json", flush=True)


if __name__ == "__main__":
    main()
