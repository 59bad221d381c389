"""The one normalisation over elements of several ranks: small all-reduces make the statistics global.

The mean comes first and the squares are centred on it, in fp32 or wider: sums of plain squares lose everything where
the mean is large. Every part counts by the global number of elements, so parts of any size are right.
"""

from typing import Any, NamedTuple

import torch

from core import collectives as c
from core.once import once_differentiable


class Over(NamedTuple):
    """Which elements share a statistic: those along ``dims``, on all ranks of ``groups``, ``count`` in all."""

    dims: tuple
    count: Any
    groups: list

    def here(self, value, dtype=None):
        """The sums over the elements of this rank."""
        return value.sum(self.dims, True, dtype=dtype)

    def everywhere(self, sums):
        for group in self.groups:
            sums = c.send_all_reduce(sums, group)
        return sums

    def spread(self, statistic):
        """The statistic of every element, to be broadcast against them."""
        return statistic


class OverBlocks(NamedTuple):
    """As :class:`Over` for (batch, channels, space), where blocks of ``width`` channels share a statistic. This rank
    has ``channels`` of them, the first of which is number ``first`` and may lie inside a block."""

    first: int
    channels: int
    width: int
    blocks: int
    count: int  # type: ignore[assignment]  # tuple.count is not used
    groups: list

    def here(self, value, dtype=None):
        sums = value.sum(2, dtype=dtype)
        return sums.new_zeros(len(sums), self.blocks).index_add(1, self._block(value), sums)

    def everywhere(self, sums):
        return Over.everywhere(self, sums)

    def spread(self, statistic):
        return statistic.index_select(1, self._block(statistic)).unsqueeze(2)

    def _block(self, t):
        return torch.arange(self.first, self.first + self.channels, device=t.device) // self.width


class Normalise(torch.autograd.Function):
    """``(x - mean) / sqrt(var + eps) * weight + bias``, and the statistics, which carry no gradient.

    ``weight`` and ``bias`` (or None) broadcast against ``x``; without ``centred`` the mean is left out. Only ``x`` and
    the statistics are kept for the backward pass, which sends one all-reduce a group.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, over, eps, centred=True, dtype=None):
        wide = torch.promote_types(x.dtype, torch.float32)
        mean = over.everywhere(over.here(x, wide)) / over.count if centred else x.new_zeros((), dtype=wide)
        hat = x.to(wide) - (over.spread(mean) if centred else 0)
        var = over.everywhere(over.here(hat.square())) / over.count
        rstd = torch.rsqrt(var + eps)
        hat *= over.spread(rstd)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.over, ctx.centred, ctx.bias = over, centred, bias
        ctx.mark_non_differentiable(mean, var)
        ctx.set_materialize_grads(False)
        hat = hat if weight is None else hat * weight
        hat = hat if bias is None else hat + bias
        return hat.to(dtype or x.dtype), mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        x, weight, mean, rstd = ctx.saved_tensors
        over, rstd = ctx.over, ctx.over.spread(rstd)
        grad, hat = grad.to(mean.dtype), (x.to(mean.dtype) - (over.spread(mean) if ctx.centred else 0)) * rstd
        grad_weight = _like(grad * hat, weight) if weight is not None else None
        grad_bias = _like(grad, ctx.bias) if ctx.bias is not None else None
        grad = grad if weight is None else grad * weight
        along, across = over.everywhere(torch.stack([over.here(grad * hat), over.here(grad)])) / over.count
        grad_x = (grad - hat * over.spread(along) - (over.spread(across) if ctx.centred else 0)) * rstd
        return grad_x.to(x.dtype), grad_weight, grad_bias, None, None, None, None


def _like(grad, operand):
    return grad.sum_to_size(operand.shape).to(operand.dtype)
