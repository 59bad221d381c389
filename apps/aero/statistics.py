"""Statistics over cases, for people who choose between designs: agreement, order, differences, and how sure they are.

numpy only. Intervals are by resampling cases with replacement, from a fixed seed, so that they can be had again.
"""

import numpy as np

RESAMPLES, SEED = 1000, 0


def mean(values):
    """Mean of a sequence of numbers."""
    return sum(values) / len(values)


def r2(predicted, true):
    """1 - sum (y' - y)^2 / sum (y - mean y)^2, or None for fewer than two cases or equal truths."""
    spread = sum((y - mean(true)) ** 2 for y in true)
    return 1 - sum((p - y) ** 2 for p, y in zip(predicted, true)) / spread if len(true) > 1 and spread else None


def spearman(predicted, true):
    """Correlation of the ranks, ties sharing theirs; None for fewer than two cases or one that does not vary."""
    ranks = [_ranks(np.asarray(values, dtype=np.float64)) for values in (predicted, true)]
    if len(true) < 2 or min(np.ptp(r) for r in ranks) == 0:
        return None
    return float(np.corrcoef(*ranks)[0, 1])


def _ranks(values):
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


def pair_differences(predicted, true):
    """Of all pairs of cases that differ, the change of a coefficient from one to the other: {"pairs", "mae", "max",
    "right_sign", "r2"}, or None where no two differ. right_sign: share of pairs put in the right order; r2: 1 - sum of
    squared errors of the change / sum of squared true changes."""
    first, second = np.triu_indices(len(true), 1)
    said, seen = (np.asarray(values, dtype=np.float64) for values in (predicted, true))
    said, seen = said[first] - said[second], seen[first] - seen[second]
    said, seen = said[seen != 0], seen[seen != 0]
    if not len(seen):
        return None
    error = np.abs(said - seen)
    square = float((seen**2).sum())
    return {
        "pairs": len(seen),
        "mae": float(error.mean()),
        "max": float(error.max()),
        "right_sign": float((np.sign(said) == np.sign(seen)).mean()),
        "r2": 1 - float((error**2).sum()) / square,
    }


def interval(measure, *columns, level=0.95):
    """[low, high] of ``measure(*columns)`` over resampled cases, or None where it means nothing (under three cases).

    columns: sequences with a number a case; measure returns a number or None, and resamples of None are left out.
    """
    columns = [np.asarray(column, dtype=np.float64) for column in columns]
    rng, count = np.random.default_rng(SEED), len(columns[0])
    if count < 3:
        return None
    drawn = (rng.integers(count, size=count) for _ in range(RESAMPLES))
    found = [measure(*(column[rows].tolist() for column in columns)) for rows in drawn]
    found = [value for value in found if value is not None]
    return np.quantile(found, [(1 - level) / 2, (1 + level) / 2]).tolist() if found else None


def confidence(cases):
    """{name: 95 % interval} of the chief scores over cases {run: scores}, and of differences between pairs of Cd."""

    def column(key):
        return [case[key] for case in cases.values()]

    first = next(iter(cases.values()))
    surface = ("pressure_l2", "pressure_l2_area", "shear_l2", "shear_l2_area")
    means = (*surface, "volume_pressure_l2", "volume_pressure_l2_volume", "velocity_l2", "velocity_l2_volume")
    out = {key: interval(mean, column(key)) for key in means if key in first}
    if "Cd" not in first:
        return out
    for name in ("Cd", "Cl", "CmPitch"):
        both = column(name), column(f"{name}_true")
        out[f"{name}_mae"] = interval(lambda p, t: mean([abs(a - b) for a, b in zip(p, t)]), *both)
        out[f"{name}_r2"], out[f"{name}_spearman"] = interval(r2, *both), interval(spearman, *both)
    both = column("Cd"), column("Cd_true")
    for key in ("mae", "right_sign"):
        out[f"Cd_pairs_{key}"] = interval(lambda p, t, key=key: (pair_differences(p, t) or {}).get(key), *both)
    return out
