"""A module recorded once and replayed: on a GPU a small step is bound by the Python that asks for it, not by its work.

:func:`capture` lets a module record a CUDA graph of its forward pass, and one of its backward pass, for each kind of
call: messages over the mesh and the sums of weight gradients are in them. A replay costs one launch, whatever is in the
module. Weights may change between calls, in place as optimizers do; shapes and cuts may not.

What the recording needs is what CUDA graphs need: no value is looked at on the way (``item``, ``if x > 0``), and no
random number of ours is drawn.
"""

from contextlib import contextmanager
from operator import is_

import torch
from torch import nn

from core._torch import tables_of
from core.arguments import described, local_of, scan
from core.errors import ShardingError
from core.recording import Recording

_MOST = 8  # kinds of call that are kept


def capture(module):
    """Records the forward and backward pass of ``module`` on a GPU, in place, and returns it; without GPU does nothing.

    Each kind of call (shapes, dtypes, cuts, gradients wanted or not, training or not, autocast) is recorded when it
    first comes, on all ranks alike, and keeps the memory of its activations; all are dropped when parameters, buffers
    or submodules are added, replaced or moved. Arguments are tensors and what compares
    equal; results are tensors. A forward pass must be differentiated before the next of its kind.

    Raises:
        ShardingError: more than eight kinds of call; a backward pass whose activations the next call has overwritten;
            random numbers while recording.
    """
    if torch.cuda.is_available():
        module.forward = _Captured(module, module.forward)
    return module


def release(module):
    """Gives a captured module its own forward pass back."""
    if isinstance(module.forward, _Captured):
        module.forward = module.forward.original.as_it_was


@contextmanager
def paused(module):
    """Calls of the module inside run as they were, and its recordings stay: for shapes that come once."""
    recorded = module.forward
    release(module)
    try:
        yield
    finally:
        if isinstance(recorded, _Captured):
            module.forward = recorded


class _Original(nn.Module):
    """The forward pass as it was, of weights that may be stood in for."""

    def __init__(self, module, forward):
        super().__init__()
        self.module, self.as_it_was = module, forward

    def forward(self, *args, **kwargs):
        return self.as_it_was(*args, **kwargs)


class Held:
    """What a module consists of, and where its parameters and buffers lie."""

    def __init__(self, module):
        self.module = module
        self._look()

    def _look(self):
        self.tables = tables_of(self.module)
        self.parts = self._parts()
        self.weights = list(self.module.parameters())
        self.tensors = [*self.weights, *self.module.buffers()]
        self.places = self._places()

    def _parts(self):
        return [part for table in self.tables for part in table.values()]

    def _places(self):
        return [local_of(t).data_ptr() for t in self.tensors]

    def changed(self):
        """Whether anything was added, replaced or moved since this was asked before; values may differ."""
        parts = self._parts()
        if len(parts) == len(self.parts) and all(map(is_, parts, self.parts)) and self._places() == self.places:
            return False
        self._look()
        return True


class _Captured:
    def __init__(self, module, forward):
        self.original, self.recordings, self.held = _Original(module, forward), {}, Held(module)

    def __call__(self, *args, **kwargs):
        tensors = []
        kind = scan(args, tensors), tuple(kwargs), scan(kwargs.values(), tensors), _modes(self.original.module)
        if not any(t.is_cuda for t in tensors) or torch.cuda.is_current_stream_capturing():
            return self.original(*args, **kwargs)
        differentiated = torch.is_grad_enabled()
        if self.held.changed():  # recordings read what is not the module's any more
            self.recordings.clear()
        wanted = tuple([p.requires_grad for p in self.held.weights])
        kind = kind, differentiated, tuple([(t.dtype, t.requires_grad and differentiated) for t in tensors]), wanted
        if kind not in self.recordings:
            if len(self.recordings) == _MOST:
                raise ShardingError(
                    f"{_MOST} kinds of call are recorded, and this is another",
                    op="capture",
                    operands=described(tensors),
                    remedy="Call a captured module with few shapes and cuts.",
                )
            self.recordings[kind] = Recording(self.original, args, kwargs, tensors)
        return self.recordings[kind](tensors)


def _modes(module):
    return module.training, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
