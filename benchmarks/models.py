"""Plain modules that the benchmarks cut: nothing in here knows of shards."""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Bare attention of ``(B, heads, tokens, dim)``."""

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def _split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x):
        h = self.norm1(x)
        a = F.scaled_dot_product_attention(self._split(self.q(h)), self._split(self.k(h)), self._split(self.v(h)))
        x = x + self.out(a.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Vision transformer: patch 8, learned positions, mean over tokens."""

    def __init__(self, size, width=768, depth=16, heads=12, patch=8, classes=1000):
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, image):
        x = self.embed(image).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class ConvNet(nn.Module):
    """``depth`` times 3 x 3 convolution, group norm, SiLU."""

    def __init__(self, width=64, depth=8, groups=8):
        super().__init__()
        layers = []
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(groups, width), nn.SiLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)
