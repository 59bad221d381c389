"""Scores as sums: each case, rank and region gives numerators and counts that add up, and the scores follow at the end.

Averages of ratios depend on how the cases were cut, sums do not; so a score of many ranks is that of one, and scores of
regions or dates can be derived again without another forecast. Only what is valid counts: a value under the mask, NaN
included, never enters. Functions take plain tensors or ShardTensors and return fp64 sums over this rank's part.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from core import ShardTensor


def error_sums(forecast, truth, valid, dims=None):
    """Sums for RMSE, MAE, bias and relative L2 over ``dims`` (all when None); the other dims stay."""
    forecast, truth, valid = _local(forecast), _local(truth), _local(valid)
    error, truth = torch.where(valid, forecast - truth, 0), torch.where(valid, truth, 0)
    parts = {"n": valid, "error": error, "absolute": error.abs(), "square": error**2, "truth_square": truth**2}
    return {key: _sum(value, dims) for key, value in parts.items()}


def event_sums(forecast, truth, valid, thresholds, below=False, dims=None):
    """Hits, misses and false alarms of the event "at least a threshold" (``below``: less than it).

    Each sum has a first dim of thresholds.
    """
    forecast, truth, valid = _local(forecast), _local(truth), _local(valid)
    rows = []
    for threshold in thresholds:
        said, seen = ((v < threshold) if below else (v >= threshold) for v in (forecast, truth))
        rows.append((valid & said & seen, valid & ~said & seen, valid & said & ~seen))
    return {k: torch.stack([_sum(r, dims) for r in row]) for k, row in zip(("hit", "miss", "false_alarm"), zip(*rows))}


def ensemble_sums(members, truth, valid, dims=None):
    """Sums for the CRPS, standard and fair, and the spread of an ensemble ``members`` (member, ...); dims of ``truth``.

    CRPS = E|X - y| - E|X - X'| / 2. The standard form takes the second mean over all M^2 pairs, the fair one over the
    M (M - 1) pairs of two members (Ferro 2014). By order statistics: sum over pairs = sum_i (2 i - M + 1) x_(i).
    """
    members, truth, valid = _local(members), _local(truth), _local(valid)
    m = members.shape[0]
    rank = torch.arange(m, device=members.device, dtype=members.dtype) * 2 - m + 1
    pairs = (members.sort(0).values * rank.view(-1, *[1] * truth.ndim)).sum(0)
    near, centre = (members - truth).abs().mean(0), members.mean(0)
    parts = {"n": valid, "crps": near - pairs / m**2, "centre_square": (centre - truth) ** 2}
    if m > 1:
        parts |= {"crps_fair": near - pairs / (m * (m - 1)), "variance": members.var(0) * (m + 1) / m}
    return {key: _sum(torch.where(valid, value, 0), dims) for key, value in parts.items()}


def fraction_sums(members, truth, valid, threshold, windows, below=False):
    """Sums for the fractions skill score (Roberts and Lean 2008) of (member, y, x) against (y, x), one per window.

    The fraction of an ensemble is the mean over its members (Necker et al. 2024). An event counts where the mask is
    valid, windows (odd widths in cells) are centred on valid cells, and what lies beyond the edge holds no event.
    """
    both = torch.cat([members, truth[None]])
    events = ((both < threshold) if below else (both >= threshold)) & valid
    events = events.to(torch.promote_types(members.dtype, torch.float32))
    rows = []
    for window in windows:
        share = _local(_window_mean(events, window))
        said, seen = (torch.where(_local(valid), v, 0) for v in (share[:-1].mean(0), share[-1]))
        rows.append((_sum((said - seen) ** 2), _sum(said**2) + _sum(seen**2)))
    return {key: torch.stack(column) for key, column in zip(("fraction_error", "fraction_worst"), zip(*rows))}


def _window_mean(x, window):
    if window % 2 == 0:
        raise ValueError(f"a window of {window} cells has no centre: choose an odd width")
    ones = torch.full((1, 1, window, 1), 1 / window, dtype=_local(x).dtype, device=_local(x).device)
    x = F.conv2d(x[:, None], ones, padding=(window // 2, 0))
    return F.conv2d(x, ones.transpose(2, 3), padding=(0, window // 2))[:, 0]


def add(total, more):
    """Sums of two sets of cases; ``total`` may be None or empty."""
    return {key: total[key] + value for key, value in more.items()} if total else dict(more)


def reduce(sums, mesh):
    """The sums of all ranks of ``mesh``, on all of them, in one message an axis."""
    flat = torch.cat([value.reshape(-1) for value in sums.values()])
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            dist.all_reduce(flat, group=mesh.get_group(axis))
    parts = flat.split([value.numel() for value in sums.values()])
    return {key: part.view(value.shape) for (key, value), part in zip(sums.items(), parts)}


def scores(sums):
    """All scores that the sums allow, by name; NaN where nothing was valid or no event happened."""
    s, out = sums, {}
    if "square" in s:
        out |= {"rmse": (s["square"] / s["n"]).sqrt(), "mae": s["absolute"] / s["n"], "bias": s["error"] / s["n"]}
        out["relative_l2"] = (s["square"] / s["truth_square"]).sqrt()
    if "hit" in s:
        hit, miss, false = s["hit"], s["miss"], s["false_alarm"]
        out |= {"csi": hit / (hit + miss + false), "pod": hit / (hit + miss), "far": false / (hit + false)}
        out["frequency_bias"] = (hit + false) / (hit + miss)
    if "crps" in s:
        out["crps"] = s["crps"] / s["n"]
    if "crps_fair" in s:
        out |= {"crps_fair": s["crps_fair"] / s["n"], "spread_skill": (s["variance"] / s["centre_square"]).sqrt()}
    if "fraction_error" in s:
        out["fss"] = 1 - s["fraction_error"] / s["fraction_worst"]
    return out


def _local(x):
    return x.to_local() if isinstance(x, ShardTensor) else x


def _sum(x, dims=None):
    return x.sum(dtype=torch.float64) if dims is None else x.sum(dims, dtype=torch.float64)
