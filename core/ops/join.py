"""Joins: along an uncut dim nothing moves; along a cut one the rows go where the whole's own cut wants them.

Pending sums stay pending, and what is finished joins them as a sum of one term: so the gradients of the parts of one
value, most of them sums under way, are summed over the ranks once, where they are one again.
"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor.placement_types import Partial, Shard

from core.dispatch import Plan, composed, op
from core.errors import ShardingError
from core.ops.pointwise import meet
from core.ops.reduction import reduced_dims
from core.spec import PARTIAL, chunk_sizes

aten = torch.ops.aten


def _pending(xs, target):
    """The target, pending on the axes that do not cut it where one of its parts is."""
    for axis, p in enumerate(target.placements):
        if not isinstance(p, Shard) and any(isinstance(x.placements[axis], Partial) for x in xs):
            target = target.with_axis(axis, PARTIAL)
    return target


@op(aten.stack, pending=True)
def stack(func, xs, dim=0):
    if any(x.shape != xs[0].shape for x in xs):
        raise ShardingError("operands of different shapes", op="stack", operands=xs)
    target = _pending(xs, meet(xs))
    if not -target.ndim - 1 <= dim <= target.ndim:
        raise IndexError(f"stack: dim {dim} for tensors of {target.ndim} dims")
    dim = dim % (target.ndim + 1)
    shape = [*target.shape[:dim], len(xs), *target.shape[dim:]]
    out = target.reshaped(shape, {d: d + (d >= dim) for d in range(target.ndim)})
    return Plan(tuple(x.recut(target.placements, target.sizes) for x in xs), out)


@op(aten.cat, pending=True)
def cat(func, xs, dim=0):
    """Along a cut dim the result is cut anew in torch.chunk's way and every operand's rows go where they belong."""
    joined = [x for x in xs if x.shape != (0,)] or xs  # torch lets empty vectors join tensors of any shape
    lead = max(joined, key=lambda x: len(x.cuts()))
    lead = _pending(joined, lead)
    dim = reduced_dims(lead, dim)[0]
    shape = list(lead.shape)
    if any((*x.shape[:dim], *x.shape[dim + 1 :]) != (*shape[:dim], *shape[dim + 1 :]) for x in joined):
        raise ShardingError(f"operands differ in more than dim {dim}", op="cat", operands=xs)
    shape[dim] = sum(x.shape[dim] for x in joined)
    axis = lead.axis_of(dim)
    if axis is None:
        out = lead.reshaped(shape)
        return Plan(tuple(x.recut(lead.placements, lead.sizes) if x in joined else x for x in xs), out)
    sizes = chunk_sizes(shape[dim], lead.mesh.size(axis))
    out = lead.reshaped(shape, sizes={axis: sizes})
    borders, at, inputs = out.offsets(axis), 0, []
    for x in xs:
        if x not in joined:
            inputs.append(x)
            continue
        n = x.shape[dim]
        part = tuple(max(0, min(b, at + n) - max(a, at)) for a, b in zip(borders, borders[1:]))
        inputs.append(x.recut(lead.placements, [part if i == axis else s for i, s in enumerate(lead.sizes)]))
        at += n
    return Plan(tuple(inputs), out)


@composed(torch.block_diag)
def block_diag(*tensors):
    blocks = [torch.atleast_2d(t) for t in tensors]
    width, before, rows = sum(b.shape[1] for b in blocks), 0, []
    for block in blocks:
        rows.append(F.pad(block, (before, width - before - block.shape[1])))
        before += block.shape[1]
    return torch.cat(rows)


@composed(torch.combinations)
def combinations(input, r=2, with_replacement=False):
    return input[torch.combinations(torch.arange(len(input), device=input.device), r, with_replacement)]
