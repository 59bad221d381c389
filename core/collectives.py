"""Every wire operation, on plain tensors, differentiable.

The one gradient rule: the ranks together compute ONE objective, the sum of what each rank's graph holds. A value that
is equal on all ranks therefore has a gradient that is a pending sum over the ranks, and the backward of each
collective is its exact transpose: an all-reduce for an all-reduce, a reduce-scatter for a gather, the reverse
exchange for an exchange. ``core.region`` translates between this rule and finished gradients.

All of it is built from four functional collectives, which gloo and NCCL run alike and torch.compile can trace.
Extents of all ranks are known from metadata, so whether a message is sent is decided alike on every rank.
"""

import weakref
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.autograd import Function

from core._torch import group_name, send, wire
from core.debug import record


class Group(NamedTuple):
    """A process group as functional collectives want it: registered name, number of ranks, own position."""

    name: str
    size: int
    rank: int


_known: dict[int, tuple] = {}  # by the id of a mesh that lives: equal meshes may have other groups


def groups_of(mesh) -> tuple[Group, ...]:
    """The groups of this rank along every axis. What is kept for one mesh and sent later is told apart by these, not by
    the mesh: on a rank that has kept nothing the groups would be those of an equal one."""
    if id(mesh) not in _known:
        groups = [(axis, group_name(mesh.get_group(axis))) for axis in range(mesh.ndim)]
        _known[id(mesh)] = tuple([Group(name, mesh.size(axis), mesh.get_local_rank(axis)) for axis, name in groups])
        weakref.finalize(mesh, _known.pop, id(mesh))
    return _known[id(mesh)]


def axis_group(mesh, axis) -> Group:
    """The group of this rank along one axis of a mesh."""
    return groups_of(mesh)[axis]


# -- the wire: no autograd, contiguous buffers only (gloo reads strided memory wrongly) ---------------------------
def _sent(message, device, handle):
    """Waits for what is under way; a message that is being traced notes when."""
    if message is None:
        return wire.wait_tensor(handle)
    message.mark(device)
    out = wire.wait_tensor(handle)
    message.mark(device)
    return out


def _recorded(kind, nbytes, device):
    message = record(kind, nbytes)
    if message is not None:
        message.mark(device)
    return message


def send_all_reduce(x, group, op="sum"):
    return start_all_reduce(x, group, op)()


def start_all_reduce(x, group, op="sum"):
    """Sends now; what is returned waits for the sum and gives it."""
    if group.size == 1 or x.numel() == 0:
        return lambda: x
    nbytes = x.numel() * x.element_size() * 2 * (group.size - 1) // group.size
    message = _recorded("all_reduce", nbytes, x.device)
    handle = send(wire.all_reduce, x.contiguous(), op, group.name)
    return lambda: _sent(message, x.device, handle)


# What gloo moves as it is; other dtypes (complex, bool, small and unsigned whole numbers) travel as their bytes.
_CARRIED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8}


def as_bytes(x):
    """A contiguous tensor as one that every backend can move."""
    x = x.contiguous()
    return x if x.dtype in _CARRIED else (torch.view_as_real(x) if x.is_complex() else x).view(torch.uint8)


def _send_all_gather(x, group):
    """Equal blocks of every rank, stacked along dim 0."""
    message = _recorded("all_gather", x.numel() * x.element_size() * (group.size - 1), x.device)
    flat = as_bytes(x.reshape(-1))
    flat = _sent(message, x.device, send(wire.all_gather_into_tensor, flat, group.size, group.name))
    return flat.view(x.dtype).view(len(x) * group.size, *x.shape[1:])


def _send_reduce_scatter(x, group):
    nbytes = x.numel() * x.element_size() * (group.size - 1) // group.size
    message = _recorded("reduce_scatter", nbytes, x.device)
    return _sent(message, x.device, send(wire.reduce_scatter_tensor, x.contiguous(), "sum", group.size, group.name))


def send_flat(flat, out_splits, in_splits, group):
    """Flat buffers cut by element counts per peer; a zero sends nothing."""
    return _start_flat(flat, out_splits, in_splits, group)()


