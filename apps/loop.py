"""The one training loop: steps, validation, checkpoints and exact resume, the same on one process and on a mesh.

An application gives a *task*: how many samples there are, the loss of a list of samples, and a validation. The loop
knows nothing of shards; the task's loss is a mean over the samples it is given, so the mean over data groups that the
wrapper takes of the gradients is the gradient of the global batch.
"""

import json
import math
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from apps.cli import check_counts, option
from apps.finite import checked_loss
from core import DistributedManager, InputError, checkpoint
from core.parallelize import parallelize, reshard, unwrapped
from data.sampler import DomainSampler


@dataclass
class LoopConfig:
    """Options that every training shares."""

    out: str = option("runs/default", "folder of this run: log, checkpoints, figures")
    steps: int = option(200, "optimizer steps in all")
    batch: int = option(2, "global batch size, cut over the data groups")
    domain: int = option(1, "ranks that share one sample; the rest of the world is data parallel")
    lr: float = option(1e-3, "peak learning rate")
    warmup: int = option(20, "steps of linear warm-up, followed by a cosine to a tenth of the peak")
    weight_decay: float = option(1e-2, "of AdamW")
    clip: float = option(1.0, "largest gradient norm; 0: no clipping")
    ema: float = option(0.99, "decay of the averaged weights that validation and inference use; 0: none")
    precision: str = option("fp32", "arithmetic of the forward pass", choices=("fp32", "bf16", "fp64"))
    fsdp: bool = option(False, "shard the weights over the data groups with FSDP2 instead of DDP")
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
    """Joins the process group and makes the (ddp, domain) mesh of a run; seeds this process.

    Raises:
        InputError: a count below one, a domain that does not fit the number of processes.
    """
    check_counts(config, "steps", "batch", "domain", "log_every", "validate_every", "checkpoint_every")
    if not DistributedManager.is_initialized():
        DistributedManager.initialize()
    mesh = DistributedManager().initialize_mesh((-1, config.domain), ("ddp", "domain"))
    torch.manual_seed(config.seed)
    return mesh


def fit(model, task: Task, config: LoopConfig, mesh, blocks=()) -> Result:
    """Trains ``model`` (plain, on the device, equal on all ranks) and returns the last checkpoint and scores.

    Raises:
        InputError: a loss or gradient that is not finite (with step and ranks), a checkpoint of another model, or one
            that cannot be written.
    """
    run = _Run(model, task, config, mesh, blocks)
    with run.saver:
        if run.resumes:
            run.resume()
        while run.step < config.steps:
            run.advance()
            last = run.step == config.steps
            if run.step % config.log_every == 0 or last:
                run.log()
            if run.step % config.validate_every == 0 or last:
                run.validate()
            if run.step % config.checkpoint_every == 0 or last:
                run.save()
        run.path = run.saver.wait() or run.path
    if run.path is None:
        raise InputError(f"nothing to do: the run is at step {run.step} of {config.steps}", remedy="Raise --steps.")
    return Result(run.path, run.scores, run.losses)


