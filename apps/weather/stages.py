"""The models of a forecast, from checkpoints: one, or the satellite's before the radar's, each one network or experts.

A stage reads the history of ``facts.channels`` and makes the next frame of those behind the first ``told``.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from apps.checkpoints import check_kind, find
from apps.weather.diffusion import Diffusion, Experts
from apps.weather.facts import Facts
from apps.weather.model import Denoiser, ModelConfig
from apps.weather.policy import Policy
from core import DistributedManager, InputError, checkpoint

KIND = "weather denoiser"
_PER_CHANNEL = ("channels", "mean", "std", "log", "floor", "units")
_PER_FIELD = ("background", "background_mean", "background_std")


@dataclass
class Stage:
    """One model of a forecast: ``network`` a `Denoiser` or `Experts`; ``told`` channels come from elsewhere."""

    network: object
    process: Diffusion
    facts: Facts
    told: int
    patch: int
    dtype: torch.dtype
    policy: Policy  # of its training
    state: dict  # of the checkpoint
    paths: tuple
    half: bool = False  # products in bf16

    def networks(self):
        """All of them, experts or the one."""
        return [network for network, _ in self.network.parts] if isinstance(self.network, Experts) else [self.network]

    @property
    def made(self):
        """Channels that it forecasts."""
        return self.facts.channels[self.told :]


def load(paths, **sampler):
    """The `Stage` of a checkpoint (or run), or of those of all its experts, with averaged weights on this device.

    sampler: fields of `Diffusion` to change; None leaves what the training had.

    Raises:
        InputError: no checkpoint, a damaged one, one of another model, or experts that do not share the noise.
    """
    paths = [find(path) for path in ((paths,) if isinstance(paths, (str, Path)) else paths)]
    states = [checkpoint.read_state(path) for path in paths]
    for path, state in zip(paths, states):
        check_kind(state, KIND, path)
    processes = [Diffusion(**state["task"]["diffusion"]) for state in states]
    order = sorted(range(len(paths)), key=lambda i: processes[i].low)
    paths, states, processes = ([these[i] for i in order] for these in (paths, states, processes))
    _check_experts(paths, states, processes)
    networks = [_network(path, state["task"]) for path, state in zip(paths, states)]
    network = Experts(list(zip(networks, (p.high or math.inf for p in processes)))) if len(paths) > 1 else networks[0]
    process = replace(processes[0], **{name: value for name, value in sampler.items() if value is not None})
    facts, config = Facts.from_json(states[0]["task"]["facts"]), networks[0].config
    dtype, task = networks[0].head.weight.dtype, states[0]["task"]
    policy = Policy(**task.get("policy", {}))
    return Stage(network, process, facts, task["told"], config.patch, dtype, policy, states[0], tuple(paths))


def _network(path, task):
    dtype = torch.float64 if task["precision"] == "fp64" else torch.float32
    model = Denoiser(ModelConfig(**task["model"])).to(DistributedManager().device, dtype)
    checkpoint.load(path, model, averaged=True)
    return model.eval()


def _check_experts(paths, states, processes):
    """Refuses experts of different models, and noise that none or two of them learned."""
    common = [[s["task"].get(name) for name in ("facts", "told", "precision", "policy")] for s in states]
    for path, own in zip(paths, common):
        if own != common[0]:
            raise InputError(
                f"is of another model than {paths[0]}",
                file=path,
                remedy="Give experts of one --part, trained on one archive with one --missing",
            )
    ends = [0.0, *(p.high or math.inf for p in processes)]
    for path, process, end in zip(paths, processes, ends):
        if process.low != end:
            raise InputError(
                f"learned noise from {process.low:g} on, and none before it from {end:g} on",
                file=path, remedy="Give one checkpoint of each expert, or one that learned all noise",
            )  # fmt: skip
    if ends[-1] != math.inf:
        raise InputError(f"learned no noise above {ends[-1]:g}", file=paths[-1],
                         remedy="Give the checkpoints of the other experts too")  # fmt: skip


def chain(last, first=None):
    """Stages in the order in which they run: ``last`` alone, or with ``first``, which forecasts what it is told.

    Raises:
        InputError: a model that is told of channels that none forecasts, or statistics that differ.
    """
    made = first.made if first else ()
    lacking = [name for name in last.facts.channels[: last.told] if name not in made]
    if lacking:
        raise InputError(
            f"is told of {', '.join(lacking)}, which nothing forecasts", file=last.paths[0],
            remedy="Give --satellite the checkpoint of a model that forecasts them",
        )  # fmt: skip
    stages = [last] if first is None else [first, last]
    merged(stages)
    return stages


def merged(stages):
    """`Facts` of all channels that the stages see, with the longest history.

    Raises:
        InputError: two stages that scale a channel differently, or stand on other grids.
    """
    whole = stages[-1].facts
    for stage in stages:
        facts = stage.facts
        for name in ("step_minutes", "shape", "x", "y", "crs"):
            if getattr(facts, name) != getattr(whole, name):
                raise InputError(f"its {name} is {getattr(facts, name)}, that of {stages[-1].paths[0]} is "
                                 f"{getattr(whole, name)}", file=stage.paths[0],
                                 remedy="Train both models on one archive")  # fmt: skip
    columns = _table(stages, _PER_CHANNEL) | _table(stages, _PER_FIELD)
    return replace(whole, history=max(stage.facts.history for stage in stages), **columns)


def _table(stages, names):
    """Columns of the facts of all stages, each row once."""
    table = {}
    for stage in stages:
        for row in zip(*(getattr(stage.facts, name) for name in names)):
            if table.setdefault(row[0], row) != row:
                raise InputError("is scaled by other statistics in the other model", file=stage.paths[0],
                                 variable=row[0], remedy="Train both models on one archive")  # fmt: skip
    return dict(zip(names, map(tuple, zip(*table.values()))))
