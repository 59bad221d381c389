"""All pointwise operations of torch, found by their tag: on shards they give the values and gradients of one process.

Arguments are made from the schema, in the first real domain where the function is finite and besides as whole numbers,
truth values and complex numbers where it takes those. Nothing is sent and no operation falls back.
"""

import itertools

import torch
import torch.nn.functional as F
from cases import extents
from torch.distributed.tensor import Shard

from core import ShardTensor, scatter_tensor, set_fallback
from core.debug import trace

aten = torch.ops.aten
SHAPE, CUTS = (2, 7, 3), {"2": ((1,), (2,)), "2x2": ((1, 2),)}


def real(g):
    return torch.randn(SHAPE, generator=g, dtype=torch.float64)


def unit(g):
    return torch.rand(SHAPE, generator=g, dtype=torch.float64) * 0.8 + 0.1


def above_one(g):
    return torch.rand(SHAPE, generator=g, dtype=torch.float64) * 2 + 1.1


def whole(g):
    return torch.randint(1, 5, SHAPE, generator=g)


def truth(g):
    return torch.rand(SHAPE, generator=g) > 0.5


def complex_(g):
    return torch.randn(SHAPE, generator=g, dtype=torch.complex128)


# Overloads whose arguments the schema does not tell.
BY_HAND = {
    aten.where.self: lambda g: ([truth(g), real(g), real(g)], {}),  # the condition is of another kind
    aten.masked_fill.Scalar: lambda g: ([real(g), truth(g), 0.3], {}),  # so is a mask
    aten.native_dropout_backward.default: lambda g: ([real(g), truth(g), 2.0], {}),
    aten.special_zeta.self_scalar: lambda g: ([1.5, above_one(g)], {}),  # a scalar above one
}


def overloads():
    """Functional and in-place overloads, and those that write into ``out=``."""
    names = sorted({s.name[6:] for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")})
    found = [getattr(getattr(aten, n), o) for n in names for o in getattr(aten, n).overloads()]
    found = [f for f in found if torch.Tag.pointwise in f.tags]
    out = [f for f in found if any(a.is_out for a in f._schema.arguments)]
    return [f for f in found if f not in out], out


def arguments(func, draw):
    """Arguments made from the schema, tensors by ``draw``; scalars grow, so that bounds are in order."""
    g, steps = torch.Generator().manual_seed(0), itertools.count(1)
    args, kwargs = [], {}
    for a in func._schema.arguments:
        kind = str(a.type)
        if kind in ("Tensor", "Optional[Tensor]"):
            value = draw(g)
        elif kind in ("number", "Optional[number]"):
            value = next(steps) * (1 if draw in (whole, truth) else 0.3)
        elif kind in ("int", "Optional[float]", "Optional[str]"):
            value = {"int": 2, "Optional[float]": 0.1, "Optional[str]": "floor"}[kind]
        else:
            continue  # its default
        if a.kwarg_only:
            kwargs[a.name] = value
        else:
            args.append(value)
    return args, kwargs


def flat(out):
    return [o for o in (out if isinstance(out, (tuple, list)) else [out])]


def defined(func, args, kwargs):
    """Whether plain torch computes it, and to finite numbers."""
    try:
        return all(o.isfinite().all() for o in flat(func(*copied(args), **kwargs)) if isinstance(o, torch.Tensor))
    except (RuntimeError, TypeError):
        return False


def copied(args):
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in args]


def samples(func):
    """Every kind of arguments that the function takes."""
    if func in BY_HAND:
        return [BY_HAND[func](torch.Generator().manual_seed(0))]
    real_ = [made for draw in (real, unit, above_one) if defined(func, *(made := arguments(func, draw)))][:1]
    return real_ + [made for d in (whole, truth, complex_) if defined(func, *(made := arguments(func, d)))]


def public(func):
    """The function or method of the same name that people call, or the overload itself."""
    name = func._schema.name[6:]
    if func._schema.is_mutable:
        return getattr(torch.Tensor, name, func)
    special = getattr(torch.special, name.removeprefix("special_"), None)
    return getattr(torch, name, None) or special or getattr(F, name, None) or func


def cut_like(value, mesh, dims):
    if not isinstance(value, torch.Tensor):
        return value
    sizes = {a: extents(value.shape[d], mesh.size(a), "uneven") for a, d in enumerate(dims)}
    return scatter_tensor(value, None, mesh, [Shard(d) for d in dims], sizes=sizes)


def equal(got, expected):
    for a, b in zip(flat(got), flat(expected), strict=True):
        if isinstance(b, torch.Tensor):
            assert isinstance(a, ShardTensor) and a._spec.local_shape() == a._local_tensor.shape
            a = a.full_tensor()
            tolerance = 1e-6 if b.dtype == torch.float32 else 1e-12
            torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance, equal_nan=True)
        else:
            assert a == b


def compare(func, args, kwargs, mesh, dims):
    """Values of the overload, then, by its public name, values and the gradients of all operands."""
    cut = [cut_like(a, mesh, dims) for a in args]
    cut_kwargs = {k: cut_like(v, mesh, dims) for k, v in kwargs.items()}
    with trace() as wire:
        got = func(*(made := copied(cut)), **cut_kwargs)
    kept = [o for o in flat(got) if isinstance(o, ShardTensor)]
    assert wire.kinds() == [] or not kept, wire.kinds()
    assert all(o._spec.sizes == next(t for t in cut if isinstance(t, ShardTensor))._spec.sizes for o in kept)
    assert not func._schema.is_mutable or got is made[0]
    equal(got, func(*copied(args), **kwargs))
    call = public(func) if defined(public(func), args, kwargs) else func
    expected = gradients(call, args, kwargs)
    if expected is not None:
        equal(gradients(call, cut, cut_kwargs), expected)


def gradients(call, args, kwargs):
    """Values and gradients, the operands being results of an operation; None where torch has no derivative."""
    leaves = [a.detach().clone().requires_grad_() for a in args if differentiable(a)]
    values = iter(leaves)
    args = [next(values) * 1 if differentiable(a) else a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    try:
        out = call(*args, **kwargs)
        out = [o for o in flat(out) if isinstance(o, torch.Tensor) and o.requires_grad]
        if not out:
            return None
        weights = torch.arange(1.0, 43, dtype=torch.float64).view(SHAPE).sin()
        total = sum((torch.view_as_real(o).sum(-1) if o.is_complex() else o).mul(weights).sum() for o in out)
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:
        if "derivative" in str(error) or "automatic differentiation" in str(error):
            return None
        raise
    return [o.detach() for o in out] + [g for g in grads if g is not None]


def differentiable(a):
    return isinstance(a, torch.Tensor) and (a.is_floating_point() or a.is_complex())


def every_overload(meshes, mesh_name):
    mesh, compared, failed = meshes[mesh_name], 0, []
    set_fallback("error")
    try:
        for func in overloads()[0]:
            for args, kwargs in samples(func):
                for dims in CUTS[mesh_name]:
                    try:
                        compare(func, args, kwargs, mesh, dims)
                    except Exception as error:  # all failures in one message
                        kinds = [str(getattr(a, "dtype", a)) for a in args]
                        failed.append(f"{func} of {kinds} cut {dims}: {type(error).__name__}: {error}")
            compared += bool(samples(func))
    finally:
        set_fallback("warn")
    assert not failed, f"{len(failed)} failures:\n" + "\n".join(failed)
    return compared


def test_every_overload_on_one_axis(pool):
    pool.run(every_overload, "2", timeout=300)
