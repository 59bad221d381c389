"""An operation of plain tensors by its formula: a kernel where torch's own is slow, and one node of the graph."""

from functools import partial

import torch
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from core._torch import compiling, transforming
from core.arguments import call, emptied
from core.precision import autocast_now


def alone(formula, operation, has_kernel, *args):
    """``operation(*args)`` of plain tensors by its formula, if it ``has_kernel()``. Where torch traces or transforms it
    is the operation, and so is what a second derivative differentiates."""
    if compiling() or transforming() or any(isinstance(a, DTensor) for a in args) or not has_kernel():
        return operation(*args)
    if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
        return _Alone.apply(formula, operation, *args)
    return formula.forward(*args)[0]


class _Alone(Function):
    """Keeps the operands whose values the wanted gradients need, as :class:`core.region.Written` does."""

    @staticmethod
    def forward(ctx, formula, operation, *args):
        out, *extra = formula.forward(*args)
        ctx.at = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
        tensors, wanted = [args[i] for i in ctx.at], [ctx.needs_input_grad[2 + i] for i in ctx.at]
        ctx.call, ctx.autocast = (formula, operation, emptied(args, {})[0]), autocast_now(out.device.type)
        ctx.like = [(t.shape, dict(dtype=t.dtype, device=t.device)) for t in tensors]
        ctx.save_for_backward(*formula.kept(tensors, wanted), *extra)
        return out

    @staticmethod
    def backward(ctx, grad):
        saved, (formula, operation, args) = ctx.saved_tensors, ctx.call  # once: a checkpoint computes what it gives
        tensors, extra = saved[: len(ctx.at)], saved[len(ctx.at) :]
        wanted, results = [ctx.needs_input_grad[2 + i] for i in ctx.at], [None] * (2 + len(args))
        if torch.is_grad_enabled():
            # each its own view, though one be made of another or be the same: the way between them is torch's
            some = [torch.zeros(n, **like) if t is None else t.view_as(t) for t, (n, like) in zip(tensors, ctx.like)]
            some = [t.requires_grad_() if w else t for t, w in zip(some, wanted)]
            with torch.autocast(*ctx.autocast):
                out = call(operation, args, {}, some)
            found = iter(torch.autograd.grad(out, [t for t, w in zip(some, wanted) if w], grad, create_graph=True))
            found = [next(found) if w else None for w in wanted]
        else:
            found = call(partial(formula.backward, grad, extra, wanted), args, {}, tensors)
        for i, (_, like), g in zip(ctx.at, ctx.like, found):
            results[2 + i] = g if g is None else g.to(like["dtype"])
        return (*results,)