class _Run:
    def __init__(self, model, task, config, mesh, blocks):
        self.task, self.config, self.mesh = task, config, mesh
        self.model = parallelize(model, mesh, fsdp=config.fsdp, blocks=blocks)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, weight_decay=config.weight_decay, betas=(0.9, 0.98)
        )
        groups, group = mesh["ddp"].size(), mesh.get_local_rank("ddp")
        self.sampler = DomainSampler(task.count(), config.batch, groups, group, config.seed)
        self.expect = getattr(task, "expect", lambda samples: None)
        self.ema = {n: p.detach().clone() for n, p in self._named()} if config.ema else {}
        self.step, self.losses, self.scores, self.path = 0, [], {}, None
        self.logged = time.perf_counter(), 0
        self.folder = Path(config.out)
        self.chief = dist.get_rank() == 0
        told = [config.resume or (self.chief and restarted(self.folder))]
        dist.broadcast_object_list(told)
        self.resumes = told[0]
        if self.chief:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self.resumes:
                put_aside(self.folder)
        dist.barrier()
        self.saver = checkpoint.Saver(self.folder / "checkpoints", config.keep or None)

    def _named(self):
        return unwrapped(self.model).named_parameters()

    def advance(self):
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * schedule(self.step, self.config)
        self.optimizer.zero_grad(set_to_none=True)
        samples = self.sampler.next()
        self.expect(self.sampler.coming())  # is read while this step computes
        loss = self._loss(self.model, samples)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip or math.inf)
        again = partial(self._loss, samples=samples)
        self.losses.append(checked_loss(loss, norm, self.step + 1, self.model, again))
        self.optimizer.step()
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
        """One line: the loss, the rate since the line before, the time left, the peak memory of a GPU."""
        if not self.chief:
            return
        now, (then, step) = time.perf_counter(), self.logged
        rate, self.logged = (self.step - step) * self.config.batch / (now - then), (now, self.step)
        memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0
        row = {"step": self.step, "loss": self.losses[-1], "samples_per_s": round(rate, 3), "GiB": round(memory, 2)}
        with open(self.folder / "log.jsonl", "a") as f:
            f.write(json.dumps(row) + "\n")
        tail = f"  {memory:.1f} GiB" if memory else ""
        left = (self.config.steps - self.step) * self.config.batch / rate
        print(
            f"step {self.step}/{self.config.steps}  loss {self.losses[-1]:.4f}  {rate:.1f} samples/s  "
            f"{left:.0f} s left{tail}",
            file=sys.stderr,
            flush=True,
        )

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        with self._averaged(), self._autocast():
            self.scores = self.task.validate(unwrapped(self.model))
        self.model.train()
        if self.chief:
            self.logged = time.perf_counter(), self.step
            text = "  ".join(f"{k} {v:.4f}" for k, v in self.scores.items())
            print(f"step {self.step}  validation: {text}", file=sys.stderr, flush=True)
            with open(self.folder / "log.jsonl", "a") as f:
                f.write(json.dumps({"step": self.step, "validation": self.scores}) + "\n")

    def _averaged(self):
        return _Swapped(self.model, self._named, self.ema)

    def save(self):
        extra = {
            "kind": self.task.kind,
            "sampler": self.sampler.state_dict(),
            "scores": self.scores,
            "losses": self.losses,
            "task": self.task.state(),
            "launch": launch(),
        }
        self.saver.save(self.step, self.model, self.optimizer, extra, self.ema)

    def resume(self):
        path = checkpoint.latest(self.folder / "checkpoints")
        if path is None:
            return
        state = checkpoint.read_state(path)
        check_kind(state, self.task.kind, path)
        checkpoint.load(path, self.model, self.optimizer, self.ema or None)
        self.sampler.load_state_dict(state["sampler"])
        self.step, self.losses, self.scores, self.path = state["step"], state["losses"], state["scores"], path
        self.logged = time.perf_counter(), self.step
        if self.chief:
            print(f"resumed from {path}", file=sys.stderr, flush=True)


class _Swapped:
    """The averaged weights in place of the trained ones, for the time of a validation."""

    def __init__(self, model, named, ema):
        self.model, self.named, self.ema = model, named, ema

    def __enter__(self):
        self._swap()

    def __exit__(self, *error):
        self._swap()

    @torch.no_grad()
    def _swap(self):
        reshard(self.model)
        for name, p in self.named() if self.ema else ():
            kept = p.detach().clone()
            p.copy_(self.ema[name])
            self.ema[name].copy_(kept)


def put_aside(folder):
    """Moves what an earlier run left in ``folder`` to ``previous_N``, so that its checkpoints are not taken for new."""
    old = [folder / name for name in ("checkpoints", "log.jsonl") if (folder / name).exists()]
    if old:
        n = 1 + max((int(p.name.split("_")[1]) for p in folder.glob("previous_*")), default=0)
        aside = folder / f"previous_{n}"
        aside.mkdir()
        for path in old:
            path.rename(aside / path.name)
        print(f"the run that was in {folder} now lies in {aside}", file=sys.stderr, flush=True)


def launch():
    """What the restarts of one torchrun have in common and other launches have not; None without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"process {os.getppid()}" if name == "none" else name


def restarted(folder):
    """Whether torchrun restarted these processes, and the last checkpoint in ``folder`` is of before the restart."""
    path = (
        checkpoint.latest(folder / "checkpoints") if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" else None
    )
    return path is not None and checkpoint.read_state(path).get("launch") == launch()


def schedule(step, config):
    """Share of the peak learning rate: linear warm-up, then a cosine down to a tenth."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    done = (step - config.warmup) / max(config.steps - config.warmup, 1)
    return 0.55 + 0.45 * math.cos(math.pi * min(done, 1.0))


def check_kind(state, kind, path):
    """Refuses a checkpoint of another application or model family."""
    if state.get("kind") != kind:
        raise InputError(
            f"a checkpoint of {state.get('kind')!r}, not of {kind!r}",
            file=path,
            remedy="Give a checkpoint written by the training command of this application.",
        )
