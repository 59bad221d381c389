"""From a fine latitude-longitude grid to the cells of a map: the mean of what lies in each cell.

A mean of a linear quantity keeps totals; a nearest point would not, and would miss most of the sharp maxima.
"""

import numpy as np

from core.errors import InputError
from data.weather.grid import EARTH_RADIUS, cell_area, cell_of

ENOUGH = 0.5  # share of a cell's area that must be observed


class CellMean:
    """Area-weighted mean over each cell of ``grid`` of values on a regular latitude-longitude grid.

    latitude (nlat,) and longitude (nlon,) in degrees. Built once and used for all frames of that source grid.
    Raises `InputError` for a source too coarse to put a point into every cell.
    """

    def __init__(self, latitude, longitude, grid):
        step = np.radians([latitude[1] - latitude[0], longitude[1] - longitude[0]])
        if np.abs(step).max() * EARTH_RADIUS > grid.spacing:
            raise InputError(f"the source has points {np.degrees(step).max():.3f} degrees apart, the grid every "
                             f"{grid.spacing / 1e3:g} km", remedy="Choose a coarser resolution")  # fmt: skip
        self.shape, self.cell_area = grid.shape, cell_area(grid)
        source, target = [], []
        cols = _within(longitude, grid.longitude)
        rows = _within(latitude, grid.latitude)
        for some in np.array_split(rows, max(1, len(rows) // 250)):  # bounds the memory
            cell = cell_of(*np.meshgrid(latitude[some], longitude[cols], indexing="ij"), grid)
            point = some[:, None] * len(longitude) + cols
            source.append(point[cell >= 0].astype(np.int32))
            target.append(cell[cell >= 0].astype(np.int32))
        self.source, self.target = np.concatenate(source), np.concatenate(target)
        area = EARTH_RADIUS**2 * np.abs(step.prod()) * np.cos(np.radians(latitude))
        self.area = np.repeat(area.astype(np.float32), len(longitude))[self.source]

    def __call__(self, values):
        """Means (ny, nx) float64 of values (nlat, nlon); NaN where under half of the cell is finite."""
        values = values.ravel()[self.source]
        finite = np.isfinite(values)
        seen = self._sum(self.area * finite)
        enough = seen >= ENOUGH * self.cell_area
        total = self._sum(np.where(finite, values, 0) * self.area)
        return np.divide(total, seen, out=np.full(self.shape, np.nan), where=enough)

    def _sum(self, weights):
        return np.bincount(self.target, weights, minlength=self.cell_area.size).reshape(self.shape)


def _within(axis, of_grid, margin=0.5):
    """Indices of the axis within the range of the grid's own coordinate, degrees."""
    return np.flatnonzero((axis >= of_grid.min() - margin) & (axis <= of_grid.max() + margin))
