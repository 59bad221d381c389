"""Weights of every kind around shards: shared, derived, loaded, optimized; and a U-Net of odd sizes."""

import torch
import torch.nn.functional as F
from strict import check, cut, draw, same, strictly, whole
from torch import nn
from torch.distributed.tensor import Replicate
from torch.nn.utils import parametrizations, parametrize

from core import ShardTensor, scatter_tensor


# -- weights ----------------------------------------------------------------------------------------------------------
class Tied(nn.Module):
    """One weight read three times: as a table, in a layer and against its own output."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(F.relu(self.first(x))) @ self.first.weight


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)


def parametrized():
    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


WEIGHTS = {
    "tied": Tied,
    "parametrize": parametrized,
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(6, 4)),
    "old weight_norm": lambda: nn.utils.weight_norm(nn.Linear(6, 4)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(6, 4)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(6, 6)),
}


@strictly
def derived_weights(meshes):
    for name, make in WEIGHTS.items():
        try:
            check(lambda m=make: m().double(), draw(2, 7, 6), meshes["2"])
        except Exception as error:
            raise AssertionError(name) from error


def test_tied_and_derived_weights(pool):
    pool.run(derived_weights)


@strictly
def state_dicts(meshes):
    """A checkpoint of one process goes into modules whose parameters are shards, and a gathered one comes out."""
    source = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).double()
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).double()
    for layer in model:
        for name, p in list(layer.named_parameters(recurse=False)):
            setattr(layer, name, nn.Parameter(cut(torch.zeros_like(p), meshes["2"], 0)))
    assert isinstance(model[0].weight, ShardTensor) and isinstance(model[0].weight, nn.Parameter)
    kept = model[0].weight
    assert not any(model.load_state_dict(source.state_dict()))
    assert model[0].weight is kept and kept._spec.sizes == ((6, 2),)
    for name, value in model.state_dict().items():
        same(value, source.state_dict()[name])
    shards = cut(draw(5, 6), meshes["2"], 0)
    same(model.eval()(shards), source.eval()(draw(5, 6)))
    model.load_state_dict(model.state_dict(), assign=True)
    assert model[0].weight._spec.sizes == ((6, 2),)


def test_state_dicts(pool):
    pool.run(state_dicts)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "sgd foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "adagrad foreach": lambda p: torch.optim.Adagrad(p, 0.1, foreach=True),
    "rmsprop foreach": lambda p: torch.optim.RMSprop(p, 0.1, foreach=True, momentum=0.5),
}


@strictly
def optimized(meshes):
    """Parameters that are plain, cut and whole in one list; gradients are clipped to the norm of the whole."""
    mesh = meshes["2"]
    for name, make in OPTIMIZERS.items():
        values = [draw(6, 4), draw(4, 6, seed=1), draw(7, seed=2)]
        plain = [nn.Parameter(v.clone()) for v in values]
        mixed = [nn.Parameter(cut(values[0], mesh, 0)), nn.Parameter(values[1].clone())]
        mixed.append(nn.Parameter(scatter_tensor(values[2], None, mesh, [Replicate()])))
        norms = []
        for parameters in (plain, mixed):
            optimizer = make(parameters)
            for i in range(3):
                optimizer.zero_grad(set_to_none=i > 1)
                a, b, v = parameters
                x = draw(5, 6, seed=i) if parameters is plain else cut(draw(5, 6, seed=i), mesh, 0)
                ((x @ a @ b).square().mean() + (a.sum() * v).square().sum()).backward()
                norm = nn.utils.clip_grad_norm_(parameters, 0.7)
                optimizer.step()
            norms.append(whole(norm))
        torch.testing.assert_close(*norms)
        for p, q in zip(plain, mixed):
            torch.testing.assert_close(whole(q.detach()), p.detach(), atol=1e-8, rtol=1e-8, msg=lambda m, n=name: n + m)


def test_optimizers_of_mixed_parameters(pool):
    pool.run(optimized)


# -- a network with skips ---------------------------------------------------------------------------------------------
class UNet(nn.Module):
    """Two levels; halving odd sizes loses a row, which padding restores; a crop of the input is added at the end."""

    def __init__(self, up):
        super().__init__()
        self.up = up
        self.enter, self.down1, self.down2 = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Conv2d(4, 6, 3, 2, 1),
            nn.Conv2d(6, 8, 2, 2),
        )
        self.up2, self.up1 = nn.ConvTranspose2d(8, 6, 2, 2), nn.ConvTranspose2d(6, 4, 3, 2, 1)
        self.merge2, self.merge1 = nn.Conv2d(12, 6, 3, padding=1), nn.Conv2d(8, 3, 1)
        self.norm, self.widen2, self.widen1 = nn.GroupNorm(2, 6), nn.Conv2d(8, 6, 1), nn.Conv2d(6, 4, 1)

    def _join(self, x, skip):
        rows, columns = skip.shape[2] - x.shape[2], skip.shape[3] - x.shape[3]
        return torch.cat([F.pad(x, (0, columns, rows // 2, rows - rows // 2)), skip], 1)

    def forward(self, x):
        a = F.silu(self.enter(x))
        b = F.silu(self.norm(self.down1(a)))
        c = F.silu(self.down2(b))
        if self.up == "transposed":
            c, widen1 = self.up2(c), self.up1
        else:
            c = self.widen2(F.interpolate(c, scale_factor=2.0, mode="bilinear"))
            widen1 = lambda t: self.widen1(F.interpolate(t, size=a.shape[2:], mode="nearest"))  # noqa: E731
        b = F.silu(self.merge2(self._join(c, b)))
        return self.merge1(self._join(widen1(b), a))[:, :, 1:-1] + x[:, :, 1:-1]


@strictly
def unet(meshes):
    for up in ("transposed", "interpolated"):
        for rows in (13, 14, 11):
            check(lambda up=up: UNet(up).double(), draw(2, 3, rows, 10), meshes["2"], 2)
            check(lambda up=up: UNet(up).double(), draw(2, 3, rows, 10), meshes["2"], 3)


def test_unet_of_odd_sizes(pool):
    pool.run(unet)
