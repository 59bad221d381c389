"""Plain modules that the benchmarks cut, and the cases made of them: nothing in here knows of shards."""

from math import log

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
    """Vision transformer of images or, with ``dims=3``, of volumes: learned positions, mean over tokens."""

    def __init__(self, size, width=768, depth=16, heads=12, patch=8, classes=1000, channels=3, dims=2):
        super().__init__()
        self.embed = (nn.Conv2d if dims == 2 else nn.Conv3d)(channels, width, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** dims, width))
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


class SliceBlock(nn.Module):
    """A block of :class:`Transolver`."""

    def __init__(self, width, heads, slices):
        super().__init__()
        self.heads, d = heads, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.place, self.value, self.out = (nn.Linear(width, width) for _ in range(3))
        self.slice, self.log_temperature = nn.Linear(d, slices), nn.Parameter(torch.full((heads, 1, 1), log(0.25)))
        self.query, self.key, self.token = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        h = self.norm1(x)
        place, value = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.place, self.value))
        weights = (self.slice(place) / self.log_temperature.exp()).softmax(-1)  # (batch, heads, points, slices)
        tokens = (weights.mT @ value) / (weights.sum(2)[..., None] + 1e-5)
        tokens = F.scaled_dot_product_attention(self.query(tokens), self.key(tokens), self.token(tokens))
        x = x + self.out((weights @ tokens).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transolver(nn.Module):
    """Attention among slices of points, (batch, points, features) to (batch, points, 4), with all weights written out:
    what any library can run. Source: Wu et al., Transolver, arXiv 2402.02366; that of ``apps.aero`` keeps no weights
    and gives the same."""

    def __init__(self, width=256, depth=4, heads=8, slices=128, features=6):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(features, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.blocks = nn.ModuleList(SliceBlock(width, heads, slices) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def cases(small, transolver=Transolver):
    """name -> (module, input shapes, dim that is cut); ``transolver`` makes the model of that name."""
    for n in (64,) if small else (16384, 65536, 131072):
        yield f"attention {n}", Attention, [(1, 16, n, 64)] * 3, 2
    for s in (32,) if small else (512, 1024, 2048):
        depth = 2 if small else 16
        yield f"ViT {s}", lambda s=s, d=depth: ViT(s, depth=d), [(1, 3, s, s)], 2
    s = 32 if small else 2048
    yield f"conv {s}", ConvNet, [(1, 64, s, s)], 2
    for n in (256,) if small else (75_000, 300_000, 1_200_000):
        yield f"Transolver {n}", transolver, [(1, n, 6)], 1


def many(small):
    """As :func:`cases`, for as many GPUs as there are: what other libraries can run too."""
    for n in (64, 128) if small else (65_536, 262_144, 1_048_576):
        yield f"attention {n}", Attention, [(1, 16, n, 64)] * 3, 2
    sizes = dict(width=32, depth=1, heads=2) if small else {}
    for s in (32,) if small else (1024, 2048, 4096):
        yield f"ViT {s}", lambda s=s: ViT(s, **sizes), [(1, 3, s, s)], 2
    for s in (32,) if small else (256, 512):
        yield f"ViT {s} cubed", lambda s=s: ViT(s, dims=3, channels=1, **sizes), [(1, 1, s, s, s)], 2


SUITES = {"usual": cases, "many": many}
