"""From rows of an archive to what the model takes and gives: the one place that knows scales and units.

The rows of a run are stored in random order, so any range of them is a fair sample of its surface. A training sample
is a range of fixed length with a random start, closed to a ring so that every row comes equally often. The start
depends on the seed and on the position in the stream of samples alone, and each rank reads its part of the range only.
"""

from dataclasses import asdict, dataclass

import numpy as np

from core import InputError


@dataclass(frozen=True)
class Kind:
    """A cloud of points: what it is placed by, its fields, a scalar and a vector that grows with U^power, and the
    measure of the cell that a point stands for, m2 or m3."""

    features: int
    place: tuple
    fields: tuple
    power: int
    measure: str

    @property
    def arrays(self):
        """Arrays of the archive that judging needs."""
        return (*self.place, *self.fields, self.measure)

    @property
    def columns(self):
        """Columns of the model's four outputs by field."""
        return dict(zip(self.fields, (slice(0, 1), slice(1, 4))))


KINDS = {
    "surface": Kind(6, ("position", "normal"), ("pressure", "shear"), 2, "area"),
    "volume": Kind(7, ("position", "direction", "sdf"), ("pressure", "velocity"), 1, "volume"),
}
COLUMNS = KINDS["surface"].columns
FAIR = 65536  # rows that stand for all, as they are in random order


@dataclass(frozen=True)
class Scaling:
    """Between the units of the archive and numbers of order one; statistics of training rows only.

    position_mean, position_std (3,) m; field_mean, field_std (4,), pressure m2/s2, then shear m2/s2 or velocity m/s;
    U m/s, the inflow at which they hold; kind: of KINDS; length m, the spread of the distances of a volume. Pressure
    and shear are taken to grow with the square of the inflow and velocity with itself, so a run at another U is
    predicted under the assumption that the Reynolds number does not matter. cell m2: mean area of a training cell where
    areas weigh the points of a surface (ModelConfig.weighed), else 0.
    """

    position_mean: tuple
    position_std: tuple
    field_mean: tuple
    field_std: tuple
    U: float
    kind: str = "surface"
    length: float = 1.0
    cell: float = 0.0

    @classmethod
    def of(cls, reader, kind="surface", weighed=False):
        """Scaling by the statistics of an archive (AeroReader); weighed: with the area of points for slices."""
        mean, std = reader.mean, reader.std

        def columns(table):
            return tuple(float(v) for name in KINDS[kind].fields for v in np.atleast_1d(table[f"{kind}/{name}"]))

        return cls(
            tuple(mean[f"{kind}/position"].tolist()),
            tuple(std[f"{kind}/position"].tolist()),
            columns(mean),
            columns(std),
            float(reader.run_attrs(reader.splits["train"][0])["U"]),
            kind,
            float(std["volume/sdf"]) if kind == "volume" else 1.0,
            _mean_area(reader) if weighed and kind == "surface" else 0.0,
        )

    @classmethod
    def from_state(cls, state):
        """Inverse of ``state``."""
        return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in state.items()})

    def state(self):
        """JSON-able dict."""
        return asdict(self)

    @property
    def columns(self):
        """Number of features."""
        return KINDS[self.kind].features + (self.cell > 0)

    def features(self, position, facing, sdf=None, area=None):
        """Position without units and where the point faces: (n, 6) with the outward normal of the surface; in a volume
        (n, 7) with the direction away from it, and the distance in a scale that tells millimetres at the wall from
        metres far off. Last, where areas weigh: area (n,) m2 over that of a mean cell."""
        columns = [(position - self.position_mean) / self.position_std, facing]
        if sdf is not None:
            columns.append(np.arcsinh(100 * sdf / self.length)[:, None] / 5)
        if self.cell:
            columns.append(area[:, None] / self.cell)
        return np.concatenate(columns, axis=1)

    def targets(self, pressure, vector, U):
        """(n, 4) without units, of fields at inflow U m/s."""
        fields = np.concatenate([pressure[:, None], vector], axis=1) / self._growth(U)
        return (fields - self.field_mean) / self.field_std

    def fields(self, outputs, U):
        """Outputs (n, 4) of the model, a plain tensor, as fp64 fields at inflow U m/s: pressure, then the vector."""
        outputs = outputs.double()
        fields = outputs * outputs.new_tensor(self.field_std) + outputs.new_tensor(self.field_mean)
        return fields * outputs.new_tensor(self._growth(U))

    def _growth(self, U):
        share, power = U / self.U, KINDS[self.kind].power
        return np.array([share**2, *[share**power] * 3])


