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
from torch.autograd import Function
from torch.func import functional_call

from core._torch import tables_of
from core.arguments import call, scan
from core.border import as_shards
from core.errors import ShardingError
from core.shard_tensor import ShardTensor

_copies = torch.ops.aten._foreach_mul.Scalar
_WARM = 3  # calls before a recording: libraries choose their kernels in them
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
        return [_local(t).data_ptr() for t in self.tensors]

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
        tensors: list[torch.Tensor] = []
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
                    operands=[t._spec if isinstance(t, ShardTensor) else tuple(t.shape) for t in tensors],
                    remedy="Call a captured module with few shapes and cuts.",
                )
            self.recordings[kind] = _Recording(self.original, args, kwargs, tensors)
        return self.recordings[kind](tensors)


def _modes(module):
    return module.training, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")


class _Recording:
    """The graphs of one kind of call, and the tensors that they read and write.

    Attributes:
        given: what stands for the arguments. stand_ins: weights by name, in the memory of the real ones, with gradients
            of their own: hooks and wrappers of the real ones do not see the recording.
        results, seeds, found: of the forward pass, and what goes into the backward pass and comes out of it.
        turn: number of the last forward pass.
    """

    def __init__(self, original, args, kwargs, tensors):
        self.original, self.call, self.turn = original, (args, kwargs), 0
        self.differentiated = torch.is_grad_enabled()
        self.given = [t.detach().clone().requires_grad_(t.requires_grad and self.differentiated) for t in tensors]
        named = dict(original.named_parameters())
        self.weights = list(named.values())
        self.stand_ins = {n: p.detach().requires_grad_(p.requires_grad) for n, p in named.items()}
        for p in self.stand_ins.values():
            p._in_bucket = True
        self.leaves = [*self.given, *self.stand_ins.values()]
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # weights are cast in the graph, as they are at each replay
        try:
            self._warm()
            self._record()
        finally:
            torch.set_autocast_cache_enabled(cached)

    def _computed(self):
        args, kwargs = self.call

        def run(*args, **kwargs):
            return functional_call(self.original, self.stand_ins, args, kwargs)

        results = call(run, args, kwargs, self.given)
        self.single = isinstance(results, torch.Tensor)
        return [results] if self.single else list(results)

    def _warm(self):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM):
                results = [r for r in self._computed() if r.requires_grad]
                if results:
                    torch.autograd.backward(results, [torch.zeros_like(r) for r in results])
                self._forget_gradients()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()

    def _record(self):
        with torch.cuda.graph(self.forward_graph, capture_error_mode="thread_local"):
            self.results = self._computed()
        live = [r for r in self.results if r.requires_grad]
        self.seeds = [torch.zeros_like(r) if r.requires_grad else None for r in self.results]
        if live:
            pool = self.forward_graph.pool()
            with torch.cuda.graph(self.backward_graph, pool=pool, capture_error_mode="thread_local"):
                torch.autograd.backward(live, [s for s in self.seeds if s is not None])
        self.found = [t.grad for t in self.leaves]
        self._forget_gradients()
        self.results = [r.detach() for r in self.results]

    def _forget_gradients(self):
        for t in self.leaves:
            t.grad = None

    def __call__(self, tensors):
        if any(s is not None for s in self.seeds):
            results = _Replayed.apply(self, *tensors, *self.weights)
        else:
            results = self.forward(tensors)
        return results[0] if self.single else tuple(results)

    def forward(self, tensors):
        with torch.no_grad():
            for mine, t in zip(self.given, tensors):
                _local(mine).copy_(_local(t))
            self.forward_graph.replay()
            self.turn += 1
            return [r.clone() for r in self.results]

    def backward(self, grads):
        """Gradients of arguments and weights, None where there is none."""
        for seed, grad in zip(self.seeds, grads):
            if seed is not None and grad is not None:
                spec = seed._spec if isinstance(seed, ShardTensor) else None
                _local(seed).copy_(_local(as_shards(grad, spec.mesh).redistribute_to(spec) if spec else grad))
            elif seed is not None:
                _local(seed).zero_()
        self.backward_graph.replay()
        plain = [g for g in self.found if g is not None and not isinstance(g, ShardTensor)]
        kept = iter(_copies(plain, 1) if plain else [])  # one that accumulates must outlive the next replay
        return [g.clone() if isinstance(g, ShardTensor) else g if g is None else next(kept) for g in self.found]


def _local(tensor):
    return tensor._local_tensor if isinstance(tensor, ShardTensor) else tensor


class _Replayed(Function):
    @staticmethod
    def forward(ctx, recording, *tensors):
        results = recording.forward(tensors[: len(recording.given)])
        ctx.recording, ctx.turn = recording, recording.turn
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(r for r, s in zip(results, recording.seeds) if s is None))
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        if ctx.turn != ctx.recording.turn:
            raise ShardingError(
                "the activations of this forward pass are overwritten by a later one",
                op="capture",
                remedy="Differentiate each call of a captured module before the next, or do not capture it.",
            )
        return None, *ctx.recording.backward(grads)
