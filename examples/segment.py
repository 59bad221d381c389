"""A model of your own: a small U-Net, trained on an image that is cut over all ranks.

    python examples/segment.py
    torchrun --nproc-per-node 2 examples/segment.py

Nothing in the network knows of ranks. The image has an odd number of rows and both runs print the same losses.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from core import DistributedManager, parallelize, scatter_tensor


class UNet(nn.Module):
    """Two levels; the way up takes the size of the skip, so that any size goes through."""

    def __init__(self, channels=3, width=8, classes=2):
        super().__init__()
        self.enter = _block(channels, width)
        self.down = nn.Sequential(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), _block(2 * width, 2 * width))
        self.leave = nn.Sequential(_block(3 * width, width), nn.Conv2d(width, classes, 1))

    def forward(self, image):
        """``image`` (B, channels, H, W) to logits (B, classes, H, W)."""
        skip = self.enter(image)
        deep = F.interpolate(self.down(skip), size=skip.shape[2:], mode="bilinear")
        return self.leave(torch.cat([skip, deep], 1))


def _block(before, after):
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(2, after), nn.SiLU())


def main(steps=5):
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = manager.initialize_mesh((1, -1), ("ddp", "domain"))
    torch.manual_seed(0)
    model = UNet().to(manager.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = parallelize.parallelize(model, mesh)
    image = torch.randn(1, 3, 101, 64, device=manager.device)
    labels = (image.mean(1) > 0).long()  # (B, H, W)
    rows = {"src": None, "mesh": mesh["domain"]}  # src=None: every rank has the whole and keeps its own rows
    image = scatter_tensor(image, placements=[Shard(2)], **rows)
    labels = scatter_tensor(labels, placements=[Shard(1)], **rows)
    losses = []
    for step in range(steps):
        loss = F.cross_entropy(model(image), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if manager.rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}, rank 0 holds {tuple(image.to_local().shape)}")
    manager.cleanup()
    return losses


if __name__ == "__main__":
    main()
