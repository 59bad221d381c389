"""What is done about frames of which little was observed: one policy for training, forecasts and scores.

It is decided by the share of each whole frame that was observed, which the archive holds, so all ranks decide alike. It
is an option of the training and stays with the model: a forecast and an evaluation follow it unless told otherwise.
"""

from dataclasses import dataclass

import numpy as np

from core import InputError

KINDS = ("mask", "reject", "refuse")


@dataclass(frozen=True)
class Policy:
    """``missing``: "mask" takes frames of which less than the share ``least`` of a channel was observed, and what is
    missing counts for nothing; "reject" leaves out what needs them; "refuse" raises.
    """

    missing: str = "mask"
    least: float = 0.5

    def __str__(self):
        return f"--missing {self.missing} --least {self.least:g}"

    def poor(self, reader, channels):
        """Which frames the policy does not take for which channels, bool (n, channel); none where it masks."""
        at = [reader.channels.index(name) for name in channels]
        return (reader.coverage[:, at] < self.least) & (self.missing != "mask")

    def demand(self, reader, channels, frames):
        """Raises `InputError` for the first of ``frames``, indices, that is poor, naming file, time and variable."""
        frames = np.asarray(frames, int)
        found = np.argwhere(self.poor(reader, channels)[frames])
        if not len(found):
            return
        frame, name = frames[found[0][0]], channels[found[0][1]]
        share = reader.coverage[frame, reader.channels.index(name)]
        leave = "Leave such times out (--missing reject)" if self.missing == "refuse" else "Choose another time"
        raise InputError(
            f"only {share:.0%} was observed at {reader.times[frame]}, {self.least:.0%} are asked",
            file=reader.path,
            variable=name,
            remedy=f"{leave} or mask what is missing (--missing mask)",
        )


MASK = Policy()
