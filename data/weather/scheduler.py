"""Work spread over processes of this machine or over a dask cluster, with results in order.

Processes, not threads: HDF5 and GRIB libraries are not safe to share. Each worker gets the function once and keeps it,
so what it prepares (weights of a regridding) is prepared once a worker; few results wait, so memory is bounded.
"""

import multiprocessing
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain, groupby

from data.processes import end_with_parent

_kept = []


def _keep(function):
    end_with_parent()
    _kept[:] = [function]


def _call_kept(item):
    return _kept[0](item)


def _call(function, item):
    return function(item)


def spread(scheduler="processes", workers=1):
    """A function like ``map(function, items)``: in this process, in ``workers`` processes or on a cluster.

    scheduler: "processes", or the address of a dask scheduler such as tcp://host:8786, whose workers see the same
    files under the same names; ``workers`` then limits the work under way.
    """
    if scheduler != "processes":
        return lambda function, items: _on_cluster(scheduler, workers, function, items)
    if workers == 1:
        return map
    return lambda function, items: _in_processes(workers, function, items)


def by_lots(each, size):
    """``each``, for whole numbers, those of one ``size``-th together: what was made for one serves the next."""

    def by_lots_each(function, items):
        lots = [list(lot) for _, lot in groupby(items, lambda i: i // size)]
        return chain.from_iterable(each(partial(_all_of, function), lots))

    return by_lots_each


def _all_of(function, items):
    return [function(item) for item in items]


def _in_processes(workers, function, items):
    items = list(items)
    context = multiprocessing.get_context("spawn")  # a fork would copy the state of HDF5 and of zarr's threads
    workers = min(workers, len(items) // 4)  # more would not have started before all is done
    if workers < 2:
        yield from map(function, items)
        return
    with ProcessPoolExecutor(workers, context, _keep, (function,)) as pool:
        try:
            yield from _ordered(lambda item: pool.submit(_call_kept, item), items, 2 * workers)
        finally:
            pool.shutdown(cancel_futures=True)


def _on_cluster(address, workers, function, items):
    from dask.distributed import Client

    with Client(address) as client:
        [kept] = client.scatter([function], broadcast=True)
        yield from _ordered(lambda item: client.submit(_call, kept, item, pure=False), items, 2 * workers)


def _ordered(submit, items, ahead):
    waiting = deque()
    for item in items:
        waiting.append(submit(item))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
