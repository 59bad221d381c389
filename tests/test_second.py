"""Second derivatives of pointwise operations, products, reductions and views: a penalty on every gradient.

The rows of these families run again, shared by the pairs of ranks; the sum of the squares of all gradients is
differentiated, and the result compared with that of one process.
"""

import pytest
import torch
import torch.nn.functional as F
from cases import cut, load, operands, share, tensors_of
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from core import ShardingError, ShardTensor, neighborhood_attention, scatter_tensor, set_attention_strategy
from core.ops import around

FAMILIES = ("cases_basic", "cases_products", "cases_reduction")


def penalty(row, args):
    """Gradients of a random sum of the results, and the gradients of the sum of their squares."""
    g = torch.Generator().manual_seed(7)
    outs = [o for o in tensors_of(row.fn(*args)) if isinstance(o, torch.Tensor) and o.requires_grad]
    loss = sum((o * torch.randn(o.shape, dtype=o.dtype, generator=g)).sum() for o in outs)
    leaves = [x for x in args if x.requires_grad]
    first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    live = [f for f in first if f is not None and f.requires_grad]
    if not live:
        return [*first]
    total = sum((f * f).sum() for f in live)
    return [*first, *torch.autograd.grad(total, leaves, allow_unused=True)]


def twice(meshes, mesh_name, family):
    mesh, wrong, done = meshes[mesh_name], [], 0
    group, groups = share(mesh)
    for row in [r for r in load().values() if r.family == family][group::groups]:
        for dims in row.cuts2 if mesh.ndim == 2 else row.cuts:
            plain = operands(row, 5, "cpu")
            parts = [cut(x, mesh, d, "uneven") for x, d in zip(plain, dims)]
            if not any(o.requires_grad for o in tensors_of(row.fn(*plain)) if isinstance(o, torch.Tensor)):
                continue
            torch.manual_seed(3)
            expected = penalty(row, plain)
            torch.manual_seed(3)
            got = penalty(row, parts)
            done += 1
            for i, (a, b) in enumerate(zip(expected, got)):
                zero = a is None or not a.abs().sum()
                b = b.full_tensor() if isinstance(b, ShardTensor) else b
                if b is None or a is None:
                    right = zero and (b is None or not b.abs().sum())
                else:
                    right = torch.allclose(a, b, atol=1e-8, rtol=1e-8)
                if not right:
                    wrong.append(f"{row.name} cut {dims}: derivative {i}")
    assert not wrong, wrong
    return done


@pytest.mark.parametrize("mesh", ["2", pytest.param("2x2", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", FAMILIES)
def test_second_derivatives(pool, mesh, family):
    assert min(pool.run(twice, mesh, family, timeout=300)) > 5


def _near(x):
    return neighborhood_attention(x, x, x, 3)


def _all(x):
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


ONCE = {  # function, cut dim, and how attention is computed
    "layer norm": (lambda x: F.layer_norm(x, (6,)), 4, "auto"),
    "group norm": (lambda x: F.group_norm(x, 7), 2, "auto"),
    "neighborhood": (_near, 1, "auto"),
    "neighborhood in pieces": (_near, 1, "auto"),
    "ring": (_all, 3, "ring"),
    "dealt": (_all, 3, "dealt"),
}


def refused(meshes, name):
    """Also where the gradient of the results is a constant, and by a rank that has nothing."""
    fn, dim, strategy = ONCE[name]
    kept = around._most_kept
    around._most_kept = 0 if name.endswith("pieces") else kept
    set_attention_strategy(strategy)
    try:
        for power in (1, 3):
            x, last = torch.randn(2, 7, 6, 5, 6, dtype=torch.float64), 1 if dim == 4 else 0
            n = x.shape[dim]
            x = scatter_tensor(x, None, meshes["2"], [Shard(dim)], requires_grad=True, sizes={0: (n - last, last)})
            (first,) = torch.autograd.grad(fn(x).pow(power).sum(), [x], create_graph=True)
            with pytest.raises(ShardingError, match="differentiated once only"):
                first.square().sum().backward()
    finally:
        around._most_kept = kept
        set_attention_strategy("auto")


@pytest.mark.parametrize("name", ONCE)
def test_what_is_differentiable_once_says_so_on_every_rank(pool, name):
    pool.run(refused, name)


def checkpointed(meshes):
    """A product of all pairs of rows, whose local graph a checkpoint drops."""
    found, x = [], torch.randn(5, 3, dtype=torch.float64)
    for leaf in (x.clone().requires_grad_(), scatter_tensor(x, None, meshes["2"], [Shard(0)], requires_grad=True)):
        out = checkpoint(lambda t: torch.einsum("ij,kj->ik", t, t), leaf, use_reentrant=False)
        (first,) = torch.autograd.grad(out.square().sum(), [leaf], create_graph=True)
        first.square().sum().backward()
        found.append((first.detach(), leaf.grad))
    for a, b in zip(*found):
        torch.testing.assert_close(b.full_tensor(), a)


def test_second_derivatives_of_a_checkpointed_block(pool):
    pool.run(checkpointed)
