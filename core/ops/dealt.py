"""Attention of rows that are dealt anew, so that all ranks have the same work: each computes a part from the front of
all rows and one from the back, whatever it holds itself and though a causal mask leaves the first rows little to see.
Keys are gathered; rows go where they are computed, and results come home, in one message each.
"""

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from core import collectives as c
from core.ops.block import ALONE
from core.ops.gathered import together
from core.ops.ring import block_attention


class Deal(NamedTuple):
    """Who computes which rows.

    Attributes:
        parts: of each rank, its two half-open ranges of all rows.
        sizes: how many rows each rank has then.
        home: of each rank, the ranges of the dealt rows, laid end to end rank by rank, that are its own in their order.
    """

    parts: tuple
    sizes: tuple
    home: tuple


@lru_cache(maxsize=256)
def deal(sizes):
    """The :class:`Deal` of rows of which the ranks hold ``sizes``."""
    ranks, total = len(sizes), sum(sizes)
    ends = [total * i // (2 * ranks) for i in range(2 * ranks + 1)]
    each = list(zip(ends, ends[1:]))
    parts = tuple((each[r], each[-1 - r]) for r in range(ranks))
    order = [part for pair in parts for part in pair if part[0] < part[1]]
    starts = dict(zip(order, accumulate((b - a for a, b in order), initial=0)))  # of the parts among the dealt rows
    home = []
    for low, high in zip(accumulate(sizes, initial=0), accumulate(sizes)):
        own = [(max(a, low), min(b, high), starts[a, b] - a) for a, b in each if max(a, low) < min(b, high)]
        home.append(tuple((a + shift, b + shift) for a, b, shift in own))
    return Deal(parts, tuple(sum(b - a for a, b in pair) for pair in parts), tuple(home))


def attention(q, k, v, rows, call):
    """Attention of the own rows ``q`` (.., queries, channels) over the keys of all ranks. Differentiable.

    Args:
        rows: how many the ranks hold of all queries.
        call: a :class:`core.ops.block.Call` whose ring holds the keys.
    """
    dealt, group = deal(rows), call.ring
    k, v = together(k, v, call.sizes, group)
    parts, outs = dealt.parts[group.rank], []
    both = c.exchange(q, -2, rows, dealt.parts, group).split([b - a for a, b in parts], -2)
    for part, (first, last) in zip(both, parts):
        seen = min(last, k.shape[-2]) if call.causal else k.shape[-2]
        alone = call._replace(first_query=first, sizes=(seen,), ring=ALONE)
        outs.append(block_attention(part, k[..., :seen, :], v[..., :seen, :], None, alone))
    return c.exchange(torch.cat(outs, -2), -2, dealt.sizes, dealt.home, group)
