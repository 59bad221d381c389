"""Kernels of our own, and the operators through which they are called.

An operator says what it returns without computing it, so that code that is being compiled meets one node; it loads
Triton when it first computes. Kernels are for GPUs. In Triton's interpreter, ``TRITON_INTERPRET=1`` from the start of
the process, they run on CPU tensors too.
"""

import os
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch

from core._torch import scoped_library
from core.once import once_differentiable
from core.ops.windows import Axis, Window

MOST_CHANNELS = 256
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_DTYPES = torch.float16, torch.bfloat16, torch.float32
_planned = False

_library = torch.library.Library("core", "FRAGMENT")
_library.define("neighborhood_forward(Tensor q, Tensor k, Tensor v, int[] axes, float scale) -> (Tensor, Tensor)")
_library.define(
    "neighborhood_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, int[] axes, float scale)"
    " -> (Tensor, Tensor, Tensor)"
)


@cache
def _there():
    return find_spec("triton") is not None


def reads(t):
    """Whether kernels read such tensors."""
    here = t.device.type == "cuda" or ((_INTERPRETED or _planned) and t.device.type == "cpu")
    return here and t.dtype in _DTYPES and (_planned or _there())


def has_kernel(q, scale):
    """Whether attention of these queries over neighbourhoods has a kernel."""
    return reads(q) and q.shape[-1] <= MOST_CHANNELS and scale > 0


def is_gpu(device):
    """Whether tensors of this device are a GPU's, or stand for one's in a plan."""
    return device.type == "cuda" or _planned


def close(t):
    """With the channels of a row next to each other, as kernels read them."""
    return t if t.stride(-1) == 1 else t.contiguous()


@contextmanager
def as_on_a_gpu():
    """Tensors of the CPU take the way of those of a GPU: :mod:`core.plan` asks what it would cost, on fake ones."""
    global _planned
    if _planned:
        yield
        return
    _planned = True
    try:
        with scoped_library("aten", "IMPL") as library:
            for kind in ("CPU", "AutogradCPU"):
                library.impl("rms_norm", _fused_rms_norm, kind)
            yield
    finally:
        _planned = False


def _fused_rms_norm(x, shape, weight=None, eps=None):
    """What torch's kernel for GPUs, which the CPU has not, reads, keeps and writes: as much as a layer norm."""
    if weight is not None and weight.dtype != x.dtype:  # torch has no kernel for that there either
        return torch.ops.aten.rms_norm.default.decompose(x, shape, weight, eps)
    return torch.native_layer_norm(x, shape, weight, None, eps or 0)[0]


class Neighborhood(torch.autograd.Function):
    """(q, k, v, axes, scale) -> attention of q over its neighbourhoods; keeps one number for each query and head."""

    @staticmethod
    def forward(ctx, q, k, v, axes, scale):
        ctx.call = numbers_of(axes), scale
        out, sums = torch.ops.core.neighborhood_forward(q, k, v, *ctx.call)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return *torch.ops.core.neighborhood_backward(grad, *ctx.saved_tensors, *ctx.call), None, None


def _results(q):
    """Attention, (batch, *grid, heads, channels), and fp32 (batch, heads, *grid)."""
    batch, *grid, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(batch, heads, *grid, dtype=torch.float32)


def _gradients(q, k, v):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def numbers_of(axes):
    """Eight numbers for each dim of the grid, as operators take them."""
    return [int(x) for axis in axes for x in (*axis.window, *axis[1:])]


def _axes(numbers):
    parts = (numbers[i : i + 8] for i in range(0, len(numbers), 8))
    return tuple(Axis(Window(size, step, bool(causal), total), *rest) for size, step, causal, total, *rest in parts)


def _forward(q, k, v, axes, scale):
    from core.kernels import neighborhood

    results = _results(q)
    neighborhood.forward(q, k, v, *results, _axes(axes), scale)
    return results


def _backward(grad, q, k, v, out, sums, axes, scale):
    from core.kernels import neighborhood

    dq, dk, dv = _gradients(q, k, v)
    both, call = sums.new_empty(*sums.shape, 2), (_axes(axes), scale)
    neighborhood.backward_queries(grad, q, k, v, out, sums, both, dq, *call)
    neighborhood.backward_keys(grad, q, k, v, both, dk, dv, *call)
    return dq, dk, dv


for _kind in ("CUDA", "CPU"):
    _library.impl("neighborhood_forward", _forward, _kind)
    _library.impl("neighborhood_backward", _backward, _kind)


@torch.library.register_fake("core::neighborhood_forward", lib=_library)
def _(q, k, v, axes, scale):
    return _results(q)


@torch.library.register_fake("core::neighborhood_backward", lib=_library)
def _(grad, q, k, v, out, sums, axes, scale):
    return _gradients(q, k, v)
