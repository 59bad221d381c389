"""Views of the whole: the cut follows its dim. Only splitting or merging a cut dim across its borders moves rows."""

import math

import torch
from torch.distributed.tensor.placement_types import Shard

from core._torch import NoDispatch, NoTorchFunction, compiling
from core.dispatch import Plan, composed, op
from core.errors import MissingShardPatch, ShardingError
from core.ops.reduction import reduced_dims
from core.shard_tensor import ShardTensor
from core.spec import chunk_sizes
from core.views import copied_as_torch_would

aten = torch.ops.aten


# -- dims that change place -------------------------------------------------------------------------------------------
@op(aten.permute, pending=True)
def permute(func, x, dims):
    dims = reduced_dims(x, dims) if dims else ()
    if sorted(dims) != list(range(x.ndim)):
        raise ShardingError(f"dims {dims} are no order of {x.ndim}", op="permute", operands=[x])
    out = x.reshaped([x.shape[d] for d in dims], {d: i for i, d in enumerate(dims)})
    return Plan((x,), out)


@op(aten.transpose, pending=True)
def transpose(func, x, a, b):
    a, b = reduced_dims(x, (a, b))
    order = list(range(x.ndim))
    if order:
        order[a], order[b] = b, a
    return Plan((x,), x.reshaped([x.shape[d] for d in order], {d: i for i, d in enumerate(order)}))


@op(aten.t, pending=True)
def t(func, x):
    order = list(reversed(range(x.ndim)))
    return Plan((x,), x.reshaped([x.shape[d] for d in order], {d: i for i, d in enumerate(order)}))


@op(aten.unsqueeze, pending=True)
def unsqueeze(func, x, dim):
    if not -x.ndim - 1 <= dim <= x.ndim:
        raise IndexError(f"unsqueeze: dim {dim} for a tensor of {x.ndim} dims")
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
    if lead < 0 or -1 in size[:lead] or any(n not in (1, shape[d + lead]) for d, n in enumerate(x.shape)):
        raise ShardingError(f"cannot be expanded to {tuple(size)}", op="expand", operands=[x])
    x = x.whole(*(d for d in range(x.ndim) if x.shape[d] == 1 and shape[d + lead] != 1))
    out = x.reshaped(shape, {d: d + lead for d in range(x.ndim)})
    shape = out.local_shape()
    return Plan((x,), out, lambda v, *a, **k: v.expand(shape))


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
        if ahead and x.axis_of(ahead[0]) is None:  # what is merged can be cut in order only along its first dim
            dim, ahead = ahead[0], []
            x = x.with_axis(axis, Shard(dim))
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
    shape = out.local_shape()
    return Plan((x,), out, lambda v, *a: v.reshape(shape))


# -- memory -----------------------------------------------------------------------------------------------------------
@op(aten.view.dtype)
def view_dtype(func, x, dtype):
    """The same bytes as numbers of another size: the last dim grows or shrinks, the rows of each part by themselves."""

    def local(t, dtype):
        num, den = t.element_size(), dtype.itemsize
        extents = {a: s for a, s in enumerate(x.sizes) if s is not None and x.placements[a].dim == x.ndim - 1}
        if x.ndim and any(n * num % den for n in [x.shape[-1], *(n for s in extents.values() for n in s)]):
            raise ShardingError(f"the last dim does not divide into {dtype}", op="view", operands=[x])
        if num == den:
            return ShardTensor(func(t, dtype), x)
        shape = (*x.shape[:-1], x.shape[-1] * num // den)
        sizes = {a: tuple(n * num // den for n in s) for a, s in extents.items()}
        return ShardTensor(func(t, dtype), x.reshaped(shape, sizes=sizes))

    return Plan((x,), None, local)


@op(aten.as_strided)
def as_strided(func, x, size, stride, storage_offset=None):
    """Memory is a matter of each part: only the strides that a tensor already has say the same of all of them."""
    if tuple(size) != tuple(x.shape) or tuple(stride) != x.stride or storage_offset:
        raise MissingShardPatch(
            f"size {tuple(size)} and stride {tuple(stride)}",
            op="as_strided",
            operands=[x],
            remedy="Use views and slices.",
        )
    return Plan((x,), x, lambda t, *a: t.view_as(t))


def _in_place(func, change):
    """``func`` gives a tensor the shape that ``change`` returns."""

    def changed_in_place(x, *args, **kwargs):
        changed = change(x, *args, **kwargs)
        with NoTorchFunction(), NoDispatch():
            func(x, *args, **kwargs)  # the wrapper's own shape
        x._local_tensor, x._spec = changed._local_tensor, changed._spec
        return x

    return changed_in_place


for _f, _change in (
    (aten.transpose_.default, aten.transpose.int),
    (aten.swapaxes_.default, aten.transpose.int),
    (aten.swapdims_.default, aten.transpose.int),
    (aten.t_.default, aten.t),
    (aten.unsqueeze_.default, aten.unsqueeze),
    (aten.squeeze_.default, aten.squeeze),
    (aten.squeeze_.dim, aten.squeeze),
    (aten.squeeze_.dims, aten.squeeze),
):
    composed(_f)(_in_place(_f, _change))


# -- views that torch may have to copy ---------------------------------------------------------------------------------
def _in_order(func):
    """Functions that copy what does not lie in order: torch asks the stride, and a view here remembers its own."""

    def call(input, *args, **kwargs):
        source = input
        if isinstance(input, ShardTensor) and not compiling():
            source = copied_as_torch_would(func, input, args, kwargs)
        with NoTorchFunction():
            out = func(source, *args, **kwargs)
        if source is not input:
            out._is_copy = False  # of nothing that anybody still sees
        return out

    return call


for _copies in (torch.Tensor.contiguous, torch.reshape, torch.Tensor.reshape, torch.flatten, torch.Tensor.flatten):
    composed(_copies)(_in_order(_copies))
