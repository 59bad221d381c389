"""Bad input that one rank meets ends all ranks, with the same words.

A truncated chunk lies in the rows of one rank; the others would wait for it in the next collective. So whatever reads
files does it ``with together():``, which costs one number a rank.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist

from core import DistributedManager, InputError


@contextmanager
def together(group=None):
    """Raises on every rank of the group, the world if None, the first `InputError` that any of them raised inside; no
    collectives inside."""
    mine = None
    try:
        yield
    except InputError as error:
        mine = error
    error = _first(mine, group) if dist.is_initialized() and dist.get_world_size(group) > 1 else mine
    if error is not None:
        raise error


def _first(mine, group):
    failed = torch.tensor([mine is not None], dtype=torch.int32, device=DistributedManager().device)
    dist.all_reduce(failed, dist.ReduceOp.MAX, group)
    if not failed.item():
        return None
    errors = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, mine, group)
    return next(error for error in errors if error is not None)