def _start_flat(flat, out_splits, in_splits, group):
    """Sends now; what is returned waits for what comes and gives it."""
    nbytes = (sum(in_splits) - in_splits[group.rank]) * flat.element_size()
    message = _recorded("all_to_all", nbytes, flat.device)
    moved = as_bytes(flat)
    unit = moved.element_size() and flat.element_size() // moved.element_size()
    splits = [[n * unit for n in counts] for counts in (out_splits, in_splits)]
    handle = send(wire.all_to_all_single, moved.reshape(-1), *splits, group.name)
    return lambda: _sent(message, flat.device, handle).view(flat.dtype)


def _outermost(shape, dim):
    """Whether rows along ``dim`` follow each other in memory, so that parts joined or cut there need no copy."""
    return shape[:dim].numel() == 1


# -- gather and its transpose -------------------------------------------------------------------------------------
def _pad_rows(x, dim, rows):
    missing = rows - x.shape[dim]
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


def send_gather(x, dim, sizes, group):
    """The whole along ``dim`` from parts of any extents."""
    if group.size == 1:
        return x
    rows, dim = max(sizes), dim % x.ndim
    stacked = _send_all_gather(_pad_rows(x, dim, rows).unsqueeze(0), group)
    if rows * group.size == sum(sizes) and _outermost(x.shape, dim):
        return stacked.view(*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :])
    return torch.cat([stacked[r].narrow(dim, 0, n) for r, n in enumerate(sizes)], dim)


def send_reduce_scatter(x, dim, sizes, group):
    """This rank's rows of the sum over ranks."""
    if group.size == 1:
        return x
    rows, dim = max(sizes), dim % x.ndim
    if rows * group.size == sum(sizes) and _outermost(x.shape, dim):
        parts = x.reshape(group.size, *x.shape[:dim], rows, *x.shape[dim + 1 :])
    else:
        parts = torch.stack([_pad_rows(p, dim, rows) for p in x.split(list(sizes), dim)])
    return _send_reduce_scatter(parts, group)[0].narrow(dim, 0, sizes[group.rank])


# -- exchange of row ranges: halos, shifts, new cuts ----------------------------------------------------------------
class _Segments(NamedTuple):
    """Who sends which rows to whom: (source, destination, first row in the source, rows, first row at destination)."""

    table: tuple

    def sent(self, rank):
        return [s for s in self.table if s[0] == rank and s[1] != rank]

    def received(self, rank):
        return [s for s in self.table if s[1] == rank and s[0] != rank]

    def kept(self, rank):
        return [s for s in self.table if s[0] == rank and s[1] == rank]

    def travel(self):
        return any(s[0] != s[1] for s in self.table)


@lru_cache(maxsize=1024)
def _segments(sizes, wanted):
    offsets, table = (0, *accumulate(sizes)), []
    for destination, ranges in enumerate(wanted):
        at = 0
        for start, stop in ranges:
            for source in range(len(sizes)):
                low, high = max(start, offsets[source]), min(stop, offsets[source + 1])
                if low < high:
                    table.append((source, destination, low - offsets[source], high - low, at + low - start))
            at += max(stop - start, 0)
    table.sort(key=lambda s: (s[0], s[1], s[4]))
    return _Segments(tuple(table))


def _start_trade(tensors, sent, received, group):
    """Sends rows of ``tensors``, a list of (peer, first row, rows), those of all in one message; what is returned waits
    for those received, a list of (peer, rows), and gives them: for each of that list the rows of every tensor."""
    units = [t.shape[1:].numel() for t in tensors]
    counts = [[0] * group.size, [0] * group.size]
    for side, table in enumerate(([(p, n) for p, _, n in sent], received)):
        for peer, n in table:
            counts[side][peer] += n * sum(units)
    parts = [t[first : first + n].reshape(-1) for _, first, n in sent for t in tensors] or [tensors[0].new_empty(0)]
    flat = torch.cat(parts) if len(parts) > 1 else parts[0]
    coming, shapes = _start_flat(flat, counts[1], counts[0], group), [t.shape[1:] for t in tensors]

    def there():
        parts = iter(coming().split([n * unit for _, n in received for unit in units]))
        return [[next(parts).view(n, *shape) for shape in shapes] for _, n in received]

    return there


