"""The aero archive: one Zarr v3 group a run, rows in a stored random order, so that any range of rows is a fair sample.

    runs/<run_id>/surface   position (n, 3) m, normal (n, 3) unit outward, area (n,) m2, pressure (n,) m2/s2,
                            shear (n, 3) m2/s2 (OpenFOAM sign), cell_id (n,) row of the source file, heldout (n,) bool
    runs/<run_id>/volume    position (n, 3) m, velocity (n, 3) m/s, pressure (n,) m2/s2, sdf (n,) m signed distance to
                            the surface, direction (n, 3) unit, along which it grows, volume (n,) m3, cell_id (n,),
                            heldout (n,)

The volume is there where it was asked for, ``heldout`` only in archives that hold cells of one run back. docs/data_aero
says all of it; data.aero.writing writes it. This module imports zarr and numpy alone: training needs nothing else.
"""

import math
import os
from operator import attrgetter

import numpy as np
from zarr.storage import LocalStore, WrapperStore

from core.errors import InputError
from data.archives import open_archive
from data.kept import Kept

FORMAT = "shardfield-aero-1"
MOST_KEPT = 2**28  # bytes of chunks in memory; what is long beside that is read past them


def _files(array):
    """Pairs (file name, length) of an array of ``_write_array``: whole chunks, then 16 bytes of index a chunk and a
    checksum of four."""
    rows, per_shard = array.chunks[0], array.shards[0]
    width = array.dtype.itemsize * math.prod(array.shape[1:])
    for number, start in enumerate(range(0, array.shape[0], per_shard)):
        chunks = -(-min(per_shard, array.shape[0] - start) // rows)
        name = os.path.join("c", str(number), *("0" for _ in array.shape[1:]))
        yield name, chunks * rows * width + per_shard // rows * 16 + 4


def _listed(runs, splits, most=12):
    """Run ids of every split, of many the first and how many more there are."""
    dealt, texts = {run for ids in splits.values() for run in ids}, []
    for name, ids in (splits | {"in no split": [run for run in runs if run not in dealt]}).items():
        more = f" and {len(ids) - most} more" if len(ids) > most else ""
        texts += [f"{name}: {' '.join(ids[:most])}{more}"] if ids else []
    return "; ".join(texts)


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

    Opens at the first use and pickles without its handle; chunks that were read stay in memory for a while. Raises
    InputError for a path that is no aero archive, an unknown run, group or field.
    """

    def __init__(self, path):
        self.path = str(path)
        self._root = self._store = None
        self._groups, self._fields, self._arrays = {}, {}, {}
        self._chunks = Kept(MOST_KEPT, attrgetter("nbytes"))

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
            start, stop, step = (*index, slice(None))[0].indices(array.shape[0])
            if (stop - start) * array.dtype.itemsize * math.prod(array.shape[1:]) > MOST_KEPT // 64 or step != 1:
                return array[tuple(index)]
            return self._rows(f"{sample}/{name}", array, start, max(start, stop))[(slice(None), *index[1:])]
        except Exception as error:
            raise InputError(
                f"cannot be read ({type(error).__name__}: {error})",
                file=self.path,
                variable=f"{sample}/{name}",
                remedy="Build the archive again",
            ) from error

    def _rows(self, key, array, start, stop):
        """Rows start ... stop, put together from chunks, of which those that were used last are kept."""
        size = array.chunks[0]
        numbers = range(start // size, -(-stop // size))
        here = {number: self._chunks[key, number] for number in numbers if (key, number) in self._chunks}
        lacking = [number for number in numbers if number not in here]
        for first in lacking[:1]:  # one read of all between the first and the last
            rows = array[first * size : (lacking[-1] + 1) * size]
            for number in range(first, lacking[-1] + 1):
                part = rows[(number - first) * size : (number - first + 1) * size].copy()
                here[number] = self._chunks[key, number] = part
        found = [here[number][max(start - number * size, 0) : stop - number * size] for number in numbers]
        return np.concatenate(found) if found else array[start:stop]

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
            store = CountingStore(LocalStore(self.path, read_only=True))
            self._root, self._store = open_archive(self.path, store, "format", FORMAT), store
        return self._root

    def _group(self, sample):
        if sample not in self._groups:
            self._groups[sample] = self._find_group(sample)
        return self._groups[sample]

    def _find_group(self, sample):
        root, run = self._open(), sample.split("/")[0]
        if run not in root.attrs["runs"]:
            raise InputError(
                f"no such run; the archive has {_listed(root.attrs['runs'], root.attrs['splits'])}",
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
