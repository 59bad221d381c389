"""``python -m apps.weather.train``: from an archive to a forecaster of the next frame.

With no arguments it makes synthetic storms, once, and trains the tiny preset on them. ``torchrun --nproc-per-node 4 -m
apps.weather.train --domain 2`` gives the losses of one process, each sample cut over two ranks.
"""

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from apps import loop, metrics
from apps.agree import together
from apps.checkpoints import check_kind, find
from apps.cli import check_counts, parse
from apps.meshes import domain_of, rounds
from apps.outputs import drawn
from apps.report import draw_losses
from apps.weather import diffusion
from apps.weather.baselines import persistence
from apps.weather.config import TrainConfig
from apps.weather.dataset import Frames
from apps.weather.facts import Facts
from apps.weather.model import Denoiser
from apps.weather.rollout import check_sizes, settled, spread, step
from apps.weather.stages import KIND
from core import DistributedManager, InputError, checkpoint
from core.command import command
from data.weather.archive import WeatherReader
from data.weather.synthetic import Storms, build_synthetic

EMBEDDED = Path("runs/synthetic-storms.zarr")
_LEVEL, _STATE, _MEMBER, _RANGE = range(4)  # first number of a key: what its noise is for
RANGES = 4  # of noise, whose losses validation gives one by one


@dataclass
class WeatherTask:
    """The `apps.loop.Task` of the forecaster: denoise the change to the next frame, validate on one-step ensembles."""

    config: TrainConfig
    reader: WeatherReader
    facts: Facts
    mesh: object
    told: int = 0  # channels, the first ones, that are not learned
    kind: str = field(default=KIND, init=False)

    def __post_init__(self):
        config, facts = self.config, self.facts
        count, self.process = len(facts.channels), config.diffusion()
        self.model = config.model(count - self.told, facts.conditions, count, facts.shape)
        self.weights = _channel_weights(config, facts.channels[self.told :])
        self.dtype = torch.float64 if config.precision == "fp64" else torch.float32
        check_sizes(self.model, facts, self.reader.path)
        self.domain = domain_of(self.mesh)
        self.training, self.validation = self._frames("train"), self._frames("valid")
        self.starts, self.cases = self.training.starts(), self.validation.starts(after=config.cases_after)
        asked = max(facts.history, config.cases_after)
        for split, starts, behind in (("train", self.starts, facts.history), ("valid", self.cases, asked)):
            if not starts:
                raise InputError(
                    f"no {behind + 1} successive frames",
                    file=self.reader.path,
                    variable=f"{split} split",
                    remedy="Use a longer archive, or a smaller --history or --cases-after",
                )
        self.cases = spread(self.cases, config.cases)

    def _frames(self, split):
        region = self.reader.split(split)
        policy = self.config.policy()
        return Frames(self.reader, self.facts, self.domain, self.model.patch, region, self.dtype, policy)

    def build(self):
        """A new model on the device of this process."""
        return Denoiser(self.model).to(DistributedManager().device, self.dtype)

    def count(self):
        return len(self.starts)

    def expect(self, samples):
        """Begins to read what `loss` of these samples will need."""
        self.training.expect([self.starts[i] for i, _ in samples])

    def loss(self, model, samples):
        with together():
            ages = [self._age(position) for _, position in samples] if self.facts.background else ()
            batch = self.training.batch([self.starts[i] for i, _ in samples], ages)
        keys = [(self.config.seed, position) for _, position in samples]
        sigma = self.process.sigma(diffusion.numbers(batch.clean, [(_LEVEL, *key) for key in keys]))
        return self._losses(model, batch, sigma, [(_STATE, *key) for key in keys]).mean()

    def _age(self, position):
        """For how many steps what a weather model says to this sample has been known, whoever asks."""
        return int(np.random.default_rng([self.config.seed, position]).integers(self.config.ages + 1))

    def _losses(self, model, batch, sigma, keys):
        """Losses (batch,) of the learned channels at noise of these levels and keys."""
        clean, valid = (part[:, self.told :] for part in (batch.clean, batch.valid))
        noise = diffusion.noise_like(clean, keys)
        weights = None if self.weights is None else self.weights.to(clean)
        return diffusion.losses(model, clean, valid, batch.conditions, sigma, noise, self.process, weights)

    def validate(self, model):
        """Loss at fixed noise, also by range of noise, and per channel RMSE and CRPS of one-step ensembles beside those
        of persistence. Every case is computed alone, so the numbers do not depend on how cases are dealt."""
        total = {}
        for index, counts in rounds(self.cases, self.mesh):
            total = metrics.add(total, {key: value * counts for key, value in self._sums(model, index).items()})
        return self._scores(metrics.reduce(total, self.mesh))

    def _sums(self, model, index):
        frames, process, seed = self.validation, self.process, self.config.seed
        with together():
            batch, history, truth = frames.batch([index]), frames.history(index), frames.observed(index + 1)
        sigma = process.sigma(diffusion.numbers(batch.clean, [(_LEVEL, seed, index)]))
        losses = [self._losses(model, batch, sigma, [(_STATE, seed, index)])]
        ends = process.ranges(RANGES)
        for low, high in zip(ends, ends[1:]):
            middle = torch.full_like(sigma, (low * high) ** 0.5)
            losses.append(self._losses(model, batch, middle, [(_RANGE, seed, index)]))
        keys = [(_MEMBER, seed, index, member) for member in range(self.config.members)]
        time = frames.reader.times[index]
        members = settled(
            frames, step(model, process, frames, history, time, keys, self.told, frames.background(index))
        )
        now = persistence(history)
        valid = (truth.valid & now.valid)[0]
        share = torch.ones(1, dtype=torch.float64, device=valid.device) / self.domain.size()
        sums = {"loss": torch.cat([part.to_local() for part in losses]) * share, "cases": share}
        for name, values in (("model", members), ("persistence", now.values)):
            of_one = metrics.ensemble_sums(frames.physical(values), frames.physical(truth.values)[0], valid, (1, 2))
            sums |= {f"{name} {key}": value for key, value in of_one.items()}
        return sums

    def _scores(self, sums):
        loss, *by_range = (sums["loss"] / sums["cases"]).tolist()
        ends, out = self.process.ranges(RANGES), {"loss": loss}
        out |= {f"loss/noise {low:.3g} to {high:.3g}": part for low, high, part in zip(ends, ends[1:], by_range)}
        for c, channel in list(enumerate(self.facts.channels))[self.told :]:
            for name in ("model", "persistence"):
                n, square, crps = (sums[f"{name} {key}"][c] for key in ("n", "centre_square", "crps"))
                out |= {
                    f"{channel}/rmse/{name}": (square / n).sqrt().item(),
                    f"{channel}/crps/{name}": (crps / n).item(),
                }
        return out

    def state(self):
        return {
            "model": asdict(self.model),
            "diffusion": asdict(self.process),
            "facts": self.facts.to_json(),
            "told": self.told,
            "archive": str(self.reader.path),
            "precision": self.config.precision,
            "policy": asdict(self.config.policy()),
        }


