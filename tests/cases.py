"""The table of cases: an operation, its operands and how they are cut; every row runs on all meshes and splits.

A row compares values and the gradients of all operands, cut and plain, with the same function on one process in fp64
under a random cotangent, and the recorded cuts with the real local shapes. Each file ``cases_*.py`` adds its family.
"""

import sys
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from core import ShardingError, ShardTensor, scatter_tensor
from core.debug import trace
from core.spec import chunk_sizes

TABLE: dict[str, "Case"] = {}
REFUSED: dict[str, tuple] = {}
SPLITS = {
    "1": ("chunk",),
    "2": ("chunk", "uneven", "one_row", "empty"),
    "3": ("chunk", "uneven", "one_row", "empty"),
    "4": ("chunk", "uneven", "one_row", "empty"),
    "2x2": ("empty",),
}


@dataclass
class Case:
    """One row.

    Attributes:
        fn: function of the operands.
        shapes: shape of every operand.
        cuts: one-axis cuts to try; each gives per operand the dim that is cut, None for a plain tensor, "R" for a
            replicated ShardTensor, "P" for one that is a pending sum.
        cuts2: the same for a mesh of two axes: per operand a pair of dims (or None).
        wire: kinds of collectives expected in the forward pass on two ranks, for every cut (``ops_table.survey``
            asserts it); None: not asserted.
        make: makes operand ``i`` from a generator instead of a normal draw (for integers, masks, positive numbers).
        differentiable: indices of operands that get gradients.
        atol: absolute tolerance.
        family: module that holds the row.
    """

    name: str
    fn: callable
    shapes: tuple
    cuts: tuple
    cuts2: tuple = ()
    wire: tuple | None = None
    make: dict = field(default_factory=dict)
    differentiable: tuple | None = None
    atol: float = 1e-10
    family: str = ""


def case(name, fn, shapes, cuts, **kwargs):
    assert name not in TABLE, name
    family = sys._getframe(1).f_globals["__name__"]
    TABLE[name] = Case(name, fn, tuple(shapes), tuple(cuts), family=family, **kwargs)


def refuse(name, fn, shape=(2, 7, 8, 2, 4), cut=1):
    """A call of a tensor cut along ``cut`` that must raise a ShardingError on every rank before anything is sent."""
    assert name not in REFUSED, name
    REFUSED[name] = fn, shape, cut


def run_refused(meshes, name):
    load()
    fn, shape, cut = REFUSED[name]
    g = torch.Generator().manual_seed(0)
    x = scatter_tensor(torch.randn(shape, generator=g, dtype=torch.float64), None, meshes["2"], [Shard(cut)])
    with trace() as wire, pytest.raises(ShardingError) as caught:
        fn(x)
    assert wire.count() == 0
    return str(caught.value)


@cache
def load():
    for path in sorted(Path(__file__).parent.glob("cases_*.py")):
        import_module(path.stem)
    rows = sorted(TABLE.values(), key=lambda row: row.family)  # whichever file a test of this process asked for first
    TABLE.clear()
    TABLE.update((row.name, row) for row in rows)  # for all ranks alike: cuts take turns by a row's place
    return TABLE


def share(mesh):
    """Which of the meshes of this name a rank is in, and how many they are: where each runs a part of the cases."""
    return int(mesh.mesh.flatten()[0]) // mesh.size(), dist.get_world_size() // mesh.size()


