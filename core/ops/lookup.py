"""Tables that are looked up, bins and counts: what is looked up stays cut, the table or the edges are whole.

Only of a table that is cut by rows are the wanted ones fetched from their owners. Counts are summed over the parts.
"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor.placement_types import Shard

from core import collectives as c
from core.arguments import tensors_in
from core.dispatch import Plan, op
from core.errors import MissingShardPatch, ShardingError
from core.ops.indexing import read
from core.ops.reduction import finish_local, reduced
from core.shard_tensor import ShardTensor
from core.spec import PARTIAL, REPLICATE, replicated_spec

aten = torch.ops.aten


# -- tables -----------------------------------------------------------------------------------------------------------
@op(F.embedding, names=("input", "weight"))
def embedding(
    func, input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False
):
    _refuse(input, weight, max_norm=max_norm, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
    if padding_idx is not None and not -weight.shape[0] <= padding_idx < weight.shape[0]:
        raise ShardingError(f"padding_idx {padding_idx}", op="embedding", operands=[weight])
    inputs, out, local = read(weight, (0,), 0, [input])

    def routed(i, table, *args, **kwargs):
        rows = local(table, [i])
        if padding_idx is None:
            return rows
        padding = (i == padding_idx % weight.shape[0]).unsqueeze(-1)
        return torch.where(padding, rows.detach(), rows)

    return Plan((inputs[1], inputs[0]), out, routed if local else _of_some(func))


def _of_some(func):
    """``func(indices, table)``; of no indices nothing: the derivative of torch's kernel would read foreign memory."""

    def local(i, table, *args, **kwargs):
        if i.numel():
            return func(i, table, *args, **kwargs)
        return table[:0].reshape(*i.shape, table.shape[-1])

    return local


def _refuse(input, weight, **options):
    """What would have to know how often all ranks use a row, or would change the table under them."""
    for name, value in options.items():
        if value and (input.is_sharded() or weight.is_sharded()):
            raise MissingShardPatch(f"{name}={value}", op="embedding", operands=[input, weight])


