"""The aero archive: one Zarr v3 group a run, rows in a stored random order, so that any range of rows is a fair sample.

    runs/<run_id>/surface   position (n, 3) m, normal (n, 3) unit outward, area (n,) m2, pressure (n,) m2/s2,
                            shear (n, 3) m2/s2 (OpenFOAM sign), cell_id (n,) row of the source file, heldout (n,) bool
    runs/<run_id>/volume    position (n, 3) m, velocity (n, 3) m/s, pressure (n,) m2/s2, sdf (n,) m distance to the
                            surface, cell_id (n,), heldout (n,)                                   (where built with it)

``heldout`` exists only in archives that hold cells of one run back. Attributes of a run: U m/s, rho kg/m3, nu m2/s,
Aref m2, Lref m, center m (of moments), winding of the source file, sources with sha256, Cd and Cl where known.
Attributes of the root: splits by run id, mean and std per "surface/pressure" or "volume/velocity" from training rows
only, statistics_hash. This module imports zarr and numpy alone: training needs nothing else.
"""

import hashlib
import json
import math
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import zarr
from zarr.storage import LocalStore, WrapperStore

from core.errors import InputError
from data.aero.splits import check_splits

CHUNK_ROWS = 65536
STATISTICS = {"surface": ("position", "pressure", "shear"), "volume": ("position", "velocity", "pressure", "sdf")}
REQUIRED = {
    "surface": ("position", "normal", "area", "pressure", "shear", "cell_id"),
    "volume": ("position", "velocity", "pressure", "sdf", "cell_id"),
}
FORMAT = "shardfield-aero-1"


@dataclass
class Run:
    """One geometry with its flow: arrays of equal row count in ``surface`` and ``volume``, and its attributes."""

    id: str
    surface: dict
    volume: dict | None = None
    attrs: dict = field(default_factory=dict)


