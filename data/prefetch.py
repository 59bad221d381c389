"""Reading ahead: worker processes fetch what will be asked next, while this one computes.

Processes, not threads: decoding holds Python's lock, and HDF5 is not safe to share. They are spawned, because stores
and their event loops do not survive a fork.
"""

import atexit
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

from data.processes import end_with_parent


class Prefetcher:
    """A :class:`data.reader.Reader` that reads through another one, partly in advance.

    Args:
        reader: any Reader that can be pickled. Each worker opens it anew.
        workers: number of processes, which start at the first `expect`; None for half of this rank's share of the
            cores, two at least and eight at most.
    """

    def __init__(self, reader, workers=None):
        self.reader, self.workers = reader, workers or min(max(_cores() // 2, 2), 8)
        self._pool, self._coming, self._bytes = None, {}, 0

    @property
    def started(self):
        return self._pool is not None

    @property
    def bytes_read(self):
        return self.reader.bytes_read + self._bytes

    def shape(self, sample, name):
        return self.reader.shape(sample, name)

    def expect(self, sample, name, index):
        """Begin to read what will be asked for soon; again and again costs nothing."""
        key = _key(sample, name, index)
        if key not in self._coming:
            self._coming[key] = self._workers().submit(_fetch, sample, name, index)

    def read(self, sample, name, index):
        coming = self._coming.pop(_key(sample, name, index), None)
        if coming is None:
            return self.reader.read(sample, name, index)
        values, nbytes = coming.result()
        self._bytes += nbytes
        return values

    def close(self):
        """Ends the workers; what they were reading is dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        self._coming.clear()

    def _workers(self):
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.workers, context, _open, (self.reader,))
            atexit.register(self.close)
        return self._pool


def _cores():
    """This rank's share of those that the process may use; of torchrun's ranks on this machine all may use the same."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return own // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _key(sample, name, index):
    return sample, name, tuple((part.start, part.stop) for part in index)


_opened = []


def _open(reader):
    end_with_parent()
    _opened[:] = [reader]


def _fetch(sample, name, index):
    """(values, bytes that came from storage for them)."""
    [reader] = _opened
    before = reader.bytes_read
    values = reader.read(sample, name, index)
    return values, reader.bytes_read - before
