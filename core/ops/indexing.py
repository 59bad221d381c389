"""Rows by number, read and written: ``index_select``, ``index_add``, ``x[i, j]`` and their kin.

An index keeps the cut of its entries; where the indexed rows are cut the entries are routed to their owners
(:mod:`core.ops.routed`). An index that is whole is dealt out in shares to read, and every rank picks its own rows to
write. Values that are cut while the rows they go to are not add up to a pending sum, or are made whole where the
operation is not a sum.
"""

from typing import NamedTuple

import torch
from torch.distributed.tensor.placement_types import Shard
from torch.overrides import handle_torch_function, has_torch_function

from core import collectives as c
from core.dispatch import TARGET, Plan, mutates, op
from core.errors import ShardingError
from core.ops.pointwise import meet, operand
from core.ops.reduction import reduced_dims
from core.ops.routed import Leg, deliver, fetch
from core.spec import PARTIAL, REPLICATE, ShardTensorSpec, replicated_spec

aten = torch.ops.aten


class _Layout(NamedTuple):
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


def _layout(x, dims, at, entries):
    return _Layout(tuple(dims), at, entries, tuple(d for d in range(x.ndim) if d not in dims))


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


def _columns(indices):
    """The indices against each other broadcast: their shape, and one vector of coordinates for each."""
    indices = torch.broadcast_tensors(*indices)
    return indices[0].shape, [i.reshape(-1) for i in indices]


def _shape(indices):
    return torch.broadcast_shapes(*(i.shape for i in indices))


def _numbers(indices, extents):
    """The indices that are given, counted from the front."""
    indices = [i for i in indices if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in indices):
        raise ShardingError("a mask in place of row numbers", op="index", remedy="Use mask.nonzero(as_tuple=True).")
    return [torch.where(i < 0, i + n, i) for i, n in zip(indices, extents)]


# -- reading ---------------------------------------------------------------------------------------------------------
def _read(x, dims, at, indices):
    """Plan inputs of the source and the indices, output, and ``local(source, indices)``."""
    entries = meet(indices)
    for axis, dim in x.cuts():
        if dim not in dims:
            entries = entries.with_axis(axis, REPLICATE)
    for axis, dim in x.cuts():
        if dim in dims and not isinstance(entries.placements[axis], Shard):
            entries = spread(entries, axis)
    to = _layout(x, dims, at, entries.ndim)
    out = replicated_spec(x.mesh, to.shape(x, entries.shape))
    for axis, dim in x.cuts():
        if dim not in dims:
            out = out.with_axis(axis, Shard(to.place(dim)), x.sizes[axis])
    for axis, dim in entries.cuts():
        out = out.with_axis(axis, Shard(at + dim), entries.sizes[axis])
    legs, extents = legs_of(x, dims, entries), [x.shape[d] for d in dims]

    def local(t, indices):
        shape, columns = _columns(indices)
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
    inputs, out, local = _read(x, dims, at, indices)
    extents = [x.shape[d] for d in dims]
    return Plan(inputs, out, local and (lambda t, dims, at, *indices: local(t, _numbers(indices, extents))))


@op(aten.index.Tensor)
def index(func, x, indices):
    dims, extents = _indexed(x, indices)
    inputs, out, local = _read(x, dims, first_dim(dims), [indices[d] for d in dims])

    def below(t, indices):
        indices = _numbers(indices, extents)
        return local(t, indices) if local else take_rows(t, dims, None, *indices)

    return Plan(inputs, out, below)


def _indexed(x, indices):
    dims = tuple(d for d, i in enumerate(indices) if i is not None)
    return dims, [x.shape[d] for d in dims]


def first_dim(dims):
    """Where torch puts the entries' dims: in the place of the indexed dims if these are neighbours, else first."""
    return dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0


@op(torch.index_select, torch.Tensor.index_select, aten.index_select, names=("input", "dim", "index"))
def index_select(func, x, dim, index):
    dim, entries = _rows_of(func, x, dim, index)
    inputs, out, local = _read(x, (dim,), dim, [entries])
    return Plan(
        (inputs[0], inputs[1] if index.ndim else index), out, local and (lambda t, dim, i: local(t, [i.view(-1)]))
    )


def _rows_of(func, x, dim, index):
    """The dim without its sign and the spec of an index that may be a single number."""
    if x.ndim == 0 or index.ndim > 1:
        raise ShardingError("needs a tensor with rows and a vector of their numbers", op=str(func), operands=[x, index])
    return reduced_dims(x, dim)[0], index if index.ndim else index._new(index.placements, index.sizes, (1,))


