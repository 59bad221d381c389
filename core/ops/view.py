"""Views and joins: the cut follows its dim. Only splitting or merging a cut dim across its borders moves rows."""

import math

import torch

from core import collectives as c
from core.dispatch import Plan, op
from core.errors import ShardingError
from core.ops.pointwise import meet, operand
from core.ops.reduction import reduced_dims
from core.spec import chunk_sizes

aten = torch.ops.aten


# -- dims that change place -------------------------------------------------------------------------------------------
@op(aten.permute, pending=True)
def permute(func, x, dims):
    dims = [d % x.ndim for d in dims]
    out = x.reshaped([x.shape[d] for d in dims], {d: i for i, d in enumerate(dims)})
    return Plan((x,), out)


@op(aten.transpose, pending=True)
def transpose(func, x, a, b):
    if x.ndim == 0:
        return Plan((x,), x)
    order = list(range(x.ndim))
    a, b = a % x.ndim, b % x.ndim
    order[a], order[b] = b, a
    return Plan((x,), x.reshaped([x.shape[d] for d in order], {d: i for i, d in enumerate(order)}))


@op(aten.t, pending=True)
def t(func, x):
    order = list(reversed(range(x.ndim)))
    return Plan((x,), x.reshaped([x.shape[d] for d in order], {d: i for i, d in enumerate(order)}))


@op(aten.unsqueeze, pending=True)
def unsqueeze(func, x, dim):
    dim = dim % (x.ndim + 1)
    shape = [*x.shape[:dim], 1, *x.shape[dim:]]
    return Plan((x,), x.reshaped(shape, {d: d + (d >= dim) for d in range(x.ndim)}))


@op(aten.squeeze, pending=True)
def squeeze(func, x, dim=None):
    """Drops dims of global extent one; a cut dim of extent one is made whole first."""
    dims = reduced_dims(x, dim)
    gone = [d for d in dims if d < x.ndim and x.shape[d] == 1]
    x = x.whole(*gone)
    keep = [d for d in range(x.ndim) if d not in gone]
    out = x.reshaped([x.shape[d] for d in keep], {d: i for i, d in enumerate(keep)})
    return Plan((x,), out, lambda v, *a: v.squeeze(tuple(gone)) if gone else v.view(v.shape))


@op(aten.expand, pending=True)
def expand(func, x, size, *, implicit=False):
    lead = len(size) - x.ndim
    shape = [x.shape[i - lead] if n == -1 else n for i, n in enumerate(size)]
    if lead < 0 or any(n not in (1, shape[d + lead]) for d, n in enumerate(x.shape)):
        raise ShardingError(f"cannot be expanded to {tuple(size)}", op="expand", operands=[x])
    x = x.whole(*(d for d in range(x.ndim) if x.shape[d] == 1 and shape[d + lead] != 1))
    out = x.reshaped(shape, {d: d + lead for d in range(x.ndim)})
    return Plan((x,), out, lambda v, *a, **k: v.expand(out.local_shape()))


# -- view: split and merge --------------------------------------------------------------------------------------------
def _groups(old, new):
    """Runs of old dims and runs of new dims with the same number of elements, in order."""
    i = j = 0
    while i < len(old) or j < len(new):
        a, b = [], []
        p = q = 1
        if i < len(old):
            a.append(i)
            p, i = old[i], i + 1
        if j < len(new):
            b.append(j)
            q, j = new[j], j + 1
        while p != q:
            if p < q and i < len(old) or j >= len(new):
                p *= old[i]
                a.append(i)
                i += 1
            else:
                q *= new[j]
                b.append(j)
                j += 1
        yield a, b


