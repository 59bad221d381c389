"""Making, moving and refusing ShardTensors."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from core import ShardingError, ShardTensor, TensorPromotionMode, UndeterminedShardingError, make_spec, scatter_tensor
from core.debug import trace
from core.spec import chunk_sizes


def same(a, b):
    torch.testing.assert_close(a, b, atol=0, rtol=0)


# -- specs: pure metadata ---------------------------------------------------------------------------------------------
def test_chunk_sizes_are_those_of_torch():
    for n, ranks in itertools.product(range(10), range(1, 5)):
        parts = [p.numel() for p in torch.arange(n).chunk(ranks)] if n else []
        assert chunk_sizes(n, ranks) == tuple(parts + [0] * (ranks - len(parts)))


def _specs(meshes):
    mesh = meshes["2"]
    a = make_spec(mesh, [Shard(0)], (8, 4), {0: (4, 4)})
    b = make_spec(mesh, [Shard(0)], (8, 4), {0: (5, 3)})
    assert a != b and hash(a) != hash(b)
    assert a == make_spec(mesh, [Shard(-2)], (8, 4)) and hash(a) == hash(make_spec(mesh, [Shard(0)], (8, 4)))
    assert copy.deepcopy(b) is b
    assert b._sharding_shapes == {0: (torch.Size([5, 4]), torch.Size([3, 4]))}
    with pytest.raises(AttributeError):
        a.shape = (1, 2)
    for bad in (
        lambda: make_spec(mesh, [Shard(2)], (8, 4)),
        lambda: make_spec(mesh, [Shard(0), Replicate()], (8, 4)),
        lambda: make_spec(mesh, [Shard(0)], (8, 4), {0: (5, 4)}),
        lambda: make_spec(mesh, [Shard(0)], (8, 4), {0: (9, -1)}),
        lambda: make_spec(meshes["2x2"], [Shard(0), Shard(0)], (8, 4), {0: (5, 3), 1: ((2, 3), (2, 2))}),
    ):
        with pytest.raises(UndeterminedShardingError):
            bad()


# -- scatter ----------------------------------------------------------------------------------------------------------
def _meshes_of_the_same_ranks(meshes):
    """They are equal, their process groups are not: a plan is made anew, and operands of both still meet."""
    one, other = (init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))["domain"] for _ in range(2))
    x, y = (scatter_tensor(torch.arange(7.0), None, mesh, [Shard(0)]) for mesh in (one, other))
    assert one == other and x._spec != y._spec and x._spec == (x * 2)._spec
    same((x + y).full_tensor(), torch.arange(7.0) * 2)


def _scatter(meshes):
    for name in ("1", "2", "2x2", "4"):
        mesh = meshes[name]
        ranks = mesh.mesh.flatten().tolist()
        src, me = ranks[-1], dist.get_rank()
        for dtype, fmt in (
            (torch.float64, None),
            (torch.bool, None),
            (torch.int64, None),
            (torch.bfloat16, torch.channels_last),
        ):
            g = torch.Generator().manual_seed(src)
            whole = (torch.randn(2, 3, 7, 5, generator=g) * 3).to(dtype)
            whole = whole.contiguous(memory_format=fmt) if fmt else whole
            placements = [Shard(2), Shard(3)][: mesh.ndim]
            sizes = {0: (5, 2)} if mesh.size(0) == 2 else None
            x = scatter_tensor(whole if me == src else None, src, mesh, placements, sizes=sizes)
            assert x.dtype == dtype and x.shape == whole.shape
            same(x.full_tensor(), whole)
            index = tuple(slice(*x._spec.local_range(d)) for d in range(4))
            same(x.to_local(), whole[index])
            assert (
                x._local_tensor.untyped_storage().nbytes() == x._local_tensor.numel() * x._local_tensor.element_size()
            )
            if fmt:
                assert x._local_tensor.is_contiguous(memory_format=fmt)
        r = scatter_tensor(
            torch.tensor(3.5) if me == src else None, src, mesh, [Replicate()] * mesh.ndim, requires_grad=True
        )
        assert r.item() == 3.5 and r.requires_grad and r.is_leaf
    with pytest.raises(ShardingError, match="not in the mesh"):
        scatter_tensor(torch.zeros(4), 99, meshes["2"], [Shard(0)])


def _every_dtype_travels(meshes):
    """Also those that gloo does not know: complex, bool, small and unsigned whole numbers, eight-bit floats."""
    kinds = [torch.complex64, torch.complex128, torch.bool, torch.int8, torch.int16, torch.uint16, torch.uint32]
    kinds += [torch.uint8, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.int64]
    mesh = meshes["2"]
    src = int(mesh.mesh.flatten()[1])
    for dtype in kinds:
        whole = (torch.randn(5, 4, generator=torch.Generator().manual_seed(src)) * 3).abs().to(dtype)
        x = scatter_tensor(whole if dist.get_rank() == src else None, src, mesh, [Shard(0)], sizes={0: (4, 1)})
        for y in (x, x.redistribute(placements=[Shard(1)]), x.redistribute(placements=[Shard(0)], sizes={0: (0, 5)})):
            assert y.dtype == dtype and torch.equal(y.full_tensor().view(torch.uint8), whole.view(torch.uint8)), dtype
        zero = scatter_tensor(whole[0, 0] if dist.get_rank() == src else None, src, mesh, [Replicate()])
        assert zero.shape == () and torch.equal(
            zero.to_local().view(1).view(torch.uint8), whole[0, :1].view(torch.uint8)
        )


def _scatter_shape_mismatch(meshes):
    mesh = meshes["2"]
    src = int(mesh.mesh.flatten()[0])
    with pytest.raises(UndeterminedShardingError, match="the source has shape"):
        scatter_tensor(torch.zeros(4, 3), src, mesh, [Shard(0)], global_shape=(5, 3))


# -- from_local -------------------------------------------------------------------------------------------------------
def _from_local(meshes):
    mesh = meshes["2"]
    me = mesh.get_local_rank()
    local = torch.full((2, (4, 6)[me]), float(me))
    x = ShardTensor.from_local(local, mesh, [Shard(1)])
    assert x.shape == (2, 10) and x._spec.sizes == ((4, 6),)
    with trace() as wire:
        y = ShardTensor.from_local(local, mesh, [Shard(1)], sharding_shapes={0: [(2, 4), (2, 6)]})
        z = ShardTensor.from_local(
            torch.zeros(3 - me, 1), mesh, [Shard(0)], sharding_shapes="chunk", global_shape=(5, 1)
        )
        x.shape, x.placements, x._spec._sharding_shapes, x.stride(), x.device_mesh
    assert wire.count() == 0
    same(x.full_tensor(), y.full_tensor())
    assert z.shape == (5, 1)
    with pytest.raises(UndeterminedShardingError):  # only this rank is wrong: the check tells all
        ShardTensor.from_local(
            torch.zeros(2 + me, 2), mesh, [Shard(0)], sharding_shapes={0: [2, 2]}, global_shape=(4, 2), check=True
        )
    for bad, claims in (  # each is wrong on one rank only, or is one claim here and another there
        (torch.zeros(2, 4 + me), {}),
        (torch.zeros(2, 4).to(torch.int64 if me else torch.float32), {}),
        (torch.zeros(2, 4), {"sharding_shapes": {0: [2 + me, 2]}}),
        (torch.zeros(2, 4), {"sharding_shapes": {0: [2, 2 + me]}, "global_shape": (4, 4)}),
        (torch.zeros(2, 4), {"sharding_shapes": "chunk", "global_shape": (4 + me, 4)}),
    ):
        with pytest.raises(UndeterminedShardingError):
            ShardTensor.from_local(bad, mesh, [Shard(0)], check=True, **claims)
    with trace() as wire:
        ShardTensor.from_local(torch.zeros(2, 4), mesh, [Shard(0)], {0: [2, 2]}, check=True)
    assert wire.kinds() == ["all_gather"] and wire.bytes() < 200
    for what in ("chunk", "infre", {1: [4, 6]}):
        with pytest.raises(UndeterminedShardingError, match="from_local"):
            ShardTensor.from_local(local, mesh, [Shard(1)], sharding_shapes=what)
    with pytest.raises(UndeterminedShardingError, match="from_local"):
        ShardTensor.from_local(torch.tensor(1.0), mesh, [Shard(0)])
    nothing = ShardTensor.from_local(local.to("meta"), mesh, [Shard(1)], check=True)  # no numbers, but extents
    assert nothing._spec.sizes == ((4, 6),) and (nothing + 1).is_meta


def _gradient_through_local(meshes):
    """from_local, to_local and redistribute with every placement: gradients as on one process."""
    for name in ("1", "2", "3"):
        mesh = meshes[name]
        if mesh.get_coordinate() is None:
            continue
        g = torch.Generator().manual_seed(3)
        whole, w = torch.randn(5, 4, generator=g), torch.randn(5, 4, generator=g)
        for p in (Shard(0), Shard(1), Replicate()):
            for q in (Shard(0), Shard(1), Replicate()):
                x = scatter_tensor(whole, None, mesh, [p], requires_grad=True)
                y = x.redistribute(placements=[q])
                cut = scatter_tensor(w, None, mesh, [q])
                (y.to_local(grad_placements=[q]) * cut.to_local()).sum().backward()
                torch.testing.assert_close(x.grad.full_tensor(), w, atol=1e-6, rtol=1e-6)
            x.grad = None
            (x.full_tensor() * w).sum().backward()
            torch.testing.assert_close(x.grad.full_tensor(), w, atol=1e-6, rtol=1e-6)
            x.grad = None
            mine = x.redistribute(placements=[Replicate()]).to_local()
            (mine * w * (mesh.get_local_rank() + 1)).sum().backward()  # every rank makes something else of it
            total = w * sum(r + 1 for r in range(mesh.size()))
            torch.testing.assert_close(x.grad.full_tensor(), total, atol=1e-6, rtol=1e-6)
            whole_and_plain = x.full_tensor().mean(0)  # goes back among the shards
            x.grad = None
            (x * whole_and_plain).sum().backward()
            torch.testing.assert_close(x.grad.full_tensor(), whole.mean(0) + whole.sum(0) / 5 + 0 * w)
        same_everywhere = w.clone().requires_grad_()
        (ShardTensor.from_local(same_everywhere, mesh, [Replicate()]) * whole).sum().backward()
        same(same_everywhere.grad, whole)
        local = torch.full((2, 3), 1.0 + mesh.get_local_rank(), requires_grad=True)
        total = ShardTensor.from_local(local, mesh, [Partial()])
        same(total.full_tensor(), torch.full((2, 3), sum(1.0 + r for r in range(mesh.size()))))
        (total * 3).sum().backward()
        same(local.grad, torch.full((2, 3), 3.0))


def _redistribute(meshes):
    for name in ("1", "2", "3", "2x2"):
        mesh = meshes[name]
        if mesh.get_coordinate() is None:
            continue
        whole = torch.arange(7.0 * 5 * 3).view(7, 5, 3)
        choices = [Shard(0), Shard(1), Shard(2), Replicate()]
        layouts = [
            p
            for p in itertools.product(choices, repeat=mesh.ndim)
            if len({*p} - {Replicate()}) == sum(isinstance(q, Shard) for q in p)
        ]
        for a, b in itertools.product(layouts, layouts):
            x = scatter_tensor(whole, None, mesh, a)
            same(x.redistribute(placements=b).full_tensor(), whole)
    mesh = meshes["2"]
    x = scatter_tensor(torch.arange(7.0), None, mesh, [Shard(0)], sizes={0: (6, 1)})
    y = x.redistribute(placements=[Shard(0)], sizes={0: (0, 7)})
    assert y._spec.sizes == ((0, 7),)
    same(y.full_tensor(), torch.arange(7.0))
    with trace() as wire:
        scatter_tensor(torch.zeros(8, 8), None, mesh, [Shard(0)]).redistribute(placements=[Shard(1)])
    assert wire.kinds() == ["all_to_all"] and wire.bytes() == 4 * 4 * 4  # only the quarter that changes hands


def _dtensor(meshes):
    mesh = meshes["2"]
    whole = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    d = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    x = ShardTensor.from_dtensor(d)
    same(x.full_tensor(), whole)
    (x * 2).sum().backward()
    same(d.grad.full_tensor(), torch.full((5, 4), 2.0))
    y = scatter_tensor(whole, None, mesh, [Shard(0)], sizes={0: (4, 1)}, requires_grad=True)
    z = y.to_dtensor()
    same(z.full_tensor(), whole)
    z.sum().backward()
    same(y.grad.full_tensor(), torch.ones(5, 4))
    position = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()  # chunk-cut parameter, user-cut activation
    (y.detach() * position).sum().backward()
    same(position.grad.full_tensor(), whole)


def _behaves_as_tensor(meshes):
    mesh = meshes["2"]
    whole = torch.arange(12.0).view(4, 3)
    x = scatter_tensor(whole, None, mesh, [Shard(0)], sizes={0: (3, 1)})
    assert isinstance(x, torch.Tensor) and len(x) == 4 and "Shard(0) [3, 1]" in repr(x)
    assert x.requires_grad_() is x and x.requires_grad and not x.detach().requires_grad
    assert x.detach().sum().item() == 66 and bool(x.sum() > 0) and f"{x.sum():.1f}" == "66.0"
    twin = copy.deepcopy(x.detach())
    twin.add_(1)
    same(x.full_tensor().detach(), whole)
    same(x.to(torch.float64).full_tensor().detach(), whole.double())
    same(torch.stack([row.full_tensor() for row in x.detach()]), whole)
    with pytest.raises(ShardingError, match="to_local"):
        x.numpy()
    with pytest.raises(ShardingError, match="one element"):
        bool(x)
    with torch.inference_mode():
        same((x + 1).full_tensor(), whole + 1)


def _errors_are_not_swallowed(meshes):
    mesh = meshes["2"]
    x = scatter_tensor(torch.zeros(4, 3), None, mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="size|shape|broadcast"):
        x + torch.zeros(5, 3)
    with pytest.raises(ShardingError, match="different meshes"):
        x + scatter_tensor(torch.zeros(4, 3), None, meshes["4"], [Shard(0)])
    ShardTensor.set_promotion_mode(TensorPromotionMode.DISABLED)
    try:
        with pytest.raises(ShardingError, match="promotion"):
            x + torch.zeros(3)
        x + 1
    finally:
        ShardTensor.set_promotion_mode(TensorPromotionMode.SILENT)


def _cut_twice(meshes):
    """Both axes cut dim 0: of 9 rows 5 and 4, of these 5 and 0, 1 and 3."""
    mesh = meshes["2x2"]
    whole = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    layouts = [
        ([Shard(0), Shard(0)], {0: (5, 4), 1: ((5, 0), (1, 3))}),
        ([Shard(0), Shard(0)], {0: (2, 7)}),
        ([Shard(0), Shard(1)], {}),
        ([Replicate(), Shard(0)], {}),
        ([Partial(), Shard(0)], {}),
        ([Replicate(), Replicate()], {}),
    ]
    for (first, sizes), (second, others) in itertools.product(layouts, layouts):
        if Partial() in first:
            continue
        x = scatter_tensor(whole, None, mesh, first, sizes=sizes, requires_grad=True)
        y = x.redistribute(placements=second, sizes=others)
        assert y._local_tensor.shape == y._spec.local_shape()
        same(y.full_tensor().detach(), whole)
        (3 * y * y).sum().backward()
        assert x.grad._spec.sizes == x._spec.sizes
        same(x.grad.full_tensor(), 6 * whole)
    x = scatter_tensor(whole, 0, mesh, *layouts[0][:1], sizes=layouts[0][1], requires_grad=True)
    assert x._spec._sharding_shapes[1] == tuple(torch.Size([n, 4]) for n in x._spec.extents(1))
    with trace() as wire:
        y = (x.sin() + x * 2).clone()
        y += torch.ones_like(y)
    assert wire.count() == 0 and y._spec.sizes == x._spec.sizes
    same(y.full_tensor().detach(), whole.sin() + whole * 2 + 1)
    same(ShardTensor.from_local(x.to_local().detach(), mesh, [Shard(0), Shard(0)]).full_tensor(), whole)
    same(copy.deepcopy(x).full_tensor().detach(), whole)
    weight = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
    (x @ weight + x[1:2, :3]).softmax(0).square().sum().backward()
    leaf = whole.clone().requires_grad_()
    plain = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
    (leaf @ plain + leaf[1:2, :3]).softmax(0).square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), leaf.grad, atol=1e-12, rtol=0)
    torch.testing.assert_close(weight.grad, plain.grad, atol=1e-12, rtol=0)
    dtensor = distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
    same(ShardTensor.from_dtensor(dtensor).full_tensor(), whole)
    same(x.detach().to_dtensor().full_tensor(), whole)


def _user_handlers(meshes):
    mesh = meshes["2"]
    x = scatter_tensor(torch.arange(6.0).view(3, 2), None, mesh, [Shard(0)])

    def erf(func, types, args, kwargs):
        return ShardTensor(args[0]._local_tensor + 100, args[0]._spec)

    ShardTensor.register_function_handler(torch.erf, erf)
    same(torch.erf(x).full_tensor(), torch.arange(6.0).view(3, 2) + 100)
    ShardTensor.register_dispatch_handler(torch.ops.aten.erfc.default, erf)
    same(torch.erfc(x).full_tensor(), torch.arange(6.0).view(3, 2) + 100)


CASES = [
    _specs, _meshes_of_the_same_ranks, _scatter, _every_dtype_travels, _scatter_shape_mismatch, _from_local,
    _gradient_through_local, _redistribute, _cut_twice, _dtensor, _behaves_as_tensor,
    _errors_are_not_swallowed, _user_handlers,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__.strip("_"))
def test_core(pool, case):
    pool.run(case)
