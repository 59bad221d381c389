"""How far a new body is from those that a model has seen, by a few numbers a shape.

A shape is described by what does not depend on its mesh: lengths (where its box begins and ends, the root of its area
and of the areas that face each axis) and a soft histogram of the directions that its surface faces. The distance of two
shapes is the root of a sum of two squares: the root mean square difference of the lengths, as a share of the training
shapes' mean diagonal, and the Hellinger distance of the histograms (0 alike, 1 no direction in common). It says whether
a body is unlike the training's, not how wrong the prediction will be.
"""

import itertools

import numpy as np

ROWS, LENGTHS = 1 << 16, 10
_AXES = np.array([d for d in itertools.product((-1, 0, 1), repeat=3) if any(d)], dtype=np.float64)
DIRECTIONS = _AXES / np.linalg.norm(_AXES, axis=1, keepdims=True)


def describe(low, high, normal, area):
    """Description (36,) of a body: box corners low, high (3,) m, unit outward normals (n, 3), areas (n,) m2."""
    facing, shares = np.zeros(3), np.zeros(len(DIRECTIONS))
    for start in range(0, len(area), ROWS):
        n, a = normal[start : start + ROWS].astype(np.float64), area[start : start + ROWS].astype(np.float64)
        near = np.maximum(n @ DIRECTIONS.T, 0) ** 16
        shares += (a / np.maximum(near.sum(axis=1), 1e-9)) @ near
        facing += a @ np.abs(n)
    total = area.sum(dtype=np.float64)
    return np.concatenate([low, high, np.sqrt([total]), np.sqrt(facing / 2), shares / total])


def shapes_of(reader, runs):
    """{run: description as a list} of runs of an archive (AeroReader), each by a fair sample of its stored rows."""
    found = {}
    for run in runs:
        key = f"{run}/surface"
        rows = reader.shape(key, "area")[0]
        taken = (slice(0, min(rows, ROWS)),)
        position, normal, area = (reader.read(key, name, taken) for name in ("position", "normal", "area"))
        area = area * (rows / len(area))
        found[run] = [round(v, 6) for v in describe(position.min(0), position.max(0), normal, area).tolist()]
    return found


def nearest(description, shapes):
    """(run, distance, reach) of the training shape nearest to ``description``.

    reach: the largest distance of any training shape to its own nearest fellow, None for a single one; a body farther
    than that lies outside of what was trained on.
    """
    runs, table = list(shapes), np.array(list(shapes.values()))
    diagonal = np.linalg.norm(table[:, 3:6] - table[:, :3], axis=1).mean()

    def distances(one):
        lengths = (((table[:, :LENGTHS] - one[:LENGTHS]) / diagonal) ** 2).mean(axis=1)
        directions = ((np.sqrt(table[:, LENGTHS:]) - np.sqrt(one[LENGTHS:])) ** 2).sum(axis=1) / 2
        return np.sqrt(lengths + directions)

    found = distances(np.asarray(description))
    reach = None
    if len(runs) > 1:
        reach = max(float(np.sort(distances(row))[1]) for row in table)
    best = int(found.argmin())
    return runs[best], float(found[best]), reach


def training_facts(reader, runs):
    """What a checkpoint keeps of its training runs for new bodies: their descriptions, and medians of references.

    {"shapes": of ``shapes_of``, "reference": {"rho", "Lref", "center", "cells"}}, JSON-able.
    """
    attrs = [reader.run_attrs(run) for run in runs]
    rows = [reader.shape(f"{run}/surface", "area")[0] for run in runs]
    reference = {name: np.median([a[name] for a in attrs], axis=0).tolist() for name in ("rho", "Lref", "center")}
    return {"shapes": shapes_of(reader, runs), "reference": reference | {"cells": int(np.median(rows))}}
