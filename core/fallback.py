"""What an operation without a rule does: gather its operands, compute, cut the results again. Right, but not cheap.

So it says once a call site what it moved, refuses above a limit that the free memory sets, and can be forbidden.
"""

import math
import os
import warnings

import torch

from core import collectives as c
from core.debug import call_site
from core.errors import MissingShardPatch, ShardingError
from core.redistribute import move
from core.shard_tensor import ShardTensor
from core.spec import replicated_spec
from core.writes import note_written

_mode = "warn"
_limit = None
_warned: set = set()
_UNQUESTIONED = 2**26  # bytes that fit anywhere; beyond them the ranks agree on what is free


def set_fallback(mode="warn", limit=None):
    """What an operation without a rule does.

    Args:
        mode: ``"warn"`` (gather, compute, cut again, one warning a call site), ``"silent"``, or ``"error"``.
        limit: most bytes that one operation may bring to each rank; by default half of what is free on the rank that
            has the least.
    """
    global _mode, _limit
    if mode not in ("warn", "silent", "error"):
        raise ShardingError(f"unknown fallback mode {mode!r}", remedy="Use 'warn', 'silent' or 'error'.")
    _mode, _limit = mode, limit


def fallback(func, call, tensors, written, in_place):
    """``call(whole tensors)`` with its results cut again; ``written`` are the tensors that it writes into."""
    shards = [t for t in tensors if isinstance(t, ShardTensor)]
    specs = [t._spec for t in shards]
    nbytes = sum(math.prod(t.shape) * t.element_size() for t in shards if not t._spec.is_replicated())
    _permit(func, specs, nbytes, shards[0].device)
    whole = [_whole(t, any(t is x for x in written)) for t in tensors]
    out = call(whole)
    for t, value in zip(tensors, whole):
        if isinstance(t, ShardTensor) and any(t is w for w in written):
            t._local_tensor.copy_(move(value, t._spec.replicated(), t._spec))
    note_written(written)
    if in_place and out is not None:
        return written[0]
    return _recut(out, max(specs, key=lambda s: s.is_sharded()))


def _whole(t, written):
    """What is written keeps its own memory until the result is there; plain tensors are written where they are."""
    if not isinstance(t, ShardTensor):
        return t
    whole = move(t._local_tensor, t._spec, t._spec.replicated())
    return whole.clone() if written and whole is t._local_tensor else whole


def _permit(func, specs, nbytes, device):
    say = {"op": str(func), "operands": specs}
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise MissingShardPatch("a random operation without a rule: the ranks would draw unlike values", **say)
    if _mode == "error":
        raise MissingShardPatch("no sharding rule", remedy="Register one with core.op.", **say)
    if not nbytes:
        return
    limit = _limit if _limit is not None else _agreed_limit(specs[0].mesh, device) if nbytes > _UNQUESTIONED else nbytes
    if nbytes > limit:
        remedy = "Register a rule with core.op, or allow more with core.set_fallback(limit=...)."
        raise MissingShardPatch(f"no sharding rule, and {nbytes:,} bytes exceed {limit:,}", remedy=remedy, **say)
    site = call_site()
    if _mode == "warn" and (func, site) not in _warned:
        _warned.add((func, site))
        warnings.warn(f"{site}: {func} has no sharding rule: gathers {nbytes:,} bytes on every rank", stacklevel=4)


def _agreed_limit(mesh, device):
    """Half of what is free on the rank of the mesh that has the least: ranks that disagree would wait for ever."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_memory()
    value = torch.tensor([free // 2], device=device)
    for axis in range(mesh.ndim):
        value = c.send_all_reduce(value, c.axis_group(mesh, axis), "min")
    return int(value.item())


def _free_memory():
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not every system tells
        return 2**40


def _recut(out, like):
    """Results of the operand's shape are cut as the operand, others stay whole."""
    if isinstance(out, torch.Tensor):
        spec = like.finished() if out.shape == like.shape else replicated_spec(like.mesh, out.shape)
        return ShardTensor(move(out, spec.replicated(), spec), spec)
    if isinstance(out, (tuple, list)):
        return type(out)([_recut(o, like) for o in out])
    return out
