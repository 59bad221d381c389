"""Where a token is: waves added to it, an embedding learned for its place, or a turn of its queries and keys.

All take global positions, so a token has its place however the grid is cut.
"""

import torch
import torch.nn.functional as F

KINDS = ("waves", "learned", "rotary")
BASE = 1e4  # longest wave over the shortest


def waves(count, like):
    """Sines and cosines of ``count`` positions (Vaswani et al. 2017), half as wide as the tokens ``like``."""
    angle = _angles(count, like.shape[-1] // 4, like.device)
    return torch.cat([angle.sin(), angle.cos()], -1).to(like.dtype)


def placed(x):
    """Tokens (batch, y, x, width) with the waves of their row and of their column added, half the width each."""
    rows, columns = waves(x.shape[1], x), waves(x.shape[2], x)
    return x + F.pad(rows, (0, rows.shape[-1]))[:, None] + F.pad(columns, (columns.shape[-1], 0))


def turns(height, width, channels, like):
    """Cosines and sines (y, x, 1, channels / 2) of the angles by which heads of ``channels`` are turned.

    Rotary embedding (Su et al. 2021) in two dims: the first half of the pairs turns with the row, the other with the
    column.
    """
    rows, columns = (_angles(n, channels // 4, like.device) for n in (height, width))
    shape = height, width, channels // 4
    angle = torch.cat([rows[:, None].expand(shape), columns[None].expand(shape)], -1)[:, :, None]
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def _angles(count, waves, device):
    return torch.arange(count, device=device)[:, None] * BASE ** (-torch.arange(waves, device=device) / waves)
