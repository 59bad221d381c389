"""Trains a Transolver on the surfaces or volumes, or both, of an aero archive: python -m apps.aero.train

Without arguments: builds the embedded archive of synthetic bodies once, trains the tiny model on it (about two minutes
on two CPU cores) and ends with validation scores, the path of the checkpoint and a figure. With
torchrun --nproc-per-node N and --domain N the points of every body are cut over N processes; the numbers stay the same.
"""

from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from apps.aero import figures, metrics
from apps.aero.config import EMBEDDED, EMBEDDED_VOLUME, TrainConfig
from apps.aero.dataset import Points, Scaling, Stacked, require_runs, rows_of, runs_of, sample_start
from apps.aero.losses import field_loss, force_loss, std_over_q
from apps.aero.model import Transolver
from apps.aero.predict import KIND, judge, load_model, predict
from apps.aero.shapes import training_facts
from apps.aero.shown import table
from apps.agree import together
from apps.cli import parse
from apps.loop import fit, start
from apps.outputs import drawn, written
from core import DistributedManager, InputError, checkpoint
from core.command import command
from data.aero.archive import AeroReader
from data.sharded import read_sharded

SHOWN = ("loss", "pressure_l2", "shear_l2", "Cd_mae", "Cd_r2", "Cl_mae", "volume_pressure_l2", "velocity_l2")
FIGURE_ROWS = 40_000


class FieldTask:
    """Errors of standardised fields on random points of training runs, surface, volume or both (apps.loop.Task)."""

    kind = KIND

    def __init__(self, config, mesh):
        self.config, self.mesh, self.kinds = config, mesh, config.kinds()
        self.reader = AeroReader(config.archive)
        self.runs = runs_of(self.reader, "train")
        self.checked_on, self.checked = _validation(self.reader)
        require_runs(self.reader, [*self.runs, *self.checked], self.kinds)
        self.scalings = {kind: Scaling.of(self.reader, kind, config.weighed) for kind in self.kinds}
        self._facts = None
        self.count_rows = {kind: {run: rows_of(self.reader, run, kind) for run in self.runs} for kind in self.kinds}
        self.rows = {kind: min(config.sample_points(), *self.count_rows[kind].values()) for kind in self.kinds}
        self.dtype = torch.float64 if config.precision == "fp64" else torch.float32

    def count(self):
        return len(self.runs)

    def loss(self, model, samples):
        """Sum over clouds of the mean over samples; rows that the archive holds back do not count."""
        with together():
            clouds = {kind: self._read(kind, samples) for kind in self.kinds}
        outputs = model(*(cloud[0] for cloud in clouds.values()))
        outputs = outputs if len(clouds) > 1 else (outputs,)
        found = zip(outputs, clouds.values())
        total = sum(field_loss(self.config.loss, output, *cloud[1:3]) for output, cloud in found)
        if self.config.force_weight:
            features, targets, weight, area = clouds["surface"]
            std = std_over_q(self.scalings["surface"], targets.device, targets.dtype)
            term = force_loss(outputs[0], targets, features[..., 3:6], weight * area, std)
            total = total + self.config.force_weight * term
        return total

    def _read(self, kind, samples):
        """Features, targets and more of all samples, each (batch, points, ...)."""
        runs, rows = [self.runs[sample] for sample, _ in samples], self.count_rows[kind]
        starts = [sample_start(rows[run], self.config.seed, at) for run, (_, at) in zip(runs, samples)]
        batch = Stacked([Points(self.reader, self.scalings[kind], start, self.rows[kind]) for start in starts])
        names = ("features", "targets", "weight", *(("area",) if self._weighs(kind) else ()))
        return [read_sharded(batch, runs, name, self.mesh["domain"], [Shard(1)], dtype=self.dtype) for name in names]

    def _weighs(self, kind):
        return kind == "surface" and self.config.force_weight > 0

    def validate(self, model):
        only = self.checked_on == "heldout"
        cases = judge(model, self.reader, self.scalings, self.checked, self.mesh, only_held_out=only)
        scores = metrics.summary(cases)
        return {name: scores[name] for name in SHOWN if scores.get(name) is not None}

    def state(self):
        return {
            "model": asdict(self.config.model()),
            "scalings": [scaling.state() for scaling in self.scalings.values()],
            "statistics_hash": self.reader.attrs["statistics_hash"],
            "archive": str(Path(self.config.archive).resolve()),
            "train": self.runs,
            "validated_on": self.checked_on,
            **self._described(),
        }

    def _described(self):
        """What new bodies are compared with; read once, by the rank that writes the checkpoint, and by no training."""
        if self._facts is None:
            chief = dist.get_rank() == 0
            self._facts = training_facts(AeroReader(self.config.archive), self.runs) if chief else {}
        return self._facts