def write_archive(path, runs, splits, *, seed=0, holdout=None, attrs=None):
    """Write ``runs`` (an iterable of Run, taken one at a time) to ``path``, whole or not at all. Returns the path.

    splits: {"train": ids, "valid": ids, "test": ids}, disjoint, of runs that come. holdout: None, or a function
    (run id, group name, position) -> bool (n,), True for rows kept out of training and statistics
    (data.aero.splits.hold_out). attrs: more root attributes. Rows are permuted by a generator seeded with seed and
    run id. Raises InputError for a ``path`` that exists, splits that overlap, and arrays of unequal length.
    """
    path = Path(path)
    if path.exists():
        raise InputError("already exists", file=path, remedy="Remove it or choose another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        root = zarr.open_group(temporary, mode="w")
        moments, written = {}, []
        for run in runs:
            _write_run(root, run, seed, holdout, moments if run.id in splits["train"] else None)
            written.append(run.id)
        check_splits(splits, written)
        root.attrs.update(
            {"format": FORMAT, "seed": seed, "runs": written, "splits": splits}
            | _finish_statistics(moments, splits["train"])
            | (attrs or {})
        )
        os.chmod(temporary, 0o755)
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return path


def _write_run(root, run, seed, holdout, moments):
    target = root.create_group(f"runs/{run.id}")
    target.attrs.update(run.attrs)
    for kind, arrays in (("surface", run.surface), ("volume", run.volume)):
        if arrays is None:
            continue
        arrays = dict(arrays)
        _check_arrays(run.id, kind, arrays)
        if holdout is not None:
            arrays["heldout"] = holdout(run.id, kind, arrays["position"])
        rows = len(arrays["position"])
        order = np.random.default_rng([seed, *run.id.encode(), *kind.encode()]).permutation(rows)
        group = target.create_group(kind)
        for name, values in arrays.items():
            _write_array(group, name, values[order])
        if moments is not None:
            keep = ~arrays["heldout"] if "heldout" in arrays else slice(None)
            for name in STATISTICS[kind]:
                _add_moments(moments, f"{kind}/{name}", arrays[name][keep])


def _check_arrays(run, kind, arrays):
    rows = len(arrays["position"])
    for name in REQUIRED[kind]:
        if name not in arrays or len(arrays[name]) != rows or rows == 0:
            found = len(arrays[name]) if name in arrays else "none"
            raise InputError(
                f"{found} rows where position has {rows}",
                file=run,
                variable=f"{kind}/{name}",
                remedy="Every array of a group has one row a cell",
            )


def _write_array(group, name, values):
    """Chunks of rows, at least 32 of them so that small runs can be cut over ranks too, in few shard files.

    No compression: in random row order float32 values do not compress, and plain bytes read fastest. Zeros are written
    like all values, so that the length of every file is known and one that is missing is not read as zeros.
    """
    dtype = values.dtype if values.dtype in (np.int64, np.bool_) else np.float32
    rows = min(CHUNK_ROWS, max(1, -(-len(values) // 32)))
    per_shard = rows * min(64, -(-len(values) // rows))
    rest = values.shape[1:]
    array = group.create_array(
        name,
        shape=values.shape,
        dtype=dtype,
        chunks=(rows, *rest),
        shards=(per_shard, *rest),
        compressors=None,
        config={"write_empty_chunks": True},
    )
    for start in range(0, len(values), per_shard):
        array[start : start + per_shard] = values[start : start + per_shard].astype(dtype)


def _files(array):
    """Pairs (file name, length) of an array of ``_write_array``: whole chunks, then 16 bytes of index a chunk and a
    checksum of four."""
    rows, per_shard = array.chunks[0], array.shards[0]
    width = array.dtype.itemsize * math.prod(array.shape[1:])
    for number, start in enumerate(range(0, array.shape[0], per_shard)):
        chunks = -(-min(per_shard, array.shape[0] - start) // rows)
        name = os.path.join("c", str(number), *("0" for _ in array.shape[1:]))
        yield name, chunks * rows * width + per_shard // rows * 16 + 4


def _add_moments(moments, name, values):
    """Merge count, mean and sum of squared deviations of one more block (Chan's update: no cancellation)."""
    values = values.astype(np.float64)
    n, mean = len(values), values.mean(axis=0)
    square = ((values - mean) ** 2).sum(axis=0)
    if name in moments:
        n0, mean0, square0 = moments[name]
        shift = mean - mean0
        square = square0 + square + shift**2 * n0 * n / (n0 + n)
        mean, n = mean0 + shift * n / (n0 + n), n0 + n
    moments[name] = n, mean, square


def _finish_statistics(moments, train):
    mean = {name: np.asarray(m).tolist() for name, (_, m, _) in moments.items()}
    std = {name: np.sqrt(s / n).tolist() for name, (n, _, s) in moments.items()}
    text = json.dumps([mean, std, sorted(train)], sort_keys=True)
    return {"mean": mean, "std": std, "statistics_hash": hashlib.sha256(text.encode()).hexdigest()}


class CountingStore(WrapperStore):
    """A store that counts the bytes of array values that it hands out (metadata is not counted)."""

    bytes_read = 0

    async def get(self, key, prototype, byte_range=None):
        """As of the wrapped store."""
        found = await self._store.get(key, prototype, byte_range)
        if found is not None and not key.endswith("zarr.json"):
            self.bytes_read += len(found)
        return found


class AeroReader:
    """Arrays of an aero archive by range of rows. Sample: "<run_id>/surface" or "<run_id>/volume"; name: a field.

    Opens at the first use and pickles without its handle. Raises InputError for a path that is no aero archive, an
    unknown run, group or field.
    """

    def __init__(self, path):
        self.path = str(path)
        self._root = self._store = None
        self._groups, self._fields, self._arrays = {}, {}, {}

    def __getstate__(self):
        return {"path": self.path}

    def __setstate__(self, state):
        self.__init__(**state)

    @property
    def bytes_read(self):
        """Bytes of values fetched from storage since this reader was opened."""
        return self._store.bytes_read if self._store is not None else 0

    @property
    def attrs(self):
        """Attributes of the archive, a dict."""
        return dict(self._open().attrs)

    @property
    def runs(self):
        """Run ids, in the order of writing."""
        return list(self._open().attrs["runs"])

    @property
    def splits(self):
        """{"train": [run ids], "valid": [...], "test": [...]}."""
        return self._open().attrs["splits"]

    @property
    def mean(self):
        """{"surface/pressure": array (), "surface/shear": array (3,), ...}, of training rows."""
        return {name: np.asarray(value) for name, value in self._open().attrs["mean"].items()}

    @property
    def std(self):
        """Standard deviations with the keys and shapes of ``mean``."""
        return {name: np.asarray(value) for name, value in self._open().attrs["std"].items()}

    def run_attrs(self, run_id):
        """Attributes of one run, a dict."""
        return self._group(run_id).attrs.asdict()

    def has_volume(self, run_id):
        """Whether the run was built with its volume."""
        return "volume" in self._group(run_id)

    def fields(self, sample):
        """Names of the arrays of one sample."""
        if sample not in self._fields:
            self._fields[sample] = sorted(self._group(sample).array_keys())
        return self._fields[sample]

    def shape(self, sample, name):
        """Global shape of one array; reads metadata only."""
        return self._array(sample, name).shape

    def read(self, sample, name, index=(slice(None),)):
        """Values of ``index`` (one slice a dim, missing ones whole); touches only the chunks that ``index`` meets."""
        array = self._array(sample, name)
        try:
            return array[tuple(index)]
        except Exception as error:
            raise InputError(
                f"cannot be read ({type(error).__name__}: {error})",
                file=self.path,
                variable=f"{sample}/{name}",
                remedy="Build the archive again",
            ) from error

    def check(self, sample, names):
        """Raises InputError naming the file where a file of one of the arrays is missing or cut short.

        Compares lengths and reads no values, so it costs the same on all ranks, and all ranks find the same fault.
        """
        for name in names:
            for file, expected in _files(self._array(sample, name)):
                path = os.path.join(self.path, "runs", sample, name, file)
                found = os.path.getsize(path) if os.path.exists(path) else None
                if found != expected:
                    raise InputError(
                        "missing" if found is None else f"{found} bytes where {expected} belong: cut short or damaged",
                        file=path,
                        variable=f"{sample}/{name}",
                        remedy="Build the archive again",
                    )

    def _open(self):
        if self._root is None:
            if not os.path.exists(os.path.join(self.path, "zarr.json")):
                raise InputError("no such archive", file=self.path, remedy="Build one with python -m data.aero.build")
            store = CountingStore(LocalStore(self.path, read_only=True))
            try:
                root = zarr.open_group(store, mode="r")
            except Exception as error:
                problem = f"cannot be opened as Zarr ({type(error).__name__}: {error})"
                raise InputError(problem, file=self.path, remedy="Build the archive again") from None
            if root.attrs.get("format") != FORMAT:
                raise InputError(
                    f"not an aero archive (format {root.attrs.get('format')}, expected {FORMAT})",
                    file=self.path,
                    remedy="Build one with python -m data.aero.build",
                )
            self._store, self._root = store, root
        return self._root

    def _group(self, sample):
        if sample not in self._groups:
            self._groups[sample] = self._find_group(sample)
        return self._groups[sample]

    def _find_group(self, sample):
        root, run = self._open(), sample.split("/")[0]
        if run not in root.attrs["runs"]:
            raise InputError(
                f"no such run; the archive has {' '.join(root.attrs['runs'][:20])}",
                file=self.path,
                variable=sample,
                remedy="Name one of them",
            )
        group = root.get(f"runs/{sample}")
        if group is None:
            raise InputError(
                "this run has no such group", file=self.path, variable=sample, remedy="Build the archive with --volume"
            )
        return group

    def _array(self, sample, name):
        key = f"{sample}/{name}"
        if key not in self._arrays:
            array = self._group(sample).get(name)
            if array is None:
                raise InputError(
                    f"no such field; there are {' '.join(self.fields(sample))}",
                    file=self.path,
                    variable=key,
                    remedy="Name one of them",
                )
            self._arrays[key] = array
        return self._arrays[key]
