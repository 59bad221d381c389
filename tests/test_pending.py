"""All pointwise operations of pending sums, and of tensors of which two axes cut one dim."""

from itertools import product

import pytest
import torch
from cases import share
from test_pointwise import copied, flat, overloads, samples
from torch.distributed.tensor import Partial, Replicate, Shard

from core import ShardTensor, scatter_tensor, set_fallback
from core.debug import trace


def pending(value, mesh):
    """Unlike terms on the ranks, that only together make the value; truth values have no terms."""
    if value.dtype == torch.bool:
        return scatter_tensor(value, None, mesh, [Shard(1)])
    term = value * 0.37 if value.is_floating_point() or value.is_complex() else value // 3
    return ShardTensor.from_local(term if mesh.get_local_rank() else value - term, mesh, [Partial()])


def cut_twice(value, mesh):
    return scatter_tensor(value, None, mesh, [Shard(1), Shard(1)])


def every_overload(meshes, kind):
    make, mesh = {"pending": (pending, meshes["2"]), "cut twice": (cut_twice, meshes["2x2"])}[kind]
    failed, (group, groups) = [], share(mesh)
    set_fallback("error")
    try:
        for func in overloads()[group::groups]:
            for args, kwargs in samples(func):
                parts = [make(a, mesh) if isinstance(a, torch.Tensor) and a.ndim else a for a in args]
                named = {k: make(v, mesh) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
                try:
                    compare(func(*parts, **named), func(*copied(args), **kwargs))
                except Exception as error:  # all failures in one message
                    failed.append(
                        f"{func} of {[getattr(a, 'dtype', a) for a in args]}: {type(error).__name__}: {error}"
                    )
    finally:
        set_fallback()
    assert not failed, f"{len(failed)} failures:\n" + "\n".join(failed)


def compare(got, expected):
    for a, b in zip(flat(got), flat(expected), strict=True):
        if isinstance(b, torch.Tensor):
            tolerance = 1e-5 if b.dtype == torch.float32 else 1e-9
            torch.testing.assert_close(a.full_tensor(), b, atol=tolerance, rtol=tolerance, equal_nan=True)
        else:
            assert a == b


@pytest.mark.parametrize("kind", ["pending", "cut twice"])
def test_every_overload(pool, kind):
    pool.run(every_overload, kind)


def joins(meshes):
    """Of pending sums with what is finished, plain or cut otherwise: pending where no cut is, and nothing is sent; the
    gradients of one value's parts meet in one message."""
    mesh = meshes["2"]
    torch.manual_seed(0)
    a, b = torch.randn(2, 3, 4, dtype=torch.float64)
    for join in (torch.cat, torch.stack):
        for others in ([pending(b, mesh)], [b], [scatter_tensor(b, None, mesh, [Replicate()])]):
            parts = [pending(a, mesh), *others, pending(a, mesh)]
            with trace() as wire:
                out = join(parts, 1)
            assert out.placements == (Partial(),) and wire.count() == 0
            compare(out, join([a, b, a], 1))
        for dim in range(2):  # a cut of another part is the result's
            out = join([pending(a, mesh), scatter_tensor(b, None, mesh, [Shard(dim)])], 1)
            assert out.placements[0].is_shard()
            compare(out, join([a, b], 1))
    square = meshes["2x2"]  # pending on one axis, cut on the other
    both = scatter_tensor(a, None, square, [Replicate(), Shard(0)]).redistribute(placements=[Partial(), Shard(0)])
    for join, other in product(
        (torch.cat, torch.stack), ([Replicate(), Shard(0)], [Shard(1), Shard(0)], [Replicate()] * 2)
    ):
        out = join([both, scatter_tensor(b, None, square, other), both], 1)
        compare(out, join([a, b, a], 1))
    x, level = torch.randn(2, 6, 3, dtype=torch.float64), torch.randn(12, dtype=torch.float64, requires_grad=True)
    same = scatter_tensor(level.detach(), None, mesh, [Replicate()], requires_grad=True)
    rows = scatter_tensor(x[0], None, mesh, [Shard(0)])
    for table, given in ((x[0], level), (rows, same)):
        scale, shift, more, last = given.chunk(4)
        loss = ((table * scale + shift) * more + last).square().sum()
        with trace() as wire:
            loss.backward()
    assert wire.count() == 4  # sums over the cut rows are finished where they arise
    compare(same.grad, level.grad)
    norm, cuts = torch.nn.functional.layer_norm, (lambda t: t.chunk(4), lambda t: [t[i : i + 3] for i in (0, 3, 6, 9)])
    cuts += (lambda t: t.view(4, 3).unbind(), lambda t: [t.view(4, 3)[i] for i in range(4)])
    for cut, (table, given) in product(cuts, ((x[0], level), (rows, same))):
        given.grad = None
        parts = cut(given)
        loss = norm(norm(table, (3,), *parts[:2]), (3,), *parts[2:]).sin().sum()
        with trace() as wire:
            loss.backward()
        if given is same:
            assert wire.count() == 1 and wire.bytes() == level.nbytes and same.grad.placements == (Replicate(),)
            compare(same.grad, level.grad)


def test_joins(pool):
    pool.run(joins)
