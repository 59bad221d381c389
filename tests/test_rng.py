"""Random fields: the same for every number of ranks, random enough, and replayed by checkpoints."""

import math

import pytest
import torch
import torch.nn.functional as F
from cases import SPLITS, extents
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

from core import ShardingError, make_spec, rng, scatter_tensor

SHAPE, N = (3, 11, 70), 1 << 18


def fields(meshes):
    """Digests of the gathered fields under every mesh, cut and dtype."""
    seen = set()
    for name, splits in SPLITS.items():
        mesh = meshes[name]
        if mesh.get_coordinate() is None:
            continue
        for split in splits:
            for dims in ((1, 2), (2, 0)):
                sizes = {a: extents(SHAPE[d], mesh.size(a), split) for a, d in zip(range(mesh.ndim), dims)}
                spec = make_spec(mesh, [Shard(d) for d in dims[: mesh.ndim]], SHAPE, sizes)
                for make, dtype in (
                    (rng.uniform, torch.float32),
                    (rng.normal, torch.float32),
                    (rng.normal, torch.bfloat16),
                ):
                    got, expected = make(spec=spec, key=7, dtype=dtype), make(SHAPE, 7, dtype=dtype)
                    assert got._local_tensor.shape == spec.local_shape()
                    assert torch.equal(got.full_tensor(), expected), (name, split, dims, make.__name__, dtype)
                many, each = rng.normal(spec=spec, key=[5, 6, 7]), [rng.normal(SHAPE[1:], key) for key in (5, 6, 7)]
                assert torch.equal(many.full_tensor(), torch.stack(each)), (name, split, dims)
                seen.add((name, split))
    return len(seen)


def test_field_is_the_same_for_every_cut(pool):
    assert pool.run(fields)[0] == sum(map(len, SPLITS.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_is_uniform(dtype):
    u = rng.uniform(N, rng.key(1, 2), dtype=dtype).double().sort().values
    assert u[0] >= 0 and u[-1] < 1
    distance = (u - torch.arange(N) / N).abs().max()  # Kolmogorov-Smirnov; beyond 1.95 / sqrt(N) once in a thousand
    assert distance < 1.95 / math.sqrt(N)


def test_normal_is_normal():
    z = rng.normal(N, rng.key(1, 2), dtype=torch.float64).sort().values
    cdf = 0.5 * (1 + torch.erf(z / math.sqrt(2)))
    assert (cdf - torch.arange(N) / N).abs().max() < 1.95 / math.sqrt(N)
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((z**power).mean() - expected) < 4 * math.sqrt(variance / N), power
    assert z.isfinite().all()


def test_neighbours_and_keys_are_independent():
    """Neither shifted fields nor fields of neighbouring keys correlate."""
    z = rng.normal(N, 0, dtype=torch.float64)
    others = [z.roll(s) for s in (1, 2, 64, 1792)] + [
        rng.normal(N, k, dtype=torch.float64) for k in (1, 2, -1, 1 << 40)
    ]
    for other in others:
        assert abs((z * other).mean()) < 4.5 / math.sqrt(N)


def test_bits_are_splitmix64():
    """The first outputs of the reference implementation from state zero."""
    state = torch.arange(1, 4) * rng._signed(0x9E3779B97F4A7C15)
    reference = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert rng._mixed(state).tolist() == [rng._signed(n) for n in reference]


def test_keys_differ():
    keys = {rng.key(a, b) for a in range(30) for b in range(30)} | {rng.key(a) for a in range(30)} | {rng.key(1, 2, 3)}
    assert len(keys) == 931
    assert rng.key(1, 2) != rng.key(2, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_below_one(dtype):
    u = rng.uniform(N, 3, dtype=dtype)
    assert u.max() < 1 and u.min() >= 0 and abs(u.double().mean() - 0.5) < 0.01


def test_shape_and_spec_exclude_each_other():
    with pytest.raises(ShardingError):
        rng.uniform(key=1)


def replayed(meshes, reentrant):
    """The gradient of a checkpointed dropout is that of the mask of its forward pass."""
    mesh, grads = meshes["2"], []
    x = torch.randn(2, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    for run in (lambda f, t: f(t), lambda f, t: checkpoint(f, t, use_reentrant=reentrant)):
        torch.manual_seed(3)
        cut = scatter_tensor(x, None, mesh, [Shard(1)], requires_grad=True, sizes={0: (5, 2)})
        run(lambda t: F.dropout(F.dropout(t.sin(), 0.4) + torch.rand_like(t), 0.5), cut).square().sum().backward()
        grads.append(cut.grad.full_tensor())
    assert torch.equal(*grads) and 0.2 < (grads[0] == 0).double().mean() < 0.95


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_replays(pool, reentrant):
    pool.run(replayed, reentrant)


INITIALISERS = (
    nn.init.normal_,
    nn.init.uniform_,
    nn.init.trunc_normal_,
    nn.init.xavier_uniform_,
    nn.init.xavier_normal_,
    nn.init.kaiming_uniform_,
    nn.init.kaiming_normal_,
    nn.init.orthogonal_,
    nn.init.eye_,
    lambda p: nn.init.sparse_(p, 0.5),
)


def initialised(meshes):
    """Parameters start alike, however they are cut."""
    found = {}
    for name, placements in (("1", [Shard(0)]), ("2", [Shard(0)]), ("2", [Shard(1)]), ("2x2", [Shard(1), Shard(0)])):
        for i, init in enumerate(INITIALISERS):
            p = nn.Parameter(scatter_tensor(torch.zeros(5, 7), None, meshes[name], placements))
            torch.manual_seed(4)
            assert init(p) is p
            value = p.detach().full_tensor()
            assert value.abs().sum() > 0
            torch.testing.assert_close(value, found.setdefault(i, value), msg=lambda m, i=i: f"{INITIALISERS[i]}: {m}")


def test_parameters_start_alike(pool):
    pool.run(initialised)


def seeds(meshes):
    """Seeded alike, the ranks of a domain have one mask; groups seeded otherwise have others."""
    mesh = meshes["ddp x domain"]
    torch.manual_seed(11 + mesh.get_local_rank("ddp"))
    x = scatter_tensor(torch.ones(4, 64), None, mesh["domain"], [Replicate()])
    return F.dropout(x, 0.5).to_local().tolist()


def test_groups_differ(pool):
    masks = pool.run(seeds)
    assert masks[0] == masks[1] and masks[2] == masks[3] and masks[0] != masks[2]


def test_a_given_generator_is_used(pool):
    pool.run(_from_generator)


def _from_generator(meshes):
    x = scatter_tensor(torch.zeros(4, 6), None, meshes["2"], [Shard(0)])
    first, second, again = (
        torch.rand_like(x, generator=torch.Generator().manual_seed(s)).full_tensor() for s in (1, 2, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, second)
