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
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from apps.norms import LayerNorm
from core.ops.slots import slot_read, slot_sums, with_one


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
    weighed: the last feature of the first cloud is not seen but weighs its points in the slices; given the area that a
    point stands for, tokens are means over the surface whatever the mesh, that of a CAD file included.
    """

    features: int = 6
    outputs: int = 4
    width: int = 64
    layers: int = 4
    heads: int = 4
    slices: int = 32
    mlp: int = 2
    volume: tuple | None = None
    temperature: float = 0.25
    low: float = 0.01
    high: float = 5.0
    slice_init: str = "orthogonal"
    tied: bool = False
    plus: bool = False
    weighed: bool = False


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
        self.heads, self.channels = heads, width // heads
        head = self.channels
        self.place = nn.Linear(width, width)
        self.slice = nn.Linear(head, slices)
        self.log_temperature = nn.Parameter(torch.full((heads, 1), math.log(self.config.temperature)))
        if self.config.plus:
            self.adapt = nn.Sequential(nn.Linear(head, slices), nn.GELU(), nn.Linear(slices, 1), nn.GELU())
        if not self.config.tied:
            self.value = nn.Linear(width, width)
        self.query, self.key, self.token = (nn.Linear(head, head, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, *clouds, measure=None):
        places = [self.places(x) for x in clouds]
        measures = measure, *(None for _ in clouds[1:])
        total = sum(self.sums(x, place, m) for x, place, m in zip(clouds, places, measures))
        mixed = self.mixed(total, clouds[0].dtype)
        taken = tuple(self.back(place, mixed) for place in places)
        return taken if len(clouds) > 1 else taken[0]

    def places(self, x):
        """Where the points (B, N, C) belong: :class:`Places`, or :class:`NoisyPlaces`."""
        placed = self._with_one(self.place, x)
        temperature = self.log_temperature.exp()
        if self.config.plus:
            temperature = temperature + self.adapt(placed[..., : self.channels])
        temperature = temperature.clamp(self.config.low, self.config.high)
        if self.config.plus and self.training:
            logits = self.slice(placed[..., : self.channels])
            uniform = torch.rand_like(logits, dtype=torch.float32).clamp(1e-6, 1 - 1e-6)
            logits = logits - torch.log(-torch.log(uniform)).to(logits.dtype)
            return NoisyPlaces(torch.softmax(logits / temperature, dim=-1))
        slots = torch.cat([self.slice.weight, self.slice.bias[:, None]], -1)
        slots = F.pad(slots, (0, placed.shape[-1] - slots.shape[-1]))
        if self.config.plus:
            return Places((placed / temperature).transpose(1, 2), slots[None, None])
        return Places(placed.transpose(1, 2), (slots / temperature[:, None])[None])  # slots are few, points many

    def sums(self, x, places, measure=None):
        """Weighted sum of the points of each slice and, after it, its weight, (B, H, G, D + 1); of parts, they add.

        measure (B, N, 1): what each point stands for, the same for all where None. A value more a head is always one,
        so that the sum and its norm are one contraction; it adds up in fp32 at least, because a slice may hold
        millions of points.
        """
        values = self._with_one(self.place if self.config.tied else self.value, x)
        return places.sums(values if measure is None else values * measure.unsqueeze(-1).to(values.dtype))

    def mixed(self, sums, dtype):
        """Tokens, the weighted means of the points, after they attended to each other, (B, H, G, D)."""
        total, weight = sums[..., : self.channels], sums[..., self.channels, None]
        tokens = (total / (weight + self.EPSILON)).to(dtype)
        return F.scaled_dot_product_attention(self.query(tokens), self.key(tokens), self.token(tokens))

    def back(self, places, mixed):
        """What every point takes from the tokens that it belongs to, (B, N, C)."""
        return self.out(places.read(mixed).flatten(2))

    def _with_one(self, linear, x):
        """A projection with a channel of one after those of every head, (B, N, H, D + 1); on a GPU zeros follow it."""
        more = with_one(self.channels, x.device) - self.channels
        weight = F.pad(linear.weight.unflatten(0, (self.heads, -1)), (0, 0, 0, more))
        bias = F.pad(linear.bias.unflatten(0, (self.heads, -1)), (0, 1), value=1.0)
        bias = F.pad(bias, (0, more - 1))
        return F.linear(x, weight.flatten(0, 1), bias.flatten()).unflatten(-1, (self.heads, -1))


class Places(NamedTuple):
    """Points among slices by softmax(q k^T) over the slices, which is never written out. q: (B, H, N, D + 1); k: (1, 1
    or H, G, D + 1); one of them over the temperature, both with zeros after these channels on a GPU."""

    q: torch.Tensor
    k: torch.Tensor

    def sums(self, values):
        """(B, N, H, D + 1) to (B, H, G, D + 1)"""
        return slot_sums(self.q, self.k, values.transpose(1, 2))

    def read(self, tokens):
        """(B, H, G, D) to (B, N, H, D)"""
        return slot_read(self.q, self.k, tokens).transpose(1, 2)


class NoisyPlaces(NamedTuple):
    """Points among slices by weights (B, N, H, G), into which noise was drawn for every pair."""

    weights: torch.Tensor

    def sums(self, values):
        with torch.autocast(values.device.type, enabled=False):
            exact = torch.promote_types(values.dtype, torch.float32)
            return torch.einsum("bnhg,bnhd->bhgd", self.weights.to(exact), values.to(exact))

    def read(self, tokens):
        return torch.einsum("bnhg,bhgd->bnhd", self.weights, tokens)


class Block(nn.Module):
    """x + attention(norm x), then x + MLP(norm x), of every cloud."""

    def __init__(self, config):
        super().__init__()
        width = config.width
        self.norm1, self.norm2 = LayerNorm(width), LayerNorm(width)
        self.attention = SliceAttention(width, config.heads, config.slices, config)
        self.mlp = mlp(width, config.mlp * width, width)

    def forward(self, *clouds, measure=None):
        taken = self.attention(*(self.norm1(x) for x in clouds), measure=measure)
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
        seen = [features - (config.weighed and number == 0) for number, (features, _) in enumerate(kinds)]
        self.stems = nn.ModuleList(mlp(features, 2 * width, width) for features in seen)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norms = nn.ModuleList(LayerNorm(width) for _ in kinds)
        self.heads = nn.ModuleList(nn.Linear(width, outputs) for _, outputs in kinds)
        for block in self.blocks:
            if config.slice_init == "orthogonal":
                nn.init.orthogonal_(block.attention.slice.weight)
            else:
                nn.init.trunc_normal_(block.attention.slice.weight, std=0.02)

    def forward(self, *clouds):
        if len(clouds) != len(self.stems):
            raise ValueError(f"{len(clouds)} clouds of points for a model of {len(self.stems)}")
        clouds, measure = self.measured(clouds)
        clouds = tuple(stem(x) for stem, x in zip(self.stems, clouds))
        for block in self.blocks:
            found = block(*clouds, measure=measure)
            clouds = found if isinstance(found, tuple) else (found,)
        clouds = tuple(head(norm(x)) for head, norm, x in zip(self.heads, self.norms, clouds))
        return clouds if len(clouds) > 1 else clouds[0]

    def measured(self, clouds):
        """(clouds of what the stems see, measure of the first cloud's points (..., N, 1) or None)."""
        if not self.config.weighed:
            return clouds, None
        return (clouds[0][..., :-1], *clouds[1:]), clouds[0][..., -1:]
