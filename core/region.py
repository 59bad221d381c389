"""One node of the global graph around a piece of local graph: what is caught above autograd is differentiated here.

Forward and backward run on plain local tensors, collectives included. The node's own gradient is again such a node,
so a second derivative is the derivative of the local backward.
"""

import weakref
from functools import partial

import torch
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from core._torch import NoTorchFunction, compiling, is_nothing, keeps_graph, unseen_by_checkpoints
from core.arguments import call, emptied, local_of
from core.border import Plain, as_shards, local_cotangent
from core.gradients import summed
from core.precision import autocast_now, autocasts
from core.redistribute import move
from core.shard_tensor import ShardTensor


def run(plan, compute, tensors, args=None, kwargs=None):
    """``compute`` of local tensors, under ``plan``; in a node of the graph if one of them wants a gradient.

    Called with ``__torch_function__`` off. Tensors are ShardTensors under the plan's specs, or plain and whole; they
    stand where ``args`` and ``kwargs`` have holes, or are all that there is.
    """
    if args is None:
        args, kwargs = emptied(tensors, {})
    if torch.is_grad_enabled():
        for t in tensors:
            if t.requires_grad:
                if plan.formula and (cast := _as_written(plan.formula, t.device.type, tensors)):
                    return Written.apply(plan, compute, args, kwargs, *cast)
                return Region.apply(plan, partial(call, compute, args, kwargs), *tensors)
    return handed_out(call(compute, args, kwargs, [local_of(t) for t in tensors]), plan.outputs, plan.final)


def _as_written(formula, kind, tensors):
    """The operands as a formula takes them, or None where it does not hold: it knows no conjugates, and of autocast
    what it says. What autocast casts is then kept as it was cast, and not as it came."""
    if compiling() or any(t.is_complex() for t in tensors):
        return None
    if autocasts(kind) and not (formula.promotes and len({t.dtype for t in tensors}) == 1):
        dtype = formula.autocast(kind) if formula.autocast else None
        if dtype is None or any(t.dtype not in (dtype, torch.float32) for t in tensors[1:]):
            return None
        if tensors[0].dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return None
        tensors = [tensors[0].to(dtype), *tensors[1:]]
    return tensors if formula.fits is None or formula.fits(*(local_of(t) for t in tensors)) else None


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


class Written(Function):
    """A node with a formula. It keeps the operands whose values the wanted gradients need, and no others: a write into
    those is no error."""

    @staticmethod
    def forward(ctx, plan, compute, args, kwargs, *tensors):
        formula, wanted = plan.formula, ctx.needs_input_grad[4:]
        out, *extra = call(formula.forward, args, kwargs, [local_of(t) for t in tensors])
        ctx.plan, ctx.call, ctx.like = plan, (compute, args, kwargs), [(t.dtype, t.device) for t in tensors]
        ctx.weights = [None if isinstance(t, ShardTensor) else t for t in tensors]
        ctx.autocast = autocast_now(tensors[0].device.type)
        ctx.save_for_backward(*formula.kept(tensors, wanted), *extra)
        ctx.set_materialize_grads(False)
        return handed_out(out, plan.outputs, plan.final)

    @staticmethod
    def backward(ctx, grad):
        n, plan, (compute, args, kwargs) = len(ctx.like), ctx.plan, ctx.call
        needed = ctx.needs_input_grad[4:]
        wanted = [i for i in range(n) if needed[i]]
        results = [None] * (n + 4)
        if grad is None:
            return (*results,)
        saved = ctx.saved_tensors  # once: a checkpoint computes what it gives
        tensors, extra = saved[:n], saved[n:]
        if torch.is_grad_enabled():
            tensors = [
                _stand_in(spec, *like, n) if t is w is None else w if t is None else t
                for t, w, spec, like, n in zip(tensors, ctx.weights, plan.inputs, ctx.like, needed)
            ]
            compute = _under(ctx.autocast, partial(call, compute, args, kwargs))
            found = _differentiable(plan, compute, tensors, ctx.weights, [0], wanted, [plan.outputs], [grad])
        else:
            backward = partial(plan.formula.backward, local_cotangent(grad, plan.outputs), extra, needed)
            found = call(backward, args, kwargs, [t if t is None else local_of(t) for t in tensors])
            found = [found[i].to(ctx.like[i][0]) for i in wanted]  # of autocast a weight in fp32 has another
            found = _finished(plan, found, wanted, ctx.weights)
        for i, g in zip(wanted, found):
            results[i + 4] = g
        return (*results,)


def _under(autocast, compute):
    """The computation as it was in the forward pass."""

    def again(inner):
        with torch.autocast(*autocast):
            return compute(inner)

    return again if autocast[-1] else compute


