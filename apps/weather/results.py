"""The results of an evaluation, as they lie in ``results.json``: scores, how sure they are, and the sums behind them.

Top level (schema "shardfield-verification-1"); a list over leads unless it says otherwise, null where nothing counted:

    cases            starting times, ISO, UTC; lead_minutes: minutes after them; split of the archive
    members          {source: members}; sources are "model" and the baselines
    units, long_names, events    {channel: unit}, {channel: what it is}, {channel: {"thresholds": [...], "below": bool}}
    windows          {"cells": [...], "km": [...]}, of fss and fss_matched_mean
    wavelengths_km   upper and lower end of each band of the spectra, [[...], [...]]
    scores           {channel: {source: {score: [lead] or [lead][threshold] or [lead][threshold][window] ...}}}
    intervals        the same with {"low", "high"} in place of a list: 95 % of the draws of the bootstrap
    differences      {channel: {baseline: {score: {"mean", "low", "high"}}}}: model less baseline in the same draws
    sun              {channel: [{"cos_zenith": [low, high], "scores": {source: {score: [lead]}}}]} of reflected sunlight
    sums             {channel: {source: {sum: [case][lead]...}}}: add over cases, then `apps.metrics.scores`
    bootstrap        draws, block_hours, and the number of blocks drawn from; under five there are no intervals
    provenance       checkpoint, archive, seeds and versions

Scores end in a dim of their own: rank_histogram and reliability of members + 1 places, roc_* of members + 2, power and
power_ratio of bands. Source "observed" has the power only. docs/verification.md defines the scores.
"""

import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from apps import metrics
from apps.outputs import write_json, written
from apps.weather.events import AT_SUN, EVENTS, SUN, WINDOWS
from data.weather.channels import CHANNELS

SCHEMA = "shardfield-verification-1"
FEWEST = 5  # blocks of starting times: of fewer, draws do not say how far the score may be off
CURVES = ("rank_histogram", "reliability", "forecasts", "roc_pod", "roc_pofd", "base_rate")  # not better or worse


def summarize(sums, facts, times, config, sources, about):
    """The results of ``sums`` {"channel/source/name": (case, lead, ...)}: a dict as above.

    times: of the cases, datetime64; sources: names of the baselines.
    """
    blocks = _blocks(times, config.block_hours)
    count = int(blocks.max()) + 1
    weights = metrics.draws(len(times), config.draws, config.seed, blocks) if count >= FEWEST else None
    tree, found = _tree(sums), {"scores": {}, "intervals": {}, "differences": {}}
    for channel, by_source in tree.items():
        if AT_SUN in channel:
            continue
        scores = _scores({s: {k: v.sum(0) for k, v in own.items()} for s, own in by_source.items()})
        found["scores"][channel] = scores
        if weights is None:
            found["intervals"][channel] = found["differences"][channel] = {}
            continue
        again = _scores({source: metrics.drawn(own, weights) for source, own in by_source.items()})
        found["intervals"][channel] = {s: {k: _interval(v) for k, v in own.items()} for s, own in again.items()}
        found["differences"][channel] = {
            source: {
                name: {"mean": scores["model"][name] - scores[source][name], **_interval(again["model"][name] - values)}
                for name, values in again[source].items()
                if name in again["model"] and name not in CURVES
            }
            for source in again
            if source not in ("model", "observed")
        }
    length, edges = facts.km * max(facts.shape), metrics.bands(facts.shape)
    return _plain({
        "schema": SCHEMA,
        "cases": [str(t) for t in times],
        "split": config.split,
        "lead_minutes": [facts.step_minutes * lead for lead in range(1, config.steps + 1)],
        "members": {"model": config.members} | {s: config.members if s == "steps" else 1 for s in sources},
        "units": dict(zip(facts.channels, facts.units)),
        "long_names": {name: CHANNELS[name].long_name.replace(" um", " µm") for name in facts.channels},
        "events": {c: asdict(EVENTS[c]) for c in facts.channels if c in EVENTS},
        "windows": {"cells": WINDOWS, "km": [w * facts.km for w in WINDOWS]},
        "wavelengths_km": [[length / k for k in part] for part in (edges[:-1], edges[1:])],
        **found,
        "sun": _by_sun(tree),
        "bootstrap": {"draws": config.draws, "block_hours": config.block_hours, "blocks": count},
        "sums": tree,
        "provenance": about,
    })  # fmt: skip


