"""The denoiser: patches, neighbourhood attention steered by the noise level, a linear head.

A plain ``nn.Module``. Nothing but learned positions is tied to the grid, so any height and width will do: the far edges
are filled up to whole patches with missing pixels, which carry the value 0 and the validity 0, and the result is
cropped. Cut over many ranks it moves only the halos of attention and convolutions, provided that every rank holds whole
patches (:func:`apps.weather.dataset.row_sizes` cuts so; other cuts are right too, but move rows).

Sources: Peebles and Xie 2023 (adaLN-Zero), Hassani et al. 2023 (neighbourhood attention), Pathak et al. 2026 (the
combination, mask tokens, convolutions after the head).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from apps.norms import RMSNorm, layer_norm
from apps.weather.positions import placed, turns
from core import neighborhood_attention, rotary_embedding

LEVELS = 128  # Fourier features of the noise level


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the denoiser; the default of each choice is that of the preset ``tiny``.

    channels, conditions: of the noisy state and beside it. kernel: in patches, odd. fine: channels of the convolutions
    that close the seams between patches, and twice the features that tokens give to them; 0: none. positions: one of
    `apps.weather.positions.KINDS`; grid: rows and columns of tokens, for learned ones. qk_norm: queries and keys are
    scaled to unit mean square, channel by channel weighted. window: frames and channels of the history that leads the
    conditions, each frame its values, then its validity. gaps: what the validity is, "inputs" of the patches; "tokens",
    one learned in each block for each frame and channel of which a patch shows nothing; or "both".
    """

    channels: int
    conditions: int
    width: int = 64
    depth: int = 4
    heads: int = 4
    kernel: int = 7
    patch: int = 4
    fine: int = 32
    positions: str = "waves"
    grid: tuple[int, int] | None = None
    qk_norm: bool = False
    window: tuple[int, int] = (0, 0)
    gaps: str = "inputs"

    @property
    def masks(self):
        """Validities that mask tokens stand for."""
        return 0 if self.gaps == "inputs" else math.prod(self.window)

    @property
    def inputs(self):
        """Channels that the patches are made of."""
        return self.channels + self.conditions - (math.prod(self.window) if self.gaps == "tokens" else 0)


