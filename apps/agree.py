"""Bad input that one rank meets ends all ranks, with the same words.

A truncated chunk lies in the rows of one rank; the others would wait for it in the next collective. So whatever reads
files does it ``with together():``, which costs one number a rank.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist

from core import DistributedManager, InputError


@contextmanager
def together():
    """Raises on every rank of the world the first `InputError` that any rank raised inside; no collectives inside."""
    mine = None
    try:
        yield
    except InputError as error:
        mine = error
    error = _first(mine) if dist.is_initialized() and dist.get_world_size() > 1 else mine
    if error is not None:
        raise error


def _first(mine):
    failed = torch.tensor([mine is not None], dtype=torch.int32, device=DistributedManager().device)
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    if not failed.item():
        return None
    errors = [None] * dist.get_world_size()
    dist.all_gather_object(errors, mine)
    return next(error for error in errors if error is not None)
