"""What a training does with a model beside the steps: optimizers, recomputed blocks, parts of a batch, averages."""

from contextlib import nullcontext

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recomputed

from apps.muon import Muon
from core import InputError
from core.parallelize import reshard, unwrapped

OPTIMIZERS = ("adamw", "muon")


def optimizers_of(model, config, blocks):
    """Optimizers that share the weights of a model: AdamW; with ``config.optimizer`` "muon" it leaves the matrices
    within ``blocks`` to Muon, scaled so that one learning rate suits both.

    Raises:
        InputError: there are no such matrices, or they are cut (FSDP2, tensor parallel), and Muon needs them whole.
    """
    matrices = [p for block in blocks for p in block.parameters() if p.ndim == 2] if config.optimizer == "muon" else []
    if config.optimizer == "muon" and (not matrices or any(isinstance(p, DTensor) for p in matrices)):
        raise InputError(
            "--optimizer muon needs whole weight matrices, which --fsdp cuts" if matrices else "no matrices for Muon",
            remedy="Leave out --fsdp, or choose --optimizer adamw",
        )
    hidden, common = set(matrices), dict(lr=config.lr, weight_decay=config.weight_decay)
    rest = [p for p in unwrapped(model).parameters() if p not in hidden]
    found = [torch.optim.AdamW(rest, betas=(0.9, 0.98), **common)] if rest else []
    return found + ([Muon(matrices, **common)] if matrices else [])


def recompute(blocks):
    """Makes each block compute its forward pass once more in the backward pass, in place of keeping what is in it."""
    for block in blocks:
        block.forward = _again(block.forward)


def _again(forward):
    def call(*args, **kwargs):
        return recomputed(forward, *args, use_reentrant=False, **kwargs)

    return call


def gradients_sent(model, now):
    """A context for one part of a batch: gradients travel between data groups after the last part only (``now``)."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not now else nullcontext()


class Swapped:
    """The averaged weights in place of the trained ones, for the time of a validation."""

    def __init__(self, model, named, ema):
        self.model, self.named, self.ema = model, named, ema

    def __enter__(self):
        self._swap()

    def __exit__(self, *error):
        self._swap()

    @torch.no_grad()
    def _swap(self):
        reshard(self.model)
        for name, p in self.named() if self.ema else ():
            kept = p.detach().clone()
            p.copy_(self.ema[name])
            self.ema[name].copy_(kept)
