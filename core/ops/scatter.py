"""Single elements by number along a dim: gather, scatter and their kin.

Along the other dims element meets element, so there the index follows the tensor's cut. Along a cut dim entries are
routed to the owners of their rows (:mod:`core.ops.routed`), each with its place among the other dims.
"""

from itertools import accumulate, pairwise
from math import prod

import torch
from torch.distributed.tensor.placement_types import Shard

from core import collectives as c
from core.dispatch import TARGET, Plan, composed, op
from core.errors import ShardingError
from core.ops.indexing import legs_of, spread
from core.ops.reduction import reduced_dims
from core.ops.routed import deliver, fetch
from core.spec import PARTIAL, replicated_spec
from core.writes import mutates

aten = torch.ops.aten


def _fitted(spec, axis, dim, shape):
    """Extents of a tensor of another length along ``dim`` whose parts begin where those of ``spec`` do."""
    ends = [min(end, shape[dim]) for end in accumulate(spec.sizes[axis])]
    return tuple(b - a for a, b in pairwise([0, *ends[:-1], shape[dim]]))


def _meet(x, dim, index, lead, mode, fixed=False):
    """How the tensor and the index lie, and the axes on which what is added is a pending sum.

    Args:
        lead: the spec, of the index's shape, whose cuts count where the tensor has none.
        mode: of an index cut along ``dim`` where the tensor is whole: ``"read"`` needs nothing, what parts ``"add"`` is
            a pending sum, what they ``"write"`` each rank has to know.
        fixed: the tensor keeps its cut.
    """
    over, summed = replicated_spec(x.mesh, index.shape), []
    for axis, d in x.cuts():
        if d != dim:
            over = over.with_axis(axis, Shard(d), _fitted(x, axis, d, index.shape))
    for axis, d in lead.cuts():
        if isinstance(over.placements[axis], Shard) or over.axis_of(d) is not None:
            continue
        if not isinstance(x.placements[axis], Shard):
            if mode == "write" and d == dim or d != dim and (fixed or x.axis_of(d) is not None):
                continue
            if d != dim:
                x = x.with_axis(axis, Shard(d), _fitted(lead, axis, d, x.shape))
            elif mode == "add":
                summed.append(axis)
        over = over.with_axis(axis, Shard(d), lead.sizes[axis])
    return x, over, summed


class _Elements:
    """Entries of an index as coordinates: the row along ``dim``, and the place among the other dims of a part."""

    def __init__(self, x, over, dim):
        self.dim, self.others = dim, [d for d in range(x.ndim) if d != dim]
        self.inner = [x.local_shape()[d] for d in self.others]
        self.starts = [over.local_range(d)[0] if x.axis_of(d) is None else 0 for d in self.others]
        self.extents = x.shape[dim], prod(self.inner)

    def columns(self, index):
        place = index.new_zeros([1] * index.ndim)
        for d, n, start in zip(self.others, self.inner, self.starts):
            along = torch.arange(index.shape[d], device=index.device) + start
            place = place * n + along.view([-1 if e == d else 1 for e in range(index.ndim)])
        return [index.reshape(-1), place.expand_as(index).reshape(-1)]

    def at(self, columns):
        """Positions in a part's vector."""
        return columns[0] * self.extents[1] + columns[1]

    def flat(self, t):
        """A copy of a part as a vector, row after row along ``dim``."""
        return t.movedim(self.dim, 0).clone(memory_format=torch.contiguous_format).view(-1)

    def shaped(self, flat, t):
        return flat.view(t.shape[self.dim], *self.inner).movedim(0, self.dim)


def _checked(func, x, dim, *others):
    """The dim without its sign; ``others`` are the index and what must not be smaller than it."""
    index = others[0]
    dim = reduced_dims(x, dim)[0]
    fits = all(s.ndim == x.ndim for s in others) and all(
        n <= m for d, (n, m) in enumerate(zip(index.shape, x.shape)) if d != dim
    )
    if not fits or any(n > m for s in others for n, m in zip(index.shape, s.shape)):
        raise ShardingError(f"shapes that do not fit along dim {dim}", op=str(func), operands=[x, *others])
    return dim


@op(torch.gather, torch.Tensor.gather, aten.gather, names=("input", "dim", "index"))
def gather(func, x, dim, index, *, sparse_grad=False):
    if x.ndim == 0 or index.ndim == 0:
        return Plan((x.replicated(), index.replicated()), index.replicated())
    dim = _checked(func, x, dim, index)
    x, over, _ = _meet(x, dim, index, index, "read")
    if x.axis_of(dim) is not None and not isinstance(over.placements[x.axis_of(dim)], Shard):
        over = spread(over, x.axis_of(dim))
    legs, elements = legs_of(x, (dim,), over), _Elements(x, over, dim)

    def local(t, dim, index, **kwargs):
        flat = t.movedim(dim, 0).reshape(-1)
        read = lambda columns: flat[elements.at(columns)]  # noqa: E731
        return fetch(read, elements.columns(index), elements.extents, legs).view(index.shape)

    return Plan((x, over), over, local if legs else None)


