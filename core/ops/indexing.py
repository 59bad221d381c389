"""Rows by number: ``index_select``, ``x[i, j]`` and their kin.

An index keeps the cut of its entries; one that is whole is dealt out in shares. Where the indexed rows are cut the
entries are routed to their owners (:mod:`core.ops.routed`), so that only wanted rows travel.
"""

from typing import NamedTuple

import torch
from torch.distributed.tensor.placement_types import Shard
from torch.overrides import handle_torch_function, has_torch_function

from core import collectives as c
from core.dispatch import Plan, op
from core.errors import ShardingError
from core.ops.pointwise import meet, operand
from core.ops.reduction import reduced_dims
from core.ops.routed import Leg, fetch
from core.spec import REPLICATE, replicated_spec

aten = torch.ops.aten


class Layout(NamedTuple):
    """How the result of an index lies: the entries' dims stand together, at ``at``, among the dims not indexed."""

    dims: tuple
    at: int
    entries: int
    features: tuple

    def shape(self, x, entries):
        kept = [x.shape[d] for d in self.features]
        return *kept[: self.at], *entries, *kept[self.at :]

    def place(self, dim):
        """Dim of the result of a dim that is not indexed."""
        i = self.features.index(dim)
        return i if i < self.at else i + self.entries

    def entry(self, dim):
        """The entries' dim that a dim of the result is, or None."""
        return dim - self.at if self.at <= dim < self.at + self.entries else None

    def feature(self, dim):
        return self.features[dim if dim < self.at else dim - self.entries]


def layout_of(x, dims, at, entries):
    return Layout(tuple(dims), at, entries, tuple(d for d in range(x.ndim) if d not in dims))


def spread(entries, axis, dims=None):
    """Shares of entries that all ranks know: cut along the longest dim that is free, if it has a row for each rank."""
    free = [d for d in (range(entries.ndim) if dims is None else dims) if entries.axis_of(d) is None]
    dim = max(free, key=lambda d: entries.shape[d], default=None)
    n = entries.mesh.size(axis)
    return entries.with_axis(axis, Shard(dim)) if dim is not None and entries.shape[dim] >= n else entries


def legs_of(x, dims, entries, every=True):
    """The axes that cut an indexed dim; entries that no axis cuts travel only if ``every`` rank wants them."""
    found = []
    for axis, dim in x.cuts():
        if dim in dims and x.mesh.size(axis) > 1:
            travels = every or isinstance(entries.placements[axis], Shard)
            found.append(Leg(c.axis_group(x.mesh, axis), dims.index(dim), x.sizes[axis], travels))
    return found


def columns_of(indices):
    """The indices against each other broadcast: their shape, and one vector of coordinates for each."""
    indices = torch.broadcast_tensors(*indices)
    return indices[0].shape, [i.reshape(-1) for i in indices]


def shape_of(indices):
    return torch.broadcast_shapes(*(i.shape for i in indices))


def numbers(indices, extents):
    """The indices that are given, counted from the front."""
    indices = [i for i in indices if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in indices):
        raise ShardingError("a mask in place of row numbers", op="index", remedy="Use mask.nonzero(as_tuple=True).")
    return [torch.where(i < 0, i + n, i) for i, n in zip(indices, extents)]


# -- reading ---------------------------------------------------------------------------------------------------------
def read(x, dims, at, indices):
    """Plan inputs of the source and the indices, output, and ``local(source, indices)``."""
    entries = meet(indices)
    for axis, dim in x.cuts():
        if dim not in dims:
            entries = entries.with_axis(axis, REPLICATE)
    for axis, dim in x.cuts():
        if dim in dims and not isinstance(entries.placements[axis], Shard):
            entries = spread(entries, axis)
    to = layout_of(x, dims, at, entries.ndim)
    out = replicated_spec(x.mesh, to.shape(x, entries.shape))
    for axis, dim in x.cuts():
        if dim not in dims:
            out = out.with_axis(axis, Shard(to.place(dim)), x.sizes[axis])
    for axis, dim in entries.cuts():
        out = out.with_axis(axis, Shard(at + dim), entries.sizes[axis])
    legs, extents = legs_of(x, dims, entries), [x.shape[d] for d in dims]

    def local(t, indices):
        shape, columns = columns_of(indices)
        table = t.movedim(dims, tuple(range(len(dims))))
        rows = fetch(lambda columns: table[tuple(columns)], columns, extents, legs)
        rows = rows.reshape(*shape, *rows.shape[1:])
        return rows.movedim(tuple(range(to.entries)), tuple(range(to.at, to.at + to.entries)))

    return (x, *(operand(i, entries) for i in indices)), out, local if legs else None


def take_rows(x, dims, at, *indices):
    """``x`` at the coordinates that ``indices`` give for ``dims``; the entries' dims stand at ``at`` in the result."""
    if has_torch_function((x, *indices)):
        return handle_torch_function(take_rows, (x, *indices), x, dims, at, *indices)
    index = [slice(None)] * x.ndim
    for dim, i in zip(dims, indices):
        index[dim] = i
    return x[tuple(index)]


@op(take_rows)
def take_rows_rule(func, x, dims, at, *indices):
    inputs, out, local = read(x, dims, at, indices)
    extents = [x.shape[d] for d in dims]
    return Plan(inputs, out, local and (lambda t, dims, at, *indices: local(t, numbers(indices, extents))))


@op(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(func, x, indices):
    dims, extents = indexed(x, indices)
    inputs, out, local = read(x, dims, first_dim(dims), [indices[d] for d in dims])

    def below(t, indices):
        indices = numbers(indices, extents)
        return local(t, indices) if local else take_rows(t, dims, None, *indices)

    return Plan(inputs, out, below)


def indexed(x, indices):
    dims = tuple(d for d, i in enumerate(indices) if i is not None)
    return dims, [x.shape[d] for d in dims]


def first_dim(dims):
    """Where torch puts the entries' dims: in the place of the indexed dims if these are neighbours, else first."""
    return dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0


@op(torch.index_select, torch.Tensor.index_select, aten.index_select, names=("input", "dim", "index"))
def index_select(func, x, dim, index):
    dim, entries = rows_of(func, x, dim, index)
    inputs, out, local = read(x, (dim,), dim, [entries])
    return Plan(
        (inputs[0], inputs[1] if index.ndim else index), out, local and (lambda t, dim, i: local(t, [i.view(-1)]))
    )


def rows_of(func, x, dim, index):
    """The dim without its sign and the spec of an index that may be a single number."""
    if x.ndim == 0 or index.ndim > 1:
        raise ShardingError("needs a tensor with rows and a vector of their numbers", op=str(func), operands=[x, index])
    return reduced_dims(x, dim)[0], index if index.ndim else index.recut(index.placements, index.sizes, (1,))