def start_exchange(tensors, dim, sizes, wanted, group):
    """:func:`exchange` without autograd of tensors that travel in one message; sizes and ranges are tuples. Sends now;
    what is returned waits for the rows and gives them."""
    segments, rows = _segments(sizes, wanted), sum(max(b - a, 0) for a, b in wanted[group.rank])
    tensors = [t.movedim(dim, 0) for t in tensors]
    sent, received = segments.sent(group.rank), segments.received(group.rank)
    trade = [(s[1], s[2], s[3]) for s in sent], [(s[0], s[3]) for s in received]
    coming = _start_trade(tensors, *trade, group) if segments.travel() else list
    out = [t.new_empty((rows, *t.shape[1:])) for t in tensors]
    for _, _, start, n, at in segments.kept(group.rank):
        for o, t in zip(out, tensors):
            o[at : at + n] = t[start : start + n]

    def there():
        for parts, (_, _, _, n, at) in zip(coming(), received):
            for o, part in zip(out, parts):
                o[at : at + n] = part
        return [o.movedim(0, dim) for o in out]

    return there


def start_return(grads, dim, sizes, wanted, group):
    """The transpose of :func:`start_exchange`: sends the gradient of each row home. What is returned waits for those of
    the own rows, and adds them to the tensors of own rows that it is given."""
    segments, grads = _segments(sizes, wanted), [g.movedim(dim, 0) for g in grads]
    sent, received = segments.received(group.rank), segments.sent(group.rank)
    trade = [(s[0], s[4], s[3]) for s in sent], [(s[1], s[3]) for s in received]
    coming = _start_trade(grads, *trade, group) if segments.travel() else list

    def add_to(tensors):
        rows = [t.movedim(dim, 0) for t in tensors]
        for _, _, start, n, at in segments.kept(group.rank):
            for r, grad in zip(rows, grads):
                r[start : start + n] += grad[at : at + n]
        for parts, (_, _, start, n, _) in zip(coming(), received):
            for r, part in zip(rows, parts):
                r[start : start + n] += part
        return tensors

    return add_to


def send_exchange(x, dim, sizes, wanted, group):
    return start_exchange([x], dim, tuple(sizes), tuple([tuple(ranges) for ranges in wanted]), group)()[0]


def _send_return(grad, dim, sizes, wanted, group):
    rows = grad.movedim(dim, 0)
    rows = rows.new_zeros((sizes[group.rank], *rows.shape[1:])).movedim(0, dim)
    return start_return([grad], dim, sizes, wanted, group)([rows])[0]


def send_all_to_all(x, cut_dim, join_dim, cut_sizes, join_sizes, group):
    """From a tensor whole along ``cut_dim`` and cut along ``join_dim`` to the opposite."""
    if group.size == 1:
        return x
    cut_dim, join_dim, rest = cut_dim % x.ndim, join_dim % x.ndim, x.numel() // max(x.shape[cut_dim], 1)
    if _outermost(x.shape, cut_dim):
        flat = x.reshape(-1)
    else:
        flat = torch.cat([p.reshape(-1) for p in x.split(list(cut_sizes), cut_dim)])
    shapes = []
    for n in (*join_sizes, sum(join_sizes)):
        shape = list(x.shape)
        shape[cut_dim], shape[join_dim] = cut_sizes[group.rank], n
        shapes.append(torch.Size(shape))
    counts = [s.numel() for s in shapes[:-1]]
    got = send_flat(flat, counts, [n * rest for n in cut_sizes], group)
    if _outermost(shapes[-1], join_dim):
        return got.view(shapes[-1])
    return torch.cat([g.view(s) for g, s in zip(got.split(counts), shapes)], join_dim)


# -- differentiable forms -------------------------------------------------------------------------------------------
class _AllReduce(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return send_all_reduce(x, group)

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad, ctx.group), None