@op(aten.embedding)
def embedding_below(func, weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    _refuse(indices, weight, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
    inputs, out, local = read(weight, (0,), 0, [indices])
    return Plan(inputs, out, local and (lambda table, i, *args: local(table, [i])))


@op(aten.embedding_dense_backward)
def embedding_backward(func, grad, indices, rows, padding_idx, scale_grad_by_freq):
    """A pending sum over the ranks that hold different indices; a cut of the channels stays."""
    _refuse(indices, grad, scale_grad_by_freq=scale_grad_by_freq)
    over, out = replicated_spec(grad.mesh, indices.shape), replicated_spec(grad.mesh, (rows, grad.shape[-1]))
    for axis, dim in grad.cuts():
        if dim == grad.ndim - 1:
            out = out.with_axis(axis, Shard(1), grad.sizes[axis])
        else:
            over, out = over.with_axis(axis, Shard(dim), grad.sizes[axis]), out.with_axis(axis, PARTIAL)

    def local(g, i, *args):
        return func(g, i, *args) if i.numel() else g.new_zeros(rows, g.shape[-1])

    return Plan((grad, over), out, local)


@op(F.embedding_bag, names=("input", "weight", "offsets"))
def embedding_bag(func, input, weight, offsets=None, max_norm=None, norm_type=2, scale_grad_by_freq=False,
                  mode="mean", sparse=False, per_sample_weights=None, *args, **kwargs):  # fmt: skip
    """Bags that are rows of a matrix stay cut; a bag and the rows of the table are whole."""
    _refuse(input, weight, max_norm=max_norm, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
    if input.ndim != 2:
        raise MissingShardPatch("bags of unlike length", op="embedding_bag", operands=[input], remedy="Pad them.")
    bags, table = input.whole(1), weight.whole(0)
    for axis, _ in bags.cuts():
        table = table.with_axis(axis, REPLICATE)
    out = bags.reshaped((input.shape[0], weight.shape[1]), {0: 0})
    for axis, dim in table.cuts():
        out = out.with_axis(axis, Shard(dim), table.sizes[axis])
    inputs = (bags, table) if per_sample_weights is None else (bags, table, bags)
    shape = out.local_shape()

    def nothing(*args, **kwargs):
        """Torch's kernels for GPUs read out of bounds where there are no bags or no columns."""
        operands = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        return operands[0].new_zeros(shape) + sum(t.flatten()[:0].sum() for t in operands)

    return Plan(inputs, out, nothing if 0 in shape else None)


@op(F.one_hot)
def one_hot(func, tensor, num_classes=-1):
    """How many classes there are is the largest value of all parts, where it is not given."""
    if num_classes != -1:
        return Plan((tensor,), tensor.reshaped((*tensor.shape, num_classes)))
    if not tensor.shape.numel():
        raise ShardingError("no values to tell the number of classes", op="one_hot", operands=[tensor])

    def local(t, *args, **kwargs):
        classes = int(_extreme(t, tensor, "max")) + 1
        return ShardTensor(func(t, max(classes, 1)), tensor.reshaped((*tensor.shape, max(classes, 1))))

    return Plan((tensor,), None, local)


def _extreme(t, x, which):
    """The smallest (``"min"``) or largest (``"max"``) element of all parts."""
    if t.numel():
        value = t.min() if which == "min" else t.max()
    else:
        info = torch.finfo(t.dtype) if t.dtype.is_floating_point else torch.iinfo(t.dtype)
        value = t.new_tensor(info.max if which == "min" else info.min)
    for axis, _ in x.cuts():
        value = c.send_all_reduce(value, c.axis_group(x.mesh, axis), which)
    return value


# -- bins -------------------------------------------------------------------------------------------------------------
@op(aten.isin.Tensor_Tensor)
def isin(func, elements, test_elements, **kwargs):
    return Plan((elements, test_elements.replicated()), elements)


@op(aten.isin.Tensor_Scalar)
def isin_number(func, elements, test_element, **kwargs):
    return Plan((elements,), elements)


@op(aten.isin.Scalar_Tensor)
def number_isin(func, element, test_elements, **kwargs):
    return Plan((test_elements.replicated(),), replicated_spec(test_elements.mesh, ()))


@op(aten.bucketize.Tensor)
def bucketize(func, x, boundaries, **kwargs):
    return Plan((x, boundaries.replicated()), x)


@op(aten.bucketize.Scalar, aten.searchsorted.Scalar)
def place_of_number(func, *args, **kwargs):
    tables = tensors_in(args, kwargs)
    return Plan(tuple(t.replicated() for t in tables), replicated_spec(tables[0].mesh, ()))


@op(aten.searchsorted.Tensor)
def searchsorted(func, sequence, values, *, sorter=None, **kwargs):
    """Sequences are whole along their last dim; along the others each meets its values."""
    rows = values
    if sequence.ndim > 1:
        if sequence.ndim != values.ndim or sequence.shape[:-1] != values.shape[:-1]:
            raise ShardingError("sequences and values do not match", op="searchsorted", operands=[sequence, values])
        for axis, dim in sequence.cuts():
            if dim < sequence.ndim - 1 and not isinstance(rows.placements[axis], Shard) and rows.axis_of(dim) is None:
                rows = rows.with_axis(axis, Shard(dim), sequence.sizes[axis])
    table = sequence.replicated()
    for axis, dim in rows.cuts() if sequence.ndim > 1 else ():
        if dim < sequence.ndim - 1:
            table = table.with_axis(axis, Shard(dim), rows.sizes[axis])
    return Plan((table, rows) if sorter is None else (table, rows, table), rows)


# -- counts -----------------------------------------------------------------------------------------------------------
@op(aten.bincount)
def bincount(func, x, weights=None, minlength=0):
    if x.ndim != 1 or weights is not None and weights.shape != x.shape:
        raise ShardingError("needs a vector and weights of its shape", op="bincount", operands=tensors_in([x, weights]))

    def local(t, weights=None, minlength=0):
        top = int(_extreme(t, x, "max")) + 1 if x.shape.numel() else 0
        counts = func(t, weights, max(top, minlength))
        if weights is not None:  # of no values torch counts whole numbers
            counts = counts.to(torch.float32 if weights.dtype == torch.float32 else torch.float64)
        return ShardTensor(finish_local(counts, _counted(x)), replicated_spec(x.mesh, counts.shape))

    return Plan((x,) if weights is None else (x, x), None, local)


@op(aten.histc)
def histc(func, x, bins=100, min=0, max=0):
    pending, whole = _counted(x), replicated_spec(x.mesh, (bins,))

    def local(t, *args):
        low, high = (min, max) if min != max else _range_of(t, x)
        low, high = (low, high) if low != high else (low - 1, high + 1)
        return finish_local(func(t, bins, low, high), pending)

    return Plan((x,), whole, local)


@op(aten.histogram.bin_ct)
def histogram(func, x, bins=100, *, range=None, weight=None, density=False):
    def local(t, bins=100, *, range=None, weight=None, density=False):
        low, high = range if range is not None else _range_of(t, x)
        low, high = (low, high) if low != high else (low - 0.5, high + 0.5)
        return _dense(func(t, bins, range=(low, high), weight=weight), x, density)

    inputs = (x,) if weight is None else (x, x)
    return Plan(inputs, (replicated_spec(x.mesh, (bins,)), replicated_spec(x.mesh, (bins + 1,))), local)


@op(aten.histogram.bins_tensor)
def histogram_of_edges(func, x, bins, *, weight=None, density=False):
    def local(t, bins, *, weight=None, density=False):
        return _dense(func(t, bins, weight=weight), x, density)

    edges = bins.replicated()
    inputs = (x, edges) if weight is None else (x, edges, x)
    return Plan(inputs, (replicated_spec(x.mesh, (bins.shape[0] - 1,)), edges), local)


def _range_of(t, x):
    if not x.shape.numel():
        return 0.0, 0.0
    return float(_extreme(t, x, "min")), float(_extreme(t, x, "max"))


def _counted(x):
    return reduced(x, tuple(range(x.ndim)), False)[0]


def _dense(found, x, density):
    counts, edges = found
    counts = finish_local(counts, _counted(x))
    return (counts / (counts.sum() * edges.diff()) if density else counts), edges
