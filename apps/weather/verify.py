"""One case: model and baselines at the same points and valid times, as sums by channel, source and lead."""

import math

import torch

from apps import metrics
from apps.agree import together
from apps.weather.baselines import forecasts, persistence
from apps.weather.events import AT_SUN, EVENTS, SOLAR, SUN, WINDOWS
from core import ShardTensor
from data.weather.sun import cos_zenith

HAIR = 1e-3  # in units of a channel


def score_case(ensemble, frames, index, config, baselines, hrrr=None, draw=False):
    """Sums of one case, {"channel/source/name": fp64 (lead, ...)}; with ``draw`` also whole fields for the maps.

    Scored is what was seen both in the history and at the valid time, reflectance of the sun only where it shines.
    Fields: {channel: {source: [(y, x) of each lead]}}, NaN where masked: "observed", "member 1", "mean", the baselines.

    Args:
        ensemble: gives for each lead the members (member, channel, y, x) in the units of the archive, fp64.
    """
    with together():
        known = persistence(frames.history(index)).valid[0]
        truths = [frames.observed(index + lead) for lead in range(1, config.steps + 1)]
    carried = forecasts(baselines, frames, index, config.steps, config.members, config.seed, hrrr)
    rows, panels = {}, {}
    for lead, (members, truth) in enumerate(zip(ensemble, truths)):
        seen, time = frames.physical(truth.values)[0], frames.reader.times[index + lead + 1]
        for c, channel in enumerate(frames.facts.channels):
            valid = truth.valid[0, c] & known[c]
            sources = {"model": members[:, c]}
            sources |= {name: fields[channel][lead] for name, fields in carried.items() if channel in fields}
            for part, where in _parts(channel, frames, time, valid):
                score = _score if part == channel else _errors
                for name, value in score(sources, seen[c], where, known[c], channel, frames.facts).items():
                    rows.setdefault(f"{part}/{name}", []).append(value)
            if draw:
                panel = panels.setdefault(channel, {})
                shown = {"member 1": members[0, c], "mean": members[:, c].mean(0)}
                shown |= {name: values[0] for name, values in sources.items() if name != "model"}
                panel.setdefault("observed", []).append(_whole(seen[c], truth.valid[0, c]))
                for name, values in shown.items():
                    panel.setdefault(name, []).append(_whole(values, known[c]))
    return {name: torch.stack(values) for name, values in rows.items()}, panels


def _parts(channel, frames, time, valid):
    """(name, points) of what is scored apart: a channel; of reflected sunlight the whole and each height of the sun."""
    if channel not in SOLAR:
        return [(channel, valid)]
    lat, lon = (v.to_local().cpu().numpy() for v in (frames.latitude, frames.longitude))
    height = torch.from_numpy(cos_zenith(lat, lon, time)).to(frames.latitude.device)
    ends = [(SUN[0], SUN[-1]), *zip(SUN, SUN[1:])]
    lit = [ShardTensor((height > low) & (height <= high), frames.latitude.spec) for low, high in ends]
    names = [channel, *(f"{channel}{AT_SUN}{i}" for i in range(len(SUN) - 1))]
    return [(name, valid & where) for name, where in zip(names, lit)]


def _score(sources, truth, valid, known, channel, facts):
    """Sums {"source/name": ...} of all sources of one channel, and the spectrum of the truth as source "observed"."""
    c, edges = facts.channels.index(channel), metrics.bands(facts.shape)
    floor = facts.floor[c]
    zero = facts.mean[c] if floor is None else floor
    out, truth = {}, _settled(truth, floor)
    for source, members in sources.items():
        members = _settled(members, floor)
        sums = score_field(members, truth, valid, known, EVENTS.get(channel))
        sums |= metrics.spectrum_sums(members, valid, edges, zero)
        out |= {f"{source}/{name}": value for name, value in sums.items()}
    seen = metrics.spectrum_sums(truth[None], valid, edges, zero)
    return out | {f"observed/{name}": value for name, value in seen.items()}


def _errors(sources, truth, valid, known, channel, facts):
    """Sums of errors and ensembles only, {"source/name": ...}."""
    return {f"{source}/{name}": value for source, members in sources.items()
            for name, value in score_field(members, truth, valid, known, None, ranks=False).items()}  # fmt: skip


def score_field(members, truth, valid, known, events, ranks=True):
    """Sums of an ensemble (member, y, x) against (y, x). Errors are those of the ensemble mean.

    known: points of which there is a forecast; valid: those of them that are scored, where the truth was seen too.
    events: `Events`, or None where the channel has none. A point where a member is NaN does not count.
    """
    valid, known = (where & members.isfinite().all(0) for where in (valid, known))
    sums = metrics.error_sums(members.mean(0), truth, valid) | metrics.ensemble_sums(members, truth, valid)
    if ranks and members.shape[0] > 1:
        sums |= metrics.rank_sums(members, truth, valid)
    if events is not None:
        sums |= metrics.event_sums(members, truth, valid, events.thresholds, events.below)
        nearby = events.thresholds, WINDOWS, events.below
        sums |= metrics.fraction_sums(members, truth, valid, *nearby)
        sums |= metrics.matched_fraction_sums(members, truth, valid, known, *nearby)
    return sums


def _settled(values, floor):
    """Values a hair from "nothing there" become it: scaling and back leaves rounding errors, and they break ties."""
    return values if floor is None else torch.where((values - floor).abs() < HAIR, floor, values)


def _whole(values, valid):
    return torch.where(valid, values, math.nan).full_tensor().cpu().numpy()
