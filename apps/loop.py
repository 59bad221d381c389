"""The one training loop: steps, validation, checkpoints and exact resume, the same on one process and on a mesh.

An application gives a *task*: how many samples there are, the loss of a list of samples, and a validation. The loop
knows nothing of shards; the task's loss is a mean over the samples it is given, so the mean over data groups that the
wrapper takes of the gradients is the gradient of the global batch.
"""

import math
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from apps.agree import together
from apps.checkpoints import check_kind
from apps.cli import check_counts, option
from apps.finite import checked_loss
from apps.meshes import mesh_of
from apps.record import Record, peak_memory
from apps.restart import launch, put_aside, restarted
from apps.training import OPTIMIZERS, Swapped, gradients_sent, optimizers_of, recompute
from core import InputError, checkpoint
from core.capture import capture, paused
from core.parallelize import parallelize, unwrapped
from data.sampler import DomainSampler

DECAYS, BACKENDS = ("cosine", "linear", "none"), ("inductor", "aot_eager", "eager")


@dataclass
class LoopConfig:
    """Options that every training shares."""

    out: str = option("runs/default", "folder of this run: log, checkpoints, figures")
    steps: int = option(200, "optimizer steps in all")
    batch: int = option(2, "global batch size, cut over the data groups")
    domain: int = option(1, "ranks that share one sample; the rest of the world is data parallel")
    lr: float = option(1e-3, "peak learning rate")
    accumulate: int = option(1, "parts of a batch that are computed one after another, with less memory")
    warmup: int = option(20, "steps of linear warm-up")
    decay: str = option("cosine", "of the learning rate after it, down to a tenth of the peak", choices=DECAYS)
    optimizer: str = option("adamw", "adamw; muon: Muon for matrices in the blocks of the model", choices=OPTIMIZERS)
    weight_decay: float = option(1e-2, "of the optimizer")
    clip: float = option(1.0, "largest gradient norm; 0: no clipping")
    ema: float = option(0.99, "decay of the averaged weights that validation and inference use; 0: none")
    precision: str = option("fp32", "arithmetic of the forward pass", choices=("fp32", "bf16", "fp64"))
    fsdp: bool = option(False, "shard the weights over the data groups with FSDP2 instead of DDP")
    recompute: bool = option(False, "compute each block once more in the backward pass, in place of keeping it")
    compile: str | None = option(None, "backend of torch.compile for the model; left out: eager", choices=BACKENDS)
    capture: bool = option(False, "record the model's passes on a GPU and replay them, which costs no Python")
    patience: int = option(0, "validations without a lower loss after which training ends; 0: never")
    seed: int = option(0, "of weights, sample order and noise")
    log_every: int = option(10, "steps between log lines")
    validate_every: int = option(100, "steps between validations; the last step always validates")
    checkpoint_every: int = option(100, "steps between checkpoints; the last step always saves")
    keep: int = option(0, "newest checkpoints that stay; 0: all")
    resume: bool = option(False, "go on from the last complete checkpoint in --out, as a restart by torchrun does")


class Task(Protocol):
    """What an application brings to the loop. With ``expect(samples)`` it hears what `loss` will be asked for."""

    kind: str  # name of the model family, stored and checked on resume

    def count(self) -> int:
        """Number of training samples."""

    def loss(self, model, samples) -> torch.Tensor:
        """Mean loss of ``samples``, a list of (sample, position in the stream), under ``model``."""

    def validate(self, model) -> dict[str, float]:
        """Scores on the validation samples; the same numbers on every rank. ``"loss"`` is the one to be low."""

    def state(self) -> dict:
        """JSON-able facts that inference needs: configuration, statistics, hashes."""


@dataclass
class Result:
    checkpoint: Path
    scores: dict
    losses: list


def start(config):
    """Joins the process group and makes the mesh of a run (`apps.meshes.mesh_of`); seeds this process.

    Raises:
        InputError: a count below one, a domain that does not divide the number of processes.
    """
    check_counts(config, "steps", "batch", "accumulate", "domain", "log_every", "validate_every", "checkpoint_every")
    mesh = mesh_of(config.domain, getattr(config, "columns", 1))
    torch.manual_seed(config.seed)
    return mesh


