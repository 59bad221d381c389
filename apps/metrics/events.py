"""Whether an event was foreseen, and how likely: one table holds the contingency, Brier, reliability and ROC.

The event is "at least a threshold" (or "below" it). At each point k of M members foresee it, and it happens or not; the
two counts for each k are all that is summed.
"""

import torch

from apps.metrics.sums import part


def event_sums(members, truth, valid, thresholds, below=False):
    """Points by the number of members (M, ...) that foresee the event: where it happens, and where not.

    truth, valid: (...). Returns {"happened", "absent"}, each (thresholds, M + 1). One forecast is an ensemble of one.
    """
    members, truth, valid = part(members), part(truth), part(valid)
    m, rows = members.shape[0], []
    members, truth = members[:, valid], truth[valid]
    for threshold in thresholds:
        said, seen = ((v < threshold) if below else (v >= threshold) for v in (members, truth))
        rows.append(torch.bincount(said.sum(0) + (m + 1) * seen, minlength=2 * (m + 1)).view(2, m + 1))
    absent, happened = torch.stack(rows, 1).double()
    return {"happened": happened, "absent": absent}


def event_scores(s):
    """Scores by threshold; those that end in (..., M + 1) or (..., M + 2) are curves.

    csi, pod, far, frequency_bias: of the members, each counted as a forecast of its own.
    brier, brier_fair: mean squared error of the share of members; the fair one is without the part that a small
    ensemble adds (Ferro 2014); brier_skill: against the frequency of the event in these cases.
    reliability: how often it happened where k of M foresaw it; forecasts: how often k of M did.
    roc_pod, roc_pofd: hit and false alarm rates of "at least k members", k = M + 1 ... 0; roc_area below them.
    """
    happened, absent = s["happened"], s["absent"]
    m = happened.shape[-1] - 1
    k = torch.arange(m + 1, dtype=happened.dtype, device=happened.device)
    hit, miss, false = (happened * k).sum(-1), (happened * (m - k)).sum(-1), (absent * k).sum(-1)
    both, yes, no = happened + absent, happened.sum(-1), absent.sum(-1)
    n = yes + no
    brier = (happened * (1 - k / m) ** 2 + absent * (k / m) ** 2).sum(-1) / n
    pod, pofd = (_at_least(v) / v.sum(-1, keepdim=True) for v in (happened, absent))
    out = {"csi": hit / (hit + miss + false), "pod": hit / (hit + miss), "far": false / (hit + false)}
    out |= {"frequency_bias": (hit + false) / (hit + miss), "base_rate": yes / n, "brier": brier}
    if m > 1:
        out["brier_fair"] = brier - (both * k * (m - k)).sum(-1) / (m**2 * (m - 1)) / n
    out |= {"brier_skill": 1 - brier / (yes * no / n**2)}
    out |= {"reliability": happened / both, "forecasts": both / n[..., None]}
    return out | {"roc_pod": pod, "roc_pofd": pofd, "roc_area": torch.trapezoid(pod, pofd)}


def _at_least(counts):
    """Points at which at least k members foresaw it, for k = M + 1 (none) to 0 (all)."""
    return torch.cat([torch.zeros_like(counts[..., :1]), counts.flip(-1).cumsum(-1)], -1)
