"""Scores of predicted surfaces: additive sums of each case, then relative errors and coefficients.

Relative L2 is of the vector difference, sqrt(sum a |y' - y|^2 / sum a |y|^2), once with a = 1 (as papers report) and
once with a = the cell's area or volume; never of magnitudes, for which opposite vectors agree. Absolute errors are
means of |y' - y|. Coefficients come from all cells of a body, the true ones from its true fields on the same cells.
"""

import torch

from apps.aero.dataset import COLUMNS
from apps.aero.forces import coefficients, force_sums, moved, reference_of
from apps.aero.statistics import mean, r2, spearman

COEFFICIENTS = ("Cd", "Cl", "Cs", "CmPitch", "Clf", "Clr")
COMPONENTS = ("pressure", "shear_x", "shear_y", "shear_z")
COUNT = 1e-3  # a drag count as the car industry has it
SHAPES = {"square": (2, 4), "truth": (2, 4), "absolute": (2, 2), "weight": (2,), "forces": (2, 4, 3), "loss": ()}
VOLUME = {name: shape for name, shape in SHAPES.items() if name != "forces"}


def empty_sums(cases, kind):
    """Zeros for ``cases`` cases: a dict of fp64 tensors (cases, ...)."""
    shapes = SHAPES if kind == "surface" else VOLUME
    return {key: torch.zeros(cases, *shape, dtype=torch.float64) for key, shape in shapes.items()}


def case_sums(predicted, fields, weight, attrs, field_std):
    """Sums over the rows at hand, which add up over ranks: fp64 tensors of the shapes of ``SHAPES``.

    predicted: (n, 4) m2/s2, pressure then shear. fields: dict of (n, ...) tensors of the archive's surface. weight
    (n,): 1 for rows that the errors count (forces always count all rows). attrs: of the run. field_std (4,): what the
    loss measures errors in. First dims: equal weights, by area; then components, of ``absolute`` pressure and shear;
    of ``forces`` predicted and true.
    """
    geometry = [fields[name] for name in ("position", "normal", "area")]
    forces = [
        force_sums(*geometry, y[:, 0], y[:, 1:], rho=attrs["rho"], center=attrs["center"])
        for y in (predicted, _true(fields))
    ]
    return _field_sums(predicted, fields, "area", weight, field_std) | {"forces": torch.stack(forces)}


def volume_sums(predicted, fields, weight, field_std):
    """As ``case_sums``, of the pressure and velocity of a volume: cells alike, then by volume; shapes of ``VOLUME``."""
    return _field_sums(predicted, fields, "volume", weight, field_std)


def _field_sums(predicted, fields, measure, weight, field_std):
    error = predicted - _true(fields)
    weights = torch.stack([weight, weight * fields[measure]])
    size = torch.stack([error[:, columns].norm(dim=1) for columns in COLUMNS.values()], dim=1)
    return {
        "square": weights @ error.square(),
        "truth": weights @ _true(fields).square(),
        "absolute": weights @ size,
        "weight": weights.sum(1),
        "loss": (weight[:, None] * (error / error.new_tensor(field_std)) ** 2).mean(1).sum(),
    }


def case_largest(predicted, fields, weight):
    """Largest |y' - y| of pressure and of shear (2,), m2/s2, over the rows that count; of parts, take the maximum."""
    error = (predicted - _true(fields)) * weight[:, None]
    return torch.stack([error[:, columns].norm(dim=1).max() for columns in COLUMNS.values()])


def _true(fields):
    vector = fields["shear"] if "shear" in fields else fields["velocity"]
    return torch.cat([fields["pressure"][:, None], vector], dim=1)


def scores(kind, sums, attrs, largest):
    """``case_scores`` of a surface, ``volume_scores`` of a volume."""
    return case_scores(sums, attrs, largest) if kind == "surface" else volume_scores(sums, largest)


def volume_scores(sums, largest):
    """Scores of the volume of one case: ``velocity`` m/s and ``volume_pressure`` m2/s2, as of ``case_scores``."""
    names = ("volume_pressure", "velocity_x", "velocity_y", "velocity_z")
    return _field_scores(sums, largest, ("volume_pressure", "velocity"), names, "volume")


