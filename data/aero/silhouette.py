"""The area of a body's shadow: what a frontal area is, holes, mirrors and overlapping parts included.

The sum of |n_x| A / 2 counts what hides behind other parts again (wheels behind the bumper, a wing over the boot) and
is right for convex bodies only. Here the projected triangles are cut by evenly spaced lines; along each line the union
of their intervals is exact, and the lines are summed by the midpoint rule over exactly the height of the body.
"""

import numpy as np

from data.aero.resample import fans

LINES = 1000


def projected_area(mesh, axis):
    """Area of the silhouette of Polygons seen along ``axis`` (0, 1, 2), in the square of the mesh's unit, fp64."""
    u, v = [k for k in range(3) if k != axis]
    used = mesh.points[mesh.connectivity]
    low, high = float(used[:, v].min()), float(used[:, v].max())
    step = (high - low) / LINES
    if not step > 0:
        return 0.0
    intervals = np.empty((3, 0))
    for corners, _ in fans(mesh):
        more = _cut(corners[..., u], (corners[..., v] - low) / step)
        intervals = _union(np.concatenate([intervals, more], axis=1))
    _, first, last = intervals
    return float((last - first).sum() * step)


def _cut(u, row):
    """Intervals (3, m): line, first and last u, in which triangles (t, 3) meet the lines at row = line + 1/2."""
    top = np.ceil(row.max(axis=1) - 0.5).astype(np.int64)
    bottom = np.ceil(row.min(axis=1) - 0.5).astype(np.int64)
    count = top - bottom
    owner = np.repeat(np.arange(len(u)), count)
    line = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count - bottom, count)
    height = line + 0.5
    first, last = np.full(len(owner), np.inf), np.full(len(owner), -np.inf)
    for k in range(3):
        r0, r1, u0, u1 = row[owner, k], row[owner, k - 2], u[owner, k], u[owner, k - 2]
        crosses = (r0 < height) != (r1 < height)
        span = np.where(crosses, r1 - r0, 1)
        at = u0 + (u1 - u0) * (height - r0) / span
        first = np.where(crosses, np.minimum(first, at), first)
        last = np.where(crosses, np.maximum(last, at), last)
    return np.stack([line, first, last])


def _union(intervals):
    """The same set as disjoint intervals, sorted by line and start."""
    line, first, last = intervals[:, np.lexsort((intervals[1], intervals[0]))]
    if not len(line):
        return intervals
    width = 2 * (np.abs(first).max() + np.abs(last).max() + 1)  # lines laid end to end: one running maximum serves all
    reach = np.maximum.accumulate(last + line * width)
    fresh = np.append(True, first[1:] + line[1:] * width > reach[:-1])
    ends = np.append(np.flatnonzero(fresh)[1:] - 1, len(line) - 1)
    return np.stack([line[fresh], first[fresh], reach[ends] - line[ends] * width])
