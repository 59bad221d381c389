"""Order along a dim: sorts, the largest, quantiles and distinct values.

Over a cut dim the cut is turned aside (one all-to-all, and one back where the result is as long as the operand), so
that each rank orders whole rows and indices are global. Only what can be thinned out first is gathered: of the largest
each rank sends its own k, of distinct values its own distinct ones.
"""

import torch

from core import collectives as c
from core.dispatch import Plan, op
from core.errors import ShardingError
from core.ops.along import aside
from core.ops.reduction import reduced, reduced_dims
from core.ops.view import viewed
from core.spec import replicated_spec

aten = torch.ops.aten


@op(torch.argsort, torch.Tensor.argsort, aten.argsort, aten.sort)
@op(torch.sort, torch.Tensor.sort)
def sort(func, x, dim=-1, descending=False, stable=False):
    _, turned = aside(x, dim)
    return Plan((turned,), turned, final=x)


@op(torch.msort, torch.Tensor.msort, aten.msort)
def msort(func, x):
    return sort(func, x, 0)


@op(aten.topk)
@op(torch.topk, torch.Tensor.topk)
def topk(func, x, k, dim=-1, largest=True, sorted=True):
    dim = reduced_dims(x, dim)[0]
    rows = x.shape[dim] if x.ndim else 1
    if not 0 <= k <= rows:
        raise ShardingError(f"k = {k} of {rows}", op="topk", operands=[x], remedy="Take at most all.")
    axis = x.axis_of(dim)
    out = x.whole(dim)
    out = out.reshaped([k if d == dim else n for d, n in enumerate(x.shape)])
    if axis is None:
        return Plan((x,), out)
    group, start = c.axis_group(x.mesh, axis), x.local_range(dim)[0]
    kept = tuple(min(k, n) for n in x.sizes[axis])

    def local(t, *args, **kwargs):
        values, indices = torch.topk(t, kept[group.rank], dim, largest)
        values = c.gather(values, dim, kept, group)
        indices = c.send_gather(indices + start, dim, kept, group)
        values, at = torch.topk(values, k, dim, largest, sorted)
        return values, indices.gather(dim, at)

    return Plan((x,), out, local, x if k == rows else out)


@op(aten.kthvalue)
@op(torch.kthvalue, torch.Tensor.kthvalue)
def kthvalue(func, x, k, dim=-1, keepdim=False):
    rows = x.shape[reduced_dims(x, dim)[0]] if x.ndim else 1
    if not 1 <= k <= rows:
        raise ShardingError(f"k = {k} of {rows}", op="kthvalue", operands=[x], remedy="Count from one.")
    return _selected(x, dim, keepdim)


@op(aten.mode)
@op(torch.mode, torch.Tensor.mode)
def mode(func, x, dim=-1, keepdim=False):
    return _selected(x, dim, keepdim)


@op(aten.median, aten.nanmedian)
@op(torch.median, torch.Tensor.median, torch.nanmedian, torch.Tensor.nanmedian)
def median(func, x, dim=None, keepdim=False):
    """Of all values: gathers."""
    if dim is None:
        return Plan((x.replicated(),), replicated_spec(x.mesh, ()))
    return _selected(x, dim, keepdim)


def _selected(x, dim, keepdim):
    dim, turned = aside(x, dim)
    if x.ndim and not x.shape[dim]:
        raise IndexError(f"dim {dim} of a tensor of shape {tuple(x.shape)} has no rows to choose from")
    return Plan((turned,), reduced(turned, (dim,), keepdim)[0])


@op(torch.quantile, torch.Tensor.quantile, torch.nanquantile, torch.Tensor.nanquantile)
def quantile(func, x, q, dim=None, keepdim=False, *, interpolation="linear"):
    """Of all values: gathers."""
    one = isinstance(q, (int, float))
    if not x.shape.numel() or one and not 0 <= q <= 1:
        problem, remedy = f"q = {q} of {x.shape.numel()} values", "Give q between zero and one."
        raise ShardingError(problem, op=func.__name__, operands=[x], remedy=remedy)
    dims = reduced_dims(x, dim)
    turned = x.replicated() if dim is None else x.aside(*dims)
    out, _ = reduced(turned, dims, keepdim)
    inputs = (turned,)
    if not one:
        inputs = turned, q.replicated()
        out = out.reshaped((*q.shape, *out.shape), {d: d + q.ndim for d in range(out.ndim)})

    def local(t, q, *args, **kwargs):
        if t.numel():
            return func(t, q, dim, keepdim, interpolation=interpolation)
        none = t.sum(dims, keepdim)  # torch refuses a part without rows; the result has none either
        return none.expand(*getattr(q, "shape", ()), *none.shape)

    return Plan(inputs, out, local)


# -- distinct values: whole on every rank, since only the values say how many there are -------------------------------
@op(aten._unique2)
def unique(func, x, sorted=True, return_inverse=False, return_counts=False):
    return _distinct(x, lambda t: func(t, sorted, True, True), 0, return_inverse and (x, x), return_counts)


@op(aten.unique_dim)
def unique_rows(func, x, dim, sorted=True, return_inverse=False, return_counts=False):
    """Rows that are cut themselves are made whole."""
    x, dim, place = _rows(x, dim)
    return _distinct(x, lambda t: func(t, dim, sorted, True, True), dim, return_inverse and place, return_counts)


@op(aten.unique_consecutive)
def unique_runs(func, x, return_inverse=False, return_counts=False, dim=None):
    """Neighbours along ``dim`` or, without it, of the flattened tensor: all other cuts are undone."""
    if dim is None:
        source = viewed(x, [x.shape.numel()])[0]
        at, place = 0, (source, x)
    else:
        source, at, place = _rows(x, dim)
        dim = at
    return _distinct(source, lambda t: func(t, True, True, dim), at, return_inverse and place, return_counts)


def _rows(x, dim):
    """``x`` cut along ``dim`` alone, ``dim`` without its sign, and the spec of one number a row."""
    dim = reduced_dims(x, dim)[0]
    x = x.whole(*(d for d in range(x.ndim) if d != dim))
    number = x.reshaped((x.shape[dim],), {dim: 0})
    return x, dim, (number, number)


def _distinct(x, find, dim, inverse, return_counts):
    """Each rank finds its own distinct values; those of all ranks are gathered and thinned out again, axis by axis.

    Args:
        find: gives values (along ``dim``), inverse and counts of a tensor.
        inverse: how the inverse is computed and handed out, or False.
    """
    groups = [c.axis_group(x.mesh, axis) for axis, _ in x.cuts()]

    def local(t, *args):
        values, place, counts = find(t)
        for group in groups:
            found = torch.tensor([values.shape[dim]], device=t.device)
            sizes = c.send_gather(found, 0, (1,) * group.size, group).tolist()
            values, again, _ = find(c.send_gather(values, dim, sizes, group))
            if inverse:
                place = again[place + sum(sizes[: group.rank])]
            if return_counts:
                counts = c.send_gather(counts, 0, sizes, group)
                counts = counts.new_zeros(values.shape[dim]).index_add_(0, again, counts)
        none = place.new_empty(0)
        return values, place if inverse else none, counts if return_counts else none

    specs, final = zip((None, None), inverse or (None, None), (None, None))
    return Plan((x,), specs, local, final)
