"""Sampling an image at given positions.

A position may lie anywhere, so the image must be whole in space: if its space is cut, the cut is laid over batch or
channels meanwhile (each rank then holds as much as before), or undone where there are too few of them. Positions may be
cut as they like, and the samples are handed out cut as the positions are.
"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor.placement_types import Shard

from core.dispatch import Plan, op
from core.errors import ShardingError
from core.ops.sliding import at_least_one, trimmed
from core.spec import replicated_spec

_MODES, _PADDINGS = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")


@op(F.grid_sample, torch.grid_sampler, torch.grid_sampler_2d, torch.grid_sampler_3d, names=("input", "grid"))
def grid_sample(func, x, grid, mode="bilinear", padding_mode="zeros", align_corners=None):
    _check(func, x, grid, mode, padding_mode)
    image = x.aside(*range(2, x.ndim))
    out = _meet(image, grid, (*x.shape[:2], *grid.shape[1:-1]))
    inputs = _as_cut(image, out, {0: 0, 1: 1}), _as_cut(grid, out, {d: max(d - 1, 0) for d in range(x.ndim) if d != 1})

    def local(t, positions, *args, **kwargs):
        y = func(at_least_one(t), at_least_one(positions), *args, **kwargs)
        return trimmed(y, out.local_shape())

    return Plan(inputs, out, local, _handed_out(x, grid, out))


def _check(func, x, grid, mode, padding_mode):
    n, name = x.ndim - 2, func.__name__
    if n not in (2, 3) or grid.ndim != x.ndim or grid.shape[0] != x.shape[0] or grid.shape[-1] != n:
        raise ShardingError("wants (batch, channels, *space) and (batch, *space, dims)", op=name, operands=[x, grid])
    named = isinstance(mode, str)
    mode, padding = (mode, padding_mode) if named else (_MODES[mode], _PADDINGS[padding_mode])
    if mode not in _MODES or padding not in _PADDINGS or (mode == "bicubic" and n == 3):
        raise ShardingError(f"mode {mode!r}, padding_mode {padding!r} in {n} dims", op=name, operands=[x, grid])


def _meet(image, grid, shape):
    """The samples are cut along batch and channels as the image, otherwise as the positions."""
    out, taken = replicated_spec(image.mesh, shape), {dim for _, dim in image.cuts()}
    for axis in range(image.mesh.ndim):
        p, q = image.placements[axis], grid.placements[axis]
        if isinstance(p, Shard):
            out = out.with_axis(axis, p, image.sizes[axis])
        elif isinstance(q, Shard) and q.dim < grid.ndim - 1:
            dim = q.dim + 1 if q.dim else 0
            if dim not in taken:
                taken.add(dim)
                out = out.with_axis(axis, Shard(dim), grid.sizes[axis])
    return out


def _as_cut(x, out, dims):
    """``x`` cut as the result, whose dim ``d`` is dim ``dims[d]`` of ``x``; whole along axes that cut another."""
    spec = x.replicated()
    for axis, dim in out.cuts():
        if dim in dims:
            spec = spec.with_axis(axis, Shard(dims[dim]), out.sizes[axis])
    return spec


def _handed_out(x, grid, out):
    """Where positions are cut in space, and where they are not but the extent is the image's, space is cut again."""
    final = out
    for axis, (p, q) in enumerate(zip(x.placements, grid.placements)):
        dim, sizes = 0, None
        if isinstance(q, Shard) and 0 < q.dim < grid.ndim - 1:
            dim, sizes = q.dim + 1, grid.sizes[axis]
        elif isinstance(p, Shard) and p.dim > 1 and x.shape[p.dim] == out.shape[p.dim]:
            dim, sizes = p.dim, x.sizes[axis]
        if dim and final.axis_of(dim) is None:
            final = final.with_axis(axis, Shard(dim), sizes)
    return final


@op(F.affine_grid, torch.affine_grid_generator, names=("theta",))
def affine_grid(func, theta, size, align_corners=None):
    n = len(size) - 2
    if n not in (2, 3) or tuple(theta.shape) != (size[0], n, n + 1):
        raise ShardingError(f"no transformations for {tuple(size)}", op=func.__name__, operands=[theta])
    theta = theta.whole(1, 2)
    out = theta.reshaped((size[0], *size[2:], n), {0: 0})

    def local(t, *args, **kwargs):
        t = at_least_one(t)
        return trimmed(func(t, (t.shape[0], *size[1:]), bool(align_corners)), out.local_shape())

    return Plan((theta,), out, local)
