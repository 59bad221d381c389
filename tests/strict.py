"""What tests of whole modules share: shards cut unevenly over two ranks, compared with one process, no fallback."""

import functools

import torch
from torch.distributed.tensor import Shard

from core import ShardTensor, scatter_tensor, set_fallback


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def cut(x, mesh, dim=1, sizes=None, **kwargs):
    """Two ranks, the second with few rows."""
    n = x.shape[dim]
    return scatter_tensor(x, None, mesh, [Shard(dim)], sizes={0: sizes or (n - n // 3, n // 3)}, **kwargs)


def whole(t):
    return t.full_tensor() if isinstance(t, ShardTensor) else t


def same(got, expected, atol=1e-10, rtol=1e-9):
    torch.testing.assert_close(whole(got).detach(), expected.detach(), atol=atol, rtol=rtol)


def strictly(case):
    """Runs a case on every worker with the fallback forbidden."""

    @functools.wraps(case)
    def run(meshes, *args):
        set_fallback("error")
        try:
            torch.manual_seed(0)
            case(meshes, *args)
        finally:
            set_fallback()

    return run


def check(make, x, mesh, dim=1, step=lambda model, x: model(x), **tolerance):
    """Values, the gradient of the input and of all parameters of a module, plain and on shards."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    model, twin = models
    plain, shards = x.clone().requires_grad_(), cut(x, mesh, dim, requires_grad=True)
    expected, got = step(model, plain), step(twin, shards)
    same(got, expected, **tolerance)
    weights = draw(*expected.shape, dtype=expected.dtype, seed=9)
    (expected * weights).sum().backward()
    (got * weights).sum().backward()
    same(shards.grad, plain.grad, **tolerance)
    assert shards.grad._spec.sizes == shards._spec.sizes
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            same(q.grad, p.grad, **tolerance)
    return got