class Points:
    """A data.reader.Reader of model arrays of the surface or the volume of runs, as the scaling is; sample: run id.

    features (n, 6 or 7), targets (n, 4), weight (n,): 1 for rows to learn from, 0 for those that the archive holds
    back, and area (n,) m2 or volume (n,) m3 of the cells.

    reader: AeroReader. start, count: the range of rows, closed to a ring; all rows of a run where count is None.
    """

    def __init__(self, reader, scaling, start=0, count=None):
        self.reader, self.scaling, self.start, self.count = reader, scaling, start, count
        self.kind = KINDS[scaling.kind]

    @property
    def bytes_read(self):
        """Bytes fetched from storage by the archive's reader so far."""
        return self.reader.bytes_read

    def shape(self, sample, name):
        """Global shape; reads metadata only."""
        rows = rows_of(self.reader, sample, self.scaling.kind) if self.count is None else self.count
        return (
            (rows, {"features": self.scaling.columns, "targets": 4}[name])
            if name in ("features", "targets")
            else (rows,)
        )

    def read(self, sample, name, index):
        """Values of ``index``, fp64."""
        first, last, _ = index[0].indices(self.shape(sample, name)[0])
        if name == "features":
            area = self.rows(sample, "area", first, last) if self.scaling.cell else None
            return self.scaling.features(*(self.rows(sample, part, first, last) for part in self.kind.place), area=area)
        if name == "targets":
            U = self.reader.run_attrs(sample)["U"]
            return self.scaling.targets(*(self.rows(sample, part, first, last) for part in self.kind.fields), U)
        if name == self.kind.measure:
            return self.rows(sample, name, first, last)
        return 1.0 - self.held_out(sample, first, last)

    def held_out(self, sample, first, last):
        """1 for rows that the archive holds back, else 0; fp64 (last - first,)."""
        if not holds_back(self.reader, sample):
            return np.zeros(last - first)
        return self.rows(sample, "heldout", first, last).astype(np.float64)

    def rows(self, sample, name, first, last):
        """Rows first ... last of the range, of an array of the archive; touches no others."""
        key = f"{sample}/{self.scaling.kind}"
        rows = self.reader.shape(key, name)[0]
        first, last = self.start + first, self.start + last
        if first >= rows:
            first, last = first - rows, last - rows
        parts = [(first, min(last, rows)), (0, last - rows)]
        found = [self.reader.read(key, name, (slice(a, b),)) for a, b in parts if a < b]
        return np.concatenate(found) if found else self.reader.read(key, name, (slice(0, 0),))


class Stacked:
    """A data.reader.Reader of several samples of one length as one array with a dim more, which reaches the device in
    one copy; sample: their run ids. parts: a `Points` for each of them."""

    def __init__(self, parts):
        self.parts = parts

    def shape(self, runs, name):
        """Global shape; reads metadata only."""
        return (len(runs), *self.parts[0].shape(runs[0], name))

    def read(self, runs, name, index):
        """Values of ``index``, fp64."""
        return np.stack([part.read(run, name, index[1:]) for part, run in zip(self.parts, runs)])[index[0]]


def _mean_area(reader):
    """Mean area of a fair sample of the cells of the first training run, m2: a scale, the same on every rank."""
    key = f"{reader.splits['train'][0]}/surface"
    return float(reader.read(key, "area", (slice(0, FAIR),)).mean(dtype=np.float64))


def rows_of(reader, run, kind):
    """Number of rows of a run."""
    return reader.shape(f"{run}/{kind}", "cell_id")[0]


def sample_start(rows, seed, position):
    """First row of the sample at ``position`` in the stream of training samples, of a run of ``rows`` rows."""
    return int(np.random.default_rng((seed, position)).integers(rows))


def holds_back(reader, run):
    """Whether some cells of the run are kept out of training."""
    return run in reader.splits["train"] and "heldout" in reader.fields(f"{run}/surface")


def require_runs(reader, runs, kinds):
    """Raises InputError, on all ranks alike, where a file of one of the runs is missing or cut short."""
    for run in runs:
        more = ["cell_id", *(["heldout"] if holds_back(reader, run) else [])]
        for kind in kinds:
            reader.check(f"{run}/{kind}", [*KINDS[kind].arrays, *more])


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
