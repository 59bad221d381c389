"""From rows of an archive to what the model takes and gives: the one place that knows scales and units.

The rows of a run are stored in random order, so any range of them is a fair sample of its surface. A training sample
is a range of fixed length with a random start, closed to a ring so that every row comes equally often. The start
depends on the seed and on the position in the stream of samples alone, and each rank reads its part of the range only.
"""

from dataclasses import asdict, dataclass

import numpy as np

from core import InputError

FIELDS = ("position", "normal", "area", "pressure", "shear")
COLUMNS = {"pressure": slice(0, 1), "shear": slice(1, 4)}


@dataclass(frozen=True)
class Scaling:
    """Between the units of the archive and numbers of order one; statistics of training rows only.

    position_mean, position_std (3,) m; field_mean, field_std (4,) m2/s2, pressure then shear; U m/s, the inflow at
    which they hold. Fields are taken to grow with the square of the inflow, so a run at another U is predicted under
    the assumption that the Reynolds number does not matter.
    """

    position_mean: tuple
    position_std: tuple
    field_mean: tuple
    field_std: tuple
    U: float

    @classmethod
    def of(cls, reader):
        """Scaling by the statistics of an archive (AeroReader)."""
        mean, std = reader.mean, reader.std

        def columns(table):
            return tuple(float(v) for name in COLUMNS for v in np.atleast_1d(table[f"surface/{name}"]))

        return cls(
            tuple(mean["surface/position"].tolist()),
            tuple(std["surface/position"].tolist()),
            columns(mean),
            columns(std),
            float(reader.run_attrs(reader.splits["train"][0])["U"]),
        )

    @classmethod
    def from_state(cls, state):
        """Inverse of ``state``."""
        return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in state.items()})

    def state(self):
        """JSON-able dict."""
        return asdict(self)

    def features(self, position, normal):
        """(n, 6): position without units, outward normal."""
        return np.concatenate([(position - self.position_mean) / self.position_std, normal], axis=1)

    def targets(self, pressure, shear, U):
        """(n, 4) without units, of fields in m2/s2 at inflow U m/s."""
        fields = np.concatenate([pressure[:, None], shear], axis=1) * (self.U / U) ** 2
        return (fields - self.field_mean) / self.field_std

    def fields(self, outputs, U):
        """Outputs (n, 4) of the model, a plain tensor, as fp64 fields in m2/s2 at inflow U m/s: pressure, shear."""
        outputs = outputs.double()
        return (outputs * outputs.new_tensor(self.field_std) + outputs.new_tensor(self.field_mean)) * (U / self.U) ** 2


class Points:
    """A data.reader.Reader of model arrays of the surface of runs; sample: run id.

    features (n, 6), targets (n, 4), and weight (n,): 1 for rows to learn from, 0 for rows that the archive holds back.

    reader: AeroReader. start, count: the range of rows, closed to a ring; all rows of a run where count is None.
    """

    def __init__(self, reader, scaling, start=0, count=None):
        self.reader, self.scaling, self.start, self.count = reader, scaling, start, count

    @property
    def bytes_read(self):
        """Bytes fetched from storage by the archive's reader so far."""
        return self.reader.bytes_read

    def shape(self, sample, name):
        """Global shape; reads metadata only."""
        rows = self.reader.shape(f"{sample}/surface", "area")[0] if self.count is None else self.count
        return {"features": (rows, 6), "targets": (rows, 4), "weight": (rows,)}[name]

    def read(self, sample, name, index):
        """Values of ``index``, fp64."""
        first, last, _ = index[0].indices(self.shape(sample, name)[0])
        raw = {name: self.rows(sample, name, first, last) for name in _SOURCES[name]}
        if name == "features":
            return self.scaling.features(raw["position"], raw["normal"])
        if name == "targets":
            return self.scaling.targets(raw["pressure"], raw["shear"], self.reader.run_attrs(sample)["U"])
        return 1.0 - self.held_out(sample, first, last)

    def held_out(self, sample, first, last):
        """1 for rows that the archive holds back, else 0; fp64 (last - first,)."""
        if not holds_back(self.reader, sample):
            return np.zeros(last - first)
        return self.rows(sample, "heldout", first, last).astype(np.float64)

    def rows(self, sample, name, first, last):
        """Rows first ... last of the range, of an array of the archive; touches no others."""
        key, rows = f"{sample}/surface", self.reader.shape(f"{sample}/surface", name)[0]
        first, last = self.start + first, self.start + last
        if first >= rows:
            first, last = first - rows, last - rows
        parts = [(first, min(last, rows)), (0, last - rows)]
        found = [self.reader.read(key, name, (slice(a, b),)) for a, b in parts if a < b]
        return np.concatenate(found) if found else self.reader.read(key, name, (slice(0, 0),))


_SOURCES = {"features": ("position", "normal"), "targets": ("pressure", "shear"), "weight": ()}


def sample_start(rows, seed, position):
    """First row of the sample at ``position`` in the stream of training samples, of a run of ``rows`` rows."""
    return int(np.random.default_rng((seed, position)).integers(rows))


def holds_back(reader, run):
    """Whether some cells of the run are kept out of training."""
    return run in reader.splits["train"] and "heldout" in reader.fields(f"{run}/surface")


def require_runs(reader, runs):
    """Raises InputError, on all ranks alike, where a file of one of the runs' surfaces is missing or cut short."""
    for run in runs:
        sample = f"{run}/surface"
        reader.check(sample, [*FIELDS, "cell_id", *(["heldout"] if holds_back(reader, run) else [])])


def runs_of(reader, split):
    """Run ids of a split; "heldout" means the training runs, judged on the cells that the archive holds back.

    Raises InputError for an unknown or empty split.
    """
    if split == "heldout":
        runs = [run for run in reader.splits["train"] if holds_back(reader, run)]
        remedy = "Build the archive with --holdout-cells"
    else:
        runs = reader.splits.get(split, [])
        remedy = f"Splits with runs are: {' '.join(name for name, ids in reader.splits.items() if ids)}"
    if not runs:
        raise InputError("no runs in this split", file=reader.path, variable=split, remedy=remedy)
    return runs
