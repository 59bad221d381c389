"""Operands that are cut differently, whole, pending, plain, DTensors or numbers meet in one operation.

Every combination of kinds, shapes and wanted gradients is computed on shards and on one process. The result must be
cut as the documented rule says, each gradient as its operand, and plain operands must get finished, plain gradients.
"""

import itertools
import operator
import warnings

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from core import ShardingError, ShardTensor, TensorPromotionMode, scatter_tensor
from core.debug import trace

FULL, SMALL = (2, 7, 3), ((7, 1), (3,), (1, 7, 3), ())
SHAPES = {
    2: [(FULL, FULL), *((FULL, s) for s in SMALL), *((s, FULL) for s in SMALL), ((7, 1), (3,)), ((3,), (7, 1))],
    3: [(FULL, (7, 1), (3,)), ((3,), FULL, (1, 7, 3)), (FULL, FULL, FULL), (FULL, (), ())],
}
S1, S2, R, P = Shard(1), Shard(2), Replicate(), Partial()
# Placements and extents as those of a tensor of the full shape; smaller operands have them on the dims that they have.
SHARDS = {
    1: {
        "cut 1": ([S1], {0: (5, 2)}),
        "cut 1 otherwise": ([S1], {0: (1, 6)}),
        "cut 2": ([S2], {0: (1, 2)}),
        "whole": ([R], {}),
        "pending": ([P], {}),
    },
    2: {
        "cut 1 2": ([S1, S2], {0: (5, 2), 1: (2, 1)}),
        "cut 1 2 otherwise": ([S1, S2], {0: (0, 7), 1: (2, 1)}),
        "cut 2 1": ([S2, S1], {0: (1, 2), 1: (4, 3)}),
        "whole, cut 1": ([R, S1], {1: (3, 4)}),
        "pending, cut 2": ([P, S2], {1: (0, 3)}),
        "pending": ([P, P], {}),
    },
}
OTHERS = ("plain", "DTensor cut", "DTensor whole", "number", "no dims")


def kinds(mesh):
    return [*SHARDS[mesh.ndim], *OTHERS]


def made(kind, value, mesh):
    """The operand of this kind, or None where the shape does not allow it."""
    if kind == "number":
        return value.flatten()[0].item() if value.shape == FULL else None
    if kind == "no dims":
        return value.flatten()[0].clone() if value.shape == FULL else None
    if kind == "plain":
        return value.clone()
    if kind.startswith("DTensor"):
        dim = value.ndim - 2
        cut = [Shard(dim) if kind.endswith("cut") and a == 0 else Replicate() for a in range(mesh.ndim)]
        return None if dim < 0 and kind.endswith("cut") else distribute_tensor(value, mesh, cut, src_data_rank=None)
    placements, sizes = [], {}
    for axis, p in enumerate(SHARDS[mesh.ndim][kind][0]):
        dim = p.dim - len(FULL) + value.ndim if isinstance(p, Shard) else None
        if dim is not None and dim < 0:
            return None
        placements.append(p if dim is None else Shard(dim))
        if dim is not None:
            given = SHARDS[mesh.ndim][kind][1][axis]
            sizes[axis] = given if sum(given) == value.shape[dim] else (1, 0)  # a cut dim of extent one
    whole = scatter_tensor(value, None, mesh, [Replicate()] * mesh.ndim)
    return whole.redistribute(placements=placements, sizes=sizes).detach()


def plain(operand):
    if isinstance(operand, torch.Tensor):
        operand = operand.detach()
        operand = operand.full_tensor() if isinstance(operand, (ShardTensor, DTensor)) else operand.clone()
    return operand


# -- the documented rule --------------------------------------------------------------------------------------------
def expected_cut(operands, shape, mesh, stays_pending):
    """Axis by axis as the largest operand that the axis cuts along a dim of full extent, the first of equals."""
    cut, taken = [], set()
    tensors = [ShardTensor.from_dtensor(t) if isinstance(t, DTensor) else t for t in operands]
    shards = sorted((t for t in tensors if isinstance(t, ShardTensor)), key=lambda t: -t.numel())
    for axis in range(mesh.ndim):
        found = None
        for t in shards:
            p = t.placements[axis]
            dim = p.dim + len(shape) - t.ndim if isinstance(p, Shard) else None
            if dim is not None and t.shape[p.dim] == shape[dim] and dim not in taken:
                found = dim, t._spec.sizes[axis]
                taken.add(dim)
                break
        pending = [isinstance(t, ShardTensor) and isinstance(t.placements[axis], Partial) for t in tensors]
        cut.append(found or ("P" if any(pending) and stays_pending(pending, operands) else "R"))
    return cut


def actual_cut(t):
    return [
        (p.dim, s) if isinstance(p, Shard) else "P" if isinstance(p, Partial) else "R"
        for p, s in zip(t.placements, t._spec.sizes)
    ]


def both(pending, operands):
    """A sum stays pending if both operands are tensors."""
    return all(isinstance(t, torch.Tensor) for t in operands)


def one(pending, operands):
    return sum(pending) == 1


