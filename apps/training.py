"""What a training does to a model beside the optimizer: recomputed blocks, compiling, parts of a batch, averages."""

from contextlib import nullcontext

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recomputed

from core.parallelize import reshard


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
