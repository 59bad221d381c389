"""Which runs train, which choose, which judge: by run id, or within one run by held-out cells."""

import json
from importlib.resources import files

import numpy as np

from core.errors import InputError

OFFICIAL = ("official", "medium", "scarce", "super_scarce", "geometry", "high_drag", "low_drag", "rear_separation")


def official_split(name, available, partial=False):
    """DrivAerML's published split ``name`` (of OFFICIAL; "official" is 400 / 34 / 50) as lists of run ids.

    available: ids at hand. Raises InputError naming the runs that are not there; with ``partial`` they are left out.
    """
    table = json.loads(files("data.aero").joinpath("drivaerml_official_split.json").read_text())
    prefix = "full" if name == "official" else name
    split = {part: table[f"{prefix}_{key}"] for part, key in (("train", "train"), ("valid", "val"), ("test", "test"))}
    if partial:
        return {part: [run for run in ids if run in set(available)] for part, ids in split.items()}
    return split


def official_runs(name):
    """Numbers of all runs of the published split ``name``: training, then validation, then test."""
    return [int(run.removeprefix("run_")) for ids in official_split(name, []).values() for run in ids]


def check_splits(splits, available):
    """Raise InputError unless train, valid and test are disjoint, train is not empty and all ids are available."""
    seen = {}
    for name in ("train", "valid", "test"):
        for run in splits[name]:
            if run in seen:
                raise InputError(
                    f"run {run} is in {seen[run]} and in {name}",
                    variable="splits",
                    remedy="Give every run to one split only",
                )
            seen[run] = name
    missing = [run for run in seen if run not in set(available)]
    if missing:
        names = " ".join(missing[:20]) + (" ..." if len(missing) > 20 else "")
        raise InputError(
            f"{len(missing)} of {len(seen)} runs are not there: {names}",
            variable="splits",
            remedy="Fetch them, or name only runs that exist",
        )
    if not splits["train"]:
        raise InputError("no training run", variable="splits", remedy="Name at least one run to train on")


def hold_out(fraction, by, seed):
    """A function (run id, group name, position (n, 3)) -> bool (n,), True for about ``fraction`` of the cells.

    by "blocks": whole cubes of a tenth of the longest extent of the group, so that most held-out cells have no
    training cell beside them; by "random": single cells, which their neighbours give away. Either way the test is
    interpolation within one flow, not a new shape.
    """
    if not 0 < fraction < 1:
        raise InputError(f"{fraction} is no share between 0 and 1", variable="holdout-cells", remedy="Use 0.2")

    def choose(run, kind, position):
        rng = np.random.default_rng([seed, *run.encode(), *kind.encode()])
        if by == "random":
            return rng.random(len(position)) < fraction
        edge = np.ptp(position, axis=0).max() / 10
        cubes = np.floor((position - position.min(axis=0)) / edge).astype(int)
        _, block, count = np.unique(cubes, axis=0, return_inverse=True, return_counts=True)
        order = rng.permutation(len(count))
        held = np.zeros(len(count), dtype=bool)
        held[order[np.cumsum(count[order]) <= fraction * len(position)]] = True
        return held[block.reshape(-1)]

    return choose
