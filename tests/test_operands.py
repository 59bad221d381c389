"""Operands that are refused or promoted, what Python's operators show of it, and DTensors of another mesh."""

import operator
import warnings

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from test_meetings import FULL, made, same
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from core import ShardingError, ShardTensor, TensorPromotionMode, scatter_tensor
from core.debug import trace


# -- promotion --------------------------------------------------------------------------------------------------------
def promotions(meshes):
    """A plain operand is taken silently, with a warning, or refused on every rank before anything is sent."""
    x = made("cut 1", torch.ones(FULL), meshes["2"])
    weight = torch.ones(3)
    calls = (lambda: x + weight, lambda: weight * x, lambda: x.mul_(weight), lambda: F.linear(x, torch.ones(4, 3)))
    try:
        for mode in TensorPromotionMode:
            ShardTensor.set_promotion_mode(mode)
            for call in calls:
                with warnings.catch_warnings(record=True) as said, trace() as wire:
                    warnings.simplefilter("always")
                    if mode is TensorPromotionMode.DISABLED:
                        with pytest.raises(ShardingError, match="set_promotion_mode"):
                            call()
                    else:
                        call()
                about = [w for w in said if "meets a ShardTensor" in str(w.message)]
                assert len(about) == (mode is TensorPromotionMode.WARN), (mode, said)
                assert wire.count() == 0
            assert torch.equal((x + 1 + torch.tensor(2.0)).to_local(), x.to_local() + 3)  # numbers are no matter
    finally:
        ShardTensor.set_promotion_mode(TensorPromotionMode.SILENT)


def test_promotion_modes(pool):
    pool.run(promotions)


# -- plain targets ----------------------------------------------------------------------------------------------------
ROWS = torch.tensor([0, 2, 1, 1, 0, 3, 2])
INTO_PLAIN = (
    lambda a, t: operator.iadd(a, t),
    lambda a, t: operator.iadd(a, t.mean()),
    lambda a, t: a.copy_(t),
    lambda a, t: a.index_add_(0, ROWS, t),
    lambda a, t: a.index_copy_(0, ROWS.argsort(), t),
    lambda a, t: a.index_put_((ROWS[1:3],), t[:2]),
    lambda a, t: a.masked_fill_(t > 0, 3.0),
    lambda a, t: a.masked_scatter_(t > 0, t),
    lambda a, t: a.masked_scatter_(a > 0, t),
    lambda a, t: a.clamp_(max=t),
    lambda a, t: a.scatter_add_(0, ROWS[:, None].expand(7, 3), t),
    lambda a, t: a.lerp_(t, 0.3),
    lambda a, t: a.addcmul_(t, t),
)
ASSIGNED = (
    lambda a, t: operator.setitem(a, slice(None), t),
    lambda a, t: operator.setitem(a, 1, t[2]),
    lambda a, t: operator.setitem(a, t > 0, 0.5),
    lambda a, t: operator.setitem(a, a > 0, t[a > 0]),
    lambda a, t: operator.setitem(a, 1, operator.iadd(a[1], t.sum(0))),
    lambda a, t: operator.setitem(a, (1, 2), operator.iadd(a[1, 2], t.sum())),
)


def into_plain(meshes):
    """A plain tensor that shards are written into stays what it is, and holds the numbers."""
    g = torch.Generator().manual_seed(0)
    x, target = torch.randn(7, 3, generator=g).double(), torch.randn(7, 3, generator=g).double()
    part = scatter_tensor(x, None, meshes["2"], [Shard(0)], sizes={0: (5, 2)})
    for i, write in enumerate((*INTO_PLAIN, *ASSIGNED)):
        expected, got = target.clone(), target.clone()
        write(expected, x)
        out = write(got, part)
        assert out is (got if write in INTO_PLAIN else None), i
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12, msg=lambda m, i=i: f"{i}: {m}")
    for i, write in enumerate((*INTO_PLAIN, *ASSIGNED)):  # the plain tensor learns of the gradient
        results = []
        for source in (x, part):
            wanting, total = source.clone().requires_grad_(), target.clone()
            write(total, wanting)
            if total.requires_grad:
                total.sin().sum().backward()
                results.append(wanting.grad if source is x else wanting.grad.full_tensor())
        if results:
            torch.testing.assert_close(*results, msg=lambda m, i=i: f"{i}: {m}")
    leaf = torch.zeros(7, 3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf"):
        leaf.add_(part)


def test_plain_targets(pool):
    pool.run(into_plain)


# -- refusals ---------------------------------------------------------------------------------------------------------
ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "matmul")


