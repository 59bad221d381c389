"""Recorded modules: on one GPU or two (``pytest -m gpu``) what eager ones give; on a CPU they stay what they are."""

import pytest
import torch
from pool import Pool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from apps.aero.model import ModelConfig as TransolverConfig
from apps.aero.model import Transolver
from apps.weather.model import Denoiser
from apps.weather.model import ModelConfig as DenoiserConfig
from core import ShardingError, capture, scatter_tensor
from core.capture import Held, paused, release
from core.parallelize import parallelize, unwrapped


class Mixer(nn.Module):
    """Convolution, attention over a cut sequence, norms."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.attend, self.head = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 2)

    def forward(self, image, level):
        x = self.norm(self.embed(image)).flatten(2).transpose(1, 2) * level
        return self.head(x + self.attend(x, x, x, need_weights=False)[0])


def made(dtype=torch.float64):
    torch.manual_seed(0)
    return Mixer().to("cuda", dtype)


def image(mesh, seed, wanted=False, dtype=torch.float64):
    torch.manual_seed(seed)
    return scatter_tensor(torch.randn(2, 3, 9, 6).to("cuda", dtype), None, mesh, [Shard(2)], requires_grad=wanted)


def step(model, optimizer, mesh, seed, parts=1, autocast=False):
    """Losses and gradients of a step on ``parts`` images."""
    found, dtype = [], next(model.parameters()).dtype
    optimizer.zero_grad()
    for part in range(parts):
        x = image(mesh, 10 * seed + part, True, dtype)
        level = torch.full((), 1.0 + seed, device="cuda", dtype=dtype)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = (model(x, level) ** 3).mean()
        loss.backward()
        found += [loss.detach().full_tensor(), x.grad.full_tensor()]
    found += [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    return found


def as_eager(meshes):
    for autocast, dtype, bound in ((True, torch.float32, 1e-2), (False, torch.float64, 1e-9)):
        pair = [made(dtype), made(dtype)]
        capture(pair[1])
        optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in pair]
        for seed in range(3):
            for parts in (1, 2):
                expected, got = (
                    step(*both, meshes[max(meshes)], seed, parts, autocast) for both in zip(pair, optimizers)
                )
                most = max(e.abs().max() for e in expected).item()  # biases of keys get rounding errors only
                torch.testing.assert_close(got, expected, rtol=bound, atol=bound * most)
                with torch.no_grad():  # in place, so that a step's rounding is not the next one's difference
                    for p, q in zip(*(m.parameters() for m in pair)):
                        q.copy_(p)
    with torch.no_grad():
        for seed in range(3):
            a, b = (
                m(image(meshes[max(meshes)], seed), torch.ones((), device="cuda").double()).full_tensor() for m in pair
            )
            torch.testing.assert_close(a, b)
    assert len(pair[1].forward.recordings) == 2  # with gradients and without
    release(pair[1])
    assert pair[1].forward.__func__ is Mixer.forward


def between_data_groups(meshes):
    """One rank a data group: DDP around a recorded module has the mean of the gradients."""
    data = made()
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cuda", (world, 1), mesh_dim_names=("ddp", "domain"))
    wrapped = parallelize(capture(made()), mesh)
    rank = torch.distributed.get_rank()
    for seed in range(2):
        wrapped.zero_grad()
        (wrapped(image(mesh["domain"], seed + rank), torch.ones((), device="cuda").double()) ** 2).mean().backward()
        data.zero_grad()
        for r in range(world):
            out = data(image(mesh["domain"], seed + r), torch.ones((), device="cuda").double())
            ((out**2).mean() / world).backward()
        for p, q in zip(unwrapped(wrapped).parameters(), data.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)


def with_other_weights(meshes):
    """Moved and replaced weights are read; their recordings take the place of those before."""
    pair, mesh, one = [made(), made()], meshes[max(meshes)], torch.ones((), device="cuda").double()
    capture(pair[1])
    for number in range(3):
        for model in pair:
            if number:
                torch.manual_seed(number)
                model.head = nn.Linear(16, 2).to("cuda", torch.float64)
            model.head.bias.data = model.head.bias.data.clone()
        with torch.no_grad():
            a, b = (m(image(mesh, 0), one).full_tensor() for m in pair)
        torch.testing.assert_close(a, b)
        assert len(pair[1].forward.recordings) == 1


def models(meshes):
    """Both applications' models, with every kind of place and gap: nothing of theirs is made on the host."""
    mesh = meshes[max(meshes)]
    kinds = [dict(positions=k, gaps=g, grid=(4, 3)) for k, g in (("waves", "inputs"), ("rotary", "both"))]
    kinds += [dict(positions="learned", gaps="tokens", grid=(4, 3), qk_norm=True)]
    sizes = dict(width=32, depth=1, heads=2, kernel=3, patch=2, fine=4, window=(1, 2))
    forecasters = [
        (lambda k=k: Denoiser(DenoiserConfig(2, 5, **sizes, **k)), [(2, 2, 8, 6), (2, 5, 8, 6), (2,)], 2) for k in kinds
    ]
    slices = [
        (lambda p=p: Transolver(TransolverConfig(width=32, heads=2, slices=8, plus=p)), [(2, 50, 6)], 1) for p in (0, 1)
    ]
    for make, shapes, dim in (*forecasters, *slices):
        torch.manual_seed(0)
        pair = [make().cuda().eval() for _ in range(2)]
        pair[1].load_state_dict(pair[0].state_dict())
        capture(pair[1])
        for seed in (1, 2):
            torch.manual_seed(seed)
            whole = [torch.rand(s).cuda() for s in shapes]
            found = []
            for model in pair:
                inputs = [scatter_tensor(x, None, mesh, [Shard(dim)]) if x.ndim > 1 else x for x in whole]
                model.zero_grad()
                out = model(*inputs)
                (out**2).mean().backward()
                found.append([out.detach().full_tensor(), *(p.grad for p in model.parameters() if p.grad is not None)])
            torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
        assert len(pair[1].forward.recordings) == 1
        with paused(pair[1]), torch.no_grad():
            pair[1](*inputs)
        assert len(pair[1].forward.recordings) == 1


