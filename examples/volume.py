"""A volume: 3-D convolutions and attention between its patches, on one rank and on all, to the same gradients.

    python examples/volume.py
    torchrun --nproc-per-node 2 examples/volume.py

The volume could be a CT scan or the grid of a flow solver. It is cut along its depth, 21 slices of which no two ranks
need hold the same number.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from core import DistributedManager, scatter_tensor
from core.debug import trace
from core.testing import check_sharded


class VolumeNet(nn.Module):
    def __init__(self, channels=1, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.stem = nn.Sequential(nn.Conv3d(channels, width, 3, padding=1), nn.GroupNorm(4, width), nn.GELU())
        self.patch = nn.Conv3d(width, width, 4, stride=4, padding=2)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, 1)

    def forward(self, volume):
        """``volume`` (B, channels, D, H, W) to one number a patch (B, patches)."""
        tokens = self.patch(self.stem(volume)).flatten(2).mT
        q, k, v = self.qkv(self.norm(tokens)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(tokens + mixed).squeeze(-1)


def main():
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = manager.initialize_mesh((-1,), ("domain",))
    torch.manual_seed(0)  # every rank draws the same
    model = VolumeNet().double().to(manager.device)
    volume = torch.randn(1, 1, 21, 16, 12, dtype=torch.float64, device=manager.device)
    report = check_sharded(model, [volume], [[Shard(2)]], mesh)  # the same module on the whole and on parts
    part = scatter_tensor(volume, None, mesh, [Shard(2)])
    with trace() as wire:
        out = model(part)
    if manager.rank == 0:
        print(report)
        print(f"of {tuple(volume.shape)} rank 0 holds {tuple(part.to_local().shape)}; result {tuple(out.shape)}")
        print(f"forward: {wire.count()} messages, {wire.bytes():,} bytes")
    manager.cleanup()
    return report


if __name__ == "__main__":
    main()
