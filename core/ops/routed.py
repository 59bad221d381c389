"""Routed rows: entries of an index go to the ranks that own the rows they name, values go the same way or come back.

An entry is one coordinate for each indexed dim, its columns. Along every axis that cuts an indexed dim the entries make
one hop: counts to all, coordinates to the owners, and then one message of rows in either direction. Only wanted rows
travel. Where the entries are equal on all ranks of an axis each rank picks its own and nothing is sent.

A coordinate out of range is found before it is used; word of it goes with the counts, so that all ranks raise.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
from torch.autograd import Function

from core import collectives as c


class Leg(NamedTuple):
    """One axis on the way: which column it goes by, the extents of its ranks, and whether entries differ by rank."""

    group: c.Group
    column: int
    sizes: tuple
    travels: bool


def fetch(read, columns, extents, legs):
    """Rows that the entries on this rank name, read by their owners.

    Args:
        read: ``read(columns)`` gives rows of this rank's part, by its own coordinates.
        columns: for each indexed dim the global coordinates, one vector of a length of this rank's own.
        extents: global extents of the indexed dims.
    """
    columns, fault = _checked(columns, extents)
    hops = []
    for leg in legs:
        hops.append(_Hop(columns, leg, fault))
        columns, fault = hops[-1].columns, hops[-1].fault
    _raise(fault, extents)
    rows = read(columns)
    for hop in reversed(hops):
        rows = hop.back(rows)
    return rows


def deliver(columns, rows, extents, legs):
    """The entries that name rows of this rank, in its own coordinates, and the values (if any) that came along."""
    columns, fault = _checked(columns, extents)
    for leg in legs:
        hop = (_Hop if leg.travels else _Pick)(columns, leg, fault)
        columns, fault = hop.columns, hop.fault
        rows = hop.along(rows) if rows is not None else None
    _raise(fault, extents)
    return columns, rows


def _checked(columns, extents):
    """The coordinates, those out of range replaced, and whether there were any."""
    columns = [column.long() for column in columns]
    fine = [(column >= 0) & (column < n) for column, n in zip(columns, extents)]
    fault = ~torch.stack([f.all() for f in fine]).all()
    return [torch.where(f, column, 0) for column, f in zip(columns, fine)], fault


def _raise(fault, extents):
    if fault:
        raise IndexError(f"an index is out of range for rows of extent {tuple(extents)}")


class _Pick:
    """Entries known to all: those whose rows lie here."""

    def __init__(self, columns, leg, fault):
        start = sum(leg.sizes[: leg.group.rank])
        here = columns[leg.column] - start
        self.own = ((here >= 0) & (here < leg.sizes[leg.group.rank])).nonzero().squeeze(1)
        self.columns = [column[self.own] for column in columns]
        self.columns[leg.column] = here[self.own]
        self.fault = fault

    def along(self, rows):
        return rows[self.own]


class _Hop:
    """Entries that travel to the owners of their rows along one axis."""

    def __init__(self, columns, leg, fault):
        group, ends = leg.group, list(accumulate(leg.sizes))
        owner = torch.bucketize(columns[leg.column], columns[0].new_tensor(ends), right=True).clamp_(max=group.size - 1)
        self.group, self.order = group, owner.argsort(stable=True)
        counts = owner.bincount(minlength=group.size)
        word = torch.stack([counts, fault.to(counts.dtype).expand_as(counts)], 1)
        got = trade(word, [1] * group.size, [1] * group.size, group)
        self.sent, (self.received, faults) = counts.tolist(), got.t().tolist()
        self.fault = fault.new_tensor(any(faults))
        there = self.along(torch.stack(columns, 1))
        there[:, leg.column] -= ends[group.rank] - leg.sizes[group.rank]
        self.columns = list(there.unbind(1))

    def along(self, rows):
        """Values of the entries, at the owners of their rows."""
        return trade(rows[self.order], self.sent, self.received, self.group)

    def back(self, rows):
        """Rows found by the owners, in the order of the entries that asked for them."""
        rows = trade(rows, self.received, self.sent, self.group)
        place = torch.empty_like(self.order)
        place[self.order] = torch.arange(len(place), device=place.device)
        return rows[place]


# -- the wire --------------------------------------------------------------------------------------------------------
def trade(rows, sent, received, group):
    """``sent[rank]`` of the rows go to each rank, in order; those that came, by their sender. Differentiable."""
    return _Trade.apply(rows, sent, received, group)


class _Trade(Function):
    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.call = received, sent, group
        shape = rows.shape[1:]
        unit = shape.numel() * rows.element_size()
        flat = rows.resolve_conj().reshape(-1).view(torch.uint8)  # bytes: not every wire carries every dtype
        flat = c.send_flat(flat, [n * unit for n in received], [n * unit for n in sent], group)
        return flat.view(rows.dtype).view(sum(received), *shape)

    @staticmethod
    def backward(ctx, grad):
        return _Trade.apply(grad, *ctx.call), None, None, None
