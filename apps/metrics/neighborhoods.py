"""Whether an event was foreseen nearby: the fractions skill score (Roberts and Lean 2008)."""

import torch
import torch.nn.functional as F

from apps.metrics.ensembles import matched_mean
from apps.metrics.sums import alike, mine, part, total, whole


def fraction_sums(members, truth, valid, thresholds, windows, below=False):
    """Sums for the fractions skill score of (member, y, x) against (y, x), each (thresholds, windows).

    The fraction of an ensemble is the mean over its members (Necker et al. 2024). An event counts where the mask is
    valid, windows (odd widths in cells) are centred on valid cells, and what lies beyond the edge holds no event.
    """
    both = torch.cat([members, truth[None]])
    events = torch.stack([((both < t) if below else (both >= t)) & valid for t in thresholds])
    events = events.to(torch.promote_types(members.dtype, torch.float32))
    said, seen = events[:, :-1].mean(1), events[:, -1]
    columns = []
    for window in windows:
        shares = (part(_window_mean(v, window)) for v in (said, seen))
        said_share, seen_share = (torch.where(part(valid), v, 0) for v in shares)
        worst = total(said_share**2, (1, 2)) + total(seen_share**2, (1, 2))
        columns.append((total((said_share - seen_share) ** 2, (1, 2)), worst))
    return {key: torch.stack(c, 1) for key, c in zip(("fraction_error", "fraction_worst"), zip(*columns))}


def matched_fraction_sums(members, truth, valid, known, thresholds, windows, below=False):
    """The same of one field in place of an ensemble: of its probability-matched mean over the ``known`` points (y, x).

    A fraction of many members is a chance, and where little can be foreseen the best chances are low ones; one field
    with the values of a member is what a field of one member is fairly compared with. Of one member it is that member.
    The values of the whole map are put in order, so each rank of a cut map gathers them.
    """
    field = members
    if members.shape[0] > 1:
        field = alike(mine(matched_mean(whole(members), whole(known)), members)[None], members[:1])
    sums = fraction_sums(field, truth, valid, thresholds, windows, below)
    return {f"matched_{key}": value for key, value in sums.items()}


def _window_mean(x, window):
    if window % 2 == 0:
        raise ValueError(f"a window of {window} cells has no centre: choose an odd width")
    ones = torch.full((1, 1, window, 1), 1 / window, dtype=part(x).dtype, device=part(x).device)
    x = F.conv2d(x[:, None], ones, padding=(window // 2, 0))
    return F.conv2d(x, ones.transpose(2, 3), padding=(0, window // 2))[:, 0]


def fraction_scores(s):
    """FSS by threshold and window: 1 where the fractions agree, 0 where they never meet."""
    return {"fss": 1 - s["fraction_error"] / s["fraction_worst"]}


def matched_fraction_scores(s):
    """The same of the probability-matched mean."""
    return {"fss_matched_mean": 1 - s["matched_fraction_error"] / s["matched_fraction_worst"]}