def show_the_error(meshes):
    """What does not fit is named with its operation, cuts and shapes, also behind Python's operators, which hide a
    TypeError; nothing is sent."""
    x = made("cut 1", torch.ones(FULL), meshes["2"])
    other = scatter_tensor(torch.ones(FULL), None, meshes["4"], [Shard(1)])
    for wrong in (torch.ones(4, 5), made("whole", torch.ones(4, 5), meshes["2"]), other):
        for name in (*ARITHMETIC, *(f"i{n}" for n in ARITHMETIC), *COMPARISONS):
            for a, b in [(x, wrong)] + [(wrong, x)] * (not name.startswith("i")):
                a, b = (a.bool(), b.bool()) if name.endswith(("and", "or")) else (a, b)
                with trace() as wire, pytest.raises(ShardingError) as caught:
                    getattr(operator, f"__{name}__")(a, b)
                assert wire.count() == 0, name
                said = str(caught.value)
                assert "(2, 7, 3)" in said and "Shard(1) [5, 2]" in said, (name, said)
                assert "meshes" in said if wrong is other else "(4, 5)" in said and ": " in said, (name, said)
    with pytest.raises(ShardingError):
        x += torch.ones(4, *FULL)  # the target would grow


def test_operators_show_the_error(pool):
    pool.run(show_the_error)


# -- DTensors of another mesh -----------------------------------------------------------------------------------------
def other_mesh(meshes):
    """Each mesh sees its own kind: the ShardTensor goes inside a replicated DTensor."""
    mesh = meshes["domain x tp"]
    value, scale = torch.rand(FULL, dtype=torch.float64) + 1, torch.rand(3, dtype=torch.float64) + 1
    weights = torch.arange(42.0, dtype=torch.float64).view(FULL).sin()
    plain_x, plain_scale = value.clone().requires_grad_(), scale.clone().requires_grad_()
    expected = plain_x * plain_scale + plain_scale / plain_x
    (expected * weights).sum().backward()
    for cut in (Replicate(), Shard(0)):
        x = scatter_tensor(value, None, mesh["domain"], [Shard(1)], requires_grad=True, sizes={0: (5, 2)})
        d = distribute_tensor(scale, mesh["tp"], [cut], src_data_rank=None).requires_grad_()
        out = x * d + d / x
        assert isinstance(out, DTensor)
        inner = out.full_tensor()
        same(inner, expected.detach())
        (inner * weights).sum().backward()
        same(x.grad, plain_x.grad)
        same(d.grad.full_tensor(), plain_scale.grad)


def test_a_dtensor_of_another_mesh(pool):
    pool.run(other_mesh)


def sent_between_groups(meshes):
    """Collectives of the other mesh's group, as DTensor calls them, send the parts and gather nothing."""
    mesh, group = meshes["domain x tp"]["domain"], meshes["domain x tp"].get_group("tp")
    here = meshes["domain x tp"].get_local_rank("tp")
    values = [torch.arange(84.0).view(4, 7, 3) * (r + 1) for r in range(2)]
    for dim, sizes in ((0, (3, 1)), (1, (5, 2)), (2, (3, 0))):
        x = scatter_tensor(values[here], None, mesh, [Shard(dim)], sizes={0: sizes})
        same(funcol.all_reduce(x, "sum", group), sum(values))
        same(funcol.broadcast(x, 0, group), values[0])
        same(funcol.all_gather_tensor(x, 0, group), torch.cat(values))
        same(funcol.reduce_scatter_tensor(x, "sum", 0, group), sum(values).chunk(2)[here])
        traded = funcol.all_to_all_single(x, [1, 1] if here else [3, 3], [3, 1], group)
        same(traded, torch.cat([v[3:] if here else v[:3] for v in values]))


def test_collectives_of_another_mesh(pool):
    pool.run(sent_between_groups)
