"""The operators through which the kernels of slots are called, and their derivatives (:mod:`core.kernels.slots`).

As those of neighbourhoods are: what they return is known without computing it, and Triton is loaded when they do.
"""

import torch

from core.kernels import MOST_CHANNELS, has_kernel
from core.once import once_differentiable

_library = torch.library.Library("core", "FRAGMENT")
_library.define("slot_attention_read(Tensor q, Tensor k, Tensor w) -> (Tensor, Tensor)")
_library.define("slot_attention_sums(Tensor q, Tensor k, Tensor x) -> (Tensor, Tensor)")
_library.define(
    "slot_attention_backward(Tensor q, Tensor k, Tensor x, Tensor w, Tensor level, bool read)"
    " -> (Tensor, Tensor, Tensor)"
)
_ops = torch.ops.core


def has_slot_kernel(q, k, values):
    """Whether attention between these points and slots, of one dtype, has a kernel."""
    return has_kernel(q, 1.0) and 0 < values.shape[-1] <= MOST_CHANNELS and q.numel() > 0 and k.shape[2] > 0


class SlotSums(torch.autograd.Function):
    """(q, k, x) -> sums by slot, fp32 (batch, heads, slots, values)"""

    @staticmethod
    def forward(ctx, q, k, x):
        found, level = _ops.slot_attention_sums(q, k, x)
        ctx.save_for_backward(q, k, x, level)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Points read the gradient of the sums: that is the gradient of x."""
        q, k, x, level = ctx.saved_tensors
        return _ops.slot_attention_backward(q, k, x, grad.to(x.dtype), level, True)


class SlotRead(torch.autograd.Function):
    """(q, k, w) -> what points take, (batch, heads, points, values)"""

    @staticmethod
    def forward(ctx, q, k, w):
        out, level = _ops.slot_attention_read(q, k, w)
        ctx.save_for_backward(q, k, w, level)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, w, level = ctx.saved_tensors
        return _ops.slot_attention_backward(q, k, grad, w, level, False)


# -- what they return -------------------------------------------------------------------------------------------------
def _of_points(q, channels):
    """(batch, points, heads, channels)"""
    batch, heads, points, _ = q.shape
    return q.new_empty(batch, points, heads, channels)


def _levels(q):
    return q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("core::slot_attention_read", lib=_library)
def _(q, k, w):
    return _of_points(q, w.shape[-1]).transpose(1, 2), _levels(q)


@torch.library.register_fake("core::slot_attention_sums", lib=_library)
def _(q, k, x):
    return q.new_empty(*q.shape[:2], k.shape[2], x.shape[-1], dtype=torch.float32), _levels(q)


@torch.library.register_fake("core::slot_attention_backward", lib=_library)
def _(q, k, x, w, level, read):
    values = _of_points(x, x.shape[-1]).transpose(1, 2) if read else w.new_empty(w.shape)
    return _of_points(q, q.shape[-1]).transpose(1, 2), k.new_empty(k.shape), values


# -- what they do -----------------------------------------------------------------------------------------------------
def _read(q, k, w):
    from core.kernels import slots

    out, level = _of_points(q, w.shape[-1]), _levels(q)
    slots.read(q, k, w, out, level)
    return out.transpose(1, 2), level


def _sums(q, k, x):
    from core.kernels import slots

    level = _levels(q)
    return slots.sums(q, k, x, level), level


def _backward(q, k, x, w, level, read):
    from core.kernels import slots

    dq, out = _of_points(q, q.shape[-1]), _of_points(x, x.shape[-1]) if read else None
    dk, dw = slots.backward(q, k, x, w, level, dq, out)
    return dq.transpose(1, 2), _together(dk, k), out.transpose(1, 2) if read else _together(dw, w)


def _together(parts, like):
    """The sum over chunks, and over the batch and heads that one served: gradient of ``like``."""
    dims = [0, *(i + 1 for i in (0, 1) if like.shape[i] == 1)]
    return parts.sum(dims, keepdim=True)[0].to(like.dtype)


for _name, _function in (("read", _read), ("sums", _sums), ("backward", _backward)):
    for _kind in ("CUDA", "CPU"):
        _library.impl(f"slot_attention_{_name}", _function, _kind)
