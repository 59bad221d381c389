"""What a forecast has to beat."""

from typing import NamedTuple

import torch


class Observed(NamedTuple):
    """Values (batch, channel, y, x), 0 where missing, and their validity, bool of the same shape."""

    values: torch.Tensor
    valid: torch.Tensor


def persistence(history):
    """Nothing changes: at each point the last value seen in ``history``, a list of `Observed`, newest last."""
    values, valid = history[0]
    for newer in history[1:]:
        values, valid = torch.where(newer.valid, newer.values, values), valid | newer.valid
    return Observed(values, valid)
