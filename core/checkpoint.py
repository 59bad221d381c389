"""Checkpoints that are complete or absent: written beside, renamed when all ranks are done, read at any world size.

Layout: ``folder/step_00000010/`` holds torch.distributed.checkpoint files (model, optimizer, EMA, random states), to
which every rank writes the parts that it has, and ``state.json`` (step, loader position, configuration, a digest of
each file).
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from core.errors import InputError
from core.files import EARLIER, Planner, Reader, Writer, check_file, complete
from core.parallelize import unwrapped
from core.shard_tensor import ShardTensor


# -- writing ------------------------------------------------------------------------------------------------------
def save(folder, step, model, optimizer, extra, ema=None, keep=None):
    """Writes one checkpoint; every rank must call it. Returns its path.

    Args:
        optimizer: one, or a list of them.
        extra: JSON-able dict, stored as it is.
        ema: dict of averaged parameters by name, or None.
        keep: how many of the newest checkpoints stay in ``folder``; None: all.

    Raises:
        InputError: it cannot be written; on every rank.
    """
    return _write(folder, step, _contents(model, optimizer, ema), _about(step, extra, ema), keep)


class Saver:
    """Writes the checkpoints of a run while the training goes on, one at a time. A context manager on every rank.

    What is written is what was there when :meth:`save` was called: it is copied to the memory of the host first. Needs
    a process group of its own (gloo, also beside NCCL), since the training sends messages at the same time.

    Args:
        folder, keep: as for :func:`save`.
    """

    def __init__(self, folder, keep=None):
        self._folder, self._keep = folder, keep
        self._group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._written = None

    def save(self, step, model, optimizer, extra, ema=None):
        """As :func:`save`, but returns when the copy is made; raises what befell the checkpoint before."""
        self.wait()
        tensors, about = _copied(_contents(model, optimizer, ema)), _about(step, extra, ema)
        self._written = self._thread.submit(_write, self._folder, step, tensors, about, self._keep, self._group)

    def wait(self):
        """Path of the last checkpoint, once it is complete; None where there is none.

        Raises:
            InputError: it could not be written; on every rank.
        """
        written, self._written = self._written, None
        return written and written.result()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        """Lets the last checkpoint be completed; an error of the training goes before one of the writing."""
        self._thread.shutdown()
        dist.destroy_process_group(self._group)
        if kind is None:
            self.wait()


def _contents(model, optimizer, ema):
    tensors = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    if ema:
        tensors["ema"] = dict(ema)
    return tensors | {"rng": {str(dist.get_rank()): _random_states()}}


def _random_states():
    states = {"cpu": torch.get_rng_state()}
    return states | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else states


def _about(step, extra, ema):
    """``state.json`` without the digests, as text: later changes of ``extra`` do not reach it."""
    facts = {"step": step, "ranks": dist.get_world_size(), "devices": list(_random_states()), "has_ema": bool(ema)}
    return json.dumps(facts | extra)


def _copied(value):
    """The same structure in which all tensors are copies on the host."""
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_copied, value))
    if isinstance(value, ShardTensor):
        return ShardTensor(_copied(value._local_tensor), value._spec)
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _write(folder, step, tensors, about, keep, group=None):
    final = Path(folder) / f"step_{step:08d}"
    try:
        dcp.save(tensors, storage_writer=Writer(final, about, keep), process_group=group)
    except CheckpointException as error:  # of all ranks
        rank, cause = _first(error)
        raise InputError(
            f"cannot be written by rank {rank} ({type(cause).__name__}: {cause})",
            file=final,
            remedy="See that the folder can be written and has room.",
        ) from cause
    return final


# -- reading ------------------------------------------------------------------------------------------------------
def latest(folder):
    """The last complete checkpoint below ``folder``, or None; half-written ones are ignored."""
    return next(reversed(complete(folder)), None)


def read_state(path):
    """The JSON part of a checkpoint.

    Raises:
        InputError: no checkpoint there, or one that cannot be read.
    """
    file = Path(path) / "state.json"
    try:
        state = json.loads(file.read_text())
        if not {"step", "ranks", "devices", "has_ema", "files"} <= state.keys():
            raise ValueError(file)
        return state
    except (FileNotFoundError, NotADirectoryError):
        raise InputError("no checkpoint", file=path, remedy="Give the step_... folder that training printed") from None
    except (ValueError, AttributeError):
        raise InputError("not a readable checkpoint", file=file, remedy=EARLIER) from None


def load(path, model, optimizer=None, ema=None, averaged=False):
    """Restores a checkpoint into a model (and optimizer, EMA, random state) at any world size; returns its JSON part.

    Every rank reads only what overlaps its own parts, and its own random state; at another world size, that of rank 0.

    Args:
        averaged: load the EMA weights into the model, where the checkpoint has them.

    Raises:
        InputError: the checkpoint belongs to another model or is damaged; on every rank.
    """
    state = read_state(path)
    weights, optimizers = get_model_state_dict(model), optimizer
    tensors = {"model": weights}
    if averaged and state["has_ema"]:  # of parameters; buffers have no average
        names = {name for name, _ in unwrapped(model).named_parameters()}
        parts = {"ema": names, "model": weights.keys() - names}
        tensors = {part: {name: weights[name] for name in weights if name in parts[part]} for part in parts}
    if optimizer is not None:
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        for each in optimizers:
            each.zero_grad()  # of other weights; and torch makes room for the states of those without
        random = {k: v for k, v in _random_states().items() if k in state["devices"]}
        source = dist.get_rank() if dist.get_world_size() == state["ranks"] else 0
        tensors |= {"optimizer": get_optimizer_state_dict(model, optimizers), "rng": {str(source): random}}
        if ema:
            tensors["ema"] = dict(ema)
    planner = _read(path, state["files"], {part: values for part, values in tensors.items() if values})
    set_model_state_dict(model, weights)
    if optimizer is not None:
        lenient = StateDictOptions(strict=False)  # towards parameters without a state
        set_optimizer_state_dict(model, optimizers, tensors["optimizer"], options=lenient)
        _drop_states(model, optimizers, planner.absent)
        torch.set_rng_state(random["cpu"])
        if "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"])
    return state


def _read(path, files, tensors):
    check_file(path, ".metadata", files)
    planner = Planner(path)
    try:
        dcp.load(tensors, storage_reader=Reader(path, files), planner=planner)
    except CheckpointException as error:  # of all ranks
        rank, cause = _first(error)
        if isinstance(cause, InputError):
            raise cause from None
        raise InputError(
            f"cannot be loaded into this model by rank {rank} ({type(cause).__name__}: {str(cause).strip()[:200]})",
            file=path,
            remedy="Use an earlier step_... folder where a file is damaged, else the configuration of the training.",
        ) from cause
    return planner


def _first(error):
    """Rank and exception of the first rank that failed."""
    rank = min(error.failures)
    return rank, error.failures[rank][0]


def _drop_states(model, optimizers, names):
    for name, parameter in unwrapped(model).named_parameters():
        for each in optimizers:
            if name in names:
                each.state.pop(parameter, None)
