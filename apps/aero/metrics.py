"""Scores of predicted surfaces: additive sums of each case, then relative errors, forces, and how they fare over cases.

Relative L2 is of the vector difference, sqrt(sum a |y' - y|^2 / sum a |y|^2), once with a = 1 (as papers report) and
once with a = the cell's area. Absolute errors are means of |y' - y|, in m2/s2. Coefficients come from all cells of a
body, the true ones from its true fields on the same cells.
"""

import torch

from apps.aero.dataset import COLUMNS
from apps.aero.forces import coefficients, force_sums

COEFFICIENTS = ("Cd", "Cl")
SHAPES = {"square": (2, 2), "truth": (2, 2), "absolute": (2, 2), "weight": (2,), "forces": (2, 4, 3), "loss": ()}


def empty_sums(cases):
    """Zeros for ``cases`` cases: a dict of fp64 tensors (cases, ...)."""
    return {key: torch.zeros(cases, *shape, dtype=torch.float64) for key, shape in SHAPES.items()}


def case_sums(predicted, fields, weight, attrs, field_std):
    """Sums over the rows at hand, which add up over ranks: fp64 tensors of the shapes of ``SHAPES``.

    predicted: (n, 4) m2/s2, pressure then shear. fields: dict of (n, ...) tensors of the archive's surface. weight
    (n,): 1 for rows that the errors count (forces always count all rows). attrs: of the run. field_std (4,): what the
    loss measures errors in. First dims: pressure, shear; then, of errors: equal weights, by area.
    """
    true = torch.cat([fields["pressure"][:, None], fields["shear"]], dim=1)
    weights = torch.stack([weight, weight * fields["area"]])
    error = predicted - true

    def by_field(values):
        return torch.stack([weights @ values[:, columns].square().sum(1) for columns in COLUMNS.values()])

    absolute = torch.stack([weights @ error[:, columns].norm(dim=1) for columns in COLUMNS.values()])
    geometry = [fields[name] for name in ("position", "normal", "area")]
    forces = [
        force_sums(*geometry, y[:, 0], y[:, 1:], rho=attrs["rho"], center=attrs["center"]) for y in (predicted, true)
    ]
    return {
        "square": by_field(error),
        "truth": by_field(true),
        "absolute": absolute,
        "weight": weights.sum(1),
        "forces": torch.stack(forces),
        "loss": (weight[:, None] * (error / error.new_tensor(field_std)) ** 2).mean(1).sum(),
    }


def case_scores(sums, reference, stated=None):
    """Scores of one case as a dict of floats.

    sums: of ``case_sums``, whole. reference: apps.aero.forces.Reference. stated: the solver's coefficients, of which Cd
    and Cl are given back where known.
    """
    l2 = (sums["square"] / sums["truth"]).sqrt()
    mae = sums["absolute"] / sums["weight"]
    scores = {"loss": (sums["loss"] / sums["weight"][0]).item()}
    for row, name in enumerate(COLUMNS):
        scores[f"{name}_l2"], scores[f"{name}_l2_area"] = l2[row].tolist()
        scores[f"{name}_mae"], scores[f"{name}_mae_area"] = mae[row].tolist()
    predicted, true = (coefficients(part, reference) for part in sums["forces"])
    for name in COEFFICIENTS:
        for key in (name, f"{name}_pressure", f"{name}_friction"):
            scores[key], scores[f"{key}_true"] = predicted[key], true[key]
        scores[f"{name}_error"] = predicted[name] - true[name]
        if stated and name in stated:
            scores[f"{name}_stated"] = stated[name]
    return scores


def summary(cases):
    """Over cases {run: scores}: mean, standard deviation and maximum of errors; of Cd and Cl also the coefficient of
    determination R2, None where it means nothing (fewer than two cases, or equal truths)."""
    table = {key: [case[key] for case in cases.values()] for key in next(iter(cases.values()))}
    out = {"cases": len(cases)}
    for key, values in table.items():
        if key == "loss" or "_l2" in key or "_mae" in key:
            out[key] = _mean(values)
            out[f"{key}_std"], out[f"{key}_max"] = _mean([(v - out[key]) ** 2 for v in values]) ** 0.5, max(values)
    for name in COEFFICIENTS:
        errors = [abs(e) for e in table[f"{name}_error"]]
        out[f"{name}_mae"], out[f"{name}_max"] = _mean(errors), max(errors)
        out[f"{name}_r2"] = r2(table[name], table[f"{name}_true"])
    return out


def r2(predicted, true):
    """1 - sum (y' - y)^2 / sum (y - mean y)^2, or None."""
    spread = sum((y - _mean(true)) ** 2 for y in true)
    return 1 - sum((p - y) ** 2 for p, y in zip(predicted, true)) / spread if len(true) > 1 and spread else None


def _mean(values):
    return sum(values) / len(values)
