"""How far from the truth: RMSE, MAE, bias, relative L2."""

import torch

from apps.metrics.sums import part, total


def error_sums(forecast, truth, valid, dims=None):
    """Sums over ``dims`` (all when None) of one value a point; the other dims stay. All of one shape, valid bool."""
    forecast, truth, valid = part(forecast), part(truth), part(valid)
    error, truth = torch.where(valid, forecast - truth, 0), torch.where(valid, truth, 0)
    parts = {"n": valid, "error": error, "absolute": error.abs(), "square": error**2, "truth_square": truth**2}
    return {key: total(value, dims) for key, value in parts.items()}


def error_scores(s):
    """RMSE, MAE and bias (forecast less truth) in the units of the field, relative L2 as a share of the truth's."""
    return {
        "rmse": (s["square"] / s["n"]).sqrt(),
        "mae": s["absolute"] / s["n"],
        "bias": s["error"] / s["n"],
        "relative_l2": (s["square"] / s["truth_square"]).sqrt(),
    }
