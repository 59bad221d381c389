"""Attention over neighbourhoods of which other ranks hold rows: they come for the forward pass, and where keys and
values are large once again for the backward pass. A rank then keeps its own rows, and no array of these and others.
"""

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from core._torch import compiling
from core.kernels import Neighborhood, has_kernel, natten, numbers_of
from core.ops.halo import fetch
from core.precision import autocast_now

_most_kept = 2**25  # bytes of keys and values with those of others that stay for the backward pass


class Halo(NamedTuple):
    """What ranks fetch along one cut dim: extents and wanted rows of all, as of :func:`core.ops.halo.fetch`."""

    dim: int
    sizes: tuple
    reach: tuple
    group: object


def fetched(k, v, halos):
    """Keys and values at hand and around, (..., 2 channels). Differentiable."""
    kv = torch.cat([k, v], -1)
    for halo in halos:
        kv = fetch(kv, *halo)
    return kv


def comes_again(k, halos):
    """Whether they are to be fetched again, alike on all ranks of a domain whatever parts they have."""
    rows = {halo.dim: max(high - low for low, high in halo.reach) for halo in halos}
    extents = [rows.get(dim, n) for dim, n in enumerate(k.shape)]
    return 2 * prod(extents) * k.element_size() > _most_kept and not compiling()


class Around(Function):
    """(q, k, v, halos, attend, axes, scale) -> attention of own queries over own keys and those around.

    attend: (q, k, v, axes, scale) -> attention of tensors at hand, for where no kernel of ours computes; the backward
    pass then computes it again.
    """

    @staticmethod
    def forward(ctx, q, k, v, halos, attend: Callable, axes, scale):
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        keys, values = fetched(k, v, halos).chunk(2, -1)
        own = Neighborhood.apply if q.numel() and has_kernel(q, factor) else None
        theirs = natten.preferred(q, keys, values, axes, factor, own, again=True)
        ctx.call = halos, natten.attention if theirs else attend, axes, factor
        ctx.autocast = autocast_now(q.device.type)
        if own and not theirs:
            out, sums = torch.ops.core.neighborhood_forward(q, keys, values, numbers_of(axes), factor)
            ctx.save_for_backward(q, k, v, out, sums)
            return out
        ctx.save_for_backward(q, k, v)
        return ctx.call[1](q, keys, values, axes, factor)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (q, k, v, *results), (halos, attend, axes, factor) = ctx.saved_tensors, ctx.call
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (k, v)]
            kv = fetched(*leaves, halos)
        near = q, *kv.detach().chunk(2, -1)
        if results:
            grad_q, *grads = torch.ops.core.neighborhood_backward(grad, *near, *results, numbers_of(axes), factor)
        else:
            near = [t.detach().requires_grad_() for t in near]
            with torch.enable_grad(), torch.autocast(*ctx.autocast):
                out = attend(*near, axes, factor)
            grad_q, *grads = torch.autograd.grad(out, near, grad)
        return grad_q, *torch.autograd.grad(kv, leaves, torch.cat(grads, -1)), None, None, None, None
