"""Backward passes that cannot be differentiated themselves, and say so to whoever tries.

The error of torch's own decorator hangs on tensors of its own. A pass that looks for the gradients of given operands,
as a region's second derivative does, never comes by it and takes what it lacks for zero. Here the error hangs on all
that the gradients depend on.
"""

from functools import cached_property, wraps

import torch
from torch.autograd import Function

from core.errors import ShardingError


def once_differentiable(backward):
    """For the ``backward(ctx, *grads)`` of an ``autograd.Function``: the derivative of its gradients is an error.

    Raises:
        ShardingError: when a second derivative passes through it.
    """

    name = backward.__qualname__.split(".")[0].strip("_")

    @wraps(backward)
    def once(ctx, *grads):
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        ctx = _Read(ctx)
        with torch.no_grad():
            found = backward(ctx, *grads)
        found = found if isinstance(found, tuple) else (found,)
        roots = [t for t in (*grads, *ctx.saved_tensors) if t is not None and t.requires_grad]
        if not roots:
            return found
        refusing = iter(_Refuse.apply(name, [g for g in found if g is not None], *roots))
        return tuple([None if g is None else next(refusing) for g in found])

    return once


class _Read:
    """A context whose saved tensors are asked for once: a checkpoint computes what it gives."""

    def __init__(self, ctx):
        self._ctx = ctx

    def __getattr__(self, name):
        return getattr(self._ctx, name)

    @cached_property
    def saved_tensors(self):
        return self._ctx.saved_tensors


class _Refuse(Function):
    """Gradients as they are, and as the error that their own derivative is."""

    @staticmethod
    def forward(ctx, name, gradients, *roots):
        ctx.name = name
        return tuple(gradients)

    @staticmethod
    def backward(ctx, *grads):
        raise ShardingError("can be differentiated once only, and a second derivative was asked for", op=ctx.name)
