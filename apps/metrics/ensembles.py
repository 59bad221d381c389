"""Whether members are draws from what may happen: CRPS, spread and skill, ranks; and their matched mean."""

import math

import torch

from apps.metrics.sums import part, total


def ensemble_sums(members, truth, valid, dims=None):
    """Sums for the CRPS, standard and fair, and the spread of an ensemble ``members`` (member, ...); dims of ``truth``.

    CRPS = E|X - y| - E|X - X'| / 2. The standard form takes the second mean over all M^2 pairs, the fair one over the
    M (M - 1) pairs of two members (Ferro 2014). By order statistics: sum over pairs = sum_i (2 i - M + 1) x_(i).
    """
    members, truth, valid = part(members), part(truth), part(valid)
    m = members.shape[0]
    rank = torch.arange(m, device=members.device, dtype=members.dtype) * 2 - m + 1
    pairs = (members.sort(0).values * rank.view(-1, *[1] * truth.ndim)).sum(0)
    near, centre = (members - truth).abs().mean(0), members.mean(0)
    parts = {"n": valid, "crps": near - pairs / m**2, "centre_square": (centre - truth) ** 2}
    if m > 1:
        parts |= {"crps_fair": near - pairs / (m * (m - 1)), "variance": members.var(0) * (m + 1) / m}
    return {key: total(torch.where(valid, value, 0), dims) for key, value in parts.items()}


def rank_sums(members, truth, valid):
    """{"ranks": (M + 1,)}: at how many points so many members lie below the truth, of (M, ...) against (...).

    A truth that equals some members (no echo in both) falls on each of the places among them in equal parts: what
    drawing one at random (Hamill 2001) gives on average, without drawing.
    """
    members, truth, valid = part(members), part(truth), part(valid)
    m = members.shape[0]
    below, ties = ((f(members, truth) & valid).sum(0)[valid] for f in (torch.lt, torch.eq))
    pairs = torch.bincount(below * (m + 1) + ties, minlength=(m + 1) ** 2).view(m + 1, m + 1).double()
    pairs = pairs / torch.arange(1, m + 2, device=pairs.device)
    return {"ranks": torch.stack([sum(pairs[b, k - b :].sum() for b in range(k + 1)) for k in range(m + 1)])}


def matched_mean(members, known):
    """The probability-matched mean of (member, y, x): the order of their mean, the values of the members; (y, x).

    Of the M n values at the n ``known`` points (y, x), in order, every Mth is taken, from the middle of its M (Ebert
    2001); equal means follow each other by rows and columns. NaN where not known. Plain tensors.
    """
    count, inside = members.shape[0], members[:, known]
    values = inside.reshape(-1).sort().values[count // 2 :: count]
    placed = torch.empty_like(values)
    placed[inside.mean(0).argsort(stable=True)] = values
    return members.new_full(members.shape[1:], math.nan).masked_scatter(known, placed)


def ensemble_scores(s):
    """CRPS, fair CRPS in the units of the field, and spread over skill, 1 for members that are like the truth.

    Spread is the root of the mean variance (M - 1 in its denominator) times (M + 1) / M, skill the RMSE of the
    ensemble mean: the factor makes both the same for an ensemble of any size (Fortin et al. 2014).
    """
    out = {"crps": s["crps"] / s["n"]}
    if "crps_fair" in s:
        out |= {"crps_fair": s["crps_fair"] / s["n"], "spread_skill": (s["variance"] / s["centre_square"]).sqrt()}
    return out


def rank_scores(s):
    """The share of the truth in each place between the members, (..., M + 1): flat at 1 / (M + 1) if they are alike."""
    return {"rank_histogram": s["ranks"] / s["ranks"].sum(-1, keepdim=True)}
