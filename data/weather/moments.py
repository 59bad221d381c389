"""Count, mean and squared deviation of each channel, added up frame by frame: no second pass, any grouping, fp64.

Source: Chan, Golub and LeVeque (1979), the pairwise update.
"""

import numpy as np


class Moments:
    """``count``, ``mean`` and ``m2`` (sum of squared deviations), each (channel,)."""

    def __init__(self, count, mean, m2):
        self.count = np.array(count, np.int64)
        self.mean, self.m2 = np.array(mean, np.float64), np.array(m2, np.float64)

    @classmethod
    def zero(cls, channels):
        return cls(np.zeros(channels), np.zeros(channels), np.zeros(channels))

    @classmethod
    def of(cls, values):
        """Those of (channel, n) values; NaN is left out."""
        rows = [row[np.isfinite(row)].astype(np.float64) for row in values]
        mean = [row.mean() if row.size else 0.0 for row in rows]
        return cls([row.size for row in rows], mean, [((row - m) ** 2).sum() for row, m in zip(rows, mean)])

    def __add__(self, other):
        count = self.count + other.count
        share = np.divide(other.count, count, out=np.zeros(len(count)), where=count > 0)
        delta = other.mean - self.mean
        return Moments(count, self.mean + delta * share, self.m2 + other.m2 + delta**2 * self.count * share)

    @property
    def std(self):
        """Standard deviation, (channel,); 0 where nothing was counted."""
        return np.sqrt(np.divide(self.m2, self.count, out=np.zeros(len(self.m2)), where=self.count > 0))

    def state(self):
        """Lists of plain numbers, from which ``Moments(*state)`` is the same to the last bit."""
        return self.count.tolist(), self.mean.tolist(), self.m2.tolist()
