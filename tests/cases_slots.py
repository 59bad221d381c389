"""Rows of attention between points and slots; on one process it is held against the weights written out."""

from unittest.mock import patch

import torch
from cases import case, refuse

from core import ShardTensor
from core.ops import slot_tiles, slots


def in_tiles(function, *operands):
    """In tiles of three points, and a rest."""
    with patch.object(slot_tiles, "_TILE", 3):
        return function(*operands)


def sums(q, k, v):
    out = in_tiles(slots.slot_sums, q, k, v)
    if isinstance(q, ShardTensor):
        return out
    written_out = (q @ k.mT).softmax(-1).mT @ v
    torch.testing.assert_close(out, written_out, atol=1e-11, rtol=1e-11)
    return written_out


def read(q, k, values):
    out = in_tiles(slots.slot_read, q, k, values)
    if isinstance(q, ShardTensor):
        return out
    written_out = (q @ k.mT).softmax(-1) @ values
    torch.testing.assert_close(out, written_out, atol=1e-11, rtol=1e-11)
    return written_out


POINTS, SLOTS, SHARED, NARROW = (2, 3, 7, 4), (2, 3, 5, 4), (1, 1, 5, 4), (2, 3, 7, 3)
CUTS = ((2, None, 2), (0, 0, 0), (1, 1, 1), (2, "R", 2), (2, None, None), (None, 1, None), (3, None, 2))
SEVERAL = (((0, 2), None, (0, 2)), ((2, 1), None, (2, 1)))
case("slot_sums", sums, (POINTS, SLOTS, POINTS), CUTS, cuts2=SEVERAL)
case("slot_sums_of_points", sums, (POINTS, SLOTS, POINTS), ((2, None, 2),), wire=("all_reduce",))
case("slot_sums_shared", sums, (POINTS, SHARED, NARROW), ((2, None, 2), (1, None, 1)))
READ = ((2, None, None), (0, 0, 0), (1, 1, 1), (2, "R", "P"), (None, 2, 2), (3, None, 3))
case("slot_read", read, (POINTS, SLOTS, SLOTS), READ, cuts2=(((0, 2), None, None),))
case("slot_read_by_points", read, (POINTS, SLOTS, SLOTS), ((2, None, None),), wire=())
case("slot_read_shared", read, (POINTS, SHARED, (2, 3, 5, 3)), ((2, None, None), (1, None, 1)))
refuse("slots_of_five_dims", lambda x: slots.slot_sums(x, x, x))
refuse("slots_of_other_channels", lambda x: slots.slot_read(x, x[..., :3], x), shape=(2, 3, 7, 4), cut=2)
refuse("slots_of_whole_numbers", lambda x: slots.slot_sums(x.long(), x.long(), x.long()), shape=(2, 3, 7, 4), cut=2)
