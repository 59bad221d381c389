"""From a history to the frames after it, one step at a time, each member on its own forecast."""

import math

import torch

from apps.weather import diffusion
from apps.weather.baselines import Observed, persistence
from apps.weather.events import LEAST
from apps.weather.facts import Facts
from apps.weather.model import ModelConfig
from core import InputError


def step(network, process, frames, history, time, keys, told=0, background=()):
    """The frame after ``history``, one draw per key, scaled (len(keys), channel, y, x); of the first ``told`` channels
    the last value seen.

    history: list of `Observed` of one batch entry, or of one per key; time: of its last frame; background: what a
    weather model says of the frame (`Frames.background`).
    """
    count = len(keys)
    now = _many(persistence(history).values, count)
    conditions = _many(frames.conditions(history, time, background), count)
    noise = diffusion.noise_like(now[:, told:], keys)

    def fresh(level):
        return diffusion.noise_like(noise, [(*key, level) for key in keys])

    made = now[:, told:] + diffusion.sample(network, noise, conditions, process, fresh)
    return torch.cat([now[:, :told], made], 1)


def rollout(stages, frames, index, leads, members, seed, at_once=8, past=()):
    """Yields `Observed` ensembles (member, channel, y, x), scaled, for each of ``leads`` after frame ``index``.

    A member depends on seed, start time and its number only. Forecasts are valid where the history was: elsewhere
    nothing was ever learned.

    Args:
        stages: `apps.weather.stages.Stage` in the order in which they run; ``frames`` has the channels of all.
        leads: numbers of the steps to do, 0 for the first one.
        members: numbers of the members.
        at_once: members that the networks see together.
        past: what was yielded for the steps before ``leads``, or for the last ones of them, as many as the history has.
    """
    start, members = frames.reader.times[index], list(members)
    history = [Observed(*(_many(part, len(members)) for part in frame)) for frame in frames.history(index)]
    history = [*history, *past][-len(history) :]
    minutes = int(start.astype("datetime64[m]").astype(int))
    for lead in leads:
        parts = []
        for first in range(0, len(members), at_once):
            chosen = slice(first, first + at_once)
            keys = [(seed, minutes, member, lead) for member in members[chosen]]
            own = [Observed(*(part[chosen] for part in frame)) for frame in history]
            parts.append(_next(stages, frames, own, (index, lead), keys))
        history = [*history[1:], Observed(*(torch.cat(part) for part in zip(*parts)))]
        yield history[-1]


def _next(stages, frames, history, at, keys):
    """The `Observed` frame after ``history``, to which each stage gives its channels; at: start and steps since."""
    time = frames.reader.times[at[0]] + at[1] * frames.facts.step
    seen, names, made = persistence(history).valid, frames.facts.channels, {}
    for number, stage in enumerate(stages):
        own = [_chosen(frame, [names.index(c) for c in stage.facts.channels]) for frame in history]
        with torch.autocast(seen.device.type, torch.bfloat16, enabled=stage.half):
            values = step(stage.network, stage.process, frames, own[-stage.facts.history :], time,
                          [(*key, number) for key in keys], stage.told,
                          frames.background(*at, stage.facts.background))  # fmt: skip
        made |= {name: values[:, stage.told + c] for c, name in enumerate(stage.made)}
    values = settled(frames, torch.stack([made[name] for name in names], 1))
    return Observed(torch.where(seen, values, 0), seen)


def settled(frames, values):
    """Scaled values (..., channel, y, x) of what can be: none below the floor, and none between nothing and a little.

    A diffusion model leaves a little noise on what is mostly nothing, such as dBZ where there is no echo.
    """
    values, facts = frames.at_least_floor(values), frames.facts
    for c, name in enumerate(facts.channels):
        if name in LEAST and facts.floor[c] is not None:
            half, floor = (facts.floor[c] + LEAST[name]) / 2, facts.floor[c]
            half, floor = ((math.log1p(v) if facts.log[c] else v) for v in (half, floor))
            low, nothing = ((v - facts.mean[c]) / facts.std[c] for v in (half, floor))
            mine = torch.arange(len(facts.channels), device=values.device)[:, None, None] == c
            values = torch.where(mine & (values < low), nothing, values)
    return values


def _chosen(frame, at):
    if at == list(range(frame.values.shape[1])):
        return frame
    return Observed(*(torch.stack([part[:, c] for c in at], 1) for part in frame))


def _many(x, count):
    return x.expand(count, *x.shape[1:])


def spread(cases, count):
    """``count`` of the cases, the middle ones of as many equal parts; all where there are fewer."""
    count = min(count, len(cases))
    return [cases[(2 * i + 1) * len(cases) // (2 * count)] for i in range(count)]


def check_sizes(config: ModelConfig, facts: Facts, file):
    """Refuses sizes of a model that contradict each other or the grid."""
    tokens = min(-(-n // config.patch) for n in facts.shape)
    problems = {
        "kernel": (
            config.kernel % 2 == 1 and config.kernel <= tokens,
            f"an odd number up to {tokens}, the patches across the grid",
        ),
        "width": (config.width % (4 * config.heads) == 0, f"a multiple of 4 x {config.heads} heads"),
    }
    for name, (good, wanted) in problems.items():
        if not good:
            raise InputError(f"--{name} is {getattr(config, name)}", file=file, remedy=f"Choose {wanted}")
