"""Transolver: attention among learned slices of a point cloud, linear in the number of points.

Every point belongs softly to G slices; a slice token is the weighted mean of its points, the tokens attend to each
other, and every point takes back the mixture of tokens that it belongs to. Points meet only in the token sum, so where
the points are cut over many devices one small sum a layer, of H G (D + 1) numbers, is all that has to be exchanged.

Written from the equations of Wu et al., "Transolver: A Fast Transformer Solver for PDEs on General Geometries"
(arXiv 2402.02366), irregular meshes. Tensors are (batch, points, ...).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a :class:`Transolver`: features of a point, outputs of a point, channels, blocks, heads, slices, and the
    hidden channels of an MLP as a multiple of ``width``."""

    features: int = 6
    outputs: int = 4
    width: int = 64
    layers: int = 4
    heads: int = 4
    slices: int = 32
    mlp: int = 2


class SliceAttention(nn.Module):
    """Physics attention on (B, N, C), heads of D = C / H channels, G slices shared by the heads.

    w = softmax_g((Ws x_h + bs) / t_h)            membership of each point, t_h > 0 learned
    s_g = sum_i w_ig v_i / sum_i w_ig             tokens
    y_i = sum_g w_ig attention(s)_g               back to the points, with the same w
    """

    EPSILON = 1e-5  # a slice without points has a token of zero, not a quotient of zeros

    def __init__(self, width, heads, slices):
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is no multiple of {heads} heads")
        self.heads, head = heads, width // heads
        self.place = nn.Linear(width, width)
        self.slice = nn.Linear(head, slices)
        self.log_temperature = nn.Parameter(torch.full((heads, 1), math.log(0.5)))
        self.value = nn.Linear(width, width)
        self.query, self.key, self.token = (nn.Linear(head, head, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x):
        weights = self.membership(x)
        return self.back(weights, self.mixed(self.sums(x, weights), x.dtype))

    def membership(self, x):
        """Share of each point in each slice, (B, N, H, G); sums to one over G."""
        logits = self.slice(self.place(x).unflatten(-1, (self.heads, -1)))
        return torch.softmax(logits / self.log_temperature.exp(), dim=-1)

    def sums(self, x, weights):
        """Weighted sum of the points of each slice and, last, its weight, (B, H, G, D + 1); of parts, they add.

        The value projection carries one more channel a head that is always one, so that the sum and its norm are one
        contraction; it adds up in fp32 at least, because a slice may hold millions of points.
        """
        values = F.linear(x, *self._value_and_one()).unflatten(-1, (self.heads, -1))
        with torch.autocast(x.device.type, enabled=False):
            exact = torch.promote_types(values.dtype, torch.float32)
            return torch.einsum("bnhg,bnhd->bhgd", weights.to(exact), values.to(exact))

    def mixed(self, sums, dtype):
        """Tokens, the weighted means of the points, after they attended to each other, (B, H, G, D)."""
        tokens = (sums[..., :-1] / (sums[..., -1:] + self.EPSILON)).to(dtype)
        return F.scaled_dot_product_attention(self.query(tokens), self.key(tokens), self.token(tokens))

    def back(self, weights, mixed):
        """What every point takes from the tokens that it belongs to, (B, N, C)."""
        return self.out(torch.einsum("bnhg,bhgd->bnhd", weights, mixed).flatten(2))

    def _value_and_one(self):
        """Weight and bias of the value projection with a row of zeros and a bias of one after every head."""
        weight = F.pad(self.value.weight.unflatten(0, (self.heads, -1)), (0, 0, 0, 1))
        bias = F.pad(self.value.bias.unflatten(0, (self.heads, -1)), (0, 1), value=1.0)
        return weight.flatten(0, 1), bias.flatten()


class Block(nn.Module):
    """x + attention(norm x), then x + MLP(norm x)."""

    def __init__(self, config):
        super().__init__()
        width = config.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SliceAttention(width, config.heads, config.slices)
        self.mlp = mlp(width, config.mlp * width, width)

    def forward(self, x):
        return self.finish(x, self.attention(self.norm1(x)))

    def finish(self, x, taken):
        """The block's output for points x that took ``taken`` from the tokens."""
        x = x + taken
        return x + self.mlp(self.norm2(x))


def mlp(inputs, hidden, outputs):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, outputs))


class Transolver(nn.Module):
    """Points with features (B, N, F) to fields (B, N, outputs), for any N.

    Linear maps start as torch's do (a truncated normal of 0.02 learned more slowly); the slice projection starts
    orthogonal, so that slices differ from the first step.
    """

    def __init__(self, config=ModelConfig()):
        super().__init__()
        self.config = config
        self.stem = mlp(config.features, 2 * config.width, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.outputs)
        for block in self.blocks:
            nn.init.orthogonal_(block.attention.slice.weight)

    def forward(self, features):
        x = self.stem(features)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
