"""The graphs of one kind of call of a captured module: how they are recorded, and the node that replays them."""

import torch
from torch.autograd import Function
from torch.func import functional_call

from core.arguments import call, local_of
from core.border import as_shards
from core.errors import ShardingError
from core.shard_tensor import ShardTensor

_copies = torch.ops.aten._foreach_mul.Scalar
_WARM = 3  # calls before a recording: libraries choose their kernels in them


class Recording:
    """The graphs of one kind of call, and the tensors that they read and write.

    Attributes:
        given: what stands for the arguments. stand_ins: weights by name, in the memory of the real ones, with gradients
            of their own: hooks and wrappers of the real ones do not see the recording.
        results, seeds, found: of the forward pass, and what goes into the backward pass and comes out of it.
        turn: number of the last forward pass.
    """

    def __init__(self, original, args, kwargs, tensors):
        self.original, self.call, self.turn = original, (args, kwargs), 0
        differentiated = torch.is_grad_enabled()
        self.given = [t.detach().clone().requires_grad_(t.requires_grad and differentiated) for t in tensors]
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
                local_of(mine).copy_(local_of(t))
            self.forward_graph.replay()
            self.turn += 1
            return [r.clone() for r in self.results]

    def backward(self, grads):
        """Gradients of arguments and weights, None where there is none."""
        for seed, grad in zip(self.seeds, grads):
            if seed is not None and grad is not None:
                spec = seed._spec if isinstance(seed, ShardTensor) else None
                local_of(seed).copy_(local_of(as_shards(grad, spec.mesh).redistribute_to(spec) if spec else grad))
            elif seed is not None:
                local_of(seed).zero_()
        self.backward_graph.replay()
        plain = [g for g in self.found if g is not None and not isinstance(g, ShardTensor)]
        kept = iter(_copies(plain, 1) if plain else [])  # one that accumulates must outlive the next replay
        return [g.clone() if isinstance(g, ShardTensor) else g if g is None else next(kept) for g in self.found]


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
