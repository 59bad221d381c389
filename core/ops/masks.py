"""Masks: what is true stays with its owner, so how long each part of the result is only one small all-gather tells.

The result is in order if of the mask's dims only the first is cut; another cut is moved there first.
"""

import torch
from torch.distributed.tensor.placement_types import Replicate, Shard

from core import collectives as c
from core._torch import NoTorchFunction
from core.border import as_shards, check_promotion
from core.dispatch import Plan, composed, op
from core.errors import ShardingError
from core.region import run
from core.shard_tensor import ShardTensor
from core.spec import REPLICATE, replicated_spec

aten = torch.ops.aten


def _in_order(x, dims):
    """``x`` with at most one cut among ``dims``, on the first that has rows to cut, and the axis of that cut."""
    first = next((d for d in dims if x.shape[d] > 1), None)
    cuts = [(axis, d) for axis, d in x.cuts() if d in dims]
    if first is None or not cuts:
        return x.whole(*dims), None
    axis = next((axis for axis, d in cuts if d == first), cuts[0][0])
    sizes = x.sizes[axis] if x.placements[axis].dim == first else None
    return x.with_axis(axis, REPLICATE).aside(*dims).with_axis(axis, Shard(first), sizes), axis


def _counts(here, mesh, axis, device):
    """How many there are on every rank of an axis."""
    group = c.axis_group(mesh, axis)
    return tuple(c.send_gather(torch.tensor([here], device=device), 0, (1,) * group.size, group).tolist())


@op(aten.nonzero)
def nonzero(func, x):
    x, axis = _in_order(x, range(x.ndim))

    def local(t):
        found, sizes = torch.nonzero(t), {}
        if axis is not None:
            dim = x.placements[axis].dim
            found[:, dim] += x.local_range(dim)[0]
            sizes = {axis: _counts(len(found), x.mesh, axis, t.device)}
        return ShardTensor(found, _joined(x, 0, x.ndim, sizes, len(found), (x.ndim,)))

    return Plan((x,), None, local)


def _joined(x, dim, n, sizes, here, behind=None):
    """The spec of what the true ones make of ``x``: one dim, cut into ``sizes``, in the place of ``n`` dims.

    Args:
        behind: extents of the dims behind, if not those of ``x``.
    """
    total = sum(next(iter(sizes.values()), (here,)))
    out = replicated_spec(x.mesh, (*x.shape[:dim], total, *(x.shape[dim + n :] if behind is None else behind)))
    for axis, d in x.cuts():
        if axis in sizes:
            out = out.with_axis(axis, Shard(dim), sizes[axis])
        elif not dim <= d < dim + n:
            out = out.with_axis(axis, Shard(d if d < dim else d - n + 1), x.sizes[axis])
    return out


# -- x[mask] ---------------------------------------------------------------------------------------------------------
def take_masked(x, mask, dim):
    """``x`` where ``mask``, over its dims from ``dim`` on, is true."""
    if not isinstance(x, ShardTensor) and not isinstance(mask, ShardTensor):
        return x[_at(dim, mask)]
    x, mask, sizes, here = _meet(x, mask, dim)
    out = _joined(x._spec, dim, mask.ndim, sizes, here)
    with NoTorchFunction():
        return run(Plan((x._spec, mask._spec), out), lambda x, mask: x[_at(dim, mask)], [x, mask])


def _at(dim, mask):
    return (*[slice(None)] * dim, mask)


def _meet(x, mask, dim, *others):
    """Both laid so that the true ones are in order, their counts (axis -> a number for each rank), and those here."""
    mesh, n = next(t._spec.mesh for t in (x, mask, *others) if isinstance(t, ShardTensor)), mask.ndim
    for t in (x, mask):
        if not isinstance(t, ShardTensor):
            check_promotion(t)
    x, mask = as_shards(x, mesh), as_shards(mask, mesh)
    spec, over = x._spec.cut_once().finished(), mask._spec.cut_once()
    for axis, d in over.cuts():
        if isinstance(spec.placements[axis], Replicate) and spec.axis_of(dim + d) is None:
            spec = spec.with_axis(axis, Shard(dim + d), over.sizes[axis])
    spec, axis = _in_order(spec, range(dim, dim + n))
    over = replicated_spec(mesh, mask.shape)
    if axis is not None:
        over = over.with_axis(axis, Shard(spec.placements[axis].dim - dim), spec.sizes[axis])
    x, mask = x.redistribute_to(spec), mask.redistribute_to(over)
    here = int(mask._local_tensor.sum())
    return x, mask, {} if axis is None else {axis: _counts(here, mesh, axis, x.device)}, here


def put_masked(x, mask, dim, value):
    """Writes ``value``, which broadcasts to ``x[mask]``, where ``mask``, over the dims from ``dim`` on, is true."""
    rows = value.ndim - (x.ndim - dim - mask.ndim) - 1  # the dim of the value along which the true ones are counted
    if rows < 0 or value.shape[rows] == 1:
        over = mask.reshape(*mask.shape, *[1] * (x.ndim - dim - mask.ndim))
        if rows >= 0:
            value = value.reshape(*value.shape[:rows], *[1] * mask.ndim, *value.shape[rows + 1 :])
        written = torch.where(over, value, x)
    else:
        written = _with_rows(x, mask, dim, value, rows)
    if written.shape != x.shape:
        raise ShardingError(f"a value of shape {tuple(value.shape)}", op="x[mask] = value", operands=[tuple(x.shape)])
    x.copy_(written)


def _with_rows(x, mask, dim, value, rows, longer=False):
    """With a row of the value for each that is true; of a ``longer`` one the first are taken."""
    x, mask, sizes, here = _meet(x, mask, dim, value)
    out = _joined(x._spec, dim, mask.ndim, sizes, here)
    if longer and value.shape[rows] > out.shape[dim]:
        value = value.narrow(rows, 0, out.shape[dim])
    if value.shape[rows] != out.shape[dim]:
        raise ShardingError(
            f"{value.shape[rows]} rows for {out.shape[dim]} that are true", op="x[mask] = value", operands=[x._spec]
        )
    value = as_shards(value, x._spec.mesh).expand(out.shape).redistribute_to(out)

    def written(t, m, v):
        t = t.clone()
        t[_at(dim, m)] = v
        return t

    with NoTorchFunction():
        return run(Plan((x._spec, mask._spec, out), x._spec), written, [x, mask, value])


@composed(torch.masked_select, torch.Tensor.masked_select)
def masked_select(input, mask):
    x, mask = torch.broadcast_tensors(input, mask)
    return take_masked(x, mask, 0) if x.ndim else take_masked(x.reshape(1), mask.reshape(1), 0)


@composed(torch.masked_scatter, torch.Tensor.masked_scatter)
def masked_scatter(input, mask, source):
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    x, mask = input.expand(shape), mask.expand(shape)
    return _with_rows(x, mask, 0, _in_line(source), 0, True)


@composed(torch.Tensor.masked_scatter_)
def masked_scatter_(self, mask, source):
    return self.copy_(masked_scatter(self, mask, source))


def _in_line(x):
    """All elements one after the other; a cut behind the first dim is moved there first, so that it stays a cut."""
    if isinstance(x, ShardTensor):
        x = x.redistribute_to(_in_order(x._spec.cut_once().finished(), range(x.ndim))[0])
    return x.reshape(-1)
