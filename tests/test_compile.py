"""Whole models of shards compile into one graph, and give the numbers of one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from apps.aero.model import ModelConfig, Transolver
from benchmarks.models import ConvNet, ViT
from core import ShardTensor, scatter_tensor

MODELS = {
    "vit": (lambda: ViT(32, width=32, depth=2, heads=4, classes=10), (2, 3, 32, 32), 2, (24, 8)),
    "convolutions": (lambda: ConvNet(width=8, depth=2, groups=4), (1, 8, 12, 12), 2, (9, 3)),
    "transolver": (
        lambda: Transolver(ModelConfig(features=6, outputs=4, width=32, layers=2, heads=4, slices=16)),
        (1, 50, 6), 1, (46, 4),
    ),
}  # fmt: skip


def _step(model, weights, x):
    """Output and all gradients, whole."""
    for p in weights:
        p.grad = None
    y = model(x)
    y.square().mean().backward()
    found = [y.detach(), x.grad, *[p.grad for p in weights]]
    return [t.full_tensor() if isinstance(t, ShardTensor) else t for t in found]


def whole_model(meshes, name, backend):
    """The ranks' compiled graphs differ (uneven cuts, gradients that begin on one rank), their messages not."""
    make, shape, dim, sizes = MODELS[name]
    torch._dynamo.reset()
    model, x = make().double(), torch.randn(shape, dtype=torch.float64)
    weights = list(model.parameters())
    expected = _step(model, weights, x.clone().requires_grad_())
    part = scatter_tensor(x, None, meshes["2"], [Shard(dim)], sizes={0: sizes}, requires_grad=True)
    how = dict(fullgraph=True, dynamic=False, backend=backend)
    if name == "convolutions":
        model.compile(**how)
    compiled = model if name == "convolutions" else torch.compile(model, **how)
    for got, wanted in zip(_step(compiled, weights, part), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-10)


INDUCTOR = [pytest.param(n, "inductor", marks=pytest.mark.nightly) for n in MODELS]  # a minute each


@pytest.mark.parametrize("name, backend", [*((n, "aot_eager_decomp_partition") for n in MODELS), *INDUCTOR])
def test_a_whole_model(pool, name, backend):
    pool.run(whole_model, name, backend, timeout=600)


# -- parts of a model, and sizes that change -------------------------------------------------------------------------
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    """``seen`` is given what goes into a layer and what comes out of it."""

    def __init__(self):
        super().__init__()
        self.layers, self.qkv = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(8, 24)
        self.seen = lambda x: None

    def forward(self, x):
        for layer in self.layers:
            self.seen(x)
            x = layer(x)
            self.seen(x)
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x


def sizes_that_change(meshes, regional):
    """Compiled layers between eager attention, and a whole network as torch.compile takes it by default: any split,
    empty ones too (a rank without rows must not be thought to send one message where it sends two), and any size."""
    torch._dynamo.reset()
    model, plain, backend = Network().double(), Network().double(), "aot_eager_decomp_partition"
    plain.load_state_dict(model.state_dict())
    run, borders = model if regional else torch.compile(model, backend=backend), []
    for layer in model.layers if regional else ():
        layer.compile(fullgraph=True, dynamic=False, backend=backend)
    if regional:
        model.seen = lambda x: x.register_hook(borders.append)
    for splits in ((5, 4), (7, 2), (6, 6), (0, 7)):
        x = torch.randn(2, sum(splits), 8, dtype=torch.float64)
        expected = _step(plain, list(plain.parameters()), x.clone().requires_grad_())
        part = scatter_tensor(x, None, meshes["2"], [Shard(1)], sizes={0: splits}, requires_grad=True)
        for got, wanted in zip(_step(run, list(model.parameters()), part), expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-10)
        spec = run(part)._spec
        assert spec.sizes == (splits,) and all(type(n) is int for n in (*spec.shape, *spec.stride, *spec.sizes[0]))
    assert len(borders) == (16 if regional else 0) and all(type(g) is ShardTensor for g in borders)


@pytest.mark.parametrize("regional", [True, False], ids=["layers", "whole"])
def test_sizes_that_change(pool, regional):
    pool.run(sizes_that_change, regional, timeout=240)


# -- what is kept -------------------------------------------------------------------------------------------------
def kept_graphs(meshes):
    """Rules change: what one process traced with its rules is not taken for the graph of another."""
    x = scatter_tensor(torch.arange(7.0), None, meshes["2"], [Shard(0)])
    counters = torch._dynamo.utils.counters["aot_autograd"]
    counters.clear()
    for _ in range(2):
        torch._dynamo.reset()
        y = torch.compile(lambda t: t.sin() * 2, fullgraph=True, dynamic=False)(x)
        torch.testing.assert_close(y.full_tensor(), torch.arange(7.0).sin() * 2)
    assert counters["autograd_cache_miss"] == 2 and not counters["autograd_cache_hit"], counters


def test_kept_graphs(pool):
    pool.run(kept_graphs, timeout=240)
