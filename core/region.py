"""One node of the global graph around a piece of local graph: what is caught above autograd is differentiated here.

Forward and backward run on plain local tensors, collectives included. The node's own gradient is again such a node,
so a second derivative is the derivative of the local backward.
"""

import weakref

import torch
from torch.autograd import Function

from core._torch import NoTorchFunction, is_nothing, keeps_graph, unseen_by_checkpoints
from core.gradients import summed
from core.redistribute import move
from core.shard_tensor import Plain, ShardTensor, as_shards, local_cotangent


def run(plan, compute, tensors):
    """``compute(local tensors)`` under ``plan``, in a node of the graph if one of the tensors wants a gradient.

    Called with ``__torch_function__`` off. Tensors are ShardTensors under the plan's specs, or plain and whole.
    """
    if torch.is_grad_enabled():
        for t in tensors:
            if t.requires_grad:
                return Region.apply(plan, compute, *tensors)
    return handed_out(compute([_local(t) for t in tensors]), plan.outputs, plan.final)


def _local(tensor):
    return tensor._local_tensor if isinstance(tensor, ShardTensor) else tensor


def handed_out(out, spec, final=None):
    """Local results under ``spec`` as ShardTensors under ``final``, by default with their sums carried out."""
    if isinstance(out, torch.Tensor):
        if spec is None:
            return out
        final = final or spec.finished()
        return ShardTensor(out if final is spec else move(out, spec, final), final)
    if isinstance(out, (tuple, list)):
        return tuple([handed_out(o, *s) for o, s in zip(out, pairs(spec, final, len(out)))])
    return out


def pairs(spec, final, n):
    return zip(*(s if isinstance(s, (tuple, list)) else [s] * n for s in (spec, final)))


def _detached(outs):
    if isinstance(outs, torch.Tensor):
        return outs.detach()
    return tuple([o.detach() if isinstance(o, torch.Tensor) else o for o in outs])


class Region(Function):
    """The local graph hangs on a tensor that is saved and on nothing else: whatever drops or keeps saved tensors
    (a checkpoint) does so with all that the graph holds. The saved operands are looked at only where it is gone: torch
    would take a write into one that the graph does not need for an error."""

    @staticmethod
    def forward(ctx, plan, compute, *tensors):
        token = torch.empty(0)
        token.graph = _LocalGraph(compute, tensors)
        outs = token.graph.outs
        ctx.plan, ctx.compute, ctx.graph = plan, compute, weakref.ref(token.graph)
        ctx.weights = [None if isinstance(t, ShardTensor) else t for t in tensors]
        ctx.save_for_backward(*tensors, token)
        ctx.set_materialize_grads(False)
        return handed_out(_detached(outs if isinstance(outs, tuple) else outs[0]), plan.outputs, plan.final)

    @staticmethod
    def backward(ctx, *grads):
        graph = ctx.graph() or _graph_again(ctx)
        inner, outs = graph.inner, graph.outs
        specs = ctx.plan.outputs
        specs = specs if isinstance(specs, (tuple, list)) else (specs,) * len(outs)
        live = [i for i, (o, g) in enumerate(zip(outs, grads)) if g is not None and o.requires_grad]
        wanted = [i for i, t in enumerate(inner) if t.requires_grad and ctx.needs_input_grad[i + 2]]
        results = [None] * len(inner)
        if live and wanted:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                found = _differentiable(ctx, live, wanted, specs, grads)
            else:
                found = _gradients(ctx, live, wanted, specs, grads, inner, outs)
            for i, g in zip(wanted, found):
                results[i] = g
        return None, None, *results


def _graph_again(ctx):
    """A checkpoint recomputes its whole block, this region too, when it is asked for a saved tensor; what else keeps
    saved tensors elsewhere (``save_on_cpu``) gives the operands back, from which the graph is built."""
    *tensors, token = ctx.saved_tensors
    return getattr(token, "graph", None) or _LocalGraph(ctx.compute, tensors)


class _LocalGraph:
    """Local operands as leaves, and the results computed from them. A checkpoint around us keeps its hands off what
    the local graph saves: it recomputes the region as a whole."""

    def __init__(self, compute, tensors):
        self.inner = []
        for t in tensors:
            value = _local(t).detach()
            self.inner.append(value.requires_grad_() if t.requires_grad else value)
        with torch.enable_grad(), unseen_by_checkpoints():
            outs = compute(self.inner)
        self.outs = outs if isinstance(outs, tuple) else tuple(outs) if isinstance(outs, list) else [outs]


def _gradients(ctx, live, wanted, specs, grads, inner, outs):
    found = torch.autograd.grad(
        [outs[i] for i in live],
        [inner[i] for i in wanted],
        [local_cotangent(grads[i], specs[i]) for i in live],
        allow_unused=True,
        retain_graph=keeps_graph(),
    )
    found = [torch.zeros_like(inner[i]) if g is None or is_nothing(g) else g for i, g in zip(wanted, found)]
    plain = [j for j, i in enumerate(wanted) if ctx.weights[i] is not None]
    if plain:
        weights = [ctx.weights[wanted[j]] for j in plain]
        sums = summed([found[j] for j in plain], weights, ctx.plan.inputs[wanted[plain[0]]].mesh)
        for j, g in zip(plain, sums):
            found[j] = g
    cut = [ctx.weights[i] is None for i in wanted]
    return [ShardTensor(g, ctx.plan.inputs[i].cotangent()) if c else g for i, g, c in zip(wanted, found, cut)]


# -- second derivatives ----------------------------------------------------------------------------------------------
def _differentiable(ctx, live, wanted, specs, grads):
    """The gradients as results of a region of their own, in which the local graph is built anew."""
    tensors, inputs = ctx.saved_tensors[:-1], ctx.plan.inputs
    seeds = [specs[i].cotangent() for i in live]
    cotangents = [as_shards(grads[i], s.mesh).redistribute_to(s) for i, s in zip(live, seeds)]

    def pulled_back(values):
        given, inner = values[: len(live)], values[len(live) :]
        outs = ctx.compute(inner)
        outs = outs if isinstance(outs, (tuple, list)) else (outs,)
        targets = [inner[i] for i in wanted]
        found = torch.autograd.grad([outs[i] for i in live], targets, given, create_graph=True, allow_unused=True)
        return tuple([t.new_zeros(t.shape) if g is None else g for t, g in zip(targets, found)])

    plan = ctx.plan._replace(
        inputs=(*seeds, *inputs), outputs=tuple(inputs[i].cotangent() for i in wanted), local=None, final=None
    )
    with NoTorchFunction():
        found = run(plan, pulled_back, [*cotangents, *tensors])
        return [g if ctx.weights[i] is None else Plain.apply(g) for i, g in zip(wanted, found)]
