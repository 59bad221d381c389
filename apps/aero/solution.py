"""The answer for one body and its files: a surface for ParaView, coefficients as JSON and as text, and a picture."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from apps.aero import figures, metrics
from apps.aero.forces import coefficients, force_sums, reference_of
from apps.outputs import drawn, write_json, written
from data.aero.geometry import Polygons

GEOMETRY = ("position", "normal", "area")
CONVENTIONS = (
    "pressure and shear are kinematic, m2/s2; shear has OpenFOAM's sign, so attached flow along +x has shear_x < 0; "
    "Cp = pressure / (U^2 / 2), Cf = shear / (U^2 / 2); Cd, Cs, Cl along x (flow), y = up x flow and z (up), forces "
    "in N likewise; nose up is positive pitch; Clf, Clr = Cl / 2 +- CmPitch"
)


SEEN = {"valid": "validation runs", "heldout": "training runs", "train": "training runs"}


@dataclass
class Solution:
    """arrays: of the cells that were predicted, in the order of the file: position, normal, area, cell_id, predicted
    (n, 4) m2/s2, and pressure, shear, part where known; in the frame of the training. attrs: U, rho, Aref, Lref,
    center, and stated coefficients. mesh: Polygons in the frame of the file, None for points in place of cells. frame
    (3, 3): vectors of the file to those of ``arrays``. arrays is None for a model of volumes alone; air:
    apps.aero.air.Air, where there is a volume."""

    name: str
    label: str
    attrs: dict
    arrays: dict | None
    mesh: Polygons | None = None
    frame: np.ndarray = field(default_factory=lambda: np.eye(3))
    parts: list = field(default_factory=list)
    notes: list = field(default_factory=list)
    facts: dict = field(default_factory=dict)
    air: object = None

    @property
    def known(self):
        """Whether the true fields are there."""
        return self.arrays is not None and "pressure" in self.arrays

    def scores(self):
        """Coefficients of the predicted fields, and with true fields all of ``metrics.case_scores``."""
        if self.arrays is None:
            return self.air.scores
        if not self.known:
            return self._coefficients(slice(None))
        names = (*GEOMETRY, "predicted", "pressure", "shear")
        fields = {name: torch.from_numpy(np.asarray(self.arrays[name], np.float64)) for name in names}
        predicted, weight = fields["predicted"], torch.ones(len(fields["area"]), dtype=torch.float64)
        sums = metrics.case_sums(predicted, fields, weight, self.attrs, (1.0,) * 4)
        return metrics.case_scores(sums, self.attrs, metrics.case_largest(predicted, fields, weight)) | {"loss": None}

    def by_part(self):
        """{name of part: coefficients of its cells, by the reference of the whole}, where there are several."""
        if len(self.parts) < 2 or self.arrays is None:
            return {}
        return {name: self._coefficients(self.arrays["part"] == k) for k, name in enumerate(self.parts)}

    def _coefficients(self, rows):
        position, normal, area, y = (self.arrays[name][rows] for name in (*GEOMETRY, "predicted"))
        reference = reference_of(self.attrs)
        sums = force_sums(position, normal, area, y[:, 0], y[:, 1:], rho=reference.rho, center=reference.center)
        found = coefficients(sums, reference) | {"area": float(area.sum(dtype=np.float64))}
        return found | dict(zip(("force_x", "force_y", "force_z"), sums[:2].sum(axis=0).tolist()))

    def fields(self):
        """{name: values of every cell of the file} for VTK; vectors in the frame of the file, NaN where masked. With
        ``normal``, outward, and ``area``, m2: points have neither by themselves, and the winding of polygons may be
        inward."""
        arrays, q = self.arrays, 0.5 * self.attrs["U"] ** 2
        kinds = {"predicted": (arrays["predicted"][:, 0], arrays["predicted"][:, 1:])}
        if self.known:
            kinds["true"] = arrays["pressure"], arrays["shear"]
            kinds["error"] = tuple(p - t for p, t in zip(kinds["predicted"], kinds["true"]))
        found = {"cell_id": np.arange(self._cells(), dtype=np.int64)}
        for name, index in (("pressure", 0), ("shear", 1)):
            for kind, values in kinds.items():
                found[f"{name}_{kind}"] = self._spread(values[index] @ self.frame if index else values[index])
        for name, source in (("Cp", "pressure"), ("Cf", "shear")):
            found |= {f"{name}_{kind}": (found[f"{source}_{kind}"] / q).astype(np.float32) for kind in kinds}
        found |= {"normal": self._spread(arrays["normal"] @ self.frame), "area": self._spread(arrays["area"], 0)}
        if "part" in arrays:
            found["part"] = self._spread(arrays["part"], -1, np.int32)
        return found | {"valid": self._spread(np.ones(len(arrays["area"])), 0, np.uint8)}

    def _cells(self):
        return len(self.arrays["cell_id"]) if self.mesh is None else len(self.mesh)

    def _spread(self, values, missing=np.nan, dtype=np.float32):
        if len(values) == self._cells():
            return values.astype(dtype)
        out = np.full((self._cells(), *values.shape[1:]), missing, dtype=dtype)
        out[self.arrays["cell_id"]] = values
        return out


def write(out, solution, checkpoint, state):
    """Write the files of a Solution to the folder ``out`` and print its table; returns its scores.

    checkpoint: its path; state: the JSON part of it, whose validation tells how far off the model is.

    Raises InputError where the folder cannot be written to; no file is then left behind.
    """
    from data.aero.vtk_files import write_points, write_surface

    scores, title = solution.scores(), f"{solution.name} ({solution.label})"
    scores = {name: value for name, value in scores.items() if value is not None}
    base, air = Path(out) / solution.name, solution.air
    reference = {name: solution.attrs[name] for name in ("U", "rho", "Aref", "Lref", "center")}
    validation = {"runs": SEEN[state["task"]["validated_on"]], **state["scores"]}
    paths = [base.with_name(f"{base.name}.json")]
    paths += [base.with_name(base.name + end) for end in (".vtp", ".png")] if solution.arrays is not None else []
    paths += [volume_path(out, solution.name), base.with_name(f"{base.name}_volume.png")] if air is not None else []
    with written(*paths) as (table, *rest):
        if solution.arrays is not None:
            vtp, picture, *rest = rest
            if solution.mesh is None:
                write_points(vtp, solution.arrays["position"].astype(np.float32), solution.fields(), reference)
            else:
                write_surface(vtp, solution.mesh, solution.fields(), reference)
            drawn(figures.draw_surface, picture, _drawable(solution), solution.attrs, title)
        if air is not None:
            drawn(figures.draw_volume, rest[1], air.arrays, solution.attrs, title)
        told = {"run": solution.name, "label": solution.label, "checkpoint": checkpoint, "conventions": CONVENTIONS}
        told |= {"reference": reference, "notes": solution.notes, **solution.facts}
        told |= {"volume": air.scores} if air is not None else {}
        parts = solution.by_part()
        write_json(table, told | {"scores": scores, "by_part": parts, "validation": validation})
    coefficients = [table_of(scores, validation)] if solution.arrays is not None else []
    lines = [title, *coefficients, *(air.lines() if air else [])]
    lines += [parts_of(parts)] if parts else []
    print(*lines, *(f"note: {note}" for note in solution.notes), *paths, sep="\n", flush=True)
    return scores


def volume_path(out, name):
    """The file of the air of a body ``name`` in the folder ``out``; apps.aero.air writes it."""
    return Path(out) / f"{name}_volume.vtu"


def _drawable(solution):
    return figures.sampled(solution.arrays, solution.mesh, solution.frame)


def parts_of(parts):
    """{name: coefficients} of parts as lines of text, those with the most drag, of either sign, first."""
    names = ("Cd", "Cd_pressure", "Cd_friction", "Cl", "Cs", "area")
    rows = [f"{'part':>24}" + "".join(f"{name:>13}" for name in names)]
    for part, found in sorted(parts.items(), key=lambda item: -abs(item[1]["Cd"])):
        rows.append(f"{part[:24]:>24}" + "".join(f"{found[name]:>13.5f}" for name in names))
    return "\n".join(rows)


def table_of(scores, validation):
    """All coefficients, one a line: predicted and, where known, the model's error, true and stated; and what they are.
    validation: ``Cd_mae`` and ``Cl_mae`` where known, of which ``runs``."""
    names = [f"{c}{part}" for c in ("Cd", "Cl") for part in ("", "_pressure", "_friction")]
    names += ["Clf", "Clr", "Cs", "CmRoll", "CmPitch", "CmYaw"]
    columns = {"predicted": {name: scores[name] for name in names}}
    lines = ["by Aref: drag +, lift + up, Clf and Clr its parts at the front and the rear axle, Cs + along +y;"]
    lines += ["by Aref and Lref: Cm about +x, +y (nose up), +z"]
    if errors := {name: validation[f"{name}_mae"] for name in names if validation.get(f"{name}_mae") is not None}:
        columns["+-"] = errors
        lines.append(f"+-: the model's mean error on its {validation['runs']}")
    if "Cd_true" in scores:
        columns["true fields"] = {name: scores[f"{name}_true"] for name in names}
        lines.append("true fields: from the true fields on the same cells")
        if stated := {name: scores[f"{name}_stated"] for name in names if f"{name}_stated" in scores}:
            columns["stated"] = stated
            lines[-1] += "; stated: by the solver"
        lines.append(f"relative L2: pressure {scores['pressure_l2']:.4f}, shear {scores['shear_l2']:.4f}")
    rows = [["", *columns]]
    rows += [[name, *(f"{c[name]:.5f}" if name in c else "" for c in columns.values())] for name in names]
    text = ["".join(f"{cell:>13}" for cell in row).rstrip() for row in rows]
    return "\n".join([*text, *lines])