def viewed(x, size):
    """Input and output specs of ``x.view(size)``; the input is re-cut where its borders fall inside a new row."""
    shape = [int(n) for n in size] if all(isinstance(n, int) for n in size) else list(size)
    if -1 in shape:
        rest = math.prod(n for n in shape if n != -1)
        shape[shape.index(-1)] = x.shape.numel() // rest if rest else 0
    if math.prod(shape) != x.shape.numel() or min(shape, default=0) < 0:
        raise ShardingError(f"shape {tuple(size)} is invalid", op="view", operands=[x])
    if x.shape.numel() == 0:
        same = {d: d for d in range(min(x.ndim, len(shape))) if x.shape[: d + 1] == torch.Size(shape[: d + 1])}
        x = x.whole(*(d for d in range(x.ndim) if d not in same))
        return x, x.reshaped(shape, same)
    to, sizes = {}, {}
    for axis, dim in x.cuts():
        a, b = next(g for g in _groups(x.shape, shape) if dim in g[0])
        ahead = [d for d in a if d < dim and x.shape[d] != 1]
        lead = next((d for d in b if shape[d] != 1), b[0] if b else None)
        if ahead or lead is None:
            x = x.whole(dim)
            continue
        inner_old = math.prod(x.shape[d] for d in a if d > dim)
        inner_new = math.prod(shape[d] for d in b if d > lead)
        extents = x.sizes[axis]
        if any(n * inner_old % inner_new for n in extents):
            unit = math.lcm(inner_old, inner_new)
            blocks = x.shape[dim] * inner_old // unit
            extents = tuple(n * unit // inner_old for n in chunk_sizes(blocks, len(extents)))
            if sum(extents) != x.shape[dim]:
                x = x.whole(dim)
                continue
            x = x.with_axis(axis, x.placements[axis], extents)
        to[dim] = lead
        sizes[axis] = tuple(n * inner_old // inner_new for n in extents)
    return x, x.reshaped(shape, to, sizes)


@op(aten.view.default, aten._unsafe_view, aten._reshape_alias, aten.reshape, pending=True)
def view(func, x, size, *args):
    x, out = viewed(x, size)
    return Plan((x,), out, lambda v, *a: v.reshape(out.local_shape()))


# -- parts of a dim ---------------------------------------------------------------------------------------------------
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
    dim = dim % x.ndim
    start, end, step = _bounds(x.shape[dim], start, end, step)
    return _sliced(x, dim, start, end, step)


def _sliced(x, dim, start, end, step):
    axis = x.axis_of(dim)
    shape = list(x.shape)
    shape[dim] = len(range(start, end, step))
    same = {d: d for d in range(x.ndim)}
    if axis is None:
        out = x.reshaped(shape, same)
        return Plan((x,), out, lambda v, *a: aten.slice(v, dim, start, end, step))
    sizes, firsts = _cut_of_slice(x.sizes[axis], start, end, step)
    me = x.coordinate()[axis]
    out = x.reshaped(shape, same, {axis: sizes})
    first, last = firsts[me], firsts[me] + max(sizes[me] - 1, -1) * step + 1
    return Plan((x,), out, lambda v, *a: aten.slice(v, dim, first, max(last, first), step))


@op(aten.slice_backward)
def slice_backward(func, grad, input_sizes, dim, start, end, step):
    """The rows go back to where they lie; each rank takes the gap up to the next rank's first row."""
    dim = dim % grad.ndim
    start, end, step = _bounds(input_sizes[dim], start, end, step)
    axis = grad.axis_of(dim)
    same = {d: d for d in range(grad.ndim)}
    if axis is None:
        out = grad.reshaped(input_sizes, same)
        return Plan((grad,), out, lambda g, *a: aten.slice_backward(g, out.local_shape(), dim, start, end, step))
    offsets = grad.offsets(axis)
    first = [start + o * step for o in offsets]
    borders = [0, *(min(f, input_sizes[dim]) for f in first[1:-1]), input_sizes[dim]]
    out = grad.reshaped(input_sizes, same, {axis: tuple(b - a for a, b in zip(borders, borders[1:]))})
    me = grad.coordinate()[axis]
    at = first[me] - borders[me]

    def local(g, *a):
        full = g.new_zeros(out.local_shape())
        if g.shape[dim]:
            aten.slice(full, dim, at, at + (g.shape[dim] - 1) * step + 1, step).copy_(g)
        return full

    return Plan((grad,), out, local)


@op(aten.select.int)
def select(func, x, dim, index):
    """One row of a cut dim goes to every rank."""
    dim = dim % x.ndim
    index = index + x.shape[dim] if index < 0 else index
    axis = x.axis_of(dim)
    out = x.reshaped([*x.shape[:dim], *x.shape[dim + 1 :]], {d: d - (d > dim) for d in range(x.ndim) if d != dim})
    if not 0 <= index < x.shape[dim]:
        raise IndexError(f"select(): index {index} out of range for tensor of size {list(x.shape)} at dimension {dim}")
    if axis is None:
        return Plan((x,), out, lambda v, *a: aten.select(v, dim, index))
    group, extents = c.axis_group(x.mesh, axis), x.sizes[axis]
    wanted = (((index, index + 1),),) * group.size
    return Plan((x,), out, lambda v, *a: c.send_exchange(v, dim, extents, wanted, group).squeeze(dim))


@op(aten.select_backward)
def select_backward(func, grad, input_sizes, dim, index):
    dim = dim % len(input_sizes)
    index = index % input_sizes[dim]
    out = grad.reshaped(input_sizes, {d: d + (d >= dim) for d in range(grad.ndim)})
    return Plan((grad,), out, lambda g, *a: aten.select_backward(g, out.local_shape(), dim, index))


@op(aten.split.Tensor, aten.split_with_sizes)
def split(func, x, size, dim=0):
    dim = dim % x.ndim
    extent = x.shape[dim]
    lengths = size if isinstance(size, (list, tuple)) else [min(size, extent - i) for i in range(0, extent, size)]
    if sum(lengths) != extent:
        raise ShardingError(f"lengths {list(lengths)} do not make {extent} rows", op="split", operands=[x])
    plans, at = [], 0
    for n in lengths:
        plans.append(_sliced(x, dim, at, at + n, 1))
        at += n
    return Plan((x,), tuple(p.outputs for p in plans), lambda v, *a: [p.local(v) for p in plans])


@op(aten.unbind)
def unbind(func, x, dim=0):
    dim = dim % x.ndim
    x = x.whole(dim)
    out = x.reshaped([*x.shape[:dim], *x.shape[dim + 1 :]], {d: d - (d > dim) for d in range(x.ndim) if d != dim})
    return Plan((x,), (out,) * x.shape[dim])


# -- joins ------------------------------------------------------------------------------------------------------------
@op(aten.stack)
def stack(func, xs, dim=0):
    if any(x.shape != xs[0].shape for x in xs):
        raise ShardingError("operands of different shapes", op="stack", operands=xs)
    target = meet(xs)
    dim = dim % (target.ndim + 1)
    shape = [*target.shape[:dim], len(xs), *target.shape[dim:]]
    out = target.reshaped(shape, {d: d + (d >= dim) for d in range(target.ndim)})
    return Plan(tuple(operand(x, target) for x in xs), out)


@op(aten.cat)
def cat(func, xs, dim=0):
    """Along a cut dim the result is cut anew in torch.chunk's way and every operand's rows go where they belong."""
    joined = [x for x in xs if x.shape != (0,)] or xs  # torch lets empty vectors join tensors of any shape
    lead = max(joined, key=lambda x: len(x.cuts()))
    dim = dim % lead.ndim
    shape = list(lead.shape)
    if any((*x.shape[:dim], *x.shape[dim + 1 :]) != (*shape[:dim], *shape[dim + 1 :]) for x in joined):
        raise ShardingError(f"operands differ in more than dim {dim}", op="cat", operands=xs)
    shape[dim] = sum(x.shape[dim] for x in joined)
    same = {d: d for d in range(lead.ndim)}
    axis = lead.axis_of(dim)
    if axis is None:
        out = lead.reshaped(shape, same)
        return Plan(tuple(x._new(lead.placements, lead.sizes) if x in joined else x for x in xs), out)
    sizes = chunk_sizes(shape[dim], lead.mesh.size(axis))
    out = lead.reshaped(shape, same, {axis: sizes})
    borders, at, inputs = out.offsets(axis), 0, []
    for x in xs:
        if x not in joined:
            inputs.append(x)
            continue
        n = x.shape[dim]
        part = tuple(max(0, min(b, at + n) - max(a, at)) for a, b in zip(borders, borders[1:]))
        inputs.append(x._new(lead.placements, [part if i == axis else s for i, s in enumerate(lead.sizes)]))
        at += n
    return Plan(tuple(inputs), out)
