"""Norms of the applications keep the precision of what they are given, under a GPU's autocast too."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from apps.aero.model import ModelConfig as TransolverConfig
from apps.aero.model import Transolver
from apps.norms import LayerNorm, RMSNorm
from apps.weather.model import Denoiser, modulated
from apps.weather.model import ModelConfig as DenoiserConfig
from core import scatter_tensor
from core.debug import trace
from core.gradients import gather_in_buckets
from core.plan import share
from core.precision import gpu_autocast
from core.testing import check_sharded

TOKENS = 64


@pytest.mark.parametrize("ours, torchs", [(LayerNorm, nn.LayerNorm), (RMSNorm, nn.RMSNorm)])
def test_results_are_those_of_torch(ours, torchs):
    norm, exact = ours(24, eps=1e-5), torchs(24, eps=1e-5).double()
    with torch.no_grad():
        for p, q in zip(norm.parameters(), exact.parameters()):
            q.copy_(p.normal_())
    x = torch.randn(5, 24)
    torch.testing.assert_close(norm(x), exact(x.double()).float())
    with gpu_autocast(torch.bfloat16):
        half = norm(x.bfloat16().requires_grad_())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half, exact(x.double()).bfloat16(), rtol=2e-2, atol=2e-2)
    half.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.abs().min() > 0 for p in norm.parameters())


def test_of_several_dims():
    x = torch.randn(2, 3, 4)
    for affine in (True, False):
        for norm, plain in ((LayerNorm, F.layer_norm), (RMSNorm, F.rms_norm)):
            torch.testing.assert_close(norm((3, 4), elementwise_affine=affine)(x), plain(x, (3, 4)))


class HalfNorms(nn.Module):
    """Norms of half precision whose weights are fp32."""

    def __init__(self, norm):
        super().__init__()
        self.norms = nn.Sequential(norm(8), norm(8), norm(8, elementwise_affine=False), norm(8))
        for i, p in enumerate(self.parameters()):
            nn.init.normal_(p, 1, 0.3, generator=torch.Generator().manual_seed(i))

    def forward(self, x):
        with gpu_autocast(torch.bfloat16):
            return self.norms(x.bfloat16())


def weights_on_ranks(meshes):
    """Right however rows and channels are cut, and gradients of all weights travel in one message, in fp32."""
    for norm in (LayerNorm, RMSNorm):
        model, x = HalfNorms(norm), torch.randn(2, 6, 8)
        for dim, sizes in ((1, (3, 3)), (1, (0, 6)), (2, (5, 3)), (0, (1, 1))):
            check_sharded(model, [x], [[Shard(dim)]], meshes["2"], sizes=[{0: sizes}], atol=5e-2, rtol=5e-2)
        gather_in_buckets(model)
        loss = model(scatter_tensor(x, None, meshes["2"], [Shard(1)])).float().square().sum()
        with trace() as sent:
            loss.backward()
        assert sent.count() == 1 and sent.bytes() == sum(p.nbytes for p in model.parameters())
        with torch.no_grad():
            assert any(not torch.equal(p.grad, p.grad.bfloat16()) for p in model.parameters())


def test_weights_on_ranks(pool):
    pool.run(weights_on_ranks)


def denoiser(batch):
    config = DenoiserConfig(
        2, 7, width=32, depth=2, heads=2, kernel=3, positions="rotary", window=(1, 3), gaps="tokens"
    )
    return Denoiser(config), [torch.randn(batch, n, 32, 32) for n in (2, 7)] + [torch.zeros(batch)]


def transolver(batch):
    return Transolver(TransolverConfig(width=32, layers=2)), [torch.randn(batch, TOKENS, 6)]


@pytest.mark.parametrize("made", [denoiser, transolver])
@pytest.mark.parametrize("batch", [1, 2])
def test_no_block_keeps_tokens_in_fp32(made, batch):
    model, inputs = made(batch)
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with gpu_autocast(torch.bfloat16), hooks:
        model(*inputs)
    tokens = [t for t in kept if t.numel() >= batch * TOKENS * 32 and not isinstance(t, nn.Parameter)]
    assert len(tokens) > 10 and all(t.dtype == torch.bfloat16 for t in tokens)


def test_a_sample_alone_is_steered_as_among_others():
    """One sample takes its shift and scale as a norm's weights, several do not: the same values and gradients."""
    shapes = (2, 5, 4, 8), (2, 1, 1, 8), (2, 1, 1, 8)
    together, alone = ([torch.randn(s, dtype=torch.float64, generator=g).requires_grad_() for s in shapes]
                       for g in (torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)))  # fmt: skip
    expected = modulated(*together)
    found = torch.cat([modulated(*(t[i : i + 1] for t in alone)) for i in range(2)])
    torch.testing.assert_close(found, expected)
    for out in (expected, found):
        (out**3).sum().backward()
    torch.testing.assert_close([t.grad for t in alone], [t.grad for t in together])


def test_a_plan_takes_the_rms_norm_of_a_gpu():
    """One kernel that keeps its input and a number for each row, as a layer norm; the CPU has none."""
    kept = [share(lambda n=n: n(64), [(1, 4096, 64)], [None], (1, 1)).activations for n in (nn.RMSNorm, nn.LayerNorm)]
    assert kept[0] == kept[1] > 0
