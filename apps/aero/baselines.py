"""What a model has to beat: the field of the nearest training shape, and the mean field of the training shapes.

Both look a cell up where it would lie on the training shape, its place in the body's box and the way that it faces
being the same. Field errors are on a fair sample of each body's cells and with equal weights; coefficients are those of
the training runs, so that no sampling enters them.
"""

import numpy as np

from apps.aero.metrics import COUNT
from apps.aero.shapes import describe, nearest
from apps.aero.statistics import mean, r2, spearman

ROWS, MOST = 20_000, 16
FACING = 0.2  # how much a difference of unit normals counts against one of places in the unit box
FIELDS = ("position", "normal", "area", "pressure", "shear")


def baselines(reader, trained, cases):
    """{"nearest_shape": {"runs": {run: scores}, "summary": scores}, "mean_field": ..., "rows", "mean_of"}, or None.

    reader: AeroReader; trained: run ids of the training; cases: {run: scores of the model}, of which the true
    coefficients are taken. A run is never looked up in itself. None where the archive holds no other training run.
    """
    trained = [run for run in trained if run in reader.runs]
    if not any(set(trained) - {run} for run in cases):
        return None
    bodies = {run: _Body(reader, run) for run in dict.fromkeys([*trained, *cases])}
    found = {"nearest_shape": {}, "mean_field": {}}
    for run in cases:
        fellows = [fellow for fellow in trained if fellow != run]
        best, distance, _ = nearest(bodies[run].description, {f: bodies[f].description for f in fellows})
        near = _scores(bodies[run], [bodies[best]])
        found["nearest_shape"][run] = near | {"from": best, "distance": distance}
        found["mean_field"][run] = _scores(bodies[run], [bodies[f] for f in fellows[:MOST]])
    out = {name: {"runs": runs, "summary": _summary(runs, cases)} for name, runs in found.items()}
    return out | {"rows": ROWS, "mean_of": min(len(trained), MOST)}


class _Body:
    """A fair sample of a run's cells, the coefficients of the run, and how its shape is described."""

    def __init__(self, reader, run):
        key = f"{run}/surface"
        rows = reader.shape(key, "area")[0]
        taken = (slice(0, min(rows, ROWS)),)
        self.attrs = reader.run_attrs(run)
        self.cells = {name: reader.read(key, name, taken).astype(np.float64) for name in FIELDS}
        position, area = self.cells["position"], self.cells["area"] * rows / len(self.cells["area"])
        low, high = position.min(axis=0), position.max(axis=0)
        self.description = describe(low, high, self.cells["normal"], area)
        self.place = np.concatenate([(position - low) / (high - low), FACING * self.cells["normal"]], axis=1)
        self.values = np.concatenate([self.cells["pressure"][:, None], self.cells["shear"]], axis=1)
        self.coefficients = {name: self.attrs.get(f"{name}_cells", self.attrs.get(name)) for name in ("Cd", "Cl")}
        self._tree = None

    def at(self, place, U):
        """Fields (n, 4) m2/s2 at the places of another body in an inflow of U m/s."""
        from scipy.spatial import cKDTree

        self._tree = self._tree or cKDTree(self.place)
        return self.values[self._tree.query(place)[1]] * (U / self.attrs["U"]) ** 2


def _scores(body, sources):
    said = sum(source.at(body.place, body.attrs["U"]) for source in sources) / len(sources)
    error = said - body.values
    scores = {
        name: float(np.linalg.norm(error[:, columns]) / np.linalg.norm(body.values[:, columns]))
        for name, columns in (("pressure_l2", slice(0, 1)), ("shear_l2", slice(1, 4)))
    }
    known = {name: [source.coefficients[name] for source in sources] for name in ("Cd", "Cl")}
    return scores | {name: mean(values) for name, values in known.items() if None not in values}


def _summary(runs, cases):
    out = {name: mean([scores[name] for scores in runs.values()]) for name in ("pressure_l2", "shear_l2")}
    for name in ("Cd", "Cl"):
        if all(name in scores for scores in runs.values()):
            said, true = [s[name] for s in runs.values()], [cases[run][f"{name}_true"] for run in runs]
            out[f"{name}_mae"] = mean([abs(s - t) for s, t in zip(said, true)])
            out[f"{name}_r2"], out[f"{name}_spearman"] = r2(said, true), spearman(said, true)
    if "Cd_mae" in out:
        out["Cd_mae_counts"] = out["Cd_mae"] / COUNT
    return out
