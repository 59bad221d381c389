"""Operands that are cut differently, whole, pending, plain, DTensors or numbers meet in one operation.

Every combination of kinds, shapes and wanted gradients is computed on shards and on one process. The result must be
cut as the documented rule says, each gradient as its operand, and plain operands must get finished, plain gradients.
"""

import itertools
import operator

import pytest
import torch
from cases import share
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from core import ShardTensor, scatter_tensor

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
    """Every ``step``-th combination of kinds with all shapes, ``at_once`` operations each, shared by the pairs of
    ranks. Operations and the operands that want gradients go round, so that each comes with each pair of kinds."""
    mesh, failed, count = meshes[mesh_name], [], 0
    table, (group, groups) = {2: BINARY, 3: TERNARY}[arity], share(mesh)
    g = torch.Generator().manual_seed(group)
    names = itertools.cycle(table)
    rounds = itertools.cycle([w for w in itertools.product([True, False], repeat=arity) if any(w)])
    combinations = itertools.product(kinds(mesh)[: None if arity == 2 else -2], repeat=arity)
    for i, chosen in enumerate(itertools.islice(combinations, 0, None, step)):
        for shapes in SHAPES[arity][(group + i) % groups :: groups]:
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
    return count / mesh.size()


@pytest.mark.parametrize("mesh", ["2", "2x2"])
def test_two_operands(pool, mesh):
    assert sum(pool.run(meetings, mesh, 2, 2 if mesh == "2" else 1, 1, timeout=300)) > 500


@pytest.mark.parametrize("mesh", ["2", pytest.param("2x2", marks=pytest.mark.nightly)])
def test_three_operands(pool, mesh):
    assert sum(pool.run(meetings, mesh, 3, 1, 2 if mesh == "2" else 4, timeout=300)) > 300
