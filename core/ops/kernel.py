"""Torch's attention kernels with the logarithm of each row's normaliser, which ``scaled_dot_product_attention`` hides.

Torch chooses among them as it does there. Their backward takes any output and logarithm: given those over all keys, it
gives the terms of the keys at hand.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

aten = torch.ops.aten
CPU = "cpu"


def choose(q, k, v, causal):
    """The kernel for these, or None; none computes tensors without numbers."""
    if q.is_meta or not q.numel() or not k.numel() or q.shape[-1] != v.shape[-1]:
        return None
    if q.device.type == "cpu":
        return CPU if torch.backends.cuda.flash_sdp_enabled() else None
    chosen = SDPBackend(aten._fused_sdp_choice(*_four(q, k, v), None, 0.0, causal))
    return chosen if chosen in _FORWARD else None


def forward(chosen, q, k, v, causal, scale):
    """Output and logarithm (.., queries, 1)."""
    out, total = _FORWARD[chosen](*_four(q, k, v), causal, scale)[:2]
    total = total.flatten(2)[..., : q.shape[-2]]
    return out[..., : v.shape[-1]].reshape(*q.shape[:-1], -1), total.reshape(*q.shape[:-1], 1)


def backward(chosen, grad, q, k, v, out, total, causal, scale):
    """Gradients of the operands, keys and values with a head for each of the queries."""
    four = _four(q, k, v)
    out = _close(_wide(out.to(q.dtype)).reshape(four[0].shape))
    grad = _wide(grad.to(q.dtype)).reshape(four[0].shape)
    if grad.stride() != out.stride():  # some kernels take no other
        grad = torch.empty_like(out).copy_(grad)
    total = total.reshape(four[0].shape[:-1]).contiguous()
    found = _BACKWARD[chosen](grad, *four, out, total, causal, scale)
    return [g[..., : v.shape[-1]].reshape(*q.shape[:-2], g.shape[-2], -1) for g in found[:3]]


_FORWARD = {
    CPU: lambda q, k, v, causal, scale: aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, scale=scale
    ),
    SDPBackend.FLASH_ATTENTION: lambda q, k, v, causal, scale: aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, scale=scale
    ),
    SDPBackend.EFFICIENT_ATTENTION: lambda q, k, v, causal, scale: aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    ),
    SDPBackend.CUDNN_ATTENTION: lambda q, k, v, causal, scale: aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    ),
}


def _cpu(grad, q, k, v, out, total, causal, scale):
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, total, 0.0, causal, scale=scale
    )


def _flash(grad, q, k, v, out, total, causal, scale):
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropped weights: there are none
    ends = None, None, q.shape[-2], k.shape[-2]
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, total, *ends, 0.0, causal, seed, seed, scale=scale
    )


def _efficient(grad, q, k, v, out, total, causal, scale):
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    total = F.pad(total, (0, -total.shape[-1] % 32))  # as the forward pass aligns it
    wanted = [True, True, True, False]
    return aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, total, seed, seed, 0.0, wanted, causal, scale=scale
    )


def _cudnn(grad, q, k, v, out, total, causal, scale):
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    ends = None, None, q.shape[-2], k.shape[-2]
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, total[..., None], seed, seed, None, *ends, 0.0, causal, scale=scale
    )


_BACKWARD = {
    CPU: _cpu,
    SDPBackend.FLASH_ATTENTION: _flash,
    SDPBackend.EFFICIENT_ATTENTION: _efficient,
    SDPBackend.CUDNN_ATTENTION: _cudnn,
}


def _four(q, k, v):
    """Operands as (batch, heads, rows, channels), keys and values with a head for each of the queries."""
    lead = q.shape[:-2]
    heads = lead[-1] if lead else 1
    four = (_wide(served(t, q)).expand(*lead, -1, -1) for t in (q, k, v))
    return [_close(t if t.ndim == 4 else t.reshape(-1, heads, *t.shape[-2:])) for t in four]


def _close(t):
    """With the channels of a row next to each other, and no two elements in one place."""
    return t if t.stride(-1) == 1 and 0 not in t.stride() else t.contiguous()


def _wide(t):
    """With channels of zeros up to a number that the kernels take."""
    missing = -t.shape[-1] % _channels[t.device.type]
    return F.pad(t, (0, missing)) if missing else t


_channels = {"cpu": 1, "cuda": 8}  # their number is a multiple of this


def served(x, q):
    """Keys or values with each head repeated for the heads of ``q`` that it serves."""
    if x.ndim < 3 or q.ndim < 3 or x.shape[-3] in (1, q.shape[-3]) or q.shape[-3] == 1:
        return x
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], -3)


def shared(grad, x):
    """Transpose of :func:`served` and of broadcasting."""
    if grad.ndim > 2 and x.ndim > 2 and x.shape[-3] not in (1, grad.shape[-3]):
        grad = grad.unflatten(-3, (x.shape[-3], -1)).sum(-3)
    return grad.sum_to_size(x.shape)
