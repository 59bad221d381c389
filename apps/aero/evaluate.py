"""Scores of all runs of a split: python -m apps.aero.evaluate --checkpoint PATH --archive PATH --split test --out DIR

Writes results.json (docs/aero_results.md says what stands in it), report.html, which is complete in itself and needs no
network, and the pictures in it: parity.png, trend.png and one of each of the first runs. Every score is on all cells of
a run. Beside the model stand the field of the nearest training shape and the mean field. --split heldout judges
training runs on the cells that the archive holds back, which is interpolation within known flows, and is labelled so.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from apps.aero import figures, submission
from apps.aero.baselines import baselines
from apps.aero.dataset import require_runs, runs_of
from apps.aero.metrics import COUNT, summary
from apps.aero.predict import judge, load_model, predict
from apps.aero.profiles import box_of, centreline, wake
from apps.aero.report import PARITY, TREND, write_report
from apps.aero.shown import table
from apps.aero.statistics import confidence, pair_differences
from apps.agree import together
from apps.checkpoints import beside, find
from apps.cli import check_counts, option, parse
from apps.meshes import mesh_of, rounds
from apps.outputs import drawn, write_json, written
from core.command import command
from data.aero.archive import AeroReader

LABELS = {
    "heldout": "interpolation: held-out cells of training runs",
    "train": "training runs: how well the model fits, not how well it predicts",
    "valid": "validation runs",
    "test": "test runs",
}
FIGURE_ROWS = 40_000
UNITS = (
    "errors of pressure and shear m2/s2, of velocity m/s; relative L2 as shares, of vector differences; coefficients "
    "by each run's own Aref, those with _constant by the one that all runs share; a count is 0.001"
)
BASELINES = {"mean_field": "mean of training shapes", "nearest_shape": "nearest training shape"}


@dataclass
class EvaluateConfig:
    """Options of python -m apps.aero.evaluate."""

    checkpoint: str = field(metadata={"help": "folder of a training, or a step of it"})
    archive: str = field(metadata={"help": "aero archive"})
    split: str = option("test", "which runs", choices=tuple(LABELS))
    out: str | None = option(None, "folder to write to; left out: evaluation, in the run's folder")
    domain: int = option(1, "ranks that share one surface; the rest of the world takes other runs")
    pictures: int = option(3, "runs to draw")
    export: str | None = option(None, "folder for all predictions in the layout of AutoCFD5")
    chunk: int | None = option(None, "cells computed at a time, for less memory and the same answer; left out: all")


@command
def main(argv=None):
    """Runs the command; returns the results as written to results.json, on the first rank; None on the others."""
    config = parse(EvaluateConfig, argv, __doc__)
    check_counts(config, "chunk", "domain")
    mesh = mesh_of(config.domain)
    config.checkpoint = find(config.checkpoint)
    config.out = config.out or beside(config.checkpoint, "evaluation")
    model, scalings, state = load_model(config.checkpoint)
    reader = AeroReader(config.archive)
    runs = runs_of(reader, config.split)
    require_runs(reader, runs, tuple(scalings))
    cases = judge(model, reader, scalings, runs, mesh, config.split == "heldout", config.chunk)
    drawings = [_drawing(model, reader, scalings, run, mesh, config.chunk) for run in runs[: config.pictures]]
    if config.export is not None:
        _export(config, model, reader, scalings, runs, mesh)
    results = None
    with together():
        if dist.get_rank() == 0:
            results = _results(config, state, reader, cases)
            results["profiles"] = {drawing.run: drawing.profiles for drawing in drawings}
            _write(config, results, drawings)
    return results


def label_of(split, trained):
    """What was judged, in words; trained: the runs of it that the model has seen, of another archive it may be any."""
    seen = f", {f'{len(trained)} of them' if trained else 'not'} trained on"
    return LABELS[split] + (seen if split in ("valid", "test") else "")


def _results(config, state, reader, cases):
    task = state["task"]
    trained = sorted(set(cases) & set(task["train"]))
    return {
        "split": config.split,
        "label": label_of(config.split, trained),
        "runs_that_were_trained_on": trained,
        "checkpoint": config.checkpoint,
        "archive": config.archive,
        "same_statistics_as_training": reader.attrs["statistics_hash"] == task["statistics_hash"],
        "units": UNITS,
        "summary": summary(cases),
        "intervals": confidence(cases),
        "pairs": _pairs(cases),
        "baselines": baselines(reader, task["train"], cases) if _with_forces(cases) else None,
        "runs": cases,
    }


def _with_forces(cases):
    """Whether the model predicts surfaces."""
    return all("Cd" in case for case in cases.values())


def _pairs(cases):
    """Differences of Cd between runs, errors also in counts; None where no two runs differ."""
    if not _with_forces(cases):
        return None
    found = pair_differences(*([case[key] for case in cases.values()] for key in ("Cd", "Cd_true")))
    return found and found | {"mae_counts": found["mae"] / COUNT, "max_counts": found["max"] / COUNT}


@dataclass
class Drawing:
    """A run to be drawn: fair samples of its surface and of its air, None where not predicted, and its curves."""

    run: str
    attrs: dict
    surface: dict | None
    air: dict | None
    profiles: dict


def _drawing(model, reader, scalings, run, mesh, chunk):
    cells, domain = predict(model, reader, scalings, run, mesh["domain"], chunk), mesh["domain"]
    whole = {kind: part.whole(FIGURE_ROWS) for kind, part in cells.items()}
    curves = {}
    if "surface" in cells:
        curves["centreline"] = centreline(cells["surface"], domain)
    if "volume" in cells:
        curves["wake"] = wake(cells["volume"], box_of(reader, run), domain)
    return Drawing(run, reader.run_attrs(run), whole.get("surface"), whole.get("volume"), curves)


def _export(config, model, reader, scalings, runs, mesh):
    """All runs in the layout of AutoCFD5, dealt over the data groups."""
    with together():
        submission.refuse_old(config.export)
    written = {}
    for run, counts in rounds(runs, mesh):
        cells = predict(model, reader, scalings, run, mesh["domain"], config.chunk)
        with together():
            if counts:
                written[run] = submission.export(config.export, run, cells, mesh.get_local_rank("domain"))
    submission.finish(config.export, written)


def _write(config, results, drawings):
    out, label = Path(config.out), results["label"]
    plots = {PARITY: out / "parity.png", TREND: out / "trend.png"} if _with_forces(results["runs"]) else {}
    named = {"Surface of": "", "Air around": "_volume", "Curves of": "_profiles"}
    shown = {f"{name} {d.run}": out / f"{d.run}{end}.png" for d in drawings for name, end in named.items()}
    pictures = plots | shown
    with written(out / "results.json", out / "report.html", *pictures.values()) as (scores, page, *parts):
        write_json(scores, results)
        part = dict(zip(pictures, parts))
        if plots:
            drawn(figures.draw_parity, part[PARITY], results["runs"], label)
            drawn(figures.draw_trend, part[TREND], results["runs"], _others(results), label)
        for d in drawings:
            title = f"{d.run} ({label})"
            if d.surface is not None:
                drawn(figures.draw_surface, part[f"Surface of {d.run}"], d.surface, d.attrs, title)
            if d.air is not None:
                drawn(figures.draw_volume, part[f"Air around {d.run}"], d.air, d.attrs, title)
            drawn(figures.draw_profiles, part[f"Curves of {d.run}"], d.profiles, title)
        write_report(page, results, part)
    known = BASELINES if results["baselines"] else ()
    others = {key.replace("_", " "): results["baselines"][key]["summary"] for key in known}
    print(table(f"{len(results['runs'])} runs", {"model": results["summary"]} | others))
    print(label)
    print(out / "results.json", out / "report.html", sep="\n", flush=True)


def _others(results):
    """{label: {run: Cd}} of the baselines that have one for every run."""
    if not results["baselines"]:
        return {}
    found = {title: results["baselines"][key]["runs"] for key, title in BASELINES.items()}
    found = {title: runs for title, runs in found.items() if all("Cd" in scores for scores in runs.values())}
    return {title: {run: scores["Cd"] for run, scores in runs.items()} for title, runs in found.items()}


if __name__ == "__main__":
    main()
