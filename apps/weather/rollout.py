"""From a history to the frames after it, one step at a time, each member on its own forecast."""

from dataclasses import replace

import torch

from apps.loop import check_kind
from apps.weather import diffusion
from apps.weather.baselines import Observed, persistence
from apps.weather.dataset import Facts
from apps.weather.diffusion import Diffusion
from apps.weather.model import Denoiser, ModelConfig
from core import DistributedManager, InputError, checkpoint

KIND = "weather denoiser"


def step(model, process, frames, history, time, keys):
    """The frame after ``history``, one draw per key, scaled (len(keys), channel, y, x).

    history: list of `Observed` of one batch entry, or of one per key; time: of its last frame.
    """
    now, count = persistence(history), len(keys)
    conditions = _many(frames.conditions(history, time), count)
    noise = diffusion.noise_like(now.values, keys)

    def fresh(level):
        return diffusion.noise_like(now.values, [(*key, level) for key in keys])

    return frames.at_least_floor(now.values + diffusion.sample(model, noise, conditions, process, fresh))


def rollout(model, process, frames, index, steps, members, seed, at_once=8):
    """Yields `Observed` ensembles (member, channel, y, x), scaled, for each of ``steps`` steps after frame ``index``.

    A member depends on seed, start time and its number only. Forecasts are valid where the history was: elsewhere
    nothing was ever learned. at_once: members that the network sees together.
    """
    start, facts = frames.reader.times[index], frames.facts
    groups = [range(i, min(i + at_once, members)) for i in range(0, members, at_once)]
    histories = [
        [Observed(*(_many(part, len(g)) for part in frame)) for frame in frames.history(index)] for g in groups
    ]
    minutes = int(start.astype("datetime64[m]").astype(int))
    for lead in range(steps):
        for i, (group, history) in enumerate(zip(groups, histories)):
            keys = [(seed, minutes, member, lead) for member in group]
            seen = persistence(history).valid
            values = step(model, process, frames, history, start + lead * facts.step, keys)
            histories[i] = [*history[1:], Observed(torch.where(seen, values, 0), seen)]
        yield Observed(*(torch.cat(parts) for parts in zip(*(history[-1] for history in histories))))


def _many(x, count):
    return x.expand(count, *x.shape[1:])


def rounds(cases, mesh):
    """This data group's share of ``cases``: pairs (case, whether it counts).

    All groups go through as many rounds, so that collectives meet; where none is left the last case comes again,
    uncounted.
    """
    groups, group = mesh["ddp"].size(), mesh.get_local_rank("ddp")
    for first in range(0, len(cases), groups):
        yield cases[min(first + group, len(cases) - 1)], first + group < len(cases)


def spread(cases, count):
    """``count`` of the cases, evenly spaced; all where there are fewer."""
    return cases[:: max(len(cases) // count, 1)][:count]


def load(path, sampler_steps=None, churn=0.0):
    """The averaged model of a checkpoint on this process's device, its `Diffusion`, `Facts` and stored state.

    Raises:
        InputError: no checkpoint, a damaged one, or one of another model.
    """
    state = checkpoint.read_state(path)
    check_kind(state, KIND, path)
    task = state["task"]
    process = replace(Diffusion(**task["diffusion"]), churn=churn)
    process = replace(process, steps=sampler_steps) if sampler_steps else process
    dtype = torch.float64 if task["precision"] == "fp64" else torch.float32
    model = Denoiser(ModelConfig(**task["model"])).to(DistributedManager().device, dtype)
    checkpoint.load(path, model, averaged=True)
    return model.eval(), process, Facts.from_json(task["facts"]), state


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