def case_scores(sums, attrs, largest=None):
    """Scores of one case as a dict of floats.

    sums: of ``case_sums``, whole; attrs: of the run, whose stated coefficients are given back where known; largest: of
    ``case_largest``. Coefficients use the run's own reference; where the run has the constant one too, those of
    ``COEFFICIENTS`` also stand with _constant at their end.
    """
    return _field_scores(sums, largest, COLUMNS, COMPONENTS, "area") | _judged(sums["forces"], attrs)


def _field_scores(sums, largest, fields, components, measure):
    """Relative L2 and mean errors of two ``fields`` and four ``components``, equal weights and by ``measure``."""
    weight, scores = sums["weight"], {"loss": (sums["loss"] / sums["weight"][0]).item()}
    for number, (name, columns) in enumerate(zip(fields, COLUMNS.values())):
        l2 = (sums["square"][:, columns].sum(1) / sums["truth"][:, columns].sum(1)).sqrt()
        scores[f"{name}_l2"], scores[f"{name}_l2_{measure}"] = l2.tolist()
        scores[f"{name}_mae"], scores[f"{name}_mae_{measure}"] = (sums["absolute"][:, number] / weight).tolist()
        if largest is not None:
            scores[f"{name}_largest"] = largest[number].item()
    for number, name in list(enumerate(components))[1:]:
        l2 = (sums["square"][:, number] / sums["truth"][:, number].clamp(min=1e-300)).sqrt()
        scores[f"{name}_l2"], scores[f"{name}_l2_{measure}"] = l2.tolist()
    return scores


def _judged(forces, attrs):
    """Coefficients of predicted and true force sums, their differences, and what the solver stated."""
    reference, scores = reference_of(attrs), {}
    predicted, true = (coefficients(part, reference) for part in forces)
    for name in predicted:
        scores[name], scores[f"{name}_true"] = predicted[name], true[name]
    for name in COEFFICIENTS:
        scores[f"{name}_error"] = predicted[name] - true[name]
        if name in attrs:
            scores[f"{name}_stated"] = attrs[name]
    if attrs.get("constant"):
        constant = reference_of(attrs, "constant")
        predicted, true = (coefficients(moved(p, reference.center, constant.center), constant) for p in forces)
        for name in COEFFICIENTS:
            scores[f"{name}_constant"], scores[f"{name}_constant_true"] = predicted[name], true[name]
    return scores


def summary(cases):
    """Over cases {run: scores}: mean, standard deviation and maximum of errors; of every coefficient mean and largest
    absolute error, the coefficient of determination R2 and Spearman's rank correlation, None where they mean nothing
    (fewer than two cases, or truths within a tenth of a count); Cd's error also in counts of 0.001."""
    table = {key: [case[key] for case in cases.values()] for key in next(iter(cases.values()))}
    out = {"cases": len(cases)}
    for key, values in table.items():
        if key == "loss" or "_l2" in key or "_mae" in key or "_largest" in key:
            out[key] = mean(values)
            out[f"{key}_std"], out[f"{key}_max"] = mean([(v - out[key]) ** 2 for v in values]) ** 0.5, max(values)
    names = [name for name in COEFFICIENTS if f"{name}_true" in table]
    names += [f"{name}_constant" for name in names if all(f"{name}_constant" in case for case in cases.values())]
    for name in names:
        errors = [abs(p - t) for p, t in zip(table[name], table[f"{name}_true"])]
        out[f"{name}_mae"], out[f"{name}_max"] = mean(errors), max(errors)
        both = table[name], table[f"{name}_true"]
        alike = max(both[1]) - min(both[1]) < COUNT / 10  # as side force of symmetric bodies: what is left is rounding
        out[f"{name}_r2"], out[f"{name}_spearman"] = (None, None) if alike else (r2(*both), spearman(*both))
    if "Cd_mae" in out:
        out["Cd_mae_counts"], out["Cd_max_counts"] = out["Cd_mae"] / COUNT, out["Cd_max"] / COUNT
    return out
