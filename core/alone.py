"""An operation of plain tensors by its formula: a kernel where torch's own is slow, and one node of the graph."""

from functools import partial

import torch
from torch.autograd import Function

from core._torch import compiling, transforming
from core.arguments import call, emptied


def alone(formula, operation, has_kernel, *args):
    """``operation(*args)`` of plain tensors by its formula, if it ``has_kernel()``. Where torch traces or transforms it
    is the operation, and so is what a second derivative differentiates."""
    if compiling() or transforming() or not has_kernel():
        return operation(*args)
    if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
        return _Alone.apply(formula, operation, *args)
    return formula.forward(*args)[0]


class _Alone(Function):
    @staticmethod
    def forward(ctx, formula, operation, *args):
        out, *extra = formula.forward(*args)
        ctx.formula, ctx.operation = formula, operation
        ctx.args, _ = emptied(args, {})
        ctx.at = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
        ctx.save_for_backward(*(args[i] for i in ctx.at), *extra)
        return out

    @staticmethod
    def backward(ctx, grad):
        tensors, extra = ctx.saved_tensors[: len(ctx.at)], ctx.saved_tensors[len(ctx.at) :]
        needed, results = [ctx.needs_input_grad[2 + i] for i in ctx.at], [None] * (2 + len(ctx.args))
        if torch.is_grad_enabled():
            wanted = [t for t, n in zip(tensors, needed) if n]
            out = call(ctx.operation, ctx.args, {}, tensors)
            found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
            found = [next(found) if n else None for n in needed]
        else:
            found = call(partial(ctx.formula.backward, grad, extra, needed), ctx.args, {}, tensors)
        for i, t, g in zip(ctx.at, tensors, found):
            results[2 + i] = g if g is None else g.to(t.dtype)
        return (*results,)
