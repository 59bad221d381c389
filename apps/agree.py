"""An error that one rank meets ends all ranks, with the same words.

A truncated chunk lies in the rows of one rank; the others would wait for it in the next collective. So whatever reads
files does it ``with together():``, which costs one number a rank.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist

from core import DistributedManager, InputError


@contextmanager
def together(group=None):
    """Raises on every rank of the group, the world if None, the first exception that any of them raised inside; no
    collectives inside.

    Raises:
        InputError: as it was raised.
        OSError, RuntimeError: of an OSError or any other exception its words, after the rank that met it. That rank's
            own is their cause.
    """
    mine = None
    try:
        yield
    except Exception as error:
        mine = error
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        if mine is not None:
            raise mine
        return
    first = _first(mine, group)
    if first is not None:
        raise first from mine


def _first(mine, group):
    failed = torch.tensor([mine is not None], dtype=torch.int32, device=DistributedManager().device)
    dist.all_reduce(failed, dist.ReduceOp.MAX, group)
    if not failed.item():
        return None
    errors = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, _portable(mine), group)
    return next(error for error in errors if error is not None)


def _portable(error):
    if error is None or isinstance(error, InputError):
        return error
    kind = OSError if isinstance(error, OSError) else RuntimeError
    return kind(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
