"""Derivatives that are written out: torch's own for every subset of wanted gradients, and nothing kept in vain."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from core import scatter_tensor

CALLS = {
    "linear": lambda x, w, b: F.linear(x, w, b),
    "linear without bias": lambda x, w, b: F.linear(x, w),
    "layer norm": lambda x, w, b: F.layer_norm(x, (4,), w[0], b, 1e-3),
    "layer norm, bias by name": lambda x, w, b: F.layer_norm(x, (4,), bias=b),
    "layer norm, plain": lambda x, w, b: F.layer_norm(x, (4,)),
}


def _drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def _gradients(call, tensors, again):
    """Of a cubic sum of the result, by every tensor that wants one; or of the sum of squares of these."""
    wanted = [t for t in tensors if t.requires_grad]
    found = torch.autograd.grad((call(*tensors) ** 3).sum(), wanted, create_graph=again, allow_unused=True)
    if again:
        total = sum((g**2).sum() for g in found if g is not None and g.requires_grad)
        found = torch.autograd.grad(total, wanted, allow_unused=True)
    return [g if g is None or type(g) is torch.Tensor else g.full_tensor() for g in found]


def as_torch(meshes, name):
    for wants in product((False, True), repeat=3):
        whole = [t.requires_grad_(w) for t, w in zip((_drawn(2, 7, 4), _drawn(4, 4), _drawn(4)), wants)]
        if not call_wants(name, wants):
            continue
        for sizes in ((4, 3), (7, 0)):
            x = scatter_tensor(
                whole[0].detach(), None, meshes["2"], [Shard(1)], requires_grad=wants[0], sizes={0: sizes}
            )
            for again in (False, True)[: 1 if "by name" in name else 2]:  # torch has no second derivative of that
                pair = [_gradients(CALLS[name], [t, *whole[1:]], again) for t in (whole[0], x)]
                for expected, got in zip(*pair):
                    if expected is not None:  # torch says None where we may say zero
                        torch.testing.assert_close(got, expected)
                    assert expected is not None or got is None or not got.any()


def call_wants(name, wants):
    used = {"linear": wants, "linear without bias": wants[:2], "layer norm": wants}.get(name, (wants[0], False, False))
    return any(used) or name == "layer norm, bias by name" and wants[2]


@pytest.mark.parametrize("name", CALLS)
def test_as_torch(pool, name):
    pool.run(as_torch, name)


def kept(meshes):
    """What is kept is what torch keeps: a write into anything else is no error, and costs no memory."""
    w, b, whole = _drawn(4, 4), _drawn(4), _drawn(2, 7, 4)
    for frozen in (True, False):
        for call in (CALLS["linear"], CALLS["layer norm"]):
            packed = []
            for source in (whole.clone(), scatter_tensor(whole, None, meshes["1"], [Shard(1)])):
                x, shapes = source.requires_grad_(), []
                weight = w.clone().requires_grad_(not frozen)
                with torch.autograd.graph.saved_tensors_hooks(
                    lambda t, s=shapes: s.append(t.numel()) or t, lambda t: t
                ):
                    call(x * 1, weight, b)
                packed.append(sum(n for n in shapes if n == whole.numel()))
            assert packed[0] == packed[1], (frozen, packed)
    h = scatter_tensor(whole, None, meshes["2"], [Shard(1)], requires_grad=True) * 1
    y = F.linear(h, w, b)
    h.add_(1)  # no gradient hangs on it
    y.sum().backward()
    y = F.linear(h.detach().requires_grad_() * 1, leaf := w.clone().requires_grad_())
    with torch.no_grad():
        leaf.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_kept(pool):
    pool.run(kept)
