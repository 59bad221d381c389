"""Rows that other ranks hold: each rank asks for exactly the rows that its own results need.

One exchange whatever the width: a halo wider than a neighbour's part comes from several ranks. Only foreign rows
travel; own rows are copied once, into the array that the plain operation then reads. Whether anything is sent follows
from metadata, alike on all ranks, and an empty part takes part in every exchange, forward and backward.
"""

import torch

from core import collectives as c
from core.shard_tensor import memory_format


def extended(t, dim, sizes, before, after, group):
    """Own rows of ``dim`` with other rows before and after them.

    Args:
        sizes: extents of all ranks along ``dim``.
        before, after: for each rank a tuple of half-open global row ranges, in the order in which they are laid.
    """
    wanted = tuple((*a, *b) for a, b in zip(before, after))
    if not any(low < high for ranges in wanted for low, high in ranges):
        return t
    got = c.exchange(t, dim, sizes, wanted, group).contiguous(memory_format=memory_format(t))
    first = sum(max(high - low, 0) for low, high in before[group.rank])
    return torch.cat([got.narrow(dim, 0, first), t, got.narrow(dim, first, got.shape[dim] - first)], dim)


def fetch(t, dim, sizes, ranges, group):
    """Global rows ``ranges[rank]`` along ``dim``; rows before the first and beyond the last are zero."""
    total, start, needs = sum(sizes), 0, []
    for n, (low, high) in zip(sizes, ranges):
        stop, inside = start + n, (max(low, 0), min(high, total))
        before = (inside[0], min(inside[1], start))
        after = (max(inside[0], stop), inside[1])
        kept = min(max(inside[0], start), stop), min(max(inside[1], start), stop)
        needs.append((before, after, kept[0] - start, max(kept[1] - kept[0], 0)))
        start = stop
    _, _, first, count = needs[group.rank]
    before, after = [(n[0],) for n in needs], [(n[1],) for n in needs]
    own = t if count == t.shape[dim] else t.narrow(dim, first, count)
    if any(low < high for low, high in (r for b, a in zip(before, after) for r in (*b, *a))):
        ...
    return own


