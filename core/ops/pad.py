"""Padding: the new rows belong to the ranks at the edges, which fetch what they need; nobody else does anything."""

import torch.nn.functional as F

from core import _torch
from core import collectives as c
from core.dispatch import Plan, op
from core.errors import MissingShardPatch, ShardingError
from core.ops.halo import join


@op(F.pad, _torch.pad)
def pad(func, x, pad, mode="constant", value=None):
    """Negative widths crop. The cut follows the rows; a constant sends nothing, other modes only what they copy."""
    if len(pad) % 2 or len(pad) > 2 * x.ndim:
        raise ShardingError(f"widths {tuple(pad)}", op="pad", operands=[x], remedy="Give two widths for each last dim.")
    if mode != "constant" and (mode not in _LIMITS or x.ndim - len(pad) // 2 not in (1, 2)):
        raise MissingShardPatch(f"mode {mode!r} with {len(pad)} widths", op="pad", operands=[x])
    widths = {x.ndim - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
    shape = [n + sum(widths.get(d, (0, 0))) for d, n in enumerate(x.shape)]
    left = [x.shape[d] + min(a, 0) + min(b, 0) for d, (a, b) in widths.items()] if mode == "constant" else []
    if min(*shape, *left, 0) < 0:
        raise ShardingError(f"widths {tuple(pad)} crop more than there is", op="pad", operands=[x])
    sizes, steps = {}, []
    for axis, dim in x.cuts():
        if any(widths.get(dim, (0, 0))):
            kept, before, after = _rows(x, dim, *widths[dim])
            ends = [min(max(row, kept.start), kept.stop) for row in x.offsets(axis)]
            kept = list(zip(ends, ends[1:]))
            sizes[axis] = [b - a for a, b in kept]
            sizes[axis][0] += len(before)
            sizes[axis][-1] += len(after)
            sources = None if mode == "constant" else _sources(mode, x, dim, before, after, *widths[dim])
            steps.append((dim, axis, kept, (len(before), len(after)), sources))
    out = x.reshaped(shape, sizes=sizes)
    rest = [0 if d in (s[0] for s in steps) else w for d, ws in widths.items() for w in ws]

    def local(t, *args, **kwargs):
        if any(rest) and t.numel():
            t = func(t, rest, mode, value)
        elif any(rest):
            t = F.pad(F.pad(t, [max(w, 0) for w in rest]), [min(w, 0) for w in rest])
        for step in steps:
            t = _pad_cut(t, x, *step, value)
        return t

    return Plan((x,), out, local if x.is_sharded() else None)


def _rows(x, dim, left, right):
    """The rows of the result, numbered as those of ``x``: which stay, and which are new before and after them."""
    n = x.shape[dim]
    low, high = max(0, -left), min(n, n + right)
    before, after = range(-left, min(0, n + right)), range(max(n, -left), n + right)
    return range(low, max(low, high)), before, after


def _reflect(row, n, low, high):
    return -row if row < 0 else 2 * (n - 1) - row


def _replicate(row, n, low, high):
    return 0 if row < 0 else n - 1


def _circular(row, n, low, high):
    """What was cropped is not wrapped round."""
    return low + (row - low) % (high - low)


# How a new row is copied, and the largest width for n rows of which m stay.
_LIMITS = {
    "reflect": (_reflect, lambda n, m: n - 1),
    "replicate": (_replicate, lambda n, m: float("inf")),
    "circular": (_circular, lambda n, m: m),
}


def _sources(mode, x, dim, before, after, left, right):
    """The rows that the new ones copy."""
    n, (source, limit) = x.shape[dim], _LIMITS[mode]
    low, high = max(0, -left), n + min(right, 0)
    if max(left, right) > limit(n, high - low) or not n:
        raise ShardingError(f"widths {(left, right)} in mode {mode!r} of {n} rows", op="pad", operands=[x])
    return [[source(row, n, low, high) for row in rows] for rows in (before, after)]


def _pad_cut(t, x, dim, axis, kept, new, sources, value):
    group, start = c.axis_group(x.mesh, axis), x.offsets(axis)[c.axis_group(x.mesh, axis).rank]
    (first, last), edges = kept[group.rank], (group.rank == 0, group.rank == group.size - 1)
    own = t.narrow(dim, first - start if last > first else 0, last - first)
    if sources is None:
        ends = [n if edge else 0 for n, edge in zip(new, edges)]
        return F.pad(own, [*(0, 0) * (t.ndim - 1 - dim), *ends], value=value) if any(ends) else own
    before, after = ([()] * group.size for _ in range(2))
    before[0], after[-1] = (tuple((i, i + 1) for i in rows) for rows in sources)
    return join(t, dim, x.sizes[axis], before, [own], after, group)