class Denoiser(nn.Module):
    """Network of a diffusion model: what to make of a noisy state, given conditions and the noise level."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config, width, p = config, config.width, config.patch
        self.embed = nn.Conv2d(config.inputs, width, p, stride=p)
        self.level = nn.Sequential(nn.Linear(2 * LEVELS, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.last = nn.Linear(width, 2 * width)
        made = config.channels + config.fine // 2
        self.head = nn.Linear(width, made * p * p)
        if config.fine:
            self.fine = nn.Conv2d(made + config.inputs, config.fine, 3, padding=1)
            self.finer = nn.Conv2d(config.fine, config.channels, 3, padding=1)
        self.apply(_initialise)
        zero = [self.last, self.head, *(block.steer for block in self.blocks)]
        for layer in [*zero, self.finer] if config.fine else zero:
            nn.init.zeros_(layer.weight)
        if config.fine:
            nn.init.xavier_uniform_(self.head.weight[config.channels * p * p :])
        if config.positions == "learned":
            self.place = nn.Parameter(0.02 * torch.randn(*config.grid, width))

    def forward(self, noisy, conditions, level):
        """(batch, channels, y, x), (batch, conditions, y, x) and (batch,), in -2 to 2, to (batch, channels, y, x)."""
        height, width = noisy.shape[-2:]
        p = self.config.patch
        valid, told = self._told(conditions)
        seen = torch.cat([noisy, *told], 1)
        x, turn = self._located(_tokens(self.embed(self._whole(seen))))
        gaps = 1 - _tokens(F.max_pool2d(self._whole(valid), p)) if self.config.masks else None
        level = self.level(fourier(level))
        for block in self.blocks:
            x = block(x, level, gaps, turn)
        shift, scale = self.last(level)[:, None, None].chunk(2, -1)
        x = self.head(modulated(x, shift, scale))
        b, h, w, _ = x.shape
        x = x.view(b, h, w, -1, p, p).permute(0, 3, 1, 4, 2, 5).reshape(b, -1, h * p, w * p)
        x = x[..., :height, :width]
        if not self.config.fine:
            return x
        near = F.gelu(self.fine(torch.cat([x, seen], 1)), approximate="tanh")
        return x[:, : self.config.channels] + self.finer(near)

    def _told(self, conditions):
        """The validities for mask tokens (batch, masks, y, x), or None, and the conditions that the patches take."""
        if not self.config.masks:
            return None, [conditions]
        frames, channels = self.config.window
        history = conditions[:, : 2 * frames * channels].unflatten(1, (frames, 2, channels))
        valid = history[:, :, 1].flatten(1, 2)
        if self.config.gaps == "both":
            return valid, [conditions]
        return valid, [history[:, :, 0].flatten(1, 2), conditions[:, 2 * frames * channels :]]

    def _whole(self, x):
        """Filled up with zeros to whole patches."""
        return F.pad(x, (0, -x.shape[-1] % self.config.patch, 0, -x.shape[-2] % self.config.patch))

    def _located(self, x):
        """Tokens that know where they are, and what turns their queries and keys, or None."""
        kind, (_, h, w, width) = self.config.positions, x.shape
        if kind == "rotary":
            return x, turns(h, w, width // self.config.heads, x)
        return (x + self.place.to(x.dtype) if kind == "learned" else placed(x)), None


class Block(nn.Module):
    """Attention within a neighbourhood, then an MLP; the noise level shifts, scales and gates both (adaLN-Zero)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        width, self.heads, self.kernel = config.width, config.heads, config.kernel
        self.steer = nn.Linear(width, 6 * width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList(RMSNorm(width // config.heads) for _ in range(2 * config.qk_norm))
        if config.masks:
            self.missing = nn.Parameter(0.02 * torch.randn(width, config.masks))

    def forward(self, x, level, gaps=None, turn=None):
        """Tokens (batch, y, x, width) to tokens.

        level: embedding (batch, width); gaps: 1 where a patch shows nothing, (batch, y, x, masks); turn: see `turns`.
        """
        shift, scale, gate, shift2, scale2, gate2 = self.steer(level)[:, None, None].chunk(6, -1)
        if gaps is not None:
            x = x + F.linear(gaps, self.missing)
        x = torch.addcmul(x, gate, self.attention(modulated(x, shift, scale), turn))
        return torch.addcmul(x, gate2, self.mlp(modulated(x, shift2, scale2)))

    def attention(self, x, turn):
        b, h, w, width = x.shape
        q, k, v = self.qkv(x).view(b, h, w, 3, self.heads, width // self.heads).unbind(3)
        q, k = (norm(x) for norm, x in zip(self.norms, (q, k))) if self.norms else (q, k)
        q, k = (rotary_embedding(x, *turn) for x in (q, k)) if turn else (q, k)
        return self.project(neighborhood_attention(q, k, v, self.kernel).reshape(b, h, w, width))


def modulated(x, shift, scale):
    """Tokens of mean 0 and variance 1, scaled and shifted; x (batch, y, x, width), the others (batch, 1, 1, width)."""
    if len(x) == 1:  # then these are a norm's own weights, and there is one pass forward and one back
        return layer_norm(x, 1 + scale.flatten(), shift.flatten(), eps=1e-6)
    return torch.addcmul(shift, layer_norm(x, eps=1e-6), 1 + scale)


def fourier(level):
    """Sines and cosines of the noise level, (batch,) to (batch, 2 LEVELS): waves of length 20 down to 0.2."""
    frequency = 2 * math.pi * torch.logspace(math.log10(0.05), math.log10(5.0), LEVELS, device=level.device)
    angle = level[:, None] * frequency.to(level.dtype)
    return torch.cat([angle.sin(), angle.cos()], -1)


def _tokens(x):
    """(batch, channels, y, x) to (batch, y, x, channels), contiguous: as convolutions leave them, the channels of a
    token lie far apart, and what is added to them in all blocks would keep them so."""
    return x.permute(0, 2, 3, 1).contiguous()


def _initialise(layer):
    if isinstance(layer, (nn.Linear, nn.Conv2d)):
        nn.init.xavier_uniform_(layer.weight.view(layer.weight.shape[0], -1))
        nn.init.zeros_(layer.bias)