def _channel_weights(config, channels):
    """Weights of mean one, (channel,), or None where all are alike."""
    if config.channel_weights is None:
        return None
    weights = torch.tensor(config.channel_weights, dtype=torch.float64)
    if len(weights) != len(channels) or not (weights > 0).all():
        raise InputError(
            f"--channel-weights are {config.channel_weights}",
            remedy=f"Give one above 0 for each of {', '.join(channels)}",
        )
    return weights / weights.mean()


def prepare(config):
    """Joins the process group and opens the archive, or makes it: the task and the mesh of a training.

    Raises:
        InputError: an archive, channel, split or size that cannot be used, or a run in --out of another training.
    """
    sizes = ("history", "patch", "width", "depth", "heads", "kernel", "sampler_steps")
    check_counts(config, *sizes, "cases", "cases_after", "members", "columns")
    mesh = loop.start(config)
    with together():
        if config.archive is None and not EMBEDDED.exists() and dist.get_rank() == 0:
            print(f"making {EMBEDDED}", file=sys.stderr, flush=True)
            build_synthetic(EMBEDDED, Storms(days=10))
    with together():
        reader = WeatherReader(config.archive or EMBEDDED)
        told, channels = config.names(reader.channels)
        facts = Facts.of(reader, config.history, told + channels, config.model_fields(reader.channels))
        task = WeatherTask(config, reader, facts, mesh, len(told))
        if config.resume:
            _check_resumed(task, Path(config.out) / "checkpoints")
    return task, mesh


def _check_resumed(task, folder):
    path = checkpoint.latest(folder)
    if path is None:
        return
    state = checkpoint.read_state(path)
    check_kind(state, KIND, path)
    before, now = Facts.from_json(state["task"]["facts"]), task.facts
    if state["task"]["told"] != task.told:
        raise InputError(
            f"was told of {state['task']['told']} channels and is of {task.told}", file=path,
            remedy="Resume with the options of the run, or choose another --out",
        )  # fmt: skip
    for name in vars(now):
        if getattr(before, name) != getattr(now, name):
            raise InputError(
                f"was {getattr(before, name)} and is {getattr(now, name)}",
                file=path,
                variable=name,
                remedy="Resume with the archive and options of the run, or choose another --out",
            )


def report(result, config):
    """Prints scores and paths; draws the loss curve where matplotlib is installed."""
    print(f"{'validation, one step ahead':32}{'model':>10}{'persistence':>14}")
    for name, value in result.scores.items():
        if name.endswith("/model"):
            channel, score, _ = name.split("/")
            print(f"{channel + ' ' + score:32}{value:10.3f}{result.scores[f'{channel}/{score}/persistence']:14.3f}")
    print(f"checkpoint {result.checkpoint}")
    figure = Path(config.out) / "loss.png"
    if drawn(draw_losses, figure, Path(config.out) / "log.jsonl"):
        print(f"figure {figure}")


@command
def main(argv=None):
    config = parse(TrainConfig, argv, __doc__.splitlines()[0])
    task, mesh = prepare(config)
    model = task.build()
    if config.start_from:
        path = find(config.start_from)
        check_kind(checkpoint.read_state(path), KIND, path)
        checkpoint.load(path, model, averaged=True)
    result = loop.fit(model, task, config, mesh, model.blocks)
    if dist.get_rank() == 0:
        report(result, config)
    return result


if __name__ == "__main__":
    main()
