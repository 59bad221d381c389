"""Curves that aerodynamicists compare: Cp along the centreline of a body, and the velocity in its wake.

A curve is made of means in bins, of sums that add up over ranks: Cp of the cells of a narrow strip around the middle
plane, by area, upper and lower side apart; u / U, by volume, on vertical lines in the middle plane behind the body.
"""

import numpy as np
import torch
import torch.distributed as dist

from apps.aero.dataset import FAIR
from apps.aero.statistics import r2

BINS, STRIP = 60, 0.05  # strip: half width, as a share of the body's width
BEHIND, REACH = (0.1, 0.3, 0.6), 0.04  # lines behind the body and half sides of their columns, in its lengths


def centreline(cells, domain):
    """{"x": m, "upper" and "under": {"true", "predicted"} Cp by bin, None where no cell is, "r2"} of predict.Cells of
    a surface, all cells counted; the same on every rank."""
    position, q = cells.fields["position"], 0.5 * cells.attrs["U"] ** 2
    low, high = _extent(position, domain)
    middle = (low[1] + high[1]) / 2
    near = (position[:, 1] - middle).abs() <= STRIP * (high[1] - low[1])
    weight = cells.fields["area"] * near
    up = cells.fields["normal"][:, 2]
    values = torch.stack([cells.fields["pressure"], cells.predicted[:, 0]]) / q
    bins = _bins(position[:, 0], low[0], high[0])
    out = {"x": _middles(low[0], high[0])}
    for name, side in (("upper", up > 0), ("under", up < 0)):
        out[name] = _curves(values, weight * side, bins, domain)
    return out | {"r2": _agreement([out["upper"], out["under"]])}


def wake(cells, body, domain):
    """{"z": m, "lines": [{"x": m, "true", "predicted": u / U by bin}], "r2"} of predict.Cells of a volume.

    body: (low, high) corners (3,) m of the body's box."""
    low, high = body
    length, position = high[0] - low[0], cells.fields["position"]
    bottom, top = low[2], low[2] + 1.5 * (high[2] - low[2])
    values = torch.stack([cells.fields["velocity"][:, 0], cells.predicted[:, 1]]) / cells.attrs["U"]
    bins, lines = _bins(position[:, 2], bottom, top), []
    inside = (position[:, 2] >= bottom) & (position[:, 2] <= top)
    for share in BEHIND:
        x = float(high[0] + share * length)
        near = (position[:, 0] - x).abs() <= REACH * length
        near &= (position[:, 1] - (low[1] + high[1]) / 2).abs() <= REACH * length
        lines.append({"x": x, **_curves(values, cells.fields["volume"] * (near & inside), bins, domain)})
    return {"z": _middles(bottom, top), "lines": lines, "r2": _agreement(lines)}


def box_of(reader, run):
    """Corners (3,), (3,) of the box of a run's surface, by a fair sample of its cells."""
    position = reader.read(f"{run}/surface", "position", (slice(0, FAIR),)).astype(np.float64)
    return position.min(axis=0), position.max(axis=0)


def _extent(position, domain):
    big = torch.full((3,), torch.inf, dtype=torch.float64, device=position.device)
    low = torch.minimum(big, position.min(0).values) if len(position) else big
    high = torch.maximum(-big, position.max(0).values) if len(position) else -big
    dist.all_reduce(low, dist.ReduceOp.MIN, group=domain.get_group())
    dist.all_reduce(high, dist.ReduceOp.MAX, group=domain.get_group())
    return low.cpu().numpy(), high.cpu().numpy()


def _bins(values, low, high):
    return ((values - float(low)) / float(high - low) * BINS).long().clamp(0, BINS - 1)


def _middles(low, high):
    return (low + (np.arange(BINS) + 0.5) * (high - low) / BINS).tolist()


def _curves(values, weight, bins, domain):
    """Weighted means (2, BINS) of values (2, n), true and predicted, as lists; None where no cell is."""
    sums = values.new_zeros(3, BINS)
    sums.index_add_(1, bins, torch.cat([values * weight, weight[None]]))
    dist.all_reduce(sums, group=domain.get_group())
    true, predicted, total = sums.cpu().numpy()
    there = total > 0
    means = (np.where(there, part / np.where(there, total, 1), np.nan) for part in (true, predicted))
    return dict(zip(("true", "predicted"), ([None if np.isnan(v) else float(v) for v in m] for m in means)))


def _agreement(curves):
    """R2 of all bins of several curves together."""
    pairs = [(p, t) for c in curves for p, t in zip(c["predicted"], c["true"]) if t is not None]
    return r2([p for p, _ in pairs], [t for _, t in pairs]) if pairs else None
