"""All pointwise operations of torch, found by their tag: on shards they give the values and gradients of one process.

Arguments are made from the schema, in the first real domain where the function is finite and besides as whole numbers,
truth values and complex numbers where it takes those. Nothing is sent and no operation falls back.
"""

import itertools
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from cases import extents, share
from torch.distributed.tensor import Shard

from core import ShardingError, ShardTensor, scatter_tensor, set_fallback
from core.debug import trace
from core.ops.pointwise import UNTAGGED

aten = torch.ops.aten
SHAPE, CUTS = (2, 7, 3), {1: ((1,), (2,)), 2: ((1, 2),)}
OUT = (aten.add.Tensor, aten.mul.Tensor, aten.exp.default, aten.where.self, aten.clamp.default, aten.eq.Tensor)

# Other names of pointwise operations, which torch takes apart before it dispatches.
OTHER_NAMES = """absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh divide fix greater greater_equal less
    less_equal multiply negative not_equal subtract true_divide __and__ __or__ __iand__ __ior__ isclose isreal
    special_expit special_ndtr special_psi special_gammaln special_multigammaln special_polygamma special_round"""
# In-place methods that are not pointwise: of other families, and those that shards refuse.
ELSEWHERE = """addbmm addmm addmv addr baddbmm bernoulli copy cumprod cumsum detach exponential fill_diagonal index_add
    index_copy index_fill index_put index_reduce log_normal masked_scatter normal put random renorm requires_grad
    scatter scatter_add scatter_reduce squeeze swapaxes swapdims t transpose tril triu uniform unsqueeze"""
REFUSED = {
    "apply_": lambda x: x.apply_(abs),
    "map_": lambda x: x.map_(x, max),
    "map2_": lambda x: x.map2_(x, x, max),
    "share_memory_": lambda x: x.share_memory_(),
    "resize_": lambda x: x.resize_(3, 3),
    "resize_as_": lambda x: x.resize_as_(x[:1]),
    "as_strided_": lambda x: x.as_strided_((3,), (1,)),
    "set_": lambda x: x.set_(x * 2),
    "cauchy_": lambda x: x.cauchy_(),
    "geometric_": lambda x: x.geometric_(0.5),
}
SPARSE = {"_coalesced_", "resize_as_sparse_", "sparse_resize_", "sparse_resize_and_clear_"}


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
    aten.masked_fill.Tensor: lambda g: ([real(g), truth(g), real(g)[0, 0, 0]], {}),  # and the value has no dims
    aten.masked_fill_.Tensor: lambda g: ([real(g), truth(g), real(g)[0, 0, 0]], {}),
    aten.fill.Tensor: lambda g: ([real(g), real(g)[0, 0, 0]], {}),
    aten.fill_.Tensor: lambda g: ([real(g), real(g)[0, 0, 0]], {}),
    aten.native_dropout_backward.default: lambda g: ([real(g), truth(g), 2.0], {}),
    aten.special_zeta.self_scalar: lambda g: ([1.5, above_one(g)], {}),  # a scalar above one
}


