"""Rows that other ranks hold: each rank asks for exactly the rows that its own results need.

One exchange whatever the width: a halo wider than a neighbour's part comes from several ranks. Only foreign rows
travel; own rows are copied once, into the array that the plain operation then reads. Whether anything is sent follows
from metadata, alike on all ranks, and an empty part takes part in every exchange, forward and backward.
"""

from itertools import accumulate

import torch

from core import collectives as c
from core.strides import memory_format_of


def fetch(t, dim, sizes, ranges, group):
    """Global rows ``ranges[rank]`` along ``dim`` on every rank; rows before the first and beyond the last are zero.

    Args:
        t: own rows.
        sizes: extents of all ranks along ``dim``.
        ranges: a half-open range for each rank, of any position.
    """
    total, offsets, before, kept, after = sum(sizes), (0, *accumulate(sizes)), [], [], []
    for (low, high), start, stop in zip(ranges, offsets, offsets[1:]):
        low, high = max(low, 0), min(high, total)
        before.append((_range(low, min(high, start)),))
        kept.append(_range(max(low, start), min(high, stop)))
        after.append((_range(max(low, stop), high),))
    (low, high), (first, last), me = ranges[group.rank], kept[group.rank], group.rank
    own = t.narrow(dim, first - offsets[me] if last > first else 0, last - first)
    zeros_before = min(max(-low, 0), high - low)
    zeros_after = min(max(high - total, 0), high - low)
    parts = [own]
    if zeros_before or zeros_after:
        parts = [_zeros(t, dim, zeros_before), own, _zeros(t, dim, zeros_after)]
    return join(t, dim, sizes, before, parts, after, group)


def join(t, dim, sizes, before, parts, after, group):
    """Foreign rows ``before[rank]`` and ``after[rank]`` (tuples of ranges) laid around the middle one of ``parts``."""
    wanted = tuple((*a, *b) for a, b in zip(before, after))
    if any(low < high for ranges in wanted for low, high in ranges):
        got = c.exchange(torch.view_as_real(t) if t.is_complex() else t, dim, sizes, wanted, group)
        got = torch.view_as_complex(got.contiguous()) if t.is_complex() else got  # gloo trades real numbers only
        got = got.contiguous(memory_format=memory_format_of(t))  # torch.cat keeps a format that all its operands have
        n = sum(high - low for low, high in before[group.rank])
        first, last = got.narrow(dim, 0, n), got.narrow(dim, n, got.shape[dim] - n)
        middle = len(parts) // 2
        parts = [*parts[:middle], first, parts[middle], last, *parts[middle + 1 :]]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def _range(low, high):
    return low, max(low, high)


def _zeros(t, dim, rows):
    shape = list(t.shape)
    shape[dim] = rows
    return t.new_zeros(shape).contiguous(memory_format=memory_format_of(t))
