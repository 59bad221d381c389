"""Parts of a dim: slices, rows, pieces and windows. What a slice keeps stays where it lies; nothing is sent.

A row of a cut dim goes to every rank. Windows lie with the owner of their first row, which fetches the rows beyond.
"""

import torch

from core import collectives as c
from core.dispatch import Plan, composed, op
from core.errors import ShardingError
from core.ops.reduction import reduced_dims

aten = torch.ops.aten


def _bounds(extent, start, end, step):
    start, end, step = slice(start, end, step).indices(extent)
    return start, max(end, start), step


def _cut_of_slice(extents, start, end, step):
    """Rows of ``range(start, end, step)`` that each rank holds, and the first of them as a local index."""
    sizes, firsts, a = [], [], 0
    for n in extents:
        first = start if a <= start else start + -(-(a - start) // step) * step
        count = max(0, -(-(min(end, a + n) - first) // step))
        sizes.append(count)
        firsts.append(first - a if count else 0)
        a += n
    return tuple(sizes), tuple(firsts)


@op(aten.slice.Tensor, pending=True)
def slice_(func, x, dim=0, start=None, end=None, step=1):
    dim = reduced_dims(x, dim)[0]
    start, end, step = _bounds(x.shape[dim], start, end, step)
    return _sliced(x, dim, start, end, step)


def _sliced(x, dim, start, end, step):
    axis = x.axis_of(dim)
    shape = list(x.shape)
    shape[dim] = len(range(start, end, step))
    if axis is None:
        out = x.reshaped(shape)
        return Plan((x,), out, lambda v, *a: aten.slice(v, dim, start, end, step))
    sizes, firsts = _cut_of_slice(x.sizes[axis], start, end, step)
    me = x.coordinate()[axis]
    out = x.reshaped(shape, sizes={axis: sizes})
    first, last = firsts[me], firsts[me] + max(sizes[me] - 1, -1) * step + 1
    return Plan((x,), out, lambda v, *a: aten.slice(v, dim, first, max(last, first), step))


@op(aten.slice_backward, pending=True)
def slice_backward(func, grad, input_sizes, dim, start, end, step):
    """The rows go back to where they lie; each rank takes the gap up to the next rank's first row."""
    dim = dim % grad.ndim
    start, end, step = _bounds(input_sizes[dim], start, end, step)
    axis = grad.axis_of(dim)
    if axis is None:
        out = grad.reshaped(input_sizes)
        return Plan((grad,), out, lambda g, *a: aten.slice_backward(g, out.local_shape(), dim, start, end, step))
    offsets = grad.offsets(axis)
    first = [start + o * step for o in offsets]
    borders = [0, *(min(f, input_sizes[dim]) for f in first[1:-1]), input_sizes[dim]]
    out = grad.reshaped(input_sizes, sizes={axis: tuple(b - a for a, b in zip(borders, borders[1:]))})
    me = grad.coordinate()[axis]
    at = first[me] - borders[me]

    def local(g, *a):
        full = g.new_zeros(out.local_shape())
        if g.shape[dim]:
            aten.slice(full, dim, at, at + (g.shape[dim] - 1) * step + 1, step).copy_(g)
        return full

    return Plan((grad,), out, local)


@op(aten.select.int, pending=True)
def select(func, x, dim, index):
    """One row of a cut dim goes to every rank."""
    dim = reduced_dims(x, dim)[0]
    index = index + x.shape[dim] if index < 0 else index
    axis = x.axis_of(dim)
    out = x.reshaped([*x.shape[:dim], *x.shape[dim + 1 :]], {d: d - (d > dim) for d in range(x.ndim) if d != dim})
    if not 0 <= index < x.shape[dim]:
        raise IndexError(f"select(): index {index} out of range for tensor of size {list(x.shape)} at dimension {dim}")
    if axis is None or x.mesh.size(axis) == 1:
        return Plan((x,), out, lambda v, *a: aten.select(v, dim, index))
    group, extents = c.axis_group(x.mesh, axis), x.sizes[axis]
    wanted = (((index, index + 1),),) * group.size
    return Plan((x,), out, lambda v, *a: c.send_exchange(v, dim, extents, wanted, group).squeeze(dim))


@op(aten.select_backward, pending=True)
def select_backward(func, grad, input_sizes, dim, index):
    dim = dim % len(input_sizes)
    index = index % input_sizes[dim]
    out = grad.reshaped(input_sizes, {d: d + (d >= dim) for d in range(grad.ndim)})
    return Plan((grad,), out, lambda g, *a: aten.select_backward(g, out.local_shape(), dim, index))


@op(aten.split.Tensor, aten.split_with_sizes, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes)
def split(func, x, size, dim=0):
    dim = reduced_dims(x, dim)[0]
    extent = x.shape[dim]
    lengths = size if isinstance(size, (list, tuple)) else [min(size, extent - i) for i in range(0, extent, size)]
    if sum(lengths) != extent:
        raise ShardingError(f"lengths {list(lengths)} do not make {extent} rows", op="split", operands=[x])
    plans, at = [], 0
    for n in lengths or [0]:
        plans.append(_sliced(x, dim, at, at + n, 1))
        at += n
    return Plan((x,), tuple(p.outputs for p in plans), lambda v, *a: [p.local(v) for p in plans])


@op(aten.unbind, pending=True)
def unbind(func, x, dim=0):
    """Of a cut dim all rows are wanted: its cut moves to another dim, that of the rows, by one all-to-all."""
    dim = reduced_dims(x, dim)[0]
    x = x.aside(dim)
    out = x.reshaped([*x.shape[:dim], *x.shape[dim + 1 :]], {d: d - (d > dim) for d in range(x.ndim) if d != dim})
    return Plan((x,), (out,) * x.shape[dim])


@composed(torch.slice_scatter, torch.Tensor.slice_scatter)
def slice_scatter(input, src, dim=0, start=None, end=None, step=1):
    out = input.clone()
    out[(slice(None),) * (dim % input.ndim) + (slice(start, end, step),)] = src
    return out


@composed(torch.select_scatter, torch.Tensor.select_scatter)
def select_scatter(input, src, dim, index):
    out = input.clone()
    out[(slice(None),) * (dim % input.ndim) + (index,)] = src
    return out


@composed(torch.narrow_copy, torch.Tensor.narrow_copy)
def narrow_copy(input, dim, start, length):
    return input.narrow(dim, start, length).clone()


# -- windows ----------------------------------------------------------------------------------------------------------
@op(aten.unfold, pending=True)
def unfold(func, x, dim, size, step):
    """Windows lie with the owner of their first row."""
    dim = reduced_dims(x, dim)[0]
    if x.ndim == 0 or not 0 <= size <= x.shape[dim] or step < 1:
        raise ShardingError(f"windows of {size} rows, {step} apart", op="unfold", operands=[x])
    shape, axis = [*x.shape, size], x.axis_of(dim)
    shape[dim] = (x.shape[dim] - size) // step + 1
    if axis is None:
        return Plan((x,), x.reshaped(shape))
    extents, group = x.sizes[axis], c.axis_group(x.mesh, axis)
    sizes, _ = _cut_of_slice(extents, 0, shape[dim] * step, step)
    out = x.reshaped(shape, sizes={axis: sizes})
    rows = _reach(out.offsets(axis), size, step)

    def local(t, *args):
        t = c.send_exchange(t, dim, extents, [(r,) for r in rows], group)
        return t.unfold(dim, size, step) if sizes[group.rank] else t.unsqueeze(-1).expand(out.local_shape())

    return Plan((x,), out, local)


def _reach(offsets, size, step):
    """Rows that the windows of every rank cover, as half-open ranges."""
    return [(a * step, (b - 1) * step + size if b > a else a * step) for a, b in zip(offsets, offsets[1:])]


@op(aten.unfold_backward)
def unfold_backward(func, grad, input_sizes, dim, size, step):
    """A rank has the rows up to the next rank's first window; what others know of them is added."""
    dim = dim % len(input_sizes)
    grad = grad.whole(grad.ndim - 1)
    axis, same = grad.axis_of(dim), {d: d for d in range(grad.ndim - 1)}
    if axis is None:
        out = grad.reshaped(input_sizes, same)
        return Plan((grad,), out, lambda g, *a: func(g, out.local_shape(), dim, size, step))
    group, offsets = c.axis_group(grad.mesh, axis), grad.offsets(axis)
    ends = [0, *(min(k * step, input_sizes[dim]) for k in offsets[1:-1]), input_sizes[dim]]
    rows = _reach(offsets, size, step)
    out = grad.reshaped(input_sizes, same, {axis: tuple(b - a for a, b in zip(ends, ends[1:]))})
    lengths = [b - a for a, b in rows]
    shared = [_overlaps(rows, lengths, low, high) for low, high in zip(ends, ends[1:])]
    wanted = [[(at, at + n) for at, _, n in parts] for parts in shared]

    def local(g, *args):
        shape, result, at = list(out.local_shape()), g.new_zeros(out.local_shape()), 0
        shape[dim] = lengths[group.rank]
        known = func(g, shape, dim, size, step) if shape[dim] else g.new_zeros(shape)
        got = c.send_exchange(known, dim, lengths, wanted, group)
        for _, start, n in shared[group.rank]:
            result.narrow(dim, start, n).add_(got.narrow(dim, at, n))
            at += n
        return result

    return Plan((grad,), out, local)


def _overlaps(rows, lengths, low, high):
    """What the ranks hold of rows ``low`` to ``high``: position in all that they hold, first row from ``low``, rows."""
    found, held = [], 0
    for (a, b), n in zip(rows, lengths):
        first, last = max(a, low), min(b, high)
        if first < last:
            found.append((held + first - a, first - low, last - first))
        held += n
    return found
