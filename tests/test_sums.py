"""Reductions, losses and products where fp64 and the table do not look: half precision, refused values, names."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

from core import ShardingError, scatter_tensor
from core.debug import trace


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cut(x, mesh, dim, sizes=None, **kwargs):
    return scatter_tensor(x, None, mesh, [Shard(dim)], sizes=sizes and {0: sizes}, **kwargs)


# -- half precision ---------------------------------------------------------------------------------------------------
def half_reductions(meshes):
    """Of 16-bit fields far from zero the error is one rounding of the result, and no sum overflows."""
    mesh = meshes["2"]
    for dtype, unit in ((torch.float16, 1e-3), (torch.bfloat16, 8e-3)):
        x = (draw(6, 4000) * 30 + 1000).to(dtype)
        wide = x.double()
        parts = cut(x, mesh, 1, (2500, 1500))
        for fn in (
            lambda t: t.mean(1),
            lambda t: t.mean(),
            lambda t: t.var(1),
            lambda t: t.std(1),
            lambda t: torch.var_mean(t, 1)[0],
            lambda t: (t / 1000).norm(dim=1),
            lambda t: t.logsumexp(1),
            lambda t: t.amax(1),
            lambda t: t.min(1).values,
            lambda t: (t / 16).softmax(1) * 100,
            lambda t: F.mse_loss(t / 30, t * 0),
            lambda t: F.cross_entropy(t.T, torch.arange(4000, device=t.device) % 6),
        ):
            got = fn(parts)
            assert got.dtype == dtype
            torch.testing.assert_close(got.full_tensor().double(), fn(wide), rtol=4 * unit, atol=1e-3)


def half_variance_backward(meshes):
    """Centred on the mean in fp32, backward too: torch's own formula would lose the small differences."""
    x = (draw(4, 600) * 8 + 1000).to(torch.bfloat16)
    wide = x.double().requires_grad_()
    wide.var(1).sum().backward()
    part = cut(x, meshes["2"], 1, (400, 200), requires_grad=True)
    part.var(1).sum().backward()
    torch.testing.assert_close(part.grad.full_tensor().double(), wide.grad, rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("test", [half_reductions, half_variance_backward])
def test_half_precision(pool, test):
    pool.run(test)


# -- values that one rank alone holds ---------------------------------------------------------------------------------
def bad_values(meshes):
    """One bad class or probability on one rank raises on all, whatever the reduction."""
    x, classes, chance = draw(7, 5), torch.arange(7) % 5, draw(7, 5).sigmoid()
    labels = torch.zeros(7, 5, dtype=torch.int64)
    for name in ("2", "3", "2x2"):
        mesh = meshes[name]
        if mesh.get_coordinate() is None:
            continue

        def rows(t, mesh=mesh):
            return scatter_tensor(t, None, mesh, [Shard(0), Replicate()][: mesh.ndim])

        for bad, reduction in itertools.product((5, -1), ("mean", "sum", "none")):
            wrong = classes.clone()
            wrong[6] = bad
            for loss, value, target in (
                (F.cross_entropy, rows(x), rows(wrong)),
                (F.cross_entropy, rows(x), wrong),
                (F.nll_loss, rows(x), rows(wrong)),
                (F.multi_margin_loss, rows(x), rows(wrong)),
                (F.multilabel_margin_loss, rows(x), rows(labels + 7)),
                (F.binary_cross_entropy, rows(chance * 3), rows(chance)),
            ):
                with pytest.raises(ShardingError, match="none of 5 classes|outside 0 to 1"):
                    loss(value, target, reduction=reduction)
            F.cross_entropy(rows(x), rows(wrong), ignore_index=bad)
        with pytest.raises(ValueError, match="negative"):
            F.gaussian_nll_loss(rows(x), rows(x), rows(x))


def test_bad_values_raise_everywhere(pool):
    pool.run(bad_values)


# -- forms that the table does not compare ----------------------------------------------------------------------------
def names(meshes):
    x = cut(draw(2, 7, 6), meshes["2"], 1)
    found = x.max(dim=1)
    assert isinstance(found, torch.return_types.max) and found.values.shape == found.indices.shape == (2, 6)
    assert isinstance(torch.min(x, 1), torch.return_types.min)
    assert isinstance(x.aminmax(dim=1), torch.return_types.aminmax)
    square = cut(draw(3, 4, 4), meshes["2"], 0)
    assert isinstance(torch.linalg.svd(square), torch.return_types.linalg_svd)
    assert isinstance(square.slogdet(), torch.return_types.slogdet)
    assert torch.linalg.eigh(square).eigenvectors.shape == (3, 4, 4)


def small_messages(meshes):
    """What a reduction sends does not depend on the extent that is reduced."""
    sent = []
    for n in (40, 4000):
        x = cut(draw(3, n), meshes["2"], 1, requires_grad=True)
        with trace() as wire:
            for fn in (
                lambda t: t.sum(1),
                lambda t: t.amax(1),
                lambda t: t.max(1)[0],
                lambda t: t.prod(1),
                lambda t: t.std(1),
                lambda t: t.norm(dim=1),
                lambda t: t.logsumexp(1),
                lambda t: t.softmax(1).square().sum(1),
                lambda t: F.cosine_similarity(t, t * 2),
                lambda t: F.normalize(t, dim=1).sum(1),
            ):
                fn(x).sum().backward()
            assert x.argmax() >= 0 and x.aminmax().max > 0 and x.count_nonzero() == 3 * n
        sent.append(wire.bytes())
    assert sent[0] == sent[1] and wire.count("all_to_all") == 0


@pytest.mark.parametrize("test", [names, small_messages])
def test_forms(pool, test):
    pool.run(test)