def fit(model, task: Task, config: LoopConfig, mesh, blocks=()) -> Result:
    """Trains ``model`` (plain, on the device, equal on all ranks) and returns the last checkpoint and scores.

    The checkpoint of the lowest validation loss lies in ``best/``. Which it is, and when to stop, rank 0 decides.

    Raises:
        InputError: a loss or gradient that is not finite (with step and ranks), a checkpoint of another model, or one
            that cannot be written.
    """
    run = _Run(model, task, config, mesh, blocks)
    with run.record or nullcontext(), run.saver:
        if run.resumes:
            run.resume()
        while run.step < config.steps and not run.stops():
            run.advance()
            last = run.step == config.steps
            if run.step % config.log_every == 0 or last:
                run.log()
            if run.step % config.validate_every == 0 or last:
                run.validate()
            if run.step % config.checkpoint_every == 0 or last or run.stops():
                run.save()
        run.path = run.saver.wait() or run.path
    if run.path is None:
        raise InputError(f"nothing to do: the run is at step {run.step} of {config.steps}", remedy="Raise --steps.")
    return Result(run.path, run.scores, run.losses)


def _check(config, groups, kind):
    """Refuses options that do not go together, or not with so many data groups on this kind of device."""
    if config.compile and (config.recompute or config.fsdp or groups > 1):
        raise InputError("--compile is for one data group, without --recompute and --fsdp", remedy="Leave it out")
    if config.capture and (config.compile or config.recompute or config.fsdp):
        raise InputError("--capture goes without --compile, --recompute and --fsdp", remedy="Leave it out")
    if config.capture and kind != "cuda":
        raise InputError("--capture records on GPUs, and there is none", remedy="Leave it out")
    if config.batch // groups % config.accumulate:
        raise InputError(f"--accumulate is {config.accumulate}", remedy="Choose a divisor of the samples of a data "
                         f"group, of which there are {config.batch // groups}")  # fmt: skip


