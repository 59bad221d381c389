"""Writes an aero archive run by run, in bounded memory, so that a build can stop and go on.

Every run becomes a folder of its own, complete or absent; the archive appears under its name when the last one is
there. Rows are dealt to their places in random order: those of one shard file are collected on disk and put in order
when all of them have come, so a volume of any size passes through the memory of one shard (4 million rows).
"""

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import zarr

from core.errors import InputError
from data.aero.archive import FORMAT
from data.aero.splits import check_splits

CHUNK_ROWS = 65536
STATISTICS = {"surface": ("position", "pressure", "shear"), "volume": ("position", "velocity", "pressure", "sdf")}
REQUIRED = {
    "surface": ("position", "normal", "area", "pressure", "shear", "cell_id"),
    "volume": ("position", "velocity", "pressure", "sdf", "direction", "volume", "cell_id"),
}


@dataclass
class Run:
    """One geometry with its flow: arrays of equal row count in ``surface`` and ``volume``, and its attributes.

    volume: a dict as well, or what gives dicts of blocks of rows by ``blocks()`` (data.aero.volume.VolumeCells).
    """

    id: str
    surface: dict
    volume: object = None
    attrs: dict = field(default_factory=dict)


def write_archive(path, runs, splits, *, seed=0, holdout=None, attrs=None):
    """Write ``runs`` (an iterable of Run, taken one at a time) to ``path``, whole or not at all. Returns the path.

    splits: {"train": ids, "valid": ids, "test": ids}, disjoint, of runs that come. holdout: None, or a function
    (run id, group name, position) -> bool (n,), True for rows kept out of training and statistics
    (data.aero.splits.hold_out). attrs: more root attributes. Rows are permuted by a generator seeded with seed and
    run id. Raises InputError for a ``path`` that exists, splits that overlap, and arrays of unequal length.
    """
    path = refuse_existing(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        work = Workplace(temporary, seed, holdout)
        written = [run.id for run in runs if work.write(run)]
        check_splits(splits, written)
        work.finish(path, written, splits, attrs or {})
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return path


def refuse_existing(path):
    """The path; InputError where something is there."""
    path = Path(path)
    if path.exists():
        raise InputError("already exists", file=path, remedy="Remove it or choose another --out")
    return path


class Workplace:
    """A folder in which an archive grows; several processes may write different runs at a time."""

    def __init__(self, folder, seed=0, holdout=None):
        self.folder, self.seed, self.holdout = Path(folder), seed, holdout

    def runs(self):
        """Ids of the runs that are complete."""
        found = (self.folder / "runs").glob("*/zarr.json")
        return sorted(path.parent.name for path in found if not path.parent.name.startswith("."))

    def write(self, run):
        """Write one Run, whole or not at all; returns the number of its rows, of the volume too."""
        temporary, final = self.folder / "runs" / f".{run.id}", self.folder / "runs" / run.id
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            group, moments = zarr.open_group(str(temporary), mode="w"), {}
            sources = {kind: s for kind, s in (("surface", run.surface), ("volume", run.volume)) if s is not None}
            rows = sum(self._write_group(group, run.id, kind, source, moments) for kind, source in sources.items())
            found = {name: [n, np.asarray(m).tolist(), np.asarray(s).tolist()] for name, (n, m, s) in moments.items()}
            group.attrs.update(run.attrs | {"moments": found})
            os.replace(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return rows

    def finish(self, path, runs, splits, attrs):
        """Give the archive its root attributes and its manifest, and move it to ``path``."""
        for left in (self.folder / "runs").glob(".*"):  # by a build that was killed, of a run that is left out since
            shutil.rmtree(left)
        root = zarr.open_group(str(self.folder), mode="a")
        groups = {run: root.require_group("runs")[run] for run in runs}
        moments = {}
        for run in runs:
            for name, values in groups[run].attrs["moments"].items() if run in splits["train"] else ():
                _merge(moments, name, values[0], np.asarray(values[1]), np.asarray(values[2]))
        facts = {"format": FORMAT, "seed": self.seed, "runs": runs, "splits": splits}
        facts |= _statistics(moments, splits["train"]) | attrs
        root.attrs.update(facts)
        manifest = {run: _entry(run, group, splits) for run, group in groups.items()}
        told = {"statistics_hash": facts["statistics_hash"], "left_out": attrs.get("left_out", {}), "runs": manifest}
        (self.folder / "manifest.json").write_text(json.dumps(told, indent=1) + "\n")
        os.chmod(self.folder, 0o755)
        os.replace(self.folder, path)

    def _write_group(self, target, run, kind, source, moments):
        whole = source if isinstance(source, dict) else None
        blocks = source.blocks if whole is None else lambda: [whole]
        if whole is not None:
            _check_arrays(run, kind, whole)
        held = None
        if self.holdout is not None:
            held = self.holdout(run, kind, np.concatenate([block["position"] for block in blocks()]))
        group, first = target.create_group(kind), 0
        with tempfile.TemporaryDirectory(prefix=".rows.", dir=self.folder / "runs" / f".{run}") as folder:
            rows = _Dealt(folder)
            for block in blocks():
                last = first + len(block["position"])
                kept = slice(None)
                if held is not None:
                    block, kept = block | {"heldout": held[first:last]}, ~held[first:last]
                rows.add(block)
                for name in STATISTICS[kind]:
                    values = block[name][kept].astype(np.float64)
                    if len(values):
                        mean = values.mean(axis=0)
                        _merge(moments, f"{kind}/{name}", len(values), mean, ((values - mean) ** 2).sum(axis=0))
                first = last
            rows.write(group, np.random.default_rng([self.seed, *run.encode(), *kind.encode()]))
        return first


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


class _Dealt:
    """Rows that wait on disk, as they come, for their places in random order."""

    def __init__(self, folder):
        self.folder, self.count, self.dtype = Path(folder), 0, None

    def add(self, block):
        """Append a block of rows."""
        if self.dtype is None:
            self.dtype = np.dtype([(name, _stored(v), v.shape[1:]) for name, v in block.items()])
        records = np.empty(len(block["position"]), self.dtype)
        for name, values in block.items():
            records[name] = values
        with open(self.folder / "rows", "ab") as stream:
            records.tofile(stream)
        self.count += len(records)

    def write(self, group, rng):
        """Write all rows as arrays of ``group``, row i of the source to a random place; a shard file at a time.

        Chunks are at least 32, so that small runs can be cut over ranks too, in few shard files. No compression: in
        random order float32 values do not compress, and plain bytes read fastest. Zeros are written like all values,
        so that the length of every file is known and one that is missing is not read as zeros.
        """
        chunk = min(CHUNK_ROWS, max(1, -(-self.count // 32)))
        shard = chunk * min(64, -(-self.count // chunk))
        arrays = {name: self._create(group, name, chunk, shard) for name in self.dtype.names}
        place = np.arange(self.count, dtype=np.int32 if self.count < 2**31 else np.int64)
        rng.shuffle(place)
        source = np.memmap(self.folder / "rows", self.dtype, mode="r")
        piles = _sorted_into(source, place, shard, self.folder) if self.count > shard else [(source, place)]
        for number, (records, where) in enumerate(piles):
            order = np.empty(len(where), dtype=place.dtype)
            order[where - number * shard] = np.arange(len(where))
            for name, array in arrays.items():
                array[number * shard : number * shard + len(where)] = records[name][order]

    def _create(self, group, name, chunk, shard):
        kind, rest = self.dtype[name].base, self.dtype[name].shape
        config = {"write_empty_chunks": True}
        shape, chunks, shards = (self.count, *rest), (chunk, *rest), (shard, *rest)
        return group.create_array(
            name, shape=shape, dtype=kind, chunks=chunks, shards=shards, compressors=None, config=config
        )


def _sorted_into(source, place, shard, folder):
    """Pairs (records, places) of the rows of each shard, from one pass over the source."""
    count = -(-len(place) // shard)
    for first in range(0, len(place), CHUNK_ROWS):
        records, where = source[first : first + CHUNK_ROWS], place[first : first + CHUNK_ROWS]
        number = where // shard
        for k in np.unique(number):
            with open(folder / f"rows.{k}", "ab") as rows, open(folder / f"places.{k}", "ab") as places:
                records[number == k].tofile(rows)
                where[number == k].tofile(places)
    os.remove(folder / "rows")
    for k in range(count):
        yield np.fromfile(folder / f"rows.{k}", source.dtype), np.fromfile(folder / f"places.{k}", place.dtype)
        os.remove(folder / f"rows.{k}")


def _stored(values):
    return values.dtype if values.dtype in (np.int64, np.bool_) else np.float32


def _merge(moments, name, n, mean, square):
    """Merge count, mean and sum of squared deviations of one more block (Chan's update: no cancellation)."""
    if name in moments:
        n0, mean0, square0 = moments[name]
        shift = mean - mean0
        square = square0 + square + shift**2 * n0 * n / (n0 + n)
        mean, n = mean0 + shift * n / (n0 + n), n0 + n
    moments[name] = n, mean, square


def _statistics(moments, train):
    mean = {name: np.asarray(m).tolist() for name, (_, m, _) in moments.items()}
    std = {name: np.sqrt(s / n).tolist() for name, (n, _, s) in moments.items()}
    text = json.dumps([mean, std, sorted(train)], sort_keys=True)
    return {"mean": mean, "std": std, "statistics_hash": hashlib.sha256(text.encode()).hexdigest()}


def _entry(run, group, splits):
    split = next((name for name, ids in splits.items() if run in ids), None)
    rows = {kind: group[kind]["cell_id"].shape[0] for kind in ("surface", "volume") if kind in group}
    return {"split": split, "rows": rows, "sources": group.attrs.get("sources", {})}
