"""What the plan commands of the applications share: the flags of a training, and a mesh that need not exist."""

from dataclasses import dataclass

import torch

from apps.cli import check_counts, option
from apps.meshes import domain_shape
from core import InputError
from core.devices import DEVICES
from core.plan import plan


@dataclass
class Mesh:
    """Flags beside those of the training."""

    ddp: int = option(1, "data groups, among which --batch is divided; --domain ranks share a sample")
    device: str = option("h200", "GPU to plan for", choices=tuple(DEVICES))


def planned(config, make_model, inputs, dims, step, sizes=None):
    """The :class:`core.planned.Report` of a training under ``config``.

    Args:
        inputs: name -> shape without the batch, and dtype or None for that of the weights.
        dims: placements of an input over the domain, by its number of dims with the batch; None where it is not cut.
        step: ``step(model, *inputs)`` gives the loss.
        sizes: for each axis of the domain the extents of the cut, or None for torch.chunk's.

    Raises:
        InputError: a batch that does not divide over the data groups, or FSDP, of which there is no plan.
    """
    check_counts(config, "ddp", "domain", "batch")
    if config.batch % config.ddp:
        raise InputError(
            f"a batch of {config.batch} for {config.ddp} data groups", remedy="Choose --batch as a multiple"
        )
    if config.fsdp:
        raise InputError("there is no plan of FSDP", remedy="Leave --fsdp out: with it each rank holds less")
    dtype, batch = torch.float64 if config.precision == "fp64" else torch.float32, config.batch // config.ddp
    sample = [torch.empty(batch, *shape, dtype=kind or dtype, device="meta") for shape, kind in inputs]
    placements = [dims(x.ndim) for x in sample]
    return plan(
        make_model,
        sample,
        placements,
        (config.ddp, *domain_shape(config.domain, getattr(config, "columns", 1))),
        dtype=dtype,
        device=config.device,
        ema=bool(config.ema),
        step=step,
        autocast=torch.bfloat16 if config.precision == "bf16" else None,
        sizes=[sizes and dict(enumerate(sizes)) if p else None for p in placements],
    )
