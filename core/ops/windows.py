"""Where the windows of a neighbourhood lie, along one dim: tiles of queries, blocks of keys, and the way back.

A window of dilation ``d`` holds every ``d``-th point, so the points of a dim fall into ``d`` classes that do not see
each other. Queries of one class are taken in tiles; the windows of a tile lie in one block of the class's keys, little
longer than the tile. All is arithmetic of positions in the whole grid, for numbers and for tensors alike; which part
of the grid is at hand (a rank's share, or a piece of it) only says where counting starts.
"""

from bisect import bisect
from functools import wraps
from typing import NamedTuple

import torch


class Window(NamedTuple):
    """The window along one dim of ``total`` points."""

    size: int
    dilation: int
    causal: bool
    total: int

    def first(self, query, least=min, most=max):
        """Position of the first key that a query sees; causal windows are shorter at the start, others are pushed
        inwards at both ends."""
        rest, place = query % self.dilation, query // self.dilation
        start = most(place - (self.size - 1 if self.causal else self.size // 2), 0)
        if not self.causal:
            start = least(start, (self.total - 1 - rest) // self.dilation + 1 - self.size)
        return rest + self.dilation * start

    def last(self, query, least=min, most=max):
        """Position of the last key that a query sees."""
        return query if self.causal else self.first(query, least, most) + self.dilation * (self.size - 1)

    def reach(self, start, stop):
        """Range of the keys in the windows of the queries ``start`` to ``stop``."""
        if start >= stop:
            return 0, 0
        ends = min(self.dilation, stop - start)
        low = min(self.first(i) for i in range(start, start + ends))
        return low, 1 + max(self.last(i) for i in range(stop - ends, stop))


class Axis(NamedTuple):
    """One dim of the grid, and which queries and keys of it are at hand."""

    window: Window
    first_query: int
    queries: int
    first_key: int
    keys: int

    def piece(self, start, stop):
        """The same for some of the queries, counted from what is at hand, and the keys that they reach."""
        low, high = self.window.reach(self.first_query + start, self.first_query + stop)
        return self._replace(first_query=self.first_query + start, queries=stop - start, first_key=low, keys=high - low)


def kept(table):
    """A table that is computed once for each device; anew while code is being traced, when no tensor is a real one."""

    @wraps(table)
    def once(self, device):
        if type(torch.empty(0, device=device)) is not torch.Tensor:
            return table(self, device)
        key = table.__name__, device
        if key not in self.tables:
            with torch.inference_mode(False):  # what is kept must do for training too
                self.tables[key] = table(self, device)
        return self.tables[key]

    return once


class Tiles:
    """One dim in ``count`` tiles of ``tile`` queries, each with a block of ``block`` keys that holds their windows.

    A tile has ``size`` queries, or more where half a window is more: small tiles gather many keys again and again,
    large ones mask most products. Every class has as many tiles as the longest one. ``overlap`` is the largest number
    of blocks that hold one key.
    """

    def __init__(self, axis, size):
        self.axis, window, self.tables = axis, axis.window, {}
        self.step = window.dilation
        longest = -(-axis.queries // self.step)
        self.tile = min(size * -(-(window.size // 2 + 1) // size), longest)
        self.each = -(-longest // self.tile)
        self.classes = min(self.step, axis.queries)
        self.count = self.classes * self.each
        self.block = min(self.tile + window.size - 1, -(-axis.keys // self.step))
        self.overlap = max(map(self._overlap, range(self.classes)))

    def _overlap(self, c):
        queries = [min(i * self.tile, self._length(c) - 1) * self.step + c for i in range(self.each)]
        starts = [self._start(i, min, max) for i in queries]
        return max(i + 1 - bisect(starts, t - self.block * self.step) for i, t in enumerate(starts))

    def _length(self, c):
        """Number of queries at hand in the class of the query ``c``, one of the first ones."""
        return (self.axis.queries - 1 - c) // self.step + 1

    def _start(self, query, least, most):
        """Position of the first key in the block of a tile that begins with ``query``, counted from what is at hand."""
        a = self.axis
        first = a.window.first(query + a.first_query, least, most)
        end = a.first_key + a.keys - 1
        return least(first, end - (end - first) % self.step - (self.block - 1) * self.step)

    def _numbers(self, device):
        """(count, tile): the queries of each tile within their class, those beyond the last as they are; the class."""
        number = torch.arange(self.each * self.tile, device=device).view(1, self.each, self.tile)
        c = torch.arange(self.classes, device=device).view(-1, 1, 1)
        shape = self.count, self.tile
        return number.expand(self.classes, -1, -1).reshape(shape), c.expand(-1, self.each, self.tile).reshape(shape)

    @kept
    def queries(self, device):
        """(count, tile): the queries of every tile; those beyond the last are the last."""
        number, c = self._numbers(device)
        return torch.minimum(number, self._length(c) - 1) * self.step + c

    @kept
    def real(self, device):
        """(count, tile): whether a query is none of those beyond the last."""
        number, c = self._numbers(device)
        return number < self._length(c)

    @kept
    def starts(self, device):
        return self._start(self.queries(device)[:, 0], torch.clamp_max, torch.clamp_min)

    @kept
    def keys(self, device):
        """(count, block): the keys of every block."""
        return (self._positions(device) - self.axis.first_key).clamp(0, self.axis.keys - 1)

    def _positions(self, device):
        return self.starts(device)[:, None] + torch.arange(self.block, device=device) * self.step

    @kept
    def mask(self, device):
        """(count, tile, block): whether a key is in the window of a query."""
        a, how = self.axis, (torch.clamp_max, torch.clamp_min)
        query, key = self.queries(device)[..., None] + a.first_query, self._positions(device)[:, None]
        return (key >= a.window.first(query, *how)) & (key <= a.window.last(query, *how))

    @kept
    def homes(self, device):
        """(1, queries) each: the tile of a query, where in it it is, and that it is there."""
        query = torch.arange(self.axis.queries, device=device)[None]
        number = query // self.step
        return query % self.step * self.each + number // self.tile, number % self.tile, number >= 0

    @kept
    def holders(self, device):
        """(overlap, keys) each: the blocks that hold a key, where in them it is, and whether there is such a block."""
        a = self.axis
        key = torch.arange(a.first_key, a.first_key + a.keys, device=device)
        c, starts = (key - a.first_query) % self.step, self.starts(device)
        far = 2 * (a.window.total + self.block * self.step)  # lays the classes behind each other
        order = starts + torch.arange(self.count, device=device) // self.each * far
        block = torch.searchsorted(order, key + c * far, right=True) - 1
        block = block - torch.arange(self.overlap, device=device)[:, None]
        at = (key - starts[block.clamp_min(0)]) // self.step
        return block, at, (block >= 0) & (block // self.each == c) & (at < self.block)
