"""Norms in the precision of what they are given, under autocast too.

Torch's go up to fp32 there and return that: the input is written once more and kept for the backward pass, the result
is twice as large, and the next layer casts it down again. That was a third of all that a training kept. The sums within
a norm are fp32 in either case.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from core import ShardTensor
from core.ops.norm import layer_norm_of_parts, rms_norm_of_parts


def layer_norm(x, weight=None, bias=None, eps=1e-5):
    """Over the last dim; weight, bias (channels,) of any dtype, or None. The result has the dtype of ``x``."""
    return _layer_norm(x, x.shape[-1:], weight, bias, eps)


class LayerNorm(nn.LayerNorm):
    def forward(self, x):
        return _layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        with _as_given(x):
            norm = F.rms_norm if isinstance(x, ShardTensor) else rms_norm_of_parts
            return norm(x, self.normalized_shape, self.weight, self.eps)


def _layer_norm(x, shape, weight, bias, eps):
    with _as_given(x):
        norm = F.layer_norm if isinstance(x, ShardTensor) else layer_norm_of_parts
        return norm(x, shape, weight, bias, eps)  # both cast weights themselves


def _as_given(x):
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
