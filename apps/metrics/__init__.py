"""Scores as sums: each case, rank and region gives numerators and counts that add up, and the scores follow at the end.

Averages of ratios depend on how the cases were cut, sums do not; so a score of many ranks is that of one, and scores of
regions or dates can be derived again without another forecast. Only what is valid counts: a value under the mask, NaN
included, never enters. Functions take plain tensors or ShardTensors and return fp64 sums over this rank's part; one
file a family of scores.
"""

from apps.metrics.ensembles import ensemble_scores, ensemble_sums, matched_mean, rank_scores, rank_sums
from apps.metrics.errors import error_scores, error_sums
from apps.metrics.events import event_scores, event_sums
from apps.metrics.intervals import drawn, draws, limits
from apps.metrics.neighborhoods import (
    fraction_scores,
    fraction_sums,
    matched_fraction_scores,
    matched_fraction_sums,
)
from apps.metrics.spectra import bands, spectrum_scores, spectrum_sums
from apps.metrics.sums import add, reduce

_FAMILIES = {  # a sum that each family has, and no other
    "square": error_scores,
    "crps": ensemble_scores,
    "ranks": rank_scores,
    "happened": event_scores,
    "fraction_error": fraction_scores,
    "matched_fraction_error": matched_fraction_scores,
    "power": spectrum_scores,
}

__all__ = [
    "add",
    "bands",
    "drawn",
    "draws",
    "ensemble_sums",
    "error_sums",
    "event_sums",
    "fraction_sums",
    "limits",
    "matched_fraction_sums",
    "matched_mean",
    "rank_sums",
    "reduce",
    "scores",
    "spectrum_sums",
]


def scores(sums):
    """All scores that the sums allow, by name; NaN where nothing was valid or no event happened.

    Dims before those of a family's own sums (cases, leads, draws) stay in front.
    """
    out = {}
    for key, family in _FAMILIES.items():
        if key in sums:
            out |= family(sums)
    return out
