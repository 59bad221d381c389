"""What a forecast and an evaluation share: the options of an ensemble, its models, and what it does about gaps."""

from dataclasses import dataclass, replace

import torch

from apps.cli import option
from apps.weather.diffusion import SOLVERS
from apps.weather.policy import KINDS
from apps.weather.stages import chain, load
from core import InputError
from core.capture import capture


@dataclass(kw_only=True)
class EnsembleConfig:
    """Options of what makes ensembles."""

    satellite: tuple[str, ...] | None = option(None, "training of the model of the bands that --checkpoint is told, "
                                               "or a step of it; one of each expert")  # fmt: skip
    steps: int = option(6, "steps ahead")
    members: int = option(4, "ensemble members")
    seed: int = option(0, "of the ensemble")
    solver: str = option("heun", "heun: two calls of the network a step; dpm: one, for few steps", choices=SOLVERS)
    sampler_steps: int | None = option(None, "steps of the sampler; left out: as in training")
    sigma_max: float | None = option(None, "noise from which the sampler starts; left out: as in training")
    churn: float = option(0.0, "share by which Heun raises the noise before each step; 0: deterministic")
    at_once: int = option(8, "members that the network sees together; fewer need less memory")
    precision: str = option("fp32", "arithmetic of the networks: that of their weights, or bf16 as in training: "
                            "faster, less exact, and members hang a little on how ranks are arranged",
                            choices=("fp32", "bf16"))  # fmt: skip
    capture: bool = option(False, "record the networks' passes on a GPU and replay them, which costs no Python")
    columns: int = option(1, "of the --domain ranks, how many stand side by side: the grid is then cut both ways")
    missing: str | None = option(None, "what is done about frames with little observed; left out: as in "
                                 "training", choices=KINDS)  # fmt: skip
    least: float | None = option(None, "share of a frame that must be observed in every channel; left out: as in "
                                 "training")  # fmt: skip


def load_stages(config):
    """The stages that --checkpoint and --satellite name, with the sampler and the arithmetic of the other options.

    Raises:
        InputError: --capture without a GPU, bf16 of a training in fp64, or what `load` and `chain` refuse.
    """
    if config.capture and not torch.cuda.is_available():
        raise InputError("--capture records on GPUs, and there is none", remedy="Leave it out")
    if config.sigma_max is not None and config.sigma_max <= 0:
        raise InputError(f"--sigma-max is {config.sigma_max:g}", remedy="Give some number above 0")
    sampler = dict(steps=config.sampler_steps, sigma_max=config.sigma_max, churn=config.churn, solver=config.solver)
    last = load(config.checkpoint, **sampler)
    stages = chain(last, load(config.satellite, **sampler) if config.satellite else None)
    for stage in stages:
        stage.half = config.precision == "bf16"
        if stage.half and stage.dtype == torch.float64:
            raise InputError("was trained in fp64, which bf16 leaves as it is", file=stage.paths[0],
                             remedy="Leave out --precision")  # fmt: skip
        for network in stage.networks() if config.capture else ():
            capture(network)
    return stages


def policy_of(config, stages):
    """The `Policy` of the options, where they are left out that of the trainings.

    Raises:
        InputError: two trainings that differ in it.
    """
    first, last = stages[0], stages[-1]
    if first.policy != last.policy and None in (config.missing, config.least):
        raise InputError(
            f"was trained with {first.policy}, {last.paths[0]} with {last.policy}", file=first.paths[0],
            remedy="Choose with --missing and --least",
        )  # fmt: skip
    return chosen(config, last.policy)


def chosen(config, policy):
    """``policy`` with what the options say of it."""
    own = {name: getattr(config, name) for name in ("missing", "least") if getattr(config, name) is not None}
    return replace(policy, **own)
