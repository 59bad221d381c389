"""The middle plane of a volume as a picture: each pixel has the value of the nearest of the cells beside the plane.

Cells are no farther apart than they are from the body, so a pixel that is farther than that from the nearest one is
inside of the body, or where no cell is, and stays blank.
"""

import numpy as np

ROOM = ((0.4, 1.0), (0.1, 0.4))  # before and behind the body, below and above it, in its lengths
PIXELS = 600


class Slice:
    """Pixels of the plane that the most points are beside: position (n, 3) m and sdf (n,) m of a fair sample.

    ``extent`` (x, x, z, z): of the picture, around the body; ``rows``: points that are drawn.
    """

    def __init__(self, position, sdf):
        from scipy.spatial import cKDTree

        body = position[sdf <= np.quantile(sdf, 0.05)]
        low, high = body.min(axis=0), body.max(axis=0)
        apart, length = np.abs(position[:, 1] - (low[1] + high[1]) / 2), high[0] - low[0]
        inside = np.ones(len(position), bool)
        ends = []
        for axis, (before, behind) in zip((0, 2), ROOM):
            first = max(position[:, axis].min(), low[axis] - before * length)
            last = min(position[:, axis].max(), high[axis] + behind * length)
            inside &= (position[:, axis] >= first) & (position[:, axis] <= last)
            ends += [first, last]
        near = np.flatnonzero(inside)
        near = near[apart[near] <= np.quantile(apart[near], 0.1)]
        self.extent, self.rows = ends, near
        places = position[near][:, [0, 2]]
        step = (ends[1] - ends[0]) / PIXELS
        x, z = (np.arange(a + step / 2, b, step) for a, b in (ends[:2], ends[2:]))
        tree = cKDTree(places)
        distance, self.owner = tree.query(np.stack(np.meshgrid(x, z), axis=-1))
        self.blank = distance > sdf[near][self.owner] + 0.01 * length

    def image(self, values):
        """Pixels (z, x) of values (n,) of the sample, NaN where blank."""
        return np.where(self.blank, np.nan, values[self.rows][self.owner])
