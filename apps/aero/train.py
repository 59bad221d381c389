"""Trains a Transolver on the surfaces of an aero archive: python -m apps.aero.train

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
from apps.aero.config import EMBEDDED, TrainConfig
from apps.aero.dataset import Points, Scaling, require_runs, runs_of, sample_start
from apps.aero.model import Transolver
from apps.aero.outputs import drawn, written
from apps.aero.predict import KIND, judge, load_model, predict
from apps.aero.shapes import training_facts
from apps.agree import together
from apps.cli import command, parse
from apps.loop import fit, start
from core import DistributedManager, InputError, checkpoint
from data.aero.archive import AeroReader
from data.sharded import read_sharded

SHOWN = ("loss", "pressure_l2", "shear_l2", "Cd_mae", "Cl_mae")
FIGURE_ROWS = 40_000


class SurfaceTask:
    """Mean squared error of standardised pressure and shear on random points of training runs (apps.loop.Task)."""

    kind = KIND

    def __init__(self, config, mesh):
        self.config, self.mesh = config, mesh
        self.reader = AeroReader(config.archive)
        self.runs = runs_of(self.reader, "train")
        self.checked_on, self.checked = _validation(self.reader)
        require_runs(self.reader, [*self.runs, *self.checked])
        self.scaling = Scaling.of(self.reader)
        self._facts = None
        rows = [self.reader.shape(f"{run}/surface", "area")[0] for run in self.runs]
        self.count_rows, self.rows = dict(zip(self.runs, rows)), min(config.sample_points(), *rows)
        self.dtype = torch.float64 if config.precision == "fp64" else torch.float32

    def count(self):
        return len(self.runs)

    def loss(self, model, samples):
        """Mean over samples of the mean over their points; rows that the archive holds back do not count."""
        with together():
            read = [self._read(*sample) for sample in samples]
        features, targets, weight = (torch.stack(parts) for parts in zip(*read))
        square = (model(features) - targets).square().mean(-1)
        return ((weight * square).sum(1) / weight.sum(1).clamp(min=1)).mean()

    def _read(self, sample, position):
        run = self.runs[sample]
        points = Points(
            self.reader, self.scaling, sample_start(self.count_rows[run], self.config.seed, position), self.rows
        )
        return [
            read_sharded(points, run, name, self.mesh["domain"], [Shard(0)], dtype=self.dtype)
            for name in ("features", "targets", "weight")
        ]

    def validate(self, model):
        cases = judge(
            model, self.reader, self.scaling, self.checked, self.mesh, only_held_out=self.checked_on == "heldout"
        )
        scores = metrics.summary(cases)
        return {name: scores[name] for name in SHOWN}

    def state(self):
        return {
            "model": asdict(self.config.model()),
            "scaling": self.scaling.state(),
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
        config.archive = _embedded()
    task = SurfaceTask(config, mesh)
    if config.resume:
        _check_resume(config, task)
    model = Transolver(config.model()).to(DistributedManager().device, task.dtype)
    return model, task, mesh


def _embedded():
    """The archive of synthetic bodies, built by one rank where it is not there yet."""
    with together():
        if dist.get_rank() == 0 and not Path(EMBEDDED).exists():
            from data.aero.synthetic import synthetic_archive

            print(f"building {EMBEDDED}", flush=True)
            synthetic_archive(EMBEDDED, runs=24)
    return EMBEDDED


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
        size = sum(p.numel() for p in model.parameters())
        print(f"{size:,} weights, {task.count()} runs of {min(task.count_rows.values()):,} cells or more, ", end="")
        print(f"{task.rows:,} points a sample, validated on {task.checked_on} cells", flush=True)
    result = fit(model, task, config, mesh, blocks=model.blocks)
    _report(config, task, mesh, result, chief)
    return result


def _report(config, task, mesh, result, chief):
    model, scaling, _ = load_model(result.checkpoint)
    surface = predict(model, Points(task.reader, scaling), task.checked[0], mesh["domain"])
    arrays = surface.whole(FIGURE_ROWS)
    with together():
        if chief:
            for name, value in result.scores.items():
                print(f"validation {name} {value:.4f}")
            print(f"checkpoint {result.checkpoint}")
            path, title = Path(config.out) / "figure.png", f"{surface.run} ({task.checked_on})"
            with written(path) as (part,):
                log = Path(config.out) / "log.jsonl"
                if drawn(figures.draw_training, part, result.losses, log, arrays, surface.attrs, title):
                    print(f"figure {path}", flush=True)


if __name__ == "__main__":
    main()