def extents(n, ranks, split):
    """Shard sizes of ``n`` rows: torch.chunk's, lopsided, one row on the first rank, none on the first or last."""
    if ranks == 1:
        return (n,)
    if split == "chunk":
        return chunk_sizes(n, ranks)
    if split == "uneven":
        head = max(n - (ranks - 1) * max(n // (2 * ranks), 1), 0)
        return (head, *chunk_sizes(n - head, ranks - 1))
    if split == "one_row":
        return (min(1, n), *chunk_sizes(n - min(1, n), ranks - 1))
    return (0, *chunk_sizes(n, ranks - 1)) if n % 2 else (*chunk_sizes(n, ranks - 1), 0)


def operands(row, seed, device):
    g = torch.Generator().manual_seed(seed)
    made = []
    for i, shape in enumerate(row.shapes):
        x = row.make[i](g, shape) if i in row.make else torch.randn(shape, dtype=torch.float64, generator=g)
        wants = x.is_floating_point() if row.differentiable is None else i in row.differentiable
        made.append(x.to(device).requires_grad_(wants))
    return made


def tensors_of(out):
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def _here(got, expected):
    """What this rank holds, and the same part of what was expected: every rank looks at its own part."""
    got = got.full_tensor() if isinstance(got, DTensor) else got
    if not isinstance(got, ShardTensor):
        return got, expected
    if got._spec.is_partial():
        return got.full_tensor(), expected
    for dim in {d for _, d in got._spec.cuts()}:
        start, stop = got._spec.local_range(dim)
        expected = expected.narrow(dim, start, stop - start)
    return got._local_tensor, expected


def cut(x, mesh, dims, split):
    if dims is None:
        return x.detach().clone().requires_grad_(x.requires_grad)
    if dims in ("R", "P"):
        whole = scatter_tensor(x.detach(), None, mesh, [Replicate()] * mesh.ndim)
        kept = whole if dims == "R" else whole.redistribute(placements=[Partial()] * mesh.ndim)
        return kept.detach().requires_grad_(x.requires_grad)
    dims = (dims,) if isinstance(dims, int) else dims
    sizes = {a: extents(x.shape[d], mesh.size(a), split) for a, d in enumerate(dims)}
    return scatter_tensor(x.detach(), None, mesh, [Shard(d) for d in dims], requires_grad=x.requires_grad, sizes=sizes)


def _check_metadata(t, pending=False):
    if isinstance(t, ShardTensor):
        assert t._spec.local_shape() == t._local_tensor.shape, (t._spec, t._local_tensor.shape)
        assert pending or not t._spec.is_partial(), t._spec


def run_splits(meshes, name, mesh_name, every=False):
    """Every kind of split, or those whose turn it is from row to row: of two ranks the uneven one and two others, of
    three or of four (:func:`has_turn`) two."""
    splits, turn = SPLITS[mesh_name], list(load()).index(name)
    if not every and mesh_name == "2":
        splits = ("uneven", *(s for i, s in enumerate(("chunk", "one_row", "empty")) if (turn + i) % 3))
    if not every and mesh_name in ("3", "4"):
        splits = splits[turn // 2 % 2 :: 2]
    start = torch.initial_seed()
    for split in splits:
        seed_torch(start)
        run_case(meshes, name, mesh_name, split)


def has_turn(name, mesh_name):
    """Whether a row runs on a mesh in every run of the tests: on three ranks or on four, not on both."""
    return mesh_name not in ("3", "4") or list(load()).index(name) % 2 == int(mesh_name) % 2


def run_case(meshes, name, mesh_name, split):
    """Runs on every worker; ranks outside the mesh do nothing."""
    row, mesh = load()[name], meshes[mesh_name]
    if mesh.get_coordinate() is None:
        return
    group, groups = share(mesh)  # they hold different data and run together once, in which they share the cuts
    if group and split != "uneven":
        return
    seed, cuts = 1000 * (1 + torch.initial_seed()) + 2 * group, _cuts_of(row, mesh_name, split)
    for dims in (cuts[group::groups] if split == "uneven" else cuts) or cuts:
        _compare(row, mesh, dims, split, seed)


def _cuts_of(row, mesh_name, split):
    """All cuts for the uneven split of two ranks; elsewhere they take turns, one row after the other."""
    cuts = row.cuts2 if mesh_name == "2x2" else row.cuts
    if mesh_name == "2x2" or (mesh_name, split) == ("2", "uneven"):
        return cuts
    turn = list(TABLE).index(row.name) + SPLITS[mesh_name].index(split)
    return cuts[turn % len(cuts) :][:1]


def seed_torch(seed, device="cpu"):
    """torch.manual_seed also formats the stack for devices that are not there yet, which takes longer than a row."""
    torch.default_generator.manual_seed(seed)
    if device == "cuda":
        torch.cuda.manual_seed_all(seed)


class Expected(NamedTuple):
    """What one process gives: results, the cotangents they are asked with, and the gradients of the operands."""

    outs: tuple
    cotangents: list
    grads: list


@lru_cache(maxsize=2)  # the splits of a row run one after the other
def _expected(name, seed, device):
    row = TABLE[name]
    plain = operands(row, seed, device)
    seed_torch(seed, device)
    outs = tensors_of(row.fn(*plain))
    g = torch.Generator().manual_seed(seed + 1)
    wanted = [isinstance(t, torch.Tensor) and t.requires_grad for t in outs]
    cotangents = [
        torch.randn(t.shape, dtype=t.dtype, generator=g).to(device) if w else None for t, w in zip(outs, wanted)
    ]
    if any(wanted):
        _objective(outs, cotangents).backward()
    outs = tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in outs)
    return Expected(outs, cotangents, [x.grad for x in plain])


def _objective(outs, cotangents):
    return sum((t * w).sum() for t, w in zip(outs, cotangents) if w is not None)


def _compare(row, mesh, dims, split, seed):
    where = f"{row.name} cut {dims} {split}"
    device = "cuda" if mesh.device_type == "cuda" else "cpu"
    expected = _expected(row.name, seed, device)

    def close(got, wanted, what=""):
        torch.testing.assert_close(*_here(got, wanted), atol=row.atol, rtol=1e-9, msg=lambda m: f"{where}: {what}{m}")

    parts = [cut(x, mesh, d, split) for x, d in zip(operands(row, seed, device), dims)]
    seed_torch(seed, device)
    got = tensors_of(row.fn(*parts))
    assert len(got) == len(expected.outs), where
    for a, b, w in zip(expected.outs, got, expected.cotangents):
        _check_metadata(b, pending="P" in dims)  # a linear operation may leave a user's pending sum pending
        if not isinstance(a, torch.Tensor):
            assert a == b, where
            continue
        assert a.shape == b.shape and a.dtype == b.dtype, f"{where}: {b.shape} {b.dtype}, expected {a.shape} {a.dtype}"
        assert b.requires_grad or w is None, where
        close(b.detach(), a)
    if all(w is None for w in expected.cotangents):
        return
    _objective(got, expected.cotangents).backward()
    for i, (x, y) in enumerate(zip(expected.grads, parts)):
        if x is None:
            continue
        assert y.grad is not None, f"{where}: operand {i} has no gradient"
        _check_metadata(y.grad)
        if isinstance(y, ShardTensor):
            assert isinstance(y.grad, ShardTensor) and y.grad._spec.sizes == y._spec.sizes, f"{where}: {y.grad}"
        else:
            assert type(y.grad) is torch.Tensor, f"{where}: gradient of plain operand {i} is {type(y.grad)}"
        close(y.grad, x, f"gradient {i}: ")
