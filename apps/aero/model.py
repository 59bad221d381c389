"""Transolver: attention among learned slices of a point cloud, linear in the number of points.

Every point belongs softly to G slices; a slice token is the weighted mean of its points, the tokens attend to each
other, and every point takes back the mixture of tokens that it belongs to. Points meet only in the token sum, so where
the points are cut over many devices one small sum a layer, of H G (D + 1) numbers, is all that has to be exchanged.

For the same reason several clouds of points, the surface of a car and the air around it, may share the tokens: their
sums add, and each cloud has a stem and a head of its own.

Written from the equations of Wu et al., "Transolver: A Fast Transformer Solver for PDEs on General Geometries"
(arXiv 2402.02366), irregular meshes, and Luo et al., "Transolver++" (arXiv 2502.02414). Tensors are
(batch, points, ...).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of a :class:`Transolver`.

    features, outputs: of a point; volume: (features, outputs) of the points of a second cloud, None without one. width:
    channels; layers: blocks; mlp: hidden channels of an MLP as a multiple of ``width``.

    temperature: t_h at the start; low, high: bounds that it is kept within. A small t makes slices sharp, and its bound
    matters: where low is the start, t can only rise. slice_init: of the slice projection, "orthogonal", so that slices
    differ from the first step, or "normal" (0.02), as the authors' code ends up with. tied: values are the same
    projection as the one that places points in slices, as in Transolver++. plus: Transolver++'s states: a temperature
    of every point, t_h + a(x), and Gumbel noise on the logits, in training only, so that predictions can be had again.
    """

    features: int = 6
    outputs: int = 4
    width: int = 64
    layers: int = 4
    heads: int = 4
    slices: int = 32
    mlp: int = 2
    volume: tuple | None = None
    temperature: float = 0.5
    low: float = 0.01
    high: float = 5.0
    slice_init: str = "orthogonal"
    tied: bool = False
    plus: bool = False


class SliceAttention(nn.Module):
    """Physics attention on (B, N, C), heads of D = C / H channels, G slices shared by the heads.

    w = softmax_g((Ws x_h + bs) / t_h)            membership of each point, t_h > 0 learned
    s_g = sum_i w_ig v_i / sum_i w_ig             tokens
    y_i = sum_g w_ig attention(s)_g               back to the points, with the same w
    """

    EPSILON = 1e-5  # a slice without points has a token of zero, not a quotient of zeros

    def __init__(self, width, heads, slices, config=None):
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is no multiple of {heads} heads")
        self.config = config or ModelConfig()
        self.heads, head = heads, width // heads
        self.place = nn.Linear(width, width)
        self.slice = nn.Linear(head, slices)
        self.log_temperature = nn.Parameter(torch.full((heads, 1), math.log(self.config.temperature)))
        if self.config.plus:
            self.adapt = nn.Sequential(nn.Linear(head, slices), nn.GELU(), nn.Linear(slices, 1), nn.GELU())
        if not self.config.tied:
            self.value = nn.Linear(width, width)
        self.query, self.key, self.token = (nn.Linear(head, head, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, *clouds):
        weights = [self.membership(x) for x in clouds]
        mixed = self.mixed(sum(self.sums(x, w) for x, w in zip(clouds, weights)), clouds[0].dtype)
        taken = tuple(self.back(w, mixed) for w in weights)
        return taken if len(clouds) > 1 else taken[0]

    def membership(self, x):
        """Share of each point in each slice, (B, N, H, G); sums to one over G."""
        placed = self.place(x).unflatten(-1, (self.heads, -1))
        logits = self.slice(placed)
        if self.config.plus and self.training:
            uniform = torch.rand_like(logits, dtype=torch.float32).clamp(1e-6, 1 - 1e-6)
            logits = logits - torch.log(-torch.log(uniform)).to(logits.dtype)
        return torch.softmax(logits / self._temperature(placed), dim=-1)

    def _temperature(self, placed):
        """Of heads (H, 1), or with ``plus`` of every point too (B, N, H, 1)."""
        temperature = self.log_temperature.exp()
        if self.config.plus:
            temperature = temperature + self.adapt(placed)
        return temperature.clamp(self.config.low, self.config.high)

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
        value = self.place if self.config.tied else self.value
        weight = F.pad(value.weight.unflatten(0, (self.heads, -1)), (0, 0, 0, 1))
        bias = F.pad(value.bias.unflatten(0, (self.heads, -1)), (0, 1), value=1.0)
        return weight.flatten(0, 1), bias.flatten()


class Block(nn.Module):
    """x + attention(norm x), then x + MLP(norm x), of every cloud."""

    def __init__(self, config):
        super().__init__()
        width = config.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SliceAttention(width, config.heads, config.slices, config)
        self.mlp = mlp(width, config.mlp * width, width)

    def forward(self, *clouds):
        taken = self.attention(*(self.norm1(x) for x in clouds))
        if len(clouds) == 1:
            return self.finish(clouds[0], taken)
        return tuple(self.finish(x, y) for x, y in zip(clouds, taken))

    def finish(self, x, taken):
        """The block's output for points x that took ``taken`` from the tokens."""
        x = x + taken
        return x + self.mlp(self.norm2(x))


def mlp(inputs, hidden, outputs):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, outputs))


class Transolver(nn.Module):
    """Points with features (B, N, F) to fields (B, N, outputs), for any N; with ``config.volume`` two clouds to two.

    Linear maps start as torch's do (a truncated normal of 0.02 learned more slowly).
    """

    def __init__(self, config=ModelConfig()):
        super().__init__()
        self.config, width = config, config.width
        kinds = [(config.features, config.outputs), *([tuple(config.volume)] if config.volume else [])]
        self.stems = nn.ModuleList(mlp(features, 2 * width, width) for features, _ in kinds)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in kinds)
        self.heads = nn.ModuleList(nn.Linear(width, outputs) for _, outputs in kinds)
        for block in self.blocks:
            if config.slice_init == "orthogonal":
                nn.init.orthogonal_(block.attention.slice.weight)
            else:
                nn.init.trunc_normal_(block.attention.slice.weight, std=0.02)

    def forward(self, *clouds):
        if len(clouds) != len(self.stems):
            raise ValueError(f"{len(clouds)} clouds of points for a model of {len(self.stems)}")
        clouds = tuple(stem(x) for stem, x in zip(self.stems, clouds))
        for block in self.blocks:
            found = block(*clouds)
            clouds = found if isinstance(found, tuple) else (found,)
        clouds = tuple(head(norm(x)) for head, norm, x in zip(self.heads, self.norms, clouds))
        return clouds if len(clouds) > 1 else clouds[0]