def _tree(sums):
    out = {}
    for key, value in sums.items():
        channel, source, name = key.split("/")
        out.setdefault(channel, {}).setdefault(source, {})[name] = value
    return out


def _by_sun(tree):
    """Scores of reflected sunlight by the height of the sun."""
    out = {}
    for name in (name for name in tree if AT_SUN in name):
        channel, number = name.split(AT_SUN)
        scores = {s: metrics.scores({k: v.sum(0) for k, v in own.items()}) for s, own in tree[name].items()}
        out.setdefault(channel, []).append({"cos_zenith": list(SUN[int(number) :][:2]), "scores": scores})
    return out


def _scores(by_source):
    """Scores of each source of one channel, and the power of each as a share of what was observed."""
    out = {source: metrics.scores(sums) for source, sums in by_source.items()}
    for source in out.keys() - {"observed"}:
        out[source]["power_ratio"] = out[source]["power"] / out["observed"]["power"]
    return out


def _interval(values):
    low, high = metrics.limits(values)
    return {"low": low, "high": high}


def _blocks(times, hours):
    """An id for each case; those whose times fall into the same ``hours`` since the first share it."""
    since = (np.asarray(times) - np.min(times)) / np.timedelta64(1, "h")
    keys = np.floor(since / hours) if hours > 0 else since
    return torch.from_numpy(np.unique(keys, return_inverse=True)[1].reshape(-1))


def _plain(value):
    """Tensors as lists, NaN as None: JSON has neither."""
    if isinstance(value, torch.Tensor):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(results, folder):
    """``results.json`` in a folder, complete or absent."""
    path = Path(folder) / "results.json"
    with written(path) as (part,):
        write_json(part, results)
    print(f"results {path}")


def show(results):
    """CRPS against lead, with a mark where the model's is better (+) or worse (-) than the baseline's for sure."""
    leads = results["lead_minutes"]
    print(f"{'CRPS':22}{'after (minutes)':20}" + "".join(f"{lead:10.0f}" for lead in leads))
    for channel, by_source in results["scores"].items():
        for source, scores in by_source.items():
            if source == "observed":
                continue
            marks = better(results, channel, source, "crps")
            values = "".join(f"{math.nan if v is None else v:9.3f}{m}" for v, m in zip(scores["crps"], marks))
            print(f"{channel + ' (' + results['units'][channel] + ')':22}{source:20}{values}")
    print("lower is better; the model is surely better (+) or worse (-) than this one; all scores: results.json")


def better(results, channel, baseline, score, at=(), lower=True):
    """For each lead "+" where the model is surely better than a baseline, "-" surely worse, " " not told apart.

    Sure is an interval of the difference that leaves zero out; at: indices of threshold and window; lower is better.
    """
    found = results["differences"][channel].get(baseline, {}).get(score)
    if found is None:
        return [" "] * len(results["lead_minutes"])
    signs = [_side(pick(low, at), pick(high, at)) for low, high in zip(found["low"], found["high"])]
    return [" " if side == 0 else "+" if (side < 0) == lower else "-" for side in signs]


def pick(value, at):
    """``value[at[0]][at[1]]...`` of nested lists."""
    for i in at:
        value = value[i]
    return value


def _side(low, high):
    """-1 for an interval below zero, 1 above, 0 for one that holds it or is unknown."""
    if low is None or high is None or low <= 0 <= high:
        return 0
    return -1 if high < 0 else 1
