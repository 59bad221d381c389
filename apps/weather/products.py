"""What users of an ensemble ask for, of one channel at one lead: means, probabilities, rain rate. Plain numpy fields.

Fields are (member, y, x), NaN where nothing is known; it stays NaN, and neighborhoods count what is known only.
"""

import numpy as np
import torch

from apps import metrics
from apps.weather.events import EVENTS

RADAR = ("refc", "refb")
RADIUS_KM = 20.0  # of neighborhoods
CAP = 53.0  # dBZ; above it hail would pass for rain


def kinds(channel, units):
    """Products of a channel: {suffix: (dims before y and x, attributes)}."""
    named = {"mean": ((), {"units": units, "long_name": "mean of the members", "cell_methods": "member: mean"})}
    if channel in EVENTS:
        side = "below" if EVENTS[channel].below else "at or above"
        share = {"units": "1", "valid_range": [0.0, 1.0]}
        near = f"within {RADIUS_KM:g} km"
        named |= {
            "probability_matched_mean": (
                (),
                {"units": units, "long_name": "places of the mean of the members, values of the members"},
            ),
            "probability": (("threshold",), share | {"long_name": f"share of members {side} the threshold"}),
            "neighborhood_probability": (
                ("threshold",),
                share | {"long_name": f"share of members and of points {near} that are {side} the threshold"},
            ),
            "neighborhood_maximum_probability": (
                ("threshold",),
                share | {"long_name": f"share of members that are {side} the threshold somewhere {near}"},
            ),
        }
    if channel in RADAR:
        named["rain_rate"] = (
            ("member",),
            {"units": "mm h-1", "standard_name": "rainfall_rate", "comment": f"Z = 300 R^1.4, Z up to {CAP:g} dBZ"},
        )
    return named


def make(channel, members, km):
    """{suffix: float32 field} of a channel (member, y, x); km: between points."""
    known = np.isfinite(members).all(0)
    mean = members.mean(0)
    out = {"mean": mean}
    if channel in EVENTS:
        events = EVENTS[channel]
        happens = [members < t if events.below else members >= t for t in events.thresholds]
        out |= {
            "probability_matched_mean": matched_mean(members),
            "probability": np.stack([_masked(event.mean(0), known) for event in happens]),
            "neighborhood_probability": np.stack([near_share(event.mean(0), known, km) for event in happens]),
            "neighborhood_maximum_probability": np.stack([near_any(event, known, km) for event in happens]),
        }
    if channel in RADAR:
        out["rain_rate"] = rain_rate(members)
    return {name: np.asarray(field, np.float32) for name, field in out.items()}


def matched_mean(members):
    """`apps.metrics.matched_mean` of the points where all members are known: (y, x)."""
    known = torch.from_numpy(np.isfinite(members).all(0))
    return metrics.matched_mean(torch.from_numpy(members), known).numpy()


def near_share(chance, known, km):
    """Mean of ``chance`` over the known points within the radius (Schwartz and Sobash 2017, NEP): (y, x)."""
    from scipy.signal import fftconvolve

    disc = _disc(km).astype(float)
    total = fftconvolve(np.where(known, chance, 0.0), disc, mode="same")
    count = np.round(fftconvolve(known.astype(float), disc, mode="same"))
    return _masked(np.clip(total / np.maximum(count, 1), 0, 1), known)


def near_any(event, known, km):
    """Share of members with the event somewhere within the radius (the same, NMEP): (y, x)."""
    from scipy.ndimage import binary_dilation

    disc = _disc(km)
    return _masked(np.mean([binary_dilation(one & known, disc) for one in event], 0), known)


def rain_rate(reflectivity):
    """mm/h of dBZ: Z = 300 R^1.4 (Fulton et al. 1998), 0 where there is no echo, below 5 dBZ."""
    rate = (10 ** (np.minimum(reflectivity, CAP) / 10) / 300) ** (1 / 1.4)
    return np.where(reflectivity < 5, 0.0, rate)


def _disc(km):
    reach = int(RADIUS_KM // km)
    y, x = np.ogrid[-reach : reach + 1, -reach : reach + 1]
    return np.hypot(y, x) * km <= RADIUS_KM


def _masked(field, known):
    return np.where(known, field, np.nan)
