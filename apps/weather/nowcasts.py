"""Fields carried on with their motion: Lucas-Kanade extrapolation and STEPS, by pysteps, which is imported only here.

Fields are (y, x) numpy arrays on a regular grid, oldest first, NaN where nothing was seen. Motion is (2, y, x): columns
and rows a step. Sources: Germann and Zawadzki 2002 (extrapolation), Bowler et al. 2006 (STEPS), Pulkkinen et al. 2019.
"""

import contextlib
import io
import warnings
from importlib.util import find_spec

import numpy as np

NEEDS = {"pysteps": "pysteps", "cv2": "opencv-python-headless"}  # module: package
ECHO, NOTHING = 5.0, 0.0  # dBZ: the least that STEPS takes for rain, and what it is given for none


def missing():
    """The packages that these baselines lack here."""
    return [package for module, package in NEEDS.items() if find_spec(module) is None]


def motion(fields):
    """The motion of the fields by Lucas-Kanade, over those that were seen at all; none where these are fewer than two.

    The gap between the seen ones must be the same, as it is for up to three fields.
    """
    seen = [i for i, field in enumerate(fields) if np.isfinite(field).any()]
    if len(seen) < 2:
        return np.zeros((2, *fields[-1].shape))
    with _quiet():
        from pysteps.motion.lucaskanade import dense_lucaskanade

        return dense_lucaskanade(np.stack([fields[i] for i in seen])) / (seen[1] - seen[0])


def complete(fields, velocity):
    """The fields from the first seen one on; one that never came is the one before it, carried on by a step."""
    out = []
    for field in fields:
        if np.isfinite(field).any():
            out.append(field)
        elif out:
            out.append(extrapolate(out[-1], velocity, 1)[0])
    return out


def extrapolate(field, velocity, steps):
    """The field carried on, (steps, y, x); NaN where it would come from beyond the edge or from what was not seen."""
    if not np.isfinite(field).any():
        return np.full((steps, *field.shape), np.nan)
    with _quiet():
        from pysteps.extrapolation.semilagrangian import extrapolate as carry

        return carry(field, velocity, steps, allow_nonfinite_values=True)


def steps_ensemble(fields, velocity, steps, members, km, minutes, seed):
    """STEPS of reflectivity in dBZ: (members, steps, y, x), `NOTHING` where there is no echo; NaN as `extrapolate`.

    km, minutes: between points and between frames. None where an echo covers less than a hundredth of some field, too
    little to take the texture of the noise from, or where there are fewer than two fields.
    """
    wet = [np.where(np.nan_to_num(field, nan=NOTHING) >= ECHO, field, NOTHING) for field in fields]
    if len(wet) < 2 or min((field >= ECHO).mean() for field in wet) < 0.01:
        return None
    levels = int(np.clip(np.log2(min(velocity.shape[1:])) - 1, 2, 6))
    with _quiet():
        from pysteps.nowcasts.steps import forecast

        return forecast(
            np.stack(wet), velocity, steps, n_ens_members=members, n_cascade_levels=levels, ar_order=len(wet) - 1,
            precip_thr=ECHO, kmperpixel=km, timestep=minutes, seed=seed, num_workers=1,
        )  # fmt: skip


@contextlib.contextmanager
def _quiet():
    """pysteps prints its settings and its progress, and warns of scenes with little in them."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
