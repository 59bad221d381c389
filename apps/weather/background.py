"""What a weather model says of the frame to be forecast: a condition of its own, never forecast, and known by then.

A step of a forecast takes the field of the latest frame, up to the one it forecasts, that was known when the forecast
started; at worst that of the start itself. So fields grow older along a forecast. Trainings draw such ages for their
samples, and the network is told for when a field is.
"""

import numpy as np

PARTS = 3  # of a field: its values, where it has any, and the hours from the frame to be forecast to when it is


class Background:
    """Which fields of an archive a forecast may take. Raises `InputError` for an archive that does not know."""

    def __init__(self, reader, step):
        self.reader, self.step = reader, step
        self.valid, self.known = reader.background_times

    def find(self, name, index, lead):
        """(frame, hours): whose field of a channel may be taken for the step after ``lead`` others from ``index``, and
        from the frame that is forecast to the time of that field; 0 hours where there is none."""
        channel, times = self.reader.channels.index(name), self.reader.times
        start, last = times[index], min(index + lead + 1, len(times) - 1)
        frames = [i for i in range(index + 1, last + 1) if times[i] == start + (i - index) * self.step]
        found = next((i for i in reversed(frames) if self.known[i, channel] <= start), index)
        ahead = self.valid[found, channel] - (start + (lead + 1) * self.step)
        return found, 0.0 if np.isnat(ahead) else float(ahead / np.timedelta64(1, "h"))

    def age(self, index, most):
        """Up to ``most`` steps, as many as there are successive frames before ``index``."""
        times, steps = self.reader.times, 0
        while steps < min(most, index) and times[index - steps] - times[index - steps - 1] == self.step:
            steps += 1
        return steps