@composed(torch.take_along_dim, torch.Tensor.take_along_dim)
def take_along_dim(input, indices, dim=None):
    if dim is None:
        return take(input, indices.reshape(-1))
    if input.ndim != indices.ndim or not -input.ndim <= dim < input.ndim:
        raise ShardingError(f"indices of {indices.ndim} dims along dim {dim} of {input.ndim}", op="take_along_dim")
    dim = dim % input.ndim
    shapes = ([1 if d == dim else n for d, n in enumerate(t.shape)] for t in (input, indices))
    shape = torch.broadcast_shapes(*shapes)
    wide = (t.expand([n if d == dim else m for d, (n, m) in enumerate(zip(t.shape, shape))]) for t in (input, indices))
    x, indices = wide
    return torch.gather(x, dim, indices)


# -- writing ---------------------------------------------------------------------------------------------------------
def _scatter(func, x, dim, index, src, write, mode="write"):
    """``write(vector, positions, values)`` in place; ``src`` is a spec, or None for a number."""
    given = [index] if src is None else [index, src]
    if x.ndim == 0 or index.ndim == 0:
        x = x if mutates(func) else x.replicated()
        return Plan((x, *(s.replicated() for s in given)), TARGET if mutates(func) else x)
    dim, in_place = _checked(func, x, dim, *given), mutates(func)
    lead = src if src is not None and src.shape == index.shape and src.is_sharded() else index
    x, over, summed = _meet(x, dim, index, lead, mode, in_place)
    legs, elements = legs_of(x, (dim,), over, every=False), _Elements(x, over, dim)
    inputs = [over] if src is None else [over, src.replicated()]
    for axis, d in over.cuts() if src is not None else ():
        inputs[1] = inputs[1].with_axis(axis, Shard(d), _fitted(over, axis, d, src.shape))
    for axis in () if in_place else summed:
        x = x.with_axis(axis, PARTIAL)

    def local(t, dim, index, src, *args, **kwargs):
        base = torch.zeros_like(t) if in_place and summed else t
        columns, values = elements.columns(index), None
        if isinstance(src, torch.Tensor):
            values = src[tuple(slice(n) for n in index.shape)].reshape(-1)
        columns, values = deliver(columns, values, elements.extents, legs)
        flat = elements.flat(base)
        write(flat, elements.at(columns), values)
        base = elements.shaped(flat, t)
        for axis in summed if in_place else ():
            base = c.send_all_reduce(base, c.axis_group(x.mesh, axis))
        return t.add_(base) if in_place and summed else t.copy_(base) if in_place else base

    local = local if legs or in_place and summed else None
    return Plan((x, *inputs), *((TARGET, local) if in_place else (x, local, x.finished())))


@op(aten.scatter_add, aten.scatter_add_)
def scatter_add(func, x, dim, index, src):
    return _scatter(func, x, dim, index, src, lambda t, at, v: t.index_put_((at,), v, True), "add")


@op(aten.scatter.src, aten.scatter_.src)
def scatter(func, x, dim, index, src):
    return _scatter(func, x, dim, index, src, lambda t, at, v: t.index_put_((at,), v))


@op(aten.scatter.value, aten.scatter_.value)
def scatter_number(func, x, dim, index, value):
    return _scatter(func, x, dim, index, None, lambda t, at, v: t.index_fill_(0, at, value))


@op(aten.scatter.reduce, aten.scatter_.reduce)
def scatter_old(func, x, dim, index, src, *, reduce):
    return scatter_reduce(func, x, dim, index, src, {"add": "sum", "multiply": "prod"}[reduce])


@op(aten.scatter.value_reduce, aten.scatter_.value_reduce)
def scatter_old_number(func, x, dim, index, value, *, reduce):
    def write(t, at, v):
        at, same = at.unique(return_counts=True)
        t[at] = t[at] + value * same if reduce == "add" else t[at] * value**same

    return _scatter(func, x, dim, index, None, write)


@op(aten.scatter_reduce.two, aten.scatter_reduce_.two)
def scatter_reduce(func, x, dim, index, src, reduce, *, include_self=True):
    def write(t, at, v):
        t.scatter_reduce_(0, at, v, reduce, include_self=include_self)

    return _scatter(func, x, dim, index, src, write, "add" if reduce == "sum" and include_self else "write")


# -- the elements of a tensor one after the other ----------------------------------------------------------------------
@composed(torch.take, torch.Tensor.take)
def take(input, index):
    return input[_places(input, index)] if input.ndim else input.reshape(1)[index]


@composed(torch.Tensor.put_)
def put_(self, index, source, accumulate=False):
    return self.index_put_(_places(self, index), source.reshape(index.shape), accumulate)


@composed(torch.put, torch.Tensor.put)
def put(input, index, source, accumulate=False):
    return torch.index_put(input, _places(input, index), source.reshape(index.shape), accumulate)


def _places(x, index):
    """Coordinates of positions in the flattened tensor; one out of range stays so."""
    index = torch.where(index < 0, index + x.numel(), index)
    index = torch.where(index < 0, x.numel(), index)
    places = []
    for n in reversed(x.shape[1:]):
        places.append(index % n)
        index = torch.div(index, n, rounding_mode="floor")
    return (index, *reversed(places))
