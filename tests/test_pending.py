"""All pointwise operations of pending sums, and of tensors of which two axes cut one dim."""

import pytest
import torch
from cases import share
from test_pointwise import copied, flat, overloads, samples
from torch.distributed.tensor import Partial, Shard

from core import ShardTensor, scatter_tensor, set_fallback


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