# -- writing ---------------------------------------------------------------------------------------------------------
def _write(func, x, dims, at, indices, values, write, add=False):
    """Plan inputs of the target and the indices, spec of the values, output, and ``local(target, indices, values)``.

    Args:
        values: their spec, or None for a number.
        write: ``write(table, columns, rows)`` in place, the indexed dims of the table first.
        add: what several ranks write adds up.
    """
    in_place, shape = mutates(func), _shape(indices)
    to = _layout(x, dims, at, len(shape))
    x, target, summed = _meet_values(x, to, shape, values, add, in_place)
    entries = replicated_spec(x.mesh, shape)
    for axis, dim in target.cuts():
        if to.entry(dim) is not None:
            entries = entries.with_axis(axis, Shard(to.entry(dim)), target.sizes[axis])
    legs, extents = legs_of(x, dims, entries, every=False), [x.shape[d] for d in dims]

    def local(t, indices, values):
        result = t if in_place else t.clone()
        table = torch.zeros_like(t) if in_place and summed else result
        shape, columns = _columns(indices)
        rows = values
        if rows is not None:
            rows = values.expand(target.local_shape()).movedim(
                tuple(range(to.at, to.at + to.entries)), tuple(range(to.entries))
            )
            rows = rows.reshape(shape.numel(), *rows.shape[to.entries :])
        if legs:
            columns, rows = deliver(columns, rows, extents, legs)
        write(table.movedim(dims, tuple(range(len(dims)))), columns, rows)
        if table is not result:
            for axis in summed:
                table = c.send_all_reduce(table, c.axis_group(x.mesh, axis))
            result.add_(table)
        return result

    inputs = (x, *(operand(i, entries) for i in indices))
    return inputs, None if values is None else operand(values, target), TARGET if in_place else x, local


def _meet_values(x, to, shape, values, add, in_place):
    """How the target and the broadcast values lie, and the axes on which what is added is a pending sum."""
    full = to.shape(x, shape)
    target, summed = replicated_spec(x.mesh, full), []
    for axis, dim in x.cuts():
        if dim in to.features:
            target = target.with_axis(axis, Shard(to.place(dim)), x.sizes[axis])
    for axis, dim in [] if values is None else values.cuts():
        whole, dim = values.shape[dim], dim + len(full) - values.ndim
        if whole != full[dim] or isinstance(target.placements[axis], Shard) or target.axis_of(dim) is not None:
            continue
        indexed, feature = isinstance(x.placements[axis], Shard), to.entry(dim) is None
        if feature and indexed:  # one cut has to give way: that of the values
            target = spread(target, axis, range(to.at, to.at + to.entries))
        elif feature and not in_place:
            x = x.with_axis(axis, Shard(to.feature(dim)), values.sizes[axis])
            target = target.with_axis(axis, Shard(dim), values.sizes[axis])
        elif not feature and (indexed or add):
            target = target.with_axis(axis, Shard(dim), values.sizes[axis])
            summed += [] if indexed else [axis]
    for axis in [] if in_place else summed:
        x = x.with_axis(axis, PARTIAL)
    return x, target, summed


@op(aten.index_put, aten.index_put_, aten._index_put_impl_)
def index_put(func, x, indices, values, accumulate=False, *args):
    dims, extents = _indexed(x, indices)
    given = [indices[d] for d in dims]
    full = _layout(x, dims, first_dim(dims), len(_shape(given))).shape(x, _shape(given))
    if values.ndim > len(full) or torch.broadcast_shapes(values.shape, full) != full:
        raise ShardingError(f"values do not fit into {tuple(full)}", op=str(func), operands=[x, values])

    def write(table, columns, rows):
        table.index_put_(tuple(columns), rows, accumulate)

    inputs, values, out, local = _write(func, x, dims, first_dim(dims), given, values, write, add=accumulate)
    return Plan((*inputs, values), out, lambda t, indices, v, *a: local(t, _numbers(indices, extents), v))


@op(aten.index_add, aten.index_add_)
def index_add(func, x, dim, index, source, *, alpha=1):
    return _write_rows(func, x, dim, index, source, lambda t, i, rows: t.index_add_(0, i, rows, alpha=alpha), True)


@op(aten.index_copy, aten.index_copy_)
def index_copy(func, x, dim, index, source):
    return _write_rows(func, x, dim, index, source, lambda t, i, rows: t.index_copy_(0, i, rows))


@op(aten.index_reduce, aten.index_reduce_)
def index_reduce(func, x, dim, index, source, reduce, *, include_self=True):
    def write(t, i, rows):
        t.index_reduce_(0, i, rows, reduce, include_self=include_self)

    return _write_rows(func, x, dim, index, source, write)


def _write_rows(func, x, dim, index, source, write, add=False):
    """``write(table, row numbers, rows)`` of rows of one dim; a source of no dims is expanded."""
    dim, entries = _rows_of(func, x, dim, index)
    if source is not None and source.ndim and source.shape != (*x.shape[:dim], *entries.shape, *x.shape[dim + 1 :]):
        raise ShardingError(f"rows of dim {dim} that do not fit", op=str(func), operands=[x, index, source])

    def put(table, columns, rows):
        write(table, columns[0], rows)

    inputs, values, out, local = _write(func, x, (dim,), dim, [entries], source, put, add)
    inputs = (inputs[0], inputs[1] if index.ndim else index, *([] if values is None else [values]))
    return Plan(
        inputs, out, lambda t, dim, i, rows, *a, **k: local(t, [i.reshape(-1)], None if source is None else rows)
    )


@op(aten.index_fill, aten.index_fill_)
def index_fill(func, x, dim, index, value):
    if isinstance(value, ShardTensorSpec):
        return _write_rows(func, x, dim, index, value, lambda t, i, rows: t.index_copy_(0, i, rows))
    return _write_rows(func, x, dim, index, None, lambda t, i, rows: t.index_fill_(0, i, value))
