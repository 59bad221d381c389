"""Checkpoints that are complete or absent: written beside, renamed when all ranks are done, read at any world size.

Layout: ``folder/step_00000010/`` holds torch.distributed.checkpoint files (model, optimizer, EMA) and ``state.json``
(step, loader position, random state, configuration).
"""

import json
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from core.errors import InputError


def save(folder, step, model, optimizer, extra, ema=None):
    """Writes one checkpoint; every rank must call it. Returns its path.

    Args:
        extra: JSON-able dict, stored as it is.
        ema: dict of averaged parameters by name, or None.
    """
    final = Path(folder) / f"step_{step:08d}"
    part = final.with_name(final.name + ".part")
    if dist.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    dist.barrier()
    tensors = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    if ema:
        tensors["ema"] = dict(ema)
    tensors["rng"] = torch.get_rng_state()
    dcp.save(tensors, checkpoint_id=str(part))
    if dist.get_rank() == 0:
        (part / "state.json").write_text(json.dumps({"step": step, **extra}, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(part, final)
    dist.barrier()
    return final


def latest(folder):
    """The last complete checkpoint below ``folder``, or None; half-written ones are ignored."""
    found = sorted(p for p in Path(folder).glob("step_*") if p.suffix != ".part" and (p / "state.json").exists())
    return found[-1] if found else None


def read_state(path):
    """The JSON part of a checkpoint.

    Raises:
        InputError: no checkpoint there, or one that cannot be read.
    """
    file = Path(path) / "state.json"
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        raise InputError("no checkpoint", file=path, remedy="Give the step_... folder that training printed.") from None
    except ValueError:
        raise InputError("not a readable checkpoint", file=file, remedy="Use an earlier step_... folder.") from None


def load(path, model, optimizer=None, ema=None, averaged=False):
    """Restores a checkpoint into a model (and optimizer, EMA, random state) at any world size; returns its JSON part.

    Args:
        averaged: load the EMA weights into the model, where the checkpoint has them.

    Raises:
        InputError: the checkpoint belongs to another model or is damaged.
    """
    state = read_state(path)
    tensors = {"model": get_model_state_dict(model)}
    if averaged and state.get("has_ema"):
        tensors = {"ema": tensors["model"]}
    if optimizer is not None:
        tensors["optimizer"] = get_optimizer_state_dict(model, optimizer)
        tensors["rng"] = torch.get_rng_state()
        if ema is not None:
            tensors["ema"] = dict(ema)
    _check_names(path, tensors)
    try:
        dcp.load(tensors, checkpoint_id=str(path))
    except (Exception, CheckpointException) as error:  # which is no Exception
        failures = getattr(error, "failures", None)  # of the ranks: what each of them met
        cause = next(iter(failures.values()))[0] if failures else error
        raise InputError(
            f"cannot be loaded into this model ({type(cause).__name__}: {str(cause).strip()[:200]})",
            file=path,
            remedy="Use an earlier step_... folder where a file is damaged, else the configuration of the training.",
        ) from error
    set_model_state_dict(model, tensors.get("model") or tensors["ema"])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, tensors["optimizer"])
        torch.set_rng_state(tensors["rng"])
        if ema is not None:
            for name, value in tensors["ema"].items():
                ema[name].copy_(value)
    return state


def _check_names(path, tensors):
    """Names the first parameter that the checkpoint lacks or holds in another shape."""
    try:
        stored = dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata
    except Exception as error:
        raise InputError(
            f"a damaged checkpoint ({error})", file=path, remedy="Use an earlier step_... folder."
        ) from error
    part = "model" if "model" in tensors else "ema"
    for name, value in tensors[part].items():
        entry = stored.get(f"{part}.{name}")
        if entry is None or tuple(getattr(entry, "size", value.shape)) != tuple(value.shape):
            has = "nothing" if entry is None else tuple(entry.size)
            raise InputError(
                f"holds {has} where this model has shape {tuple(value.shape)}",
                file=path,
                variable=name,
                remedy="Use the checkpoint of a model with the same configuration.",
            )
