"""What operations with windows send, byte for byte, and that they keep the cut where they keep the extent."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from core import scatter_tensor
from core.debug import trace

N, C, H, W = 2, 3, 12, 5
ROW, CHANNELS = N * C * W * 8, C * 8  # bytes of one row of the cut dim and of one number a channel

SENT = {  # the most that one of two ranks, which hold seven and five rows, sends forward and backward
    "conv 3": (lambda x: F.conv2d(x, x.new_ones(C, 1, 3, 3), padding=1, groups=C), ROW, ROW),
    "conv 5 dilated": (
        lambda x: F.conv2d(x, x.new_ones(C, 1, 5, 1), padding=(6, 0), dilation=3, groups=C),
        6 * ROW,
        6 * ROW,
    ),
    "conv patches": (lambda x: F.conv2d(x[:, :, 1:], x.new_ones(C, 1, 2, 1), stride=(2, 1), groups=C), 0, 0),
    "max pool": (lambda x: F.max_pool2d(x, 3, 1, 1), ROW, ROW),
    "average pool": (lambda x: F.avg_pool2d(x, (4, 1), 1), 2 * ROW, 2 * ROW),
    "mean": (lambda x: F.adaptive_avg_pool2d(x, 1), N * CHANNELS, 0),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), ROW, ROW),
    "nearest": (lambda x: F.interpolate(x, scale_factor=3), 0, 0),
    "reflection": (lambda x: F.pad(x, (0, 0, 2, 2), mode="reflect"), 0, 0),
    "wrap": (lambda x: F.pad(x, (0, 0, 2, 2), mode="circular"), 2 * ROW, 2 * ROW),
    "shuffle": (lambda x: torch.pixel_shuffle(x.expand(N, C, H, W).repeat(1, 4, 1, 1), 2), 0, 0),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), 2 * CHANNELS, 2 * CHANNELS),
    "group norm": (lambda x: F.group_norm(x, 1), 2 * N * 8, 2 * N * 8),
}


def _bytes(meshes, name):
    function, forward, backward = SENT[name]
    x = torch.randn(N, C, H, W, dtype=torch.float64)
    x = scatter_tensor(x, None, meshes["2"], [Shard(2)], sizes={0: (7, 5)}, requires_grad=True)
    with trace() as wire:
        y = function(x)
    there = wire.bytes()
    with trace() as wire:
        y.backward(torch.ones_like(y))
    return there, wire.bytes()


@pytest.mark.parametrize("name", SENT)
def test_bytes(pool, name):
    got = pool.run(_bytes, name)[:2]
    assert max(g[0] for g in got) == SENT[name][1] and max(g[1] for g in got) == SENT[name][2], got


def _cuts(meshes):
    x = torch.randn(N, C, H, W, dtype=torch.float64)
    x = scatter_tensor(x, None, meshes["2"], [Shard(2)], sizes={0: (7, 5)})
    same = [
        *(
            nn.Conv2d(C, C, k, padding="same", padding_mode=m).double()
            for k in (3, 7)
            for m in ("zeros", "circular", "reflect")
        ),
        nn.MaxPool2d(5, 1, 2),
        nn.AvgPool2d(3, 1, 1),
        nn.Upsample((H, 9)),
        nn.AdaptiveAvgPool2d((H, 1)),
        nn.BatchNorm2d(C).double(),
        nn.ConvTranspose2d(C, C, 3, padding=1).double(),
    ]
    for module in same:
        assert module(x)._spec.sizes == ((7, 5),), module
    for module, sizes in (
        (nn.Conv2d(C, C, 3).double(), (6, 4)),  # a row less at both ends
        (nn.MaxPool2d(2), (4, 2)),
        (nn.MaxPool2d(3, 2, 1), (4, 2)),
        (nn.Upsample(scale_factor=2, mode="bilinear"), (14, 10)),
        (nn.ConvTranspose2d(C, C, 4, 2, 1).double(), (14, 10)),
    ):
        assert module(x)._spec.sizes == (sizes,), (module, module(x)._spec)
    flow = x[:, :2].movedim(1, 3)
    for image in (x, x.full_tensor()):
        warped = F.grid_sample(image, flow, align_corners=False)
        assert warped.placements == (Shard(2),) and warped._spec.sizes == ((7, 5),), warped._spec
    back = F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=(H, W))
    assert back.placements == (Shard(2),) and back._spec.sizes == ((8, 4),), back._spec


def test_cuts(pool):
    pool.run(_cuts)


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(C, 8, 3, padding=1, padding_mode="circular"), nn.BatchNorm2d(8)

    def forward(self, x):
        x = F.avg_pool2d(F.max_pool2d(F.gelu(self.norm(self.conv(x))), 3, 2, 1), 3, 1, 1)
        up = F.interpolate(x, scale_factor=2, mode="bilinear") + F.interpolate(x, size=(H, 2 * x.shape[3]))
        up = F.group_norm(F.pixel_shuffle(up, 2), 1)
        at = F.affine_grid(x.new_ones(N, 2, 3), [N, 2, H, W], align_corners=False)
        return F.grid_sample(up, at, align_corners=False) * F.adaptive_avg_pool2d(up, 1) + F.adaptive_max_pool2d(
            up, (H, W)
        )


def _compiled(meshes):
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager, model = _Net().double(), _Net().double()
    model.load_state_dict(eager.state_dict())
    x = torch.randn(N, C, H, W, dtype=torch.float64)
    outs = []
    for net in (torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager"), eager):
        cut = scatter_tensor(x, None, meshes["2"], [Shard(2)], sizes={0: (7, 5)}, requires_grad=True)
        y = net(cut)
        y.square().sum().backward()
        outs.append((y.detach().full_tensor(), cut.grad.full_tensor()))
    for a, b in zip(*outs):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)
    for a, b in zip(model.state_dict().values(), eager.state_dict().values()):
        torch.testing.assert_close(a, b)
    for a, b in zip(model.parameters(), eager.parameters()):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-9, rtol=1e-9)


def test_compiled(pool):
    pool.run(_compiled, timeout=200)
