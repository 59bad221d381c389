"""What can be chosen of the forecaster: kinds of model on shards, laws and experts of the noise, solvers, presets."""

import math

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from apps.weather import diffusion, plan
from apps.weather.config import PRESETS, TrainConfig
from apps.weather.dataset import row_sizes
from apps.weather.diffusion import Diffusion, Experts
from apps.weather.model import Denoiser, ModelConfig
from apps.weather.positions import turns
from core import InputError, rotary_embedding, scatter_tensor
from core.debug import trace
from core.gradients import gather_in_buckets
from core.testing import check_sharded

GRID = 26, 21
CHOICES = {
    "rotary, tokens": dict(positions="rotary", qk_norm=True, gaps="tokens"),
    "learned, both, no convolutions": dict(positions="learned", grid=(7, 6), gaps="both", fine=0),
}


def _model(**choices):
    """A denoiser of 2 channels that sees two frames of them, shaken so that every part of it matters."""
    torch.manual_seed(0)
    choices = {"fine": 8, "depth": 2, **choices}
    config = ModelConfig(2, 10, width=16, heads=2, kernel=5, window=(2, 2), **choices)
    model = Denoiser(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


def _inputs():
    """A noisy state, and conditions whose validities are 0 or 1, with whole patches of 0."""
    generator = torch.Generator().manual_seed(1)
    noisy, told = (torch.randn(2, c, *GRID, dtype=torch.float64, generator=generator) for c in (2, 10))
    for at in (2, 3, 6, 7):
        told[:, at] = (told[:, at] > 0).double()
        told[:, at, 4:14, : 4 * at] = 0
    return noisy, told


def on_shards(meshes, choice):
    mesh, sizes = meshes["2x2"], {i: row_sizes(GRID[i], 4, 2) for i in range(2)}
    cut = [scatter_tensor(x, None, mesh, [Shard(2), Shard(3)], sizes=sizes, requires_grad=True) for x in _inputs()]
    model, close = _model(**CHOICES[choice]), []
    for block in model.blocks:  # the channels of a token, for all that reads tokens: a convolution sets them apart
        block.register_forward_hook(
            lambda block, given, x: close.extend(t.stride(-1) == 1 for t in (given[0], given[2], x) if t is not None)
        )
    level = torch.tensor([0.3, -0.2], dtype=torch.float64)
    for same in (
        level,
        scatter_tensor(level, None, mesh, [Replicate()] * 2, requires_grad=True),
    ):  # as trainings have it
        check_sharded(model, [*cut, same])
    assert len(close) >= 24 and all(close)


@pytest.mark.parametrize("choice", CHOICES)
def test_each_kind_of_model_is_on_shards_what_it_is_whole(pool, choice):
    pool.run(on_shards, choice)


def messages(meshes):
    """A block more sends its halos once more, forward and back, and nothing else: what steers all rows, by norms and
    gates, has gradients that are sums over the ranks once, with those of the weights."""
    mesh, sent = meshes["2"], []
    for depth in (1, 3):
        model = _model(depth=depth, gaps="tokens", positions="rotary", qk_norm=True, fine=0)
        gather_in_buckets(model)
        cut = [scatter_tensor(x, None, mesh, [Shard(2)], sizes={0: (16, 10)}) for x in _inputs()]
        level = scatter_tensor(torch.tensor([0.3, -0.2], dtype=torch.float64), None, mesh, [Replicate()])
        with trace() as forward:
            loss = model(*cut, level).square().sum()
        with trace() as backward:
            loss.backward()
        sent.append((forward.count(), backward.count()))
    assert [b - a for a, b in zip(*sent)] == [2, 2] and sent[0][1] <= 4, sent


def test_a_block_sends_halos_only(pool):
    pool.run(messages)


def test_mask_tokens_speak_of_patches_that_show_nothing():
    """With tokens alone a validity counts by the patch: that of one point in a seen patch changes nothing."""
    model, (noisy, told) = _model(gaps="tokens"), _inputs()
    level = torch.tensor([0.3, -0.2], dtype=torch.float64)
    told[:, 2, 20:24, :4] = 1
    full, told[:, 2, 21, 2] = model(noisy, told, level), 0
    assert torch.equal(model(noisy, told, level), full)
    told[:, 2, 20:24, :4] = 0
    assert not torch.allclose(model(noisy, told, level), full)
    assert model.embed.weight.shape[1] == 2 + 10 - 4


def test_rotary_products_depend_on_distances():
    like = torch.zeros(1, dtype=torch.float64)
    cos, sin = turns(6, 7, 8, like)
    torch.manual_seed(0)
    q, k = torch.randn(2, 8, dtype=torch.float64)
    q, k = (rotary_embedding(x.expand(1, 6, 7, 1, 8), cos, sin)[0, :, :, 0] for x in (q, k))
    near, far = (q[1, 2] * k[3, 5]).sum(), (q[2, 1] * k[4, 4]).sum()
    assert near == pytest.approx(far.item()) and near != pytest.approx((q[1, 2] * k[3, 4]).sum().item())


# -- noise ------------------------------------------------------------------------------------------------------------
def test_laws_of_noise():
    normal = torch.randn(20000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = Diffusion(p_mean=-0.8, p_std=1.2).sigma(normal).log()
    torch.testing.assert_close(whole, -0.8 + 1.2 * normal, rtol=0, atol=1e-6)
    even = Diffusion(law="loguniform", sigma_min=0.01, sigma_max=10.0).sigma(normal).log()
    assert even.min() >= math.log(0.01) - 1e-9 and even.max() <= math.log(10) + 1e-9
    assert even.quantile(0.25).item() == pytest.approx(math.log(0.01) + 0.25 * math.log(1000), abs=0.1)
    part = Diffusion(low=0.5, high=2.0).sigma(normal)
    assert 0.5 <= part.min() < 0.51 and 1.95 < part.max() <= 2.0
    inside = whole[(whole > math.log(0.5)) & (whole < math.log(2))]
    cut = Diffusion(p_mean=-0.8, p_std=1.2, low=0.5, high=2.0).sigma(normal).log()
    assert cut.median().item() == pytest.approx(inside.median().item(), abs=0.03)


class _Gauss(torch.nn.Module):
    """The exact denoiser of N(mean, spread^2), as the network that the preconditioning asks for."""

    def __init__(self, process, mean, spread):
        super().__init__()
        self.process, self.mean, self.spread, self.calls = process, mean, spread, []

    def forward(self, noisy, conditions, level):
        self.calls.append((4 * level[0]).exp().item())
        sigma, data = (4 * level).exp()[:, None, None, None], self.process.sigma_data
        total = (sigma**2 + data**2).sqrt()
        x = noisy * total
        best = (sigma**2 * self.mean + self.spread**2 * x) / (sigma**2 + self.spread**2)
        return (best - data**2 / total**2 * x) / (sigma * data / total)


def test_the_multistep_solver_follows_the_flow_in_half_the_calls():
    """The flow of a Gaussian scales the distance from its mean; the error falls with the square of the step."""
    noise = torch.linspace(-2, 2, 9, dtype=torch.float64).view(1, 1, 3, 3)
    want, errors = 1.5 + 0.3 / (20**2 + 0.3**2) ** 0.5 * (20 * noise - 1.5), []
    for steps in (40, 80):
        process = Diffusion(sigma_min=0.01, sigma_max=20.0, steps=steps, solver="dpm")
        network = _Gauss(process, 1.5, 0.3)
        errors.append((diffusion.sample(network, noise, noise, process) - want).abs().max().item())
        assert len(network.calls) == steps
    assert errors[1] < 0.35 * errors[0] and errors[1] < 2e-2


def test_experts_have_their_noise_each():
    process = Diffusion(sigma_min=0.01, sigma_max=20.0, steps=8)
    low, high = (_Gauss(process, 1.5, 0.3) for _ in range(2))
    noise = torch.ones(1, 1, 2, 2, dtype=torch.float64)
    got = diffusion.sample(Experts([(low, 1.0), (high, math.inf)]), noise, noise, process)
    assert max(low.calls) <= 1.0 < min(high.calls) and len(low.calls) + len(high.calls) == 15
    torch.testing.assert_close(got, diffusion.sample(_Gauss(process, 1.5, 0.3), noise, noise, process))


# -- presets ----------------------------------------------------------------------------------------------------------
def test_presets_have_the_published_sizes():
    bands = ("c01", "c02", "c03", "bt07", "bt08", "bt09", "bt10", "bt13")
    available = [*bands, "refc", "refb", "glm"]
    satellite = TrainConfig(preset="conus3km", part="satellite")
    assert satellite.names(available) == ((), bands)
    with torch.device("meta"):
        model = Denoiser(satellite.model(8, 2 * 6 * 8 + 5, 8, (1024, 1792)))
        count = sum(p.numel() for p in model.parameters())
    assert model.config.inputs == 61 and (model.config.heads, model.config.width, len(model.blocks)) == (6, 768, 16)
    assert 165e6 < count < 200e6
    radar = TrainConfig(preset="conus3km", part="radar")
    assert radar.names(available) == (bands, ("refc", "refb", "glm")) and radar.model(3, 0).fine == 64
    experts = [TrainConfig(preset="conus3km", expert=i).diffusion() for i in range(3)]
    assert [(e.low, e.high) for e in experts] == [(0.0, 2.544), (2.544, 58.33), (58.33, None)]
    assert all(e.sigma_max == 800 for e in experts)


@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_is_a_model_of_each_part(preset):
    for part in ("joint", "satellite", "radar"):
        config = TrainConfig(preset=preset, part=part)
        told, made = config.names(["refc", "bt13", "c02", "glm"])
        with torch.device("meta"):
            seen, shape = len(told) + len(made), (124, 128)  # as many patches as the widest kernel
            model = Denoiser(config.model(len(made), 2 * config.history * seen + 4, seen, shape))
            out = model(*(torch.empty(1, c, *shape) for c in (len(made), model.config.conditions)), torch.empty(1))
        assert out.shape == (1, len(made), *shape)


def test_a_rank_of_two_keeps_half_of_what_one_keeps():
    """Of the planned peak in bf16, less weights and their gradients, though windows reach beyond the rows."""
    sizes = ["--grid", "1024", "1792", "--fields", "8", "--depth", "2", "--batch", "1", "--domain", "2"]
    report = plan.main(["--preset", "conus3km", "--part", "satellite", *sizes])
    one, cut = (s.inputs + s.activations - s.gradients for s in (report.one, report.cut))
    assert cut < 0.53 * one


def test_a_plan_has_the_sizes_of_preset_and_part():
    rows, both = (plan.main(["--domain", "4", "--columns", n, "--depth", "1", "--part", "radar"]) for n in "12")
    assert rows.mesh_shape == (1, 4) and both.mesh_shape == (1, 2, 2)
    batch, points, seen = 4, 64 * 96, 2 * 3 * (3 + 8) + 4
    assert rows.one.inputs == pytest.approx(batch * points * (4 * seen + 3 * 9), rel=1e-3)
    assert both.cut.inputs == pytest.approx(rows.one.inputs / 4, rel=1e-3)
    with pytest.raises(InputError, match="--columns 3 do not divide --domain 4"):
        plan.main.__wrapped__(["--domain", "4", "--columns", "3"])


def test_choices_that_contradict_are_refused():
    with pytest.raises(InputError, match="--expert is 3"):
        TrainConfig(preset="conus3km", expert=3)
    with pytest.raises(InputError, match="forecasts nothing of bt13"):
        TrainConfig(part="radar").names(["bt13"])
    with pytest.raises(InputError, match="--part joint forecasts refc"):
        TrainConfig(channels=("refc",), told=("refc",)).names(["refc", "bt13"])
