"""What a forecast has to beat: no change, motion carried on, and motion with noise; from the same history and seed.

Those of pysteps need whole fields, one channel at a time, on the first rank of a domain. Where nothing flows in from
beyond the edge they keep the last value seen, so that all forecasts are scored on the same points.
"""

import sys
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from apps.agree import together
from apps.weather import nowcasts
from core import InputError, scatter_tensor

NAMES = ("persistence", "extrapolation", "steps")
ECHOES = ("refc", "refb")  # what STEPS can make noise for


class Observed(NamedTuple):
    """Values (batch, channel, y, x), 0 where missing, and their validity, bool of the same shape."""

    values: torch.Tensor
    valid: torch.Tensor


def persistence(history):
    """Nothing changes: at each point the last value seen in ``history``, a list of `Observed`, newest last."""
    values, valid = history[0]
    for newer in history[1:]:
        values, valid = torch.where(newer.valid, newer.values, values), valid | newer.valid
    return Observed(values, valid)


def choose(names, aloud=True):
    """The baselines to score: ``names``, or with None all that are installed, and one line, ``aloud``, of the others.

    Raises:
        InputError: a name that is none, or one that was asked for and is not installed.
    """
    unknown = set(names or ()) - set(NAMES)
    if unknown:
        raise InputError(f"--baselines knows no {', '.join(sorted(unknown))}", remedy=f"Choose of {', '.join(NAMES)}")
    lacking = nowcasts.missing()
    remedy = f"pip install {' '.join(lacking)}"
    if names is None and lacking:
        if aloud:
            print(f"extrapolation and STEPS are left out; with them after {remedy}", file=sys.stderr, flush=True)
        return ("persistence",)
    if lacking and set(names or NAMES) != {"persistence"}:
        raise InputError(f"--baselines {' '.join(names)} lacks {', '.join(lacking)}", remedy=remedy)
    return NAMES if names is None else tuple(name for name in NAMES if name in names)


def forecasts(names, frames, index, steps, members, seed, hrrr=None):
    """Forecasts after frame ``index``: {name: {channel: (lead, member, y, x)}}, fp64 in the units of the archive.

    One member of persistence, extrapolation and HRRR, ``members`` of STEPS; STEPS knows radar channels only.

    All ranks of the world call it. Raises `InputError` on all of them for a file that one cannot read.

    Args:
        hrrr: `apps.weather.hrrr.Hrrr`, or None.
    """
    facts, out = frames.facts, {name: {} for name in names}
    wanted = [name for name in names if name != "persistence"]
    with together():  # all is read before anything travels
        now = frames.physical(persistence(frames.history(index)).values)[0]
        past = _recent(frames, index) if wanted else []
        told = _told(hrrr, frames, index, steps) if hrrr is not None and ECHOES[0] in facts.channels else None
    for c, channel in enumerate(facts.channels):
        still = now[c].expand(steps, 1, *now.shape[1:])
        if "persistence" in names:
            out["persistence"][channel] = still
        mine = [name for name in wanted if name == "extrapolation" or channel in ECHOES]
        if mine:
            stacked = _carried(mine, frames, past, c, index, steps, members, seed)
            counts = [members if name == "steps" else 1 for name in mine]
            for name, values in zip(mine, stacked.split(counts, 1)):
                out[name][channel] = torch.where(values.isnan(), still, values)
    if hrrr is not None and ECHOES[0] in facts.channels:
        out["hrrr"] = {ECHOES[0]: _scattered(told, frames, (steps, 1, *facts.shape))}
    return out


def _told(hrrr, frames, index, steps):
    """HRRR's reflectivity (lead, y, x) on the first rank of the domain, None on the others."""
    facts, start = frames.facts, frames.reader.times[index]
    floor, times = facts.floor[facts.channels.index(ECHOES[0])], start + facts.step * np.arange(1, steps + 1)
    return hrrr.forecast(start, times, frames.reader.grid, floor) if dist.get_rank() == _first(frames) else None


def _recent(frames, index):
    """Up to three successive frames, the newest last: a baseline may look back further than the model."""
    times, first = frames.reader.times, index
    while first > max(index - 2, 0) and times[first] - times[first - 1] == frames.facts.step:
        first -= 1
    return [frames.observed(i) for i in range(first, index + 1)]


def _carried(names, frames, past, c, index, steps, members, seed):
    """The forecasts of one channel one behind another, (lead, member, y, x), NaN where nothing flows in."""
    fields = [torch.where(f.valid[0, c], frames.physical(f.values)[0, c], np.nan).full_tensor() for f in past]
    rows = None
    count = sum(members if name == "steps" else 1 for name in names)
    if dist.get_rank() == _first(frames):
        fields = [field.cpu().numpy() for field in fields]
        minutes = int(frames.reader.times[index].astype("datetime64[m]").astype(int))
        rows = _nowcasts(names, frames, fields, c, steps, members, (seed * 7919 + minutes) % 2**31)
    return _scattered(rows, frames, (steps, count, *frames.facts.shape))


def _scattered(rows, frames, shape):
    """What the first rank of the domain has, cut as the frames are."""
    values, cut = None, [Shard(2 + axis) for axis in range(frames.mesh.ndim)]
    if rows is not None:
        values = torch.from_numpy(np.ascontiguousarray(rows.reshape(shape))).to(frames.latitude.device)
    return scatter_tensor(values, _first(frames), frames.mesh, cut, shape, torch.float64, sizes=frames.sizes)


def _first(frames):
    """The rank of the domain that does what needs whole fields."""
    return int(frames.mesh.mesh.flatten()[0])


def _nowcasts(names, frames, fields, c, steps, members, seed):
    facts = frames.facts
    velocity = nowcasts.motion(fields)
    fields = nowcasts.complete(fields, velocity)
    latest = fields[-1] if fields else np.full(velocity.shape[1:], np.nan)
    carried = nowcasts.extrapolate(latest, velocity, steps)[:, None]
    rows = {"extrapolation": carried}
    if "steps" in names:
        noisy = nowcasts.steps_ensemble(fields, velocity, steps, members, facts.km, facts.step_minutes, seed)
        noisy = carried.repeat(members, 1) if noisy is None else np.moveaxis(noisy, 0, 1)
        rows["steps"] = np.where(noisy < nowcasts.ECHO, facts.floor[c], noisy)
    return np.concatenate([rows[name] for name in names], 1)