class _Run:
    def __init__(self, model, task, config, mesh, blocks):
        self.task, self.config, self.mesh = task, config, mesh
        groups, group = mesh["ddp"].size(), mesh.get_local_rank("ddp")
        _check(config, groups, mesh.device_type)
        if config.recompute:
            recompute(blocks)
        if config.capture:
            capture(model)
        self.model = self.run = parallelize(model, mesh, fsdp=config.fsdp, blocks=blocks)
        if config.compile:
            self.run = torch.compile(self.model, backend=config.compile, fullgraph=True, dynamic=False)
        self.optimizers = optimizers_of(self.model, config, blocks)
        self.sampler = DomainSampler(task.count(), config.batch, groups, group, config.seed)
        self.expect = getattr(task, "expect", lambda samples: None)
        self.ema = {n: p.detach().clone() for n, p in self._named()} if config.ema else {}
        self.step, self.losses, self.scores, self.path = 0, [], {}, None
        self.best, self.waited = None, 0  # lowest validation loss, and validations since
        self.logged = time.perf_counter(), 0
        self.folder = Path(config.out)
        self.chief = dist.get_rank() == 0
        told = [config.resume or (self.chief and restarted(self.folder))]
        dist.broadcast_object_list(told)
        self.resumes = told[0]
        with together():
            if self.chief:
                self.folder.mkdir(parents=True, exist_ok=True)
                if not self.resumes:
                    put_aside(self.folder)
        self.record = Record(self.folder) if self.chief else None
        self.saver = checkpoint.Saver(self.folder / "checkpoints", config.keep or None)

    def _named(self):
        return unwrapped(self.model).named_parameters()

    def advance(self):
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.config.lr * schedule(self.step, self.config)
            optimizer.zero_grad(set_to_none=True)
        samples = self.sampler.next()
        self.expect(self.sampler.coming())  # is read while this step computes
        each, loss = len(samples) // self.config.accumulate, 0
        for first in range(0, len(samples), each):
            with gradients_sent(self.model, first + each == len(samples)):
                part = self._loss(self.run, samples[first : first + each]) / self.config.accumulate
                part.backward()
            loss = loss + part.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip or math.inf)
        again = partial(self._loss, samples=samples)
        self.losses.append(checked_loss(loss, norm, self.step + 1, self.model, again))
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        self._average()

    def _loss(self, model, samples):
        with self._autocast():
            return self.task.loss(model, samples)

    def _autocast(self):
        on = self.config.precision == "bf16"
        return torch.autocast(self.mesh.device_type, torch.bfloat16, enabled=on)

    @torch.no_grad()
    def _average(self):
        decay = min(self.config.ema, (1 + self.step) / (10 + self.step))
        for name, p in self._named() if self.ema else ():
            self.ema[name].lerp_(p.detach(), 1 - decay)

    def log(self):
        """One line: the loss, the rate since the line before, the time left, the most memory held."""
        if not self.chief:
            return
        now, (then, step) = time.perf_counter(), self.logged
        rate, self.logged = (self.step - step) * self.config.batch / (now - then), (now, self.step)
        loss, memory, lr = self.losses[-1], peak_memory(), self.optimizers[0].param_groups[0]["lr"]
        row = {"loss": loss, "samples_per_s": round(rate, 3), "GiB": round(memory, 2), "lr": lr}
        self.record.add(self.step, row)
        left = (self.config.steps - self.step) * self.config.batch / rate
        print(
            f"step {self.step}/{self.config.steps}  loss {loss:.4f}  {rate:.1f} samples/s  {left:.0f} s left  "
            f"{memory:.1f} GiB",
            file=sys.stderr,
            flush=True,
        )

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        model = unwrapped(self.model)
        with paused(model), self._averaged(), self._autocast():
            self.scores = self.task.validate(model)
        self.model.train()
        if self.chief:
            self.logged = time.perf_counter(), self.step
            print(f"step {self.step}  validation loss {self.scores['loss']:.4f}", file=sys.stderr, flush=True)
            self.record.add(self.step, {"validation": self.scores})
        lower = [self.best is None or self.scores["loss"] < self.best]
        dist.broadcast_object_list(lower)  # of rank 0: numbers that should be equal must not part the ranks
        self.waited = 0 if lower[0] else self.waited + 1
        if lower[0]:
            self.best = self.scores["loss"]
            checkpoint.save(
                self.folder / "best", self.step, self.model, self.optimizers, self._told(), self.ema, keep=1
            )

    def stops(self):
        """Whether validation has not become better for too long."""
        return 0 < self.config.patience <= self.waited

    def _averaged(self):
        return Swapped(self.model, self._named, self.ema)

    def _told(self):
        return {
            "kind": self.task.kind,
            "sampler": self.sampler.state_dict(),
            "scores": self.scores,
            "losses": self.losses,
            "task": self.task.state(),
            "launch": launch(),
            "optimizer": self.config.optimizer,
            "best": self.best,
            "waited": self.waited,
        }

    def save(self):
        self.saver.save(self.step, self.model, self.optimizers, self._told(), self.ema)

    def resume(self):
        path = checkpoint.latest(self.folder / "checkpoints")
        if path is None:
            return
        state = checkpoint.read_state(path)
        check_kind(state, self.task.kind, path)
        if (before := state.get("optimizer", "adamw")) != self.config.optimizer:
            raise InputError(f"was trained with --optimizer {before}", file=path, remedy="Resume with it")
        checkpoint.load(path, self.model, self.optimizers, self.ema or None)
        self.sampler.load_state_dict(state["sampler"])
        self.step, self.losses, self.scores, self.path = state["step"], state["losses"], state["scores"], path
        self.best, self.waited = state.get("best"), state.get("waited", 0)
        self.logged = time.perf_counter(), self.step
        if self.chief:
            print(f"resumed from {path}", file=sys.stderr, flush=True)


def schedule(step, config):
    """Share of the peak learning rate: linear warm-up, then a cosine or a line down to a tenth, or no decay."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    if config.decay == "none":
        return 1.0
    done = min((step - config.warmup) / max(config.steps - config.warmup, 1), 1.0)
    return 1 - 0.9 * done if config.decay == "linear" else 0.55 + 0.45 * math.cos(math.pi * done)
