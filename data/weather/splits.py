"""Which part of an archive is for training: by date, 48 h apart, or by longitude with a 200 km gap.

A storm lives for hours and is a hundred kilometres wide: closer parts would share weather, and a score would be memory.
"""

import numpy as np

from core.errors import InputError

APART, GAP_KM, KM_PER_DEGREE = np.timedelta64(48, "h"), 200.0, 111.195


def date_splits(train, valid, test):
    """Splits from three (first, last) pairs of times; refuses parts less than 48 h apart.

    Returns {"train": [first, last], "valid": ..., "test": ...}, ISO strings, both ends included.
    """
    parts = {"train": train, "valid": valid, "test": test}
    parts = {name: [np.datetime64(t, "s") for t in ends] for name, ends in parts.items()}
    ordered = sorted(parts.items(), key=lambda item: item[1][0])
    for name, (first, last) in ordered:
        if first > last:
            raise InputError(f"the {name} split ends at {last}, before it starts at {first}", variable="splits")
    for (a, (_, last)), (b, (first, _)) in zip(ordered, ordered[1:]):
        if first - last < APART:
            raise InputError(
                f"the {b} split starts {(first - last) / np.timedelta64(1, 'h'):.1f} h after the {a} split ends",
                variable="splits", remedy="Leave at least 48 h between the parts",
            )  # fmt: skip
    return {name: [str(t) for t in ends] for name, ends in parts.items()}


def longitude_splits(grid, longitude):
    """Train west of ``longitude`` (degrees east), validate east of it beyond a gap of 200 km on every row.

    Returns {"train": {"lon_max": ...}, "valid": {"lon_min": ...}}.
    """
    degrees = gap_degrees(grid)
    west, east = grid.longitude.min(), grid.longitude.max()
    if not west < longitude < longitude + degrees < east:
        raise InputError(
            f"splitting at {longitude} leaves one side of the grid ({west:.2f} to {east:.2f} degrees) empty",
            variable="longitude", remedy=f"Choose a longitude between {west:.2f} and {east - degrees:.2f}",
        )  # fmt: skip
    return {"train": {"lon_max": float(longitude)}, "valid": {"lon_min": float(longitude + degrees)}}


def gap_degrees(grid):
    """Degrees of longitude that are 200 km or more on every row of the grid."""
    return float(GAP_KM / (KM_PER_DEGREE * np.cos(np.radians(np.abs(grid.latitude).max()))))


def choose_splits(times, grid):
    """Splits for who names none: 70, 15 and 15 % of the dates where they span ten days, else by longitude.

    The longitude is 100 W where that leaves a fifth of the grid on both sides, else it gives three fifths to training.
    """
    times = np.sort(np.asarray(times, "datetime64[s]"))
    cuts = [times[0] + (times[-1] - times[0]) * share // 100 for share in (70, 85)]
    if times[-1] - times[0] >= np.timedelta64(10, "D"):
        spans = (times[0], cuts[0]), (cuts[0] + APART, cuts[1]), (cuts[1] + APART, times[-1])
        if all(((times >= first) & (times <= last)).any() for first, last in spans):
            return date_splits(*spans)
    gap, west, east = gap_degrees(grid), grid.longitude.min(), grid.longitude.max()
    fifth = (east - west) / 5
    central = west + fifth <= -100.0 <= east - gap - fifth
    return longitude_splits(grid, -100.0 if central else west + 0.6 * (east - west - gap))


def times_in(split, times):
    """Which of ``times`` (n,) belong to one split, bool (n,); all of them where the split is a region."""
    times = np.asarray(times, "datetime64[ns]")
    if isinstance(split, dict):
        return np.ones(times.shape, bool)
    first, last = (np.datetime64(t, "ns") for t in split)
    return (times >= first) & (times <= last)


def cells_in(split, longitude):
    """Which cells belong to one split, bool of the shape of ``longitude``; all where the split is a time span."""
    longitude = np.asarray(longitude)
    if not isinstance(split, dict):
        return np.ones(longitude.shape, bool)
    return (longitude <= split.get("lon_max", np.inf)) & (longitude >= split.get("lon_min", -np.inf))