def dividend(pending, operands):
    return pending[0] and not pending[1]


def never(pending, operands):
    return False


BINARY = {
    "+": (operator.add, both),
    "-": (operator.sub, both),
    "*": (operator.mul, one),
    "/": (operator.truediv, dividend),
    "**": (operator.pow, never),
    "==": (operator.eq, never),
    "maximum": (torch.maximum, never),
    "where": (lambda x, y: torch.where(MASK, x, y), never),
}
MASK = torch.arange(42).view(FULL) % 3 > 0
TERNARY = {
    "addcmul": (torch.addcmul, never),
    "where": (lambda x, y, z: torch.where(x > 1, y, z), never),
    "lerp": (torch.lerp, never),
    "clamp": (lambda x, y, z: torch.clamp(x, min=y, max=z), never),
}


def takes(name, operands):
    """Whether torch itself computes it: most functions want tensors, bounds of unlike shapes have no gradient."""
    if name == "clamp" and operands[1].shape != operands[2].shape:
        return False
    return all(isinstance(t, torch.Tensor) for t in operands) or (len(operands) == 2 and name != "maximum")


# -- one combination ------------------------------------------------------------------------------------------------
def run(function, operands, wants):
    operands = [t.requires_grad_(w) if isinstance(t, torch.Tensor) else t for t, w in zip(operands, wants)]
    out = function(*operands)
    if not out.requires_grad:
        return out, []
    weights = torch.arange(1.0, out.numel() + 1, dtype=torch.float64).view(out.shape).sin()
    (out * weights).sum().backward()
    return out.detach(), [getattr(t, "grad", None) for t in operands]


def compare(name, table, operands, wants, mesh):
    function, stays_pending = table[name]
    expected, gradients = run(function, [plain(t) for t in operands], wants)
    operands = [t.detach().clone() if isinstance(t, torch.Tensor) else t for t in operands]
    out, found = run(function, operands, wants)
    assert out._spec.local_shape() == out._local_tensor.shape
    shape = [t.shape if isinstance(t, torch.Tensor) else () for t in operands]
    cut = expected_cut(operands, torch.broadcast_shapes(*shape, expected.shape), mesh, stays_pending)
    assert actual_cut(out) == cut, f"cut {actual_cut(out)}, not {cut}"
    same(out, expected)
    for i, (operand, grad, reference) in enumerate(zip(operands, found, gradients)):
        if reference is None:
            assert grad is None
            continue
        kind = (
            ShardTensor
            if isinstance(operand, ShardTensor)
            else DTensor
            if isinstance(operand, DTensor)
            else torch.Tensor
        )
        assert type(grad) is kind, f"gradient {i} is {type(grad)}"
        if kind is ShardTensor:
            assert grad._spec.sizes == operand._spec.sizes, f"gradient {i} is cut {actual_cut(grad)}"
        same(grad, reference, f"gradient {i}: ")


def same(got, expected, words=""):
    torch.testing.assert_close(plain(got), expected, atol=1e-12, rtol=1e-12, msg=lambda m: words + m)


def meetings(meshes, mesh_name, arity, at_once, step):
    """Every ``step``-th combination of kinds with all shapes, ``at_once`` operations each. Operations and the operands
    that want gradients go round, so that each comes with each pair of kinds."""
    mesh, failed, count = meshes[mesh_name], [], 0
    table = {2: BINARY, 3: TERNARY}[arity]
    g = torch.Generator().manual_seed(int(mesh.mesh.flatten()[0]))  # groups of one mesh hold different data
    names = itertools.cycle(table)
    rounds = itertools.cycle([w for w in itertools.product([True, False], repeat=arity) if any(w)])
    combinations = itertools.product(kinds(mesh)[: None if arity == 2 else -2], repeat=arity)
    for chosen in itertools.islice(combinations, 0, None, step):
        for shapes in SHAPES[arity]:
            values = [torch.randint(2, 8, s, generator=g).double() / 4 for s in shapes]
            operands = [made(k, v, mesh) for k, v in zip(chosen, values)]
            if not any(isinstance(t, ShardTensor) for t in operands) or any(t is None for t in operands):
                continue
            for name, wants in zip(itertools.islice(names, at_once), rounds):
                if takes(name, operands):
                    count += 1
                    try:
                        compare(name, table, operands, wants, mesh)
                    except Exception as error:
                        what = f"{name} of {chosen} {shapes}, gradients {wants}"
                        failed.append(f"{what}: {type(error).__name__}: {error}")
    assert not failed, f"{len(failed)} of {count} combinations, such as\n" + "\n".join(failed[:12])
    return count


@pytest.mark.parametrize("mesh", ["2", "2x2"])
def test_two_operands(pool, mesh):
    assert pool.run(meetings, mesh, 2, 2 if mesh == "2" else 1, 1, timeout=300)[0] > 500


@pytest.mark.parametrize("mesh", ["2", "2x2"])
def test_three_operands(pool, mesh):
    assert pool.run(meetings, mesh, 3, 1, 2 if mesh == "2" else 4, timeout=300)[0] > 300


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
