"""What is scored of each channel: the thresholds of its events, the windows around them, the sunlight it needs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Events:
    """Thresholds of a channel; the event is "at least", or "below" (cold cloud tops)."""

    thresholds: tuple[float, ...]
    below: bool = False


_RADAR, _COLD = Events((20.0, 30.0, 35.0, 40.0)), Events((235.0, 220.0), below=True)
EVENTS = {
    "refc": _RADAR,
    "refb": _RADAR,
    "rain": Events((1.0, 5.0)),
    "glm": Events((1.0,)),
    **{f"bt{band:02d}": _COLD for band in range(11, 17)},
}
# the least that is something where the floor is nothing: a forecast that is less than half way to it becomes nothing
LEAST = {"refc": 5.0, "refb": 5.0, "glm": 1.0, "rain": 0.1}
WINDOWS = (1, 3, 7, 17, 33)  # cells across, of the fractions skill score: 3 are 18 km at 6 km, 7 are 21 km at 3 km
SOLAR = tuple(f"c{band:02d}" for band in range(1, 7))  # reflected sunlight
SUN = (0.1, 0.4, 0.7, 1.0)  # cosines of the zenith angle: it is scored above the first, and in each range between two
AT_SUN = " at sun "  # joins a channel and the number of its range, where a range is scored by itself
