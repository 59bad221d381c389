"""What the table of cases does not see: refusals, half precision, memory format, compiled code."""

import pytest
import torch
import torch.nn.functional as F
from cases_attention import with_strategy
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.tensor import Shard

from core import ShardingError, ShardTensor, neighborhood_attention, scatter_tensor, set_fallback


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# -- writes ----------------------------------------------------------------------------------------------------------
def refused_writes(meshes):
    """A view whose rows were fetched is a copy: what is written there would be lost."""
    x = scatter_tensor(draw(2, 7, 8), None, meshes["2"], [Shard(1)])
    views = (lambda: x[:, 2], lambda: x[:, -1], lambda: x.unbind(1)[0], lambda: x.view(-1), lambda: x.unfold(1, 2, 2))
    for view in views:
        with pytest.raises(ShardingError, match="copy"):
            view().fill_(0)
    expected = draw(2, 7, 8)
    for t in (x, expected):
        t[:, 2:3], t[0], t[..., 1], t[:, 5] = 1, 2, 3, 4
        t.diagonal().fill_(5)
    assert torch.equal(x.full_tensor(), expected)
    for dim in (3, -4):
        with pytest.raises(IndexError):
            x.sum(dim)
        with pytest.raises(IndexError):
            x.select(1, 3 * dim)


def test_writes_are_not_lost(pool):
    pool.run(refused_writes)


def test_plain_neighborhood_refuses_too():
    x = draw(2, 7, 8, 2, 4)
    for kernel in (0, (9, 3), (3,)):
        with pytest.raises(ShardingError):
            neighborhood_attention(x, x, x, kernel)


# -- transforms of torch.func -----------------------------------------------------------------------------------------
def transforms(meshes):
    """Not a promise of ours, but never a wrong number: what works is right, and what does not says so."""
    x, w = draw(5, 3), draw(3, 3, seed=1)
    part = scatter_tensor(x, None, meshes["2"], [Shard(0)], sizes={0: (4, 1)})
    for right in (
        torch.func.grad(lambda t: F.layer_norm(F.linear(t, w), (3,)).softmax(0).square().mean()),
        lambda t: torch.func.vjp(lambda s: s.softmax(0), t)[1](t)[0],
        torch.func.jacrev(lambda t: (t @ w).sin()),
        torch.vmap(lambda t: t.sin() @ w),
        torch.vmap(lambda t: t.sin().sum(), in_dims=1),
    ):
        got = right(part)
        got = got.full_tensor() if isinstance(got, ShardTensor) else got
        torch.testing.assert_close(got, right(x), atol=1e-12, rtol=1e-12)
    for refused in (
        lambda: torch.func.grad(lambda v: (part @ v).sin().sum())(w),
        lambda: torch.vmap(lambda v: part @ v)(w),
        lambda: torch.func.jvp(torch.sin, (part,), (part,)),
        lambda: torch.func.linearize(torch.sin, part),
        lambda: torch.func.hessian(lambda t: t.sin().sum())(part),
    ):
        with pytest.raises(ShardingError, match="transform of torch.func"):
            refused()
    with forward_ad.dual_level():
        tangent = forward_ad.make_dual(w, w)
        assert isinstance(part @ w, ShardTensor)
        for refused in (
            lambda: part @ tangent,
            lambda: part[:, :1] + tangent[0],
            lambda: forward_ad.make_dual(part, part),
        ):
            with pytest.raises(ShardingError, match="forward-mode"):
                refused()


def test_transforms(pool):
    pool.run(transforms)


# -- half precision ---------------------------------------------------------------------------------------------------
def half_attention(meshes, strategy):
    """The error against fp64 is that of bf16 and does not grow with the number of blocks."""
    q, k, v = (draw(1, 2, 24, 8, dtype=torch.bfloat16, seed=i) * 4 for i in range(3))
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(*wide)
    expected.sum().backward()
    fn = with_strategy(strategy, F.scaled_dot_product_attention)
    for name in ("1", "2", "4"):
        cut = [scatter_tensor(t, None, meshes[name], [Shard(2)], requires_grad=True) for t in (q, k, v)]
        out = fn(*cut)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.full_tensor().double(), expected, atol=0.05, rtol=0.02)
        out.sum().backward()
        for a, b in zip(cut, wide):
            torch.testing.assert_close(a.grad.full_tensor().double(), b.grad, atol=0.2, rtol=0.05)


