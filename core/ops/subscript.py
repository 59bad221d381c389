"""``x[...]`` and ``x[...] = v``, taken apart: slices, numbers and new dims first, as views, then masks or indices.

A row of a cut dim that is read goes to every rank; one that is written stays a slice of length one, so that the write
reaches its owner.
"""

from numbers import Integral
from typing import NamedTuple

import torch

from core._torch import NoTorchFunction
from core.dispatch import composed
from core.errors import ShardingError
from core.ops.indexing import first_dim, take_rows
from core.ops.masks import put_masked, take_masked

aten = torch.ops.aten
_WHOLE = slice(None)
_BASIC = (int, slice, type(None), type(Ellipsis))


class _Parts(NamedTuple):
    """A subscript taken apart.

    Attributes:
        basic: numbers, slices, None; a whole slice for each dim that is indexed.
        dims: where the indices stand in what ``basic`` gives, the first dim of each.
        indices: masks and tensors of numbers.
    """

    basic: tuple
    dims: tuple
    indices: tuple


@composed(torch.Tensor.__getitem__)
def getitem(x, subscript):
    if _is_basic(subscript):
        with NoTorchFunction():
            return x[subscript]
    parts = _parse(x, subscript)
    x = _view(x, parts.basic)
    if not parts.indices:
        return x
    if _is_mask(parts.indices):
        return take_masked(x, parts.indices[0], parts.dims[0])
    dims, indices = _numbered(parts.dims, parts.indices)
    return take_rows(x, dims, first_dim(dims), *indices)


@composed(torch.Tensor.__setitem__)
def setitem(x, subscript, value):
    parts = _parse(x, subscript)
    numbers = sum(isinstance(e, int) for e in parts.basic)
    x = _written(x, parts.basic)
    if not isinstance(value, torch.Tensor):
        value = torch.as_tensor(value, device=x.device)
    value = value.to(x.dtype)
    value = value[(..., *[None] * numbers)] if value.ndim else value
    if not parts.indices:
        value = _without_ones(value, x.ndim)
        if value.ndim > x.ndim or any(n not in (1, m) for n, m in zip(reversed(value.shape), reversed(x.shape))):
            raise ShardingError(f"a value of shape {tuple(value.shape)} for {tuple(x.shape)}", op="x[...] = value")
        x.copy_(value)
    elif _is_mask(parts.indices):
        value = _without_ones(value, x.ndim - parts.indices[0].ndim + 1)
        put_masked(x, parts.indices[0], parts.dims[0], value)
    else:
        dims, indices = _numbered(parts.dims, parts.indices)
        value = _without_ones(value, x.ndim - len(dims) + max(i.ndim for i in indices))
        table = dict(zip(dims, indices))
        aten.index_put_(x, [table.get(d) for d in range(dims[-1] + 1)], value)


@composed(torch.index_put, torch.Tensor.index_put)
def index_put(input, indices, values, accumulate=False):
    return aten.index_put(input, _numbered(range(len(indices)), indices)[1], values, accumulate)


@composed(torch.Tensor.index_put_)
def index_put_(self, indices, values, accumulate=False):
    return aten.index_put_(self, _numbered(range(len(indices)), indices)[1], values, accumulate)


def _without_ones(value, ndim):
    """torch lets a value have more dims than it needs, of extent one."""
    while value.ndim > ndim and value.shape[0] == 1:
        value = value.squeeze(0)
    return value


# -- taking apart -----------------------------------------------------------------------------------------------------
def _is_basic(subscript):
    kinds = [type(e) for e in subscript] if type(subscript) is tuple else [type(subscript)]
    return all(kind in _BASIC for kind in kinds)


def _parse(x, subscript):
    """The parts of a subscript, indices as tensors of numbers or masks."""
    entries = [_entry(x, e) for e in _as_tuple(subscript)]
    used = sum(_dims_of(e) for e in entries)
    if used > x.ndim:
        raise IndexError(f"too many indices for tensor of dimension {x.ndim}")
    at = next((i for i, e in enumerate(entries) if e is ...), len(entries))
    entries = [*entries[:at], *[_WHOLE] * (x.ndim - used), *(e for e in entries[at:] if e is not ...)]
    basic, dims, indices, dim, out = [], [], [], 0, 0
    for e in entries:
        n = _dims_of(e)
        if isinstance(e, torch.Tensor):
            if e.dtype == torch.bool and tuple(x.shape[dim : dim + n]) != tuple(e.shape):
                raise IndexError(f"a mask of shape {tuple(e.shape)} at dim {dim} of a tensor of shape {tuple(x.shape)}")
            basic += [_WHOLE] * n if n else [None]
            dims.append(out)
            indices.append(e if n else e.reshape(1))
        else:
            basic.append(e)
        dim, out = dim + n, out + (0 if isinstance(e, int) else max(n, 1))
    return _Parts(tuple(basic), tuple(dims), tuple(indices))


def _as_tuple(subscript):
    """torch takes a short list for a tuple if one of its items could not be a number."""
    if type(subscript) is not list:
        return subscript if type(subscript) is tuple else (subscript,)
    several = len(subscript) < 32 and any(
        e is None or e is ... or isinstance(e, (torch.Tensor, slice, list, tuple)) for e in subscript
    )
    return tuple(subscript) if several else (subscript,)


def _entry(x, e):
    if type(e) in _BASIC:
        return e
    if isinstance(e, Integral) and not isinstance(e, bool):
        return int(e)
    if not isinstance(e, torch.Tensor):
        e = torch.as_tensor(e)
        e = e.long() if e.numel() == 0 else e
    if e.dtype.is_floating_point or e.dtype.is_complex:
        raise IndexError(f"a tensor of {e.dtype} is no index; it must hold numbers or bools")
    e = e.bool() if e.dtype == torch.uint8 else e
    if e.ndim == 0 and e.dtype != torch.bool:
        return int(e)
    return e if e.device == x.device else e.to(x.device)


def _dims_of(e):
    """How many dims of the tensor an entry stands for."""
    if isinstance(e, torch.Tensor):
        return e.ndim if e.dtype == torch.bool else 1
    return 0 if e is None or e is ... else 1


def _is_mask(indices):
    return len(indices) == 1 and indices[0].dtype == torch.bool


def _numbered(places, indices):
    """Dims and numbers, the masks as the numbers of what is true."""
    dims, numbers = [], []
    for dim, i in zip(places, indices):
        columns = i.nonzero().unbind(1) if i.dtype == torch.bool else (i,)
        dims += range(dim, dim + len(columns))
        numbers += columns
    return tuple(dims), numbers


def _view(x, basic):
    if all(type(e) is slice and e == _WHOLE for e in basic):
        return x
    with NoTorchFunction():
        return x[basic]


def _written(x, basic):
    """The part that is written, as a view; dims that a number selects stand last, of extent one."""
    numbers, entries, dim, out = [], [], 0, 0
    for e in basic:
        if isinstance(e, int):
            n = x.shape[dim]
            if not -n <= e < n:
                raise IndexError(f"index {e} is out of bounds for dimension {dim} with size {n}")
            numbers.append(out)
            e = slice(e % n, e % n + 1)
        entries.append(e)
        dim, out = dim + (e is not None), out + 1
    x = _view(x, tuple(entries))
    return x.movedim(numbers, list(range(x.ndim - len(numbers), x.ndim))) if numbers else x
