"""The denoiser: patches, neighbourhood attention steered by the noise level, a linear head.

A plain ``nn.Module``. No parameter is tied to the grid, so any height and width will do: the far edges are filled up to
whole patches with missing pixels, which carry the value 0 and the validity 0, and the result is cropped. Cut over many
ranks it moves only the halo of the attention, provided that every rank holds whole patches
(:func:`apps.weather.dataset.row_sizes` cuts so; other cuts are right too, but move rows).

Sources: Peebles and Xie 2023 (adaLN-Zero), Hassani et al. 2023 (neighbourhood attention).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from core import neighborhood_attention

LEVELS = 128  # Fourier features of the noise level


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the denoiser. ``conditions``: channels beside the noisy state; ``kernel``: in patches, odd;
    ``fine``: channels of the convolutions that close the seams between patches."""

    channels: int
    conditions: int
    width: int = 64
    depth: int = 4
    heads: int = 4
    kernel: int = 7
    patch: int = 4
    fine: int = 32


class Denoiser(nn.Module):
    """Network of a diffusion model: what to make of a noisy state, given conditions and the noise level."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config, width, p = config, config.width, config.patch
        self.embed = nn.Conv2d(config.channels + config.conditions, width, p, stride=p)
        self.level = nn.Sequential(nn.Linear(2 * LEVELS, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.blocks = nn.ModuleList(Block(width, config.heads, config.kernel) for _ in range(config.depth))
        self.last = nn.Linear(width, 2 * width)
        self.head = nn.Linear(width, config.channels * p * p)
        fine = config.fine
        self.fine = nn.Conv2d(2 * config.channels + config.conditions, fine, 3, padding=1)
        self.finer = nn.Conv2d(fine, config.channels, 3, padding=1)
        self.apply(_initialise)
        for layer in (self.last, self.head, self.finer, *(block.steer for block in self.blocks)):
            nn.init.zeros_(layer.weight)

    def forward(self, noisy, conditions, level):
        """(batch, channels, y, x), (batch, conditions, y, x) and (batch,), in -2 to 2, to (batch, channels, y, x)."""
        height, width = noisy.shape[-2:]
        p = self.config.patch
        seen = torch.cat([noisy, conditions], 1)
        x = self.embed(F.pad(seen, (0, -width % p, 0, -height % p))).permute(0, 2, 3, 1)
        rows, columns = positions(x.shape[1], x), positions(x.shape[2], x)
        x = x + F.pad(rows, (0, rows.shape[-1]))[:, None] + F.pad(columns, (columns.shape[-1], 0))
        level = self.level(fourier(level))
        for block in self.blocks:
            x = block(x, level)
        shift, scale = self.last(level)[:, None, None].chunk(2, -1)
        x = self.head(modulated(x, shift, scale))
        b, h, w, _ = x.shape
        x = x.view(b, h, w, -1, p, p).permute(0, 3, 1, 4, 2, 5).reshape(b, -1, h * p, w * p)
        x = x[..., :height, :width]
        return x + self.finer(F.gelu(self.fine(torch.cat([x, seen], 1)), approximate="tanh"))


class Block(nn.Module):
    """Attention within a neighbourhood, then an MLP; the noise level shifts, scales and gates both (adaLN-Zero)."""

    def __init__(self, width, heads, kernel):
        super().__init__()
        self.heads, self.kernel = heads, kernel
        self.steer = nn.Linear(width, 6 * width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x, level):
        """Tokens (batch, y, x, width) and level embedding (batch, width) to tokens."""
        shift, scale, gate, shift2, scale2, gate2 = self.steer(level)[:, None, None].chunk(6, -1)
        x = x + gate * self.attention(modulated(x, shift, scale))
        return x + gate2 * self.mlp(modulated(x, shift2, scale2))

    def attention(self, x):
        b, h, w, width = x.shape
        q, k, v = self.qkv(x).view(b, h, w, 3, self.heads, width // self.heads).unbind(3)
        return self.project(neighborhood_attention(q, k, v, self.kernel).reshape(b, h, w, width))


def modulated(x, shift, scale):
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def fourier(level):
    """Sines and cosines of the noise level, (batch,) to (batch, 2 LEVELS): waves of length 20 down to 0.2."""
    frequency = 2 * math.pi * torch.logspace(math.log10(0.05), math.log10(5.0), LEVELS).to(level)
    angle = level[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], -1)


def positions(count, like):
    """Sines and cosines of ``count`` positions (Vaswani et al. 2017), half as wide as the tokens ``like``."""
    waves = like.shape[-1] // 4
    angle = torch.arange(count, device=like.device)[:, None] * 1e4 ** (-torch.arange(waves, device=like.device) / waves)
    return torch.cat([angle.sin(), angle.cos()], -1).to(like.dtype)


def _initialise(layer):
    if isinstance(layer, (nn.Linear, nn.Conv2d)):
        nn.init.xavier_uniform_(layer.weight.view(layer.weight.shape[0], -1))
        nn.init.zeros_(layer.bias)