class _Gather(Function):
    @staticmethod
    def forward(ctx, x, dim, sizes, group):
        ctx.call = dim, sizes, group
        return send_gather(x, dim, sizes, group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, *ctx.call), None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx, x, dim, sizes, group):
        ctx.call = dim, sizes, group
        return send_reduce_scatter(x, dim, sizes, group)

    @staticmethod
    def backward(ctx, grad):
        return gather(grad, *ctx.call), None, None, None


class _Exchange(Function):
    @staticmethod
    def forward(ctx, x, dim, sizes, wanted, group):
        ctx.call = dim, sizes, wanted, group
        return send_exchange(x, dim, sizes, wanted, group)

    @staticmethod
    def backward(ctx, grad):
        return _ExchangeBack.apply(grad, *ctx.call), None, None, None, None


class _ExchangeBack(Function):
    @staticmethod
    def forward(ctx, grad, dim, sizes, wanted, group):
        ctx.call = dim, sizes, wanted, group
        return _send_return(grad, dim, sizes, wanted, group)

    @staticmethod
    def backward(ctx, grad):
        return _Exchange.apply(grad, *ctx.call), None, None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx, x, cut_dim, join_dim, cut_sizes, join_sizes, group):
        ctx.call = join_dim, cut_dim, join_sizes, cut_sizes, group
        return send_all_to_all(x, cut_dim, join_dim, cut_sizes, join_sizes, group)

    @staticmethod
    def backward(ctx, grad):
        return _AllToAll.apply(grad, *ctx.call), None, None, None, None, None


def all_reduce(x, group):
    """Sum over the ranks of ``group``, on all of them. Backward: the same sum of the gradients."""
    return _AllReduce.apply(x, group) if group.size > 1 else x


def gather(x, dim, sizes, group):
    """The whole along ``dim``; ``sizes`` are the extents of all ranks. Backward: reduce-scatter."""
    return _Gather.apply(x, dim, sizes, group) if group.size > 1 else x


def reduce_scatter(x, dim, sizes, group):
    """Own rows of the sum over ranks. Backward: gather."""
    return _ReduceScatter.apply(x, dim, sizes, group) if group.size > 1 else x


def exchange(x, dim, sizes, wanted, group):
    """Rows of other ranks: ``wanted[rank]`` lists half-open global ranges along ``dim``, laid end to end.

    Halos of any width (several hops if shards are narrow), circular shifts and new cuts are all of this form.
    Backward: every row's gradient goes home and is added to the owner's.
    """
    return _Exchange.apply(x, dim, tuple(sizes), tuple(tuple(w) for w in wanted), group)


def all_to_all(x, cut_dim, join_dim, cut_sizes, join_sizes, group):
    """Moves the cut from ``join_dim`` (extents ``join_sizes``) to ``cut_dim`` (extents ``cut_sizes``)."""
    if group.size == 1:
        return x
    return _AllToAll.apply(x, cut_dim, join_dim, tuple(cut_sizes), tuple(join_sizes), group)


class _Shifted(Function):
    @staticmethod
    def forward(ctx, flat, coming, counts, step, group):
        ctx.call = counts, step, group
        return coming()

    @staticmethod
    def backward(ctx, grad):
        counts, step, group = ctx.call
        moved = tuple(counts[(r - step) % group.size] for r in range(group.size))
        return start_shift(grad, moved, -step, group)(), None, None, None, None


def start_shift(flat, counts, step, group):
    """One step around the ring: a flat buffer goes to rank + ``step``; ``counts`` are the lengths held by all ranks.
    Sends now; what is returned waits for what comes and gives it."""
    if group.size == 1:
        return lambda: flat
    out_splits, in_splits = [0] * group.size, [0] * group.size
    in_splits[(group.rank + step) % group.size] = counts[group.rank]
    out_splits[(group.rank - step) % group.size] = counts[(group.rank - step) % group.size]
    coming = _start_flat(flat.detach(), out_splits, in_splits, group)
    return lambda: _Shifted.apply(flat, coming, tuple(counts), step, group)
