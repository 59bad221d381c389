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
    widths = {x.ndim - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
    shape = [n + sum(widths.get(d, (0, 0))) for d, n in enumerate(x.shape)]
    if min(shape, default=0) < 0:
        raise ShardingError(f"widths {tuple(pad)} crop more than there is", op="pad", operands=[x])
    sizes, steps = {}, []
    for axis, dim in x.cuts():
        if any(widths.get(dim, (0, 0))):
            kept, sizes[axis] = _rows(x, axis, dim, *widths[dim])
            steps.append((dim, axis, kept, _sources(mode, x, dim, *widths[dim])))
    out = x.reshaped(shape, {d: d for d in range(x.ndim)}, sizes)

    def local(t, *args, **kwargs):
        rest = [0 if d in (s[0] for s in steps) else w for d, ws in widths.items() for w in ws]
        if any(rest):
            t = func(t, rest, mode if t.numel() else "constant", value)
        for dim, axis, kept, sources in steps:
            t = _pad_cut(t, x, dim, axis, kept, widths[dim], sources, value)
        return t

    return Plan((x,), out, local if x.is_sharded() else None)


def _rows(x, axis, dim, left, right):
    """Rows of each rank that stay, as global ranges, and the new extents."""
    low, high = max(0, -left), x.shape[dim] - max(0, -right)
    ends = [min(max(row, low), high) for row in x.offsets(axis)]
    sizes = [b - a for a, b in zip(ends, ends[1:])]
    sizes[0] += max(left, 0)
    sizes[-1] += max(right, 0)
    return list(zip(ends, ends[1:])), tuple(sizes)


def _sources(mode, x, dim, left, right):
    """Global rows that the new ones copy, before and after; None for a constant."""
    n = x.shape[dim]
    if mode == "constant":
        return None
    if mode not in ("reflect", "replicate", "circular") or min(left, right) < 0:
        raise MissingShardPatch(f"mode {mode!r} with widths {(left, right)} on a cut dim", op="pad", operands=[x])
    if max(left, right) > {"reflect": n - 1, "circular": n, "replicate": left + right}[mode] or not n:
        raise ShardingError(f"widths {(left, right)} in mode {mode!r} of {n} rows", op="pad", operands=[x])
    if mode == "reflect":
        return range(left, 0, -1), range(n - 2, n - 2 - right, -1)
    if mode == "circular":
        return range(n - left, n), range(right)
    return (0,) * left, (n - 1,) * right


def _pad_cut(t, x, dim, axis, kept, width, sources, value):
    group = c.axis_group(x.mesh, axis)
    me, start = group.rank, x.offsets(axis)[group.rank]
    if sources is None:
        first, last = kept[me]
        t = t.narrow(dim, first - start if last > first else 0, last - first)
        ends = max(width[0], 0) if me == 0 else 0, max(width[1], 0) if me == group.size - 1 else 0
        return F.pad(t, [*(0, 0) * (t.ndim - 1 - dim), *ends], value=value) if any(ends) else t
    before, after = ([()] * group.size for _ in range(2))
    before[0], after[-1] = (tuple((i, i + 1) for i in rows) for rows in sources)
    return join(t, dim, x.sizes[axis], before, [t], after, group)
