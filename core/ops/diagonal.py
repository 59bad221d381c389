"""Diagonals and triangles: an element lies where it does in the whole, so parts count from their first row and column.

The diagonal of a matrix with cut rows is cut as the rows that it crosses; a matrix made of a cut diagonal has its rows
cut so that each part of the diagonal stays where it is. Nothing is sent.
"""

import torch

from core.dispatch import TARGET, Plan, composed, op
from core.errors import MissingShardPatch, ShardingError
from core.ops.reduction import reduced
from core.shard_tensor import ShardTensor
from core.writes import mutates

aten = torch.ops.aten


@op(aten.tril, aten.triu, aten.tril_, aten.triu_, pending=True)
def triangle(func, x, diagonal=0):
    if x.ndim < 2:
        raise ShardingError("needs a matrix", op=str(func), operands=[x])
    shift = x.local_range(-2)[0] - x.local_range(-1)[0]
    return Plan((x,), TARGET if mutates(func) else x, lambda t, *a: func(t, diagonal + shift))


def _rows_and_columns(x, ndim, dim1, dim2, name):
    n = max(ndim, 1)
    if not (-n <= dim1 < n and -n <= dim2 < n):
        raise IndexError(f"{name}: dims {dim1} and {dim2} of a tensor of {ndim} dims")
    if dim1 % n == dim2 % n:
        raise ShardingError(f"dims {dim1} and {dim2} are one", op=name, operands=[x])
    return dim1 % n, dim2 % n


@op(aten.diagonal, aten.diagonal_copy, pending=True)
def diagonal(func, x, offset=0, dim1=0, dim2=1):
    dim1, dim2 = _rows_and_columns(x, x.ndim, dim1, dim2, "diagonal")
    if x.axis_of(dim1) is not None and x.axis_of(dim2) is not None:
        x = x.aside(dim2)
    rows, columns = x.shape[dim1], x.shape[dim2]
    length = max(0, min(rows + min(offset, 0), columns - max(offset, 0)))
    others = [d for d in range(x.ndim) if d not in (dim1, dim2)]
    to, sizes, shift = {d: i for i, d in enumerate(others)}, {}, 0
    for dim, ahead, sign in ((dim1, max(-offset, 0), 1), (dim2, max(offset, 0), -1)):
        axis = x.axis_of(dim)
        if axis is not None:
            ends = [min(max(row - ahead, 0), length) for row in x.offsets(axis)]
            to[dim], sizes[axis] = len(others), tuple(b - a for a, b in zip(ends, ends[1:]))
            shift = sign * x.local_range(dim)[0]
    out = x.reshaped([*(x.shape[d] for d in others), length], to, sizes)
    return Plan((x,), out, lambda t, *a: func(t, offset + shift, dim1, dim2))


@op(aten.diagonal_backward)
def diagonal_backward(func, grad, input_sizes, offset, dim1, dim2):
    return _embedded(grad, input_sizes, offset, *_rows_and_columns(grad, len(input_sizes), dim1, dim2, "diagonal"))


@op(aten.diag_embed)
def diag_embed(func, x, offset=0, dim1=-2, dim2=-1):
    dim1, dim2 = _rows_and_columns(x, x.ndim + 1, dim1, dim2, "diag_embed")
    shape, n = list(x.shape[:-1]), x.shape[-1] + abs(offset)
    for dim in sorted((dim1, dim2)):
        shape.insert(dim, n)
    return _embedded(x, shape, offset, dim1, dim2)


def _embedded(x, shape, offset, dim1, dim2):
    """Zeros of ``shape`` with ``x`` on the diagonal; a rank has the rows up to the first of the next."""
    others, axis, start = [d for d in range(len(shape)) if d not in (dim1, dim2)], x.axis_of(-1), 0
    to, sizes = {i: d for i, d in enumerate(others)}, {}
    if axis is not None:
        ends = [min(row + max(-offset, 0), shape[dim1]) for row in x.offsets(axis)]
        ends[0], ends[-1] = 0, shape[dim1]
        to[x.ndim - 1], sizes[axis] = dim1, tuple(b - a for a, b in zip(ends, ends[1:]))
        start = ends[x.coordinate()[axis]]
    out = x.reshaped(shape, to, sizes)

    def local(t, *args):
        full = t.new_zeros(out.local_shape())
        full.diagonal(offset + start, dim1, dim2).copy_(t)
        return full

    return Plan((x,), out, local)


@op(torch.trace, torch.Tensor.trace)
def trace(func, input):
    if input.ndim != 2:
        raise ShardingError("needs a matrix", op="trace", operands=[input])
    shift = input.local_range(0)[0] - input.local_range(1)[0]
    return Plan((input,), reduced(input, (0, 1), False)[0], lambda t: t.diagonal(shift).sum())


# -- made of these ----------------------------------------------------------------------------------------------------
@composed(torch.diagonal_scatter, torch.Tensor.diagonal_scatter)
def diagonal_scatter(input, src, offset=0, dim1=0, dim2=1):
    out = input.clone()
    if isinstance(input, ShardTensor):  # where rows and columns are cut, the diagonal of the parts is not one of theirs
        spec = out._spec.cut_once()
        both = spec.axis_of(dim1) is not None and spec.axis_of(dim2) is not None
        out = out.redistribute_to(spec.aside(dim2)) if both else out
    out.diagonal(offset, dim1, dim2).copy_(src)
    return out.redistribute_to(input._spec.finished()) if isinstance(input, ShardTensor) else out


@composed(torch.Tensor.fill_diagonal_)
def fill_diagonal_(self, fill_value, wrap=False):
    if self.ndim != 2 or wrap and self.shape[0] > self.shape[1]:
        raise MissingShardPatch(
            "more dims than two, or a wrapped diagonal", op="fill_diagonal_", operands=[self._spec],
            remedy="Use masked_fill_ with a mask.",
        )  # fmt: skip
    return self.copy_(diagonal_scatter(self, torch.full_like(self.diagonal(), fill_value)))