def refused(meshes):
    model, one = capture(made()), torch.ones((), device="cuda").double()
    first, _ = (model(image(meshes[max(meshes)], 0, True), one) for _ in range(2))
    with pytest.raises(ShardingError, match="overwritten by a later one"):
        first.sum().backward()
    drawn = capture(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout(0.5)).cuda().double())
    with pytest.raises(ShardingError, match="the same at every replay"):
        drawn(image(meshes[max(meshes)], 0))


@pytest.fixture(scope="module")
def gpus():
    pool = Pool(min(torch.cuda.device_count(), 2), device="cuda")
    yield pool
    pool.close()


@pytest.mark.gpu
@pytest.mark.parametrize("check", (as_eager, between_data_groups, with_other_weights, models, refused))
def test_on_gpus(gpus, check):
    gpus.run(check)


def test_elsewhere_nothing_changes():
    model, x = Mixer(), torch.randn(2, 3, 9, 6)
    before = model(x, 1.0)
    torch.testing.assert_close(capture(model)(x, 1.0), before)
    release(model)
    assert model.forward.__func__ is Mixer.forward


def test_what_was_recorded_is_dropped_when_the_module_is_another():
    """Added, replaced or moved parameters, buffers and submodules; not new values, nor what wants a gradient."""
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    held = Held(module)

    def moved():
        module[0].weight.data = module[0].weight.data.clone()

    def dropped():
        del module[0].extra

    def replaced():
        module[1].running_mean = torch.zeros(3)

    module[0].weight.requires_grad_(False).add_(1)
    module(torch.randn(4, 2))
    assert not held.changed()
    for change in (
        moved,
        lambda: module[0].register_parameter("extra", nn.Parameter(torch.ones(1))),
        dropped,
        replaced,
        lambda: module.append(nn.Linear(3, 1)),
        lambda: module.__setitem__(2, nn.Linear(3, 1)),
    ):
        change()
        assert held.changed() and not held.changed()
    assert len(held.weights) == 6