class Region(Function):
    """The local graph hangs on a tensor that is saved and on nothing else: whatever drops or keeps saved tensors
    (a checkpoint) does so with all that the graph holds. The saved operands are looked at only where it is gone: torch
    would take a write into one that the graph does not need for an error."""

    @staticmethod
    def forward(ctx, plan, compute, *tensors):
        token = torch.empty(0)
        token.graph = _LocalGraph(compute, tensors)
        outs = token.graph.handed()
        ctx.plan, ctx.compute, ctx.graph = plan, compute, weakref.ref(token.graph)
        ctx.weights = [None if isinstance(t, ShardTensor) else t for t in tensors]
        ctx.save_for_backward(*tensors, token)
        ctx.set_materialize_grads(False)
        return handed_out(_detached(outs if isinstance(outs, tuple) else outs[0]), plan.outputs, plan.final)

    @staticmethod
    def backward(ctx, *grads):
        graph, again = ctx.graph(), torch.is_grad_enabled() and not compiling()
        saved = ctx.saved_tensors if again or not graph else ()  # once: a checkpoint computes what it gives
        graph = graph or _graph_again(ctx.compute, *saved)
        inner, ends = graph.inner, graph.ends
        specs = ctx.plan.outputs
        specs = specs if isinstance(specs, (tuple, list)) else (specs,) * len(ends)
        live = [i for i, (end, g) in enumerate(zip(ends, grads)) if g is not None and end is not None]
        wanted = [i for i, t in enumerate(inner) if t.requires_grad and ctx.needs_input_grad[i + 2]]
        results = [None] * len(inner)
        if live and wanted:
            if again:
                found = _differentiable(ctx.plan, ctx.compute, saved[:-1], ctx.weights, live, wanted, specs, grads)
            else:
                found = _gradients(ctx, live, wanted, specs, grads, inner, ends)
            for i, g in zip(wanted, found):
                results[i] = g
        return None, None, *results


def _graph_again(compute, *saved):
    """A checkpoint recomputes its whole block, this region too, when it is asked for a saved tensor; what else keeps
    saved tensors elsewhere (``save_on_cpu``) gives the operands back, from which the graph is built."""
    *tensors, token = saved
    return getattr(token, "graph", None) or _LocalGraph(compute, tensors)


class _LocalGraph:
    """Local operands as leaves, and the ends of the graph at the results computed from them, which are handed out and
    not kept. A checkpoint around us keeps its hands off what the local graph saves: it recomputes the region as a
    whole."""

    def __init__(self, compute, tensors):
        self.inner = []
        for t in tensors:
            value = local_of(t).detach()
            self.inner.append(value.requires_grad_() if t.requires_grad else value)
        with torch.enable_grad(), unseen_by_checkpoints():
            outs = compute(self.inner)
        self._outs = outs if isinstance(outs, tuple) else tuple(outs) if isinstance(outs, list) else [outs]
        self.ends = [get_gradient_edge(o) if _has_gradient(o) else None for o in self._outs]

    def handed(self):
        outs, self._outs = self._outs, None
        return outs


def _has_gradient(out):
    return isinstance(out, torch.Tensor) and out.requires_grad


def _gradients(ctx, live, wanted, specs, grads, inner, ends):
    found = torch.autograd.grad(
        [ends[i] for i in live],
        [inner[i] for i in wanted],
        [local_cotangent(grads[i], specs[i]) for i in live],
        allow_unused=True,
        retain_graph=keeps_graph(),
    )
    found = [torch.zeros_like(inner[i]) if g is None or is_nothing(g) else g for i, g in zip(wanted, found)]
    return _finished(ctx.plan, found, wanted, ctx.weights)


def _finished(plan, found, wanted, weights):
    """Local gradients of the operands ``wanted``, those of plain ones summed over the mesh, as what goes on."""
    plain = [j for j, i in enumerate(wanted) if weights[i] is not None]
    if plain:
        owners = [weights[wanted[j]] for j in plain]
        sums = summed([found[j] for j in plain], owners, plan.inputs[wanted[plain[0]]].mesh)
        for j, g in zip(plain, sums):
            found[j] = g
    return [ShardTensor(g, plan.inputs[i].cotangent()) if weights[i] is None else g for i, g in zip(wanted, found)]


def _stand_in(spec, dtype, device, wanted):
    """For an operand that was not kept, because no gradient hangs on its value."""
    return ShardTensor(torch.zeros(spec.local_shape(), dtype=dtype, device=device), spec, requires_grad=wanted)


# -- second derivatives ----------------------------------------------------------------------------------------------
def _differentiable(plan, compute, tensors, weights, live, wanted, specs, grads):
    """The gradients as results of a region of their own, in which the local graph is built anew."""
    seeds = [specs[i].cotangent() for i in live]
    cotangents = [as_shards(grads[i], s.mesh).redistribute_to(s) for i, s in zip(live, seeds)]

    def pulled_back(*values):
        given, inner = values[: len(live)], values[len(live) :]
        outs = compute(inner)
        outs = outs if isinstance(outs, (tuple, list)) else (outs,)
        targets = [inner[i] for i in wanted]
        found = torch.autograd.grad([outs[i] for i in live], targets, given, create_graph=True, allow_unused=True)
        return tuple([t.new_zeros(t.shape) if g is None else g for t, g in zip(targets, found)])

    outputs = tuple(plan.inputs[i].cotangent() for i in wanted)
    plan = plan._replace(inputs=(*seeds, *plan.inputs), outputs=outputs, local=None, final=None, formula=None)
    operands = [*cotangents, *tensors]
    with NoTorchFunction():
        found = run(plan, pulled_back, operands)
        return [g if weights[i] is None else Plain.apply(g) for i, g in zip(wanted, found)]