def _validation(reader):
    """Where to look whether it learns: validation runs, else held-out cells, else the training runs themselves."""
    for split in ("valid", "heldout", "train"):
        try:
            return split, runs_of(reader, split)
        except InputError:
            continue
    raise InputError("no runs", file=reader.path, variable="splits", remedy="Build the archive again")


def prepare(config):
    """(model, task, mesh) of a training; the model is plain and equal on all ranks."""
    mesh = start(config)
    if config.archive is None:
        config.archive = _embedded("volume" in config.kinds())
    if config.force_weight and "surface" not in config.kinds():
        raise InputError("needs a surface to add up", variable="force-weight", remedy="Leave it out, or --fields joint")
    task = FieldTask(config, mesh)
    if config.resume:
        _check_resume(config, task)
    model = Transolver(config.model()).to(DistributedManager().device, task.dtype)
    return model, task, mesh


def _embedded(volume):
    """The archive of synthetic bodies, built by one rank where it is not there yet."""
    path = EMBEDDED_VOLUME if volume else EMBEDDED
    with together():
        if dist.get_rank() == 0 and not Path(path).exists():
            from data.aero.synthetic import CELLS, synthetic_archive

            print(f"building {path}", flush=True)
            synthetic_archive(path, runs=24, volume=volume, cells=1500 if volume else CELLS)
    return path


def _check_resume(config, task):
    path = checkpoint.latest(Path(config.out) / "checkpoints")
    if path is None:
        return
    before = checkpoint.read_state(path)["task"].get("statistics_hash")
    if before != task.state()["statistics_hash"]:
        raise InputError(
            "was trained with the statistics of another archive",
            file=path,
            variable="statistics_hash",
            remedy=f"Resume with the archive it was trained on, or give another --out than {config.out}",
        )


@command
def main(argv=None):
    """Runs the command; returns apps.loop.Result."""
    config = parse(TrainConfig, argv, __doc__)
    model, task, mesh = prepare(config)
    chief = dist.get_rank() == 0
    if chief:
        size, least = (
            sum(p.numel() for p in model.parameters()),
            {k: min(r.values()) for k, r in task.count_rows.items()},
        )
        print(f"{size:,} weights, {task.count()} runs of ", end="")
        print(
            ", ".join(f"{n:,} {kind} cells or more, {task.rows[kind]:,} a sample" for kind, n in least.items()), end=""
        )
        print(f", validated on {task.checked_on} cells", flush=True)
    result = fit(model, task, config, mesh, blocks=model.blocks)
    _report(config, task, mesh, result, chief)
    return result


def _report(config, task, mesh, result, chief):
    model, scalings, _ = load_model(result.checkpoint)
    cells = predict(model, task.reader, scalings, task.checked[0], mesh["domain"])
    shown = cells.get("surface", cells.get("volume"))
    arrays = shown.whole(FIGURE_ROWS)
    with together():
        if chief:
            print(table(f"validation, {len(task.checked)} runs", {"model": result.scores}))
            print(f"checkpoint {result.checkpoint}")
            path, title = Path(config.out) / "figure.png", f"{shown.run} ({task.checked_on})"
            with written(path) as (part,):
                log = Path(config.out) / "log.jsonl"
                told = (result.losses, log, arrays, shown.attrs, title)
                if drawn(figures.draw_training, part, *told):
                    print(f"figure {path}", flush=True)


if __name__ == "__main__":
    main()