@pytest.mark.parametrize("strategy", ["gather", "ring", "heads", "dealt"])
def test_half_precision_attention(pool, strategy):
    pool.run(half_attention, strategy)


def half_norm(meshes):
    """Statistics of bf16 fields whose mean is a hundred times their spread are those of fp32."""
    x = (draw(2, 4, 8, 6) + 100).to(torch.bfloat16)
    cut = scatter_tensor(x, None, meshes["2"], [Shard(2)], sizes={0: (5, 3)})
    expected = F.group_norm(x.double(), 2)
    got = F.group_norm(cut, 2)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.full_tensor().double(), expected, atol=0.02, rtol=0.01)
    got = F.layer_norm(cut, (8, 6)).full_tensor().double()
    torch.testing.assert_close(got, F.layer_norm(x.double(), (8, 6)), atol=0.02, rtol=0.01)
    for fn in (lambda t: F.rms_norm(t * 1e-3, (8, 6)), lambda t: F.layer_norm(t, (6,))):
        torch.testing.assert_close(fn(cut).full_tensor(), fn(x))


def test_half_precision_norms(pool):
    pool.run(half_norm)


# -- memory format ----------------------------------------------------------------------------------------------------
def channels_last(meshes):
    x = draw(2, 8, 9, 6).contiguous(memory_format=torch.channels_last)
    cut = scatter_tensor(x, None, meshes["2"], [Shard(2)], sizes={0: (6, 3)})
    weight = draw(4, 8, 3, 3).contiguous(memory_format=torch.channels_last)
    assert cut.to_local().is_contiguous(memory_format=torch.channels_last)
    out = F.conv2d(cut, weight, padding=1).to_local()
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_convolution_keeps_channels_last(pool):
    pool.run(channels_last)


# -- compiled code ----------------------------------------------------------------------------------------------------
class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 2, 2)
        self.qkv, self.layer_norm, self.up = nn.Linear(8, 24), nn.LayerNorm(8), nn.ConvTranspose2d(8, 3, 2, 2)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        h = self.down(F.silu(self.norm(self.conv(x)))).permute(0, 2, 3, 1)
        q, k, v = (t.unflatten(-1, (2, 4)) for t in self.qkv(self.layer_norm(h)).chunk(3, -1))
        h = h + neighborhood_attention(q, k, v, 3).flatten(-2)
        q, k, v = (t.flatten(1, 2).transpose(1, 2) for t in (q, k, v))
        h = h + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).unflatten(1, h.shape[1:3]).flatten(-2)
        y = self.drop(F.pad(self.up(h.permute(0, 3, 1, 2)), (1, 1, 1, 1), mode="circular")[:, :, 1:-1, 1:-1])
        return F.mse_loss(y, x) + F.huber_loss(y, x)


def compiled(meshes):
    torch._dynamo.reset()
    set_fallback("error")
    try:
        torch.manual_seed(0)
        model, grads = Everything().double(), []
        for step in (model, torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")):
            x = scatter_tensor(draw(1, 3, 12, 8), None, meshes["2"], [Shard(2)], requires_grad=True, sizes={0: (8, 4)})
            model.zero_grad()
            torch.manual_seed(1)  # one mask for both
            loss = step(x)
            loss.backward()
            grads.append([loss.full_tensor(), x.grad.full_tensor(), *(p.grad.clone() for p in model.parameters())])
    finally:
        set_fallback("warn")
    for eager, graph in zip(*grads):
        torch.testing.assert_close(graph, eager, atol=1e-10, rtol=1e-10)


@pytest.mark.nightly  # whole compiled models are seen in every run
def test_compiled_in_one_graph(pool):
    pool.run(compiled)
