"""Rows by number, written: ``index_add``, ``index_put``, ``index_copy`` and their kin, also in place.

Every rank writes the rows it owns: it picks them where all ranks know index and values, and has them routed where the
values are cut. Values that are cut while the rows they go to are not add up to a pending sum, or are made whole where
the operation is not a sum.
"""

import torch
from torch.distributed.tensor.placement_types import Shard

from core import collectives as c
from core.dispatch import TARGET, Plan, op
from core.errors import ShardingError
from core.ops.indexing import columns_of, first_dim, indexed, layout_of, legs_of, numbers, rows_of, shape_of, spread
from core.ops.pointwise import operand
from core.ops.routed import deliver
from core.spec import PARTIAL, ShardTensorSpec, replicated_spec
from core.writes import mutates

aten = torch.ops.aten


def _write(func, x, dims, at, indices, values, write, add=False):
    """Plan inputs of the target and the indices, spec of the values, output, and ``local(target, indices, values)``.

    Args:
        values: their spec, or None for a number.
        write: ``write(table, columns, rows)`` in place, the indexed dims of the table first.
        add: what several ranks write adds up.
    """
    in_place, shape = mutates(func), shape_of(indices)
    to = layout_of(x, dims, at, len(shape))
    x, target, summed = _meet_values(x, to, shape, values, add, in_place)
    entries = replicated_spec(x.mesh, shape)
    for axis, dim in target.cuts():
        if to.entry(dim) is not None:
            entries = entries.with_axis(axis, Shard(to.entry(dim)), target.sizes[axis])
    legs, extents = legs_of(x, dims, entries, every=False), [x.shape[d] for d in dims]

    def local(t, indices, values):
        result = t if in_place else t.clone()
        table = torch.zeros_like(t) if in_place and summed else result
        shape, columns = columns_of(indices)
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
    dims, extents = indexed(x, indices)
    given = [indices[d] for d in dims]
    full = layout_of(x, dims, first_dim(dims), len(shape_of(given))).shape(x, shape_of(given))
    if values.ndim > len(full) or any(n not in (1, m) for n, m in zip(reversed(values.shape), reversed(full))):
        raise ShardingError(f"values do not fit into {tuple(full)}", op=str(func), operands=[x, values])

    def write(table, columns, rows):
        table.index_put_(tuple(columns), rows, accumulate)

    inputs, values, out, local = _write(func, x, dims, first_dim(dims), given, values, write, add=accumulate)
    return _written((*inputs, values), out, lambda t, indices, v, *a: local(t, numbers(indices, extents), v))


def _written(inputs, out, local):
    return Plan(inputs, out, local, None if out is TARGET else out.finished())


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
    dim, entries = rows_of(func, x, dim, index)
    if source is not None and source.ndim and source.shape != (*x.shape[:dim], *entries.shape, *x.shape[dim + 1 :]):
        raise ShardingError(f"rows of dim {dim} that do not fit", op=str(func), operands=[x, index, source])

    def put(table, columns, rows):
        write(table, columns[0], rows)

    inputs, values, out, local = _write(func, x, (dim,), dim, [entries], source, put, add)
    inputs = (inputs[0], inputs[1] if index.ndim else index, *([] if values is None else [values]))
    return _written(
        inputs, out, lambda t, dim, i, rows, *a, **k: local(t, [i.reshape(-1)], None if source is None else rows)
    )


@op(aten.index_fill, aten.index_fill_)
def index_fill(func, x, dim, index, value):
    if isinstance(value, ShardTensorSpec):
        return _write_rows(func, x, dim, index, value, lambda t, i, rows: t.index_copy_(0, i, rows))
    return _write_rows(func, x, dim, index, None, lambda t, i, rows: t.index_fill_(0, i, value))


@op(aten._unique)
def unique_numbers(func, index, *args):
    """torch's derivative of ``index_fill`` asks for them; an index is small."""
    return Plan((index.replicated(),), None)
