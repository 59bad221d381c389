"""What the families share: sums over this rank's part, and their addition over cases and ranks."""

import torch
import torch.distributed as dist

from core import ShardTensor


def part(x):
    """This rank's part of a ShardTensor; a plain tensor itself."""
    return x.to_local() if isinstance(x, ShardTensor) else x


def alike(local, x):
    """``local`` cut as ``x`` is: the inverse of `part`."""
    return ShardTensor(local, x.spec) if isinstance(x, ShardTensor) else local


def whole(x):
    """All of a ShardTensor, on every rank; a plain tensor itself."""
    return x.full_tensor() if isinstance(x, ShardTensor) else x


def mine(plane, like):
    """This rank's part of a whole ``plane`` (y, x), cut as ``like`` (..., y, x) is, on its device."""
    if isinstance(like, ShardTensor):
        rows, columns = (slice(*like.spec.local_range(like.ndim + dim)) for dim in (-2, -1))
        plane = plane[rows, columns]
    return plane.to(part(like).device)


def total(x, dims=None):
    """Sum in fp64 over ``dims``, all when None."""
    return x.sum(dtype=torch.float64) if dims is None else x.sum(dims, dtype=torch.float64)


def add(total, more):
    """Sums of two sets of cases; ``total`` may be None or empty."""
    return {key: total[key] + value for key, value in more.items()} if total else dict(more)


def reduce(sums, mesh):
    """The sums of all ranks of ``mesh``, on all of them, in one message an axis."""
    flat = torch.cat([value.reshape(-1) for value in sums.values()])
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            dist.all_reduce(flat, group=mesh.get_group(axis))
    parts = flat.split([value.numel() for value in sums.values()])
    return {key: part.view(value.shape) for (key, value), part in zip(sums.items(), parts)}