@cache
def overloads():
    """Functional and in-place overloads, tagged or known to ``core``."""
    names = sorted({s.name[6:] for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")})
    found = [getattr(getattr(aten, n), o) for n in names for o in getattr(aten, n).overloads()]
    others = {name + form for name in OTHER_NAMES.split() for form in ("", "_")}
    found = [
        f
        for f in found
        if torch.Tag.pointwise in f.tags or f.overloadpacket in UNTAGGED or f._schema.name[6:] in others
    ]
    found = [f for f in found if any("Tensor" in str(a.type) for a in f._schema.arguments)]
    return [f for f in found if not any(a.is_out for a in f._schema.arguments)]


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
        elif kind == "bool" and not a.has_default_value():
            value = False
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


@cache
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
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    sizes = {a: extents(value.shape[d], mesh.size(a), "uneven") for a, d in enumerate(dims)}
    return scatter_tensor(value, None, mesh, [Shard(d) for d in dims], sizes=sizes)


def equal(got, expected, spec):
    """The parts of this rank, cut as the operands, and plain results."""
    for a, b in zip(flat(got), flat(expected), strict=True):
        if isinstance(b, torch.Tensor) and b.ndim == 0:
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
        elif isinstance(b, torch.Tensor):
            assert isinstance(a, ShardTensor) and a._spec.sizes == spec.sizes, getattr(a, "_spec", type(a))
            part = tuple(slice(*spec.local_range(d)) for d in range(spec.ndim))
            tolerance = 1e-6 if b.dtype == torch.float32 else 1e-12
            torch.testing.assert_close(a._local_tensor, b[part], atol=tolerance, rtol=tolerance, equal_nan=True)
        else:
            assert a == b


def gradients(call, args, kwargs, cut=lambda t: t, varied=None):
    """Values, first and second derivatives, the operands being results of an operation, and which of the first ones
    vary, of which alone there are second ones; None where torch has none. Where a node knows less of what varies than
    torch does, it has zeros for nothing."""
    leaves = [a.detach().clone().requires_grad_() for a in args if differentiable(a)]
    values = iter(leaves)
    args = [next(values) * 1 if differentiable(a) else a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    try:
        out = [o for o in flat(call(*args, **kwargs)) if isinstance(o, torch.Tensor) and o.requires_grad]
        first = derivatives(out, leaves, cut)
    except (RuntimeError, NotImplementedError) as error:
        if has_none(error):
            return None
        raise
    varied = varied or [g.requires_grad and g.ndim > 0 for g in first]
    try:
        second = derivatives([g for g, v in zip(first, varied, strict=True) if v], leaves, cut)
    except (RuntimeError, NotImplementedError) as error:
        if not has_none(error):
            raise
        second = []
    return [t.detach() for t in (*out, *first, *second)], varied


def derivatives(out, leaves, cut):
    weights = [cut(torch.arange(1.0, 43).view(SHAPE).sin().to(o.dtype)) for o in out]
    found = torch.autograd.grad(out, leaves, weights, allow_unused=True, create_graph=True) if out else []
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves)]


def has_none(error):
    return any(words in str(error) for words in ("derivative", "automatic differentiation", "not differentiable"))


def differentiable(a):
    return isinstance(a, torch.Tensor) and (a.is_floating_point() or a.is_complex())


def compare(func, args, kwargs, mesh):
    """Values of the overload, then, by its public name, values and the gradients of all operands. Nothing is sent,
    save for the one truth value of ``equal`` and the gradient of an operand without dims."""
    call = public(func) if defined(public(func), args, kwargs) else func
    values, derived = func(*copied(args), **kwargs), gradients(call, args, kwargs)
    for dims in CUTS[mesh.ndim]:
        parts = [cut_like(a, mesh, dims) for a in args]
        part_kwargs = {k: cut_like(v, mesh, dims) for k, v in kwargs.items()}
        spec = next(t._spec for t in (*parts, *part_kwargs.values()) if isinstance(t, ShardTensor))
        with trace() as wire:
            got = func(*(made := copied(parts)), **part_kwargs)
            assert not func._schema.is_mutable or got is made[0]
            equal(got, values, spec)
            if derived is not None:
                own, _ = gradients(call, parts, part_kwargs, lambda t, d=dims: cut_like(t, mesh, d), derived[1])
                equal(own, derived[0], spec)
        sends = isinstance(values, bool) or any(isinstance(a, torch.Tensor) and a.ndim == 0 for a in args)
        assert wire.count() == 0 or sends, wire.kinds()


def every_overload(meshes, mesh_name):
    mesh, without, failed = meshes[mesh_name], [], []
    group, groups = share(mesh)
    set_fallback("error")
    try:
        for func in overloads()[group::groups]:
            for args, kwargs in samples(func):
                try:
                    compare(func, args, kwargs, mesh)
                except Exception as error:  # all failures in one message
                    kinds = [str(getattr(a, "dtype", a)) for a in args]
                    failed.append(f"{func} of {kinds}: {type(error).__name__}: {error}")
            without += [] if samples(func) else [str(func)]
    finally:
        set_fallback()
    assert not failed, f"{len(failed)} failures:\n" + "\n".join(failed)
    return without


@pytest.mark.parametrize("mesh", ["2", "2x2"])
def test_every_overload(pool, mesh):
    """All of them: if torch adds one that the schema does not explain, it needs arguments by hand."""
    assert pool.run(every_overload, mesh) == [[]] * 4 and len(overloads()) > 390


def test_arguments_by_hand_are_needed():
    found = overloads()
    for func in BY_HAND:
        assert func in found
        made = [arguments(func, d) for d in (real, unit, above_one)]
        assert not any(defined(func, args, kwargs) for args, kwargs in made), f"{func} needs none"


def refused(meshes):
    for name, call in REFUSED.items():
        x = cut_like(real(torch.Generator().manual_seed(0)), meshes["2"], (1,))
        with trace() as wire, pytest.raises(ShardingError):
            call(x)
        assert wire.count() == 0, name


def test_refused_in_place(pool):
    """Neither a crash nor a lost write."""
    pool.run(refused)


def test_every_in_place_method_is_known():
    """A method that a new torch brings belongs to one of these."""
    methods = {n for n in dir(torch.Tensor) if n.endswith("_") and not n.endswith("__") and not n.startswith("_philox")}
    known = {f._schema.name[6:] for f in overloads()} | {f"{n}_" for n in ELSEWHERE.split()} | REFUSED.keys() | SPARSE
    assert methods - known == set()


def written_out(meshes):
    """``out=`` forms write into their target and keep its cut."""
    mesh = meshes["2"]
    for func in OUT:
        args, kwargs = samples(func)[0]
        expected = func(*args, **kwargs)
        for dims in CUTS[1]:
            parts = [cut_like(a, mesh, dims) for a in args]
            for out_dims in CUTS[1]:
                target = cut_like(torch.zeros_like(expected), mesh, out_dims)
                spec = target._spec
                assert public(func)(*parts, **kwargs, out=target) is target
                equal(target, expected, spec)


def test_out_forms(pool):
    pool.run(written_out)
