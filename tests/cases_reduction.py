"""Rows of reductions: sums, products, extremes and their places, variances, norms, softmax."""

import torch
import torch.nn.functional as F
from cases import case, refuse

X = (2, 7, 6)
EACH = ((0,), (1,), (2,))
TWO = (((1, 2),), ((2, 0),))
INF, aten = float("inf"), torch.ops.aten


def holes(g, shape):
    """Every third value is no number."""
    x = torch.randn(shape, dtype=torch.float64, generator=g)
    return x.masked_fill(torch.rand(shape, generator=g) < 0.3, float("nan"))


def whole_numbers(g, shape):
    return torch.randint(-3, 4, shape, generator=g)


def zeros(g, shape):
    """Some rows without a zero, some with one, some with more."""
    x = torch.randn(shape, dtype=torch.float64, generator=g)
    return x * (torch.rand(shape, generator=g) > 0.15)


def far(g, shape):
    return torch.randn(shape, dtype=torch.float64, generator=g) + 1e6


def complex_numbers(g, shape):
    return torch.randn(shape, dtype=torch.complex128, generator=g)


def flat(*results):
    """One tuple of the tensors in (named) tuples."""
    return tuple(t for r in results for t in (flat(*r) if isinstance(r, tuple) else (r,)))


def known(x):
    """Values with a mark where they are no numbers, which the table cannot compare."""
    return x.nan_to_num(), x.isnan()


# -- sums and products ------------------------------------------------------------------------------------------------
case(
    "sum_of_any_dims",
    lambda x: (x.sum(()), torch.mean(x, (), True), torch.sum(x, axis=-2), x.mean((0, -1)), x.sum((-3, -2, -1), True)),
    (X,),
    EACH + (("P",), ("R",)),
    cuts2=TWO,
)
case(
    "sum_dtype",
    lambda x: (
        x.sum(1, dtype=torch.float32),
        x.mean((1, 2), dtype=torch.float32),
        x.detach().round().sum(dtype=torch.int64),
    ),
    (X,),
    EACH + (("P",),),
    cuts2=TWO,
    atol=1e-5,
)
case(
    "nansum", lambda x: (x.nansum(), x.nansum(1), torch.nansum(x, (0, 2), True)), (X,), EACH, cuts2=TWO, make={0: holes}
)
case(
    "nanmean",
    lambda x: known(x.nanmean()) + known(x.nanmean(1)) + known(torch.nanmean(x, (0, 2), True)),
    (X,),
    EACH,
    cuts2=TWO,
    make={0: holes},
)
case("nansum_sent", lambda x: x.nansum(1), (X,), ((1,),), make={0: holes}, wire=("all_reduce",))
case(
    "prod",
    lambda x: (x.prod(), x.prod(1), torch.prod(x, -1, keepdim=True), torch.prod(x, dim=0)),
    (X,),
    EACH + (("P",),),
    cuts2=TWO,
)
case("prod_of_zeros", lambda x: (x.prod(1), x.prod(2), x.prod()), (X,), EACH, cuts2=TWO, make={0: zeros})
case("prod_sent", lambda x: x.prod(1), (X,), ((1,),), wire=("all_gather",))
case(
    "whole_numbers",
    lambda x: flat(
        (x.sum(), x.sum(1), (x > 0).sum(2), x.prod(1), (x > -3).prod(), x.prod(2, dtype=torch.float64)),
        (x.amax(1), x.amin(), x.max(), (x > 2).amax(1), (x > 2).max(2), x.int().min(1), x.int().aminmax(dim=1)),
        (x.argmax(), x.argmin(1), x.mean(1, dtype=torch.float64), x.float().var()),
        (
            x.any(1),
            x.all((0, 2)),
            torch.any(x),
            x.to(torch.uint8).all(2),
            torch.all(x, ()),
            x.any((1, 2), keepdim=True),
        ),
        (x.count_nonzero(), torch.count_nonzero(x, 1), x.count_nonzero((-1, 0)), x.logsumexp(1)),
    ),
    (X,),
    EACH,
    cuts2=TWO,
    make={0: whole_numbers},
    atol=1e-5,
)
case("count_sent", lambda x: x.count_nonzero(1), (X,), ((1,),), make={0: whole_numbers}, wire=("all_reduce",))
case("trace", lambda x: x.trace() * torch.trace(x.T), ((7, 7),), ((0,), (1,)), cuts2=(((0, 1),), ((1, 0),)))
case(
    "of_no_dims",
    lambda x: flat(
        (x.sum(), x.mean(-1), x.prod(0), x.amax(), x.max(), x.max(0), x.argmax(-1), x.detach().aminmax()),
        (x.norm(), x.std(correction=0), x.var(0, False), x.logsumexp(0), x.softmax(0), x.any(), x.count_nonzero()),
    ),
    ((),),
    (("R",), ("P",)),
)

# -- variance ---------------------------------------------------------------------------------------------------------
case(
    "variance",
    lambda x: flat(
        (
            x.var(),
            x.var(1),
            x.var((0, -1), keepdim=True),
            x.var(False),
            x.var(2, False, True),
            torch.var(x, correction=2),
        ),
        (x.std(), torch.std(x, (1, 2)), x.std(dim=1, correction=0), torch.std(x, -2, unbiased=False, keepdim=True)),
    ),
    (X,),
    EACH + (("P",),),
    cuts2=TWO,
)
case(
    "variance_and_mean",
    lambda x: flat(torch.var_mean(x, 1), torch.std_mean(x, (0, 2), keepdim=True), torch.var_mean(x, unbiased=False)),
    (X,),
    EACH,
    cuts2=TWO,
)
case("variance_far_off", lambda x: (x.var(1), x.std()), (X,), EACH, cuts2=TWO, make={0: far}, atol=1e-7)
case("variance_of_equals", lambda x: (x - x.detach() + 1).std(1), (X,), EACH)
case(
    "variance_complex", lambda x: torch.var_mean(x, 1), (X,), ((1,), (2,)), make={0: complex_numbers}, differentiable=()
)
case(
    "reductions_by_aten_names",
    lambda x: flat(
        (aten.max.dim(x, 1), aten.min.dim(x, -1, True), aten.var.correction(x, [1], correction=1)),
        (aten.std.correction(x, [0, 2]), aten.var_mean.correction(x, [1]), aten.std_mean.correction(x, [2])),
    ),
    (X,),
    EACH,
    cuts2=TWO[:1],
)
case("variance_sent", lambda x: torch.std_mean(x, 1), (X,), ((1,),), wire=("all_reduce",) * 2)

# -- norms ------------------------------------------------------------------------------------------------------------
case(
    "norms",
    lambda x: tuple(torch.linalg.vector_norm(x, p, d, k) for p, d, k in NORMS),
    (X,),
    EACH + (("P",),),
    cuts2=TWO,
)
NORMS = (
    *((2, None, False), (2, 1, False), (1, (0, -1), True), (0, 1, False), (0.5, 1, False), (3, 2, True)),
    *((INF, 1, False), (-INF, (0, 1), False), (-2, 1, False), (INF, None, True), (2.5, (), False)),
)
case(
    "norms_by_other_names",
    lambda x: (
        *(x.norm(), torch.norm(x, 1), x.norm(p=3, dim=1), torch.norm(x, dim=(0, 1)), x.norm("fro", (1, 2), True)),
        *(torch.linalg.norm(x), torch.linalg.norm(x, INF, 1), x.norm(dtype=torch.float64), torch.dist(x, x * x, 3)),
        *(torch.linalg.norm(x, 1, (0, 1)), torch.linalg.norm(x[0], "fro")),
    ),
    (X,),
    EACH[1:],
    cuts2=TWO[:1],
)
case(
    "matrix_norms",
    lambda x: (
        *(torch.linalg.matrix_norm(x, p) for p in ("fro", 1, 2, INF, -1, -2)),
        *(torch.linalg.matrix_norm(x, p, (2, 0)) for p in ("fro", "nuc", 1)),
        *(torch.norm(x, "nuc", (1, 2)), torch.norm(x[0], p="nuc")),
    ),
    (X,),
    EACH,
    cuts2=TWO[:1],
    atol=1e-9,
)
case(
    "norm_of_holes",
    lambda x: known(x.norm(dim=1)) + known(x.norm(INF, 1)) + known(x.norm(0, 1)),
    (X,),
    EACH,
    make={0: holes},
    differentiable=(),
)
case("norm_sent", lambda x: x.norm(dim=1), (X,), ((1,),), wire=("all_reduce",))
case(
    "renorm",
    lambda x: (x.renorm(2, 1, 1.5), torch.renorm(x, 1, -1, 4.0), x.renorm(INF, 0, 1.0)),
    (X,),
    EACH,
    cuts2=TWO,
    atol=1e-7,
)
case(
    "normalize",
    lambda x: (F.normalize(x, dim=1), F.normalize(x, 1, -1), F.normalize(x, 3.0, (0, 2))),
    (X,),
    EACH,
    cuts2=TWO,
)
case("normalize_sent", lambda x: F.normalize(x, dim=1), (X,), ((1,),), wire=("all_reduce",))

# -- softmax ----------------------------------------------------------------------------------------------------------
case(
    "logsumexp",
    lambda x: (x.logsumexp(1), torch.logsumexp(x, (0, -1), True), torch.special.logsumexp(x, (0, 1, 2))),
    (X,),
    EACH + (("P",),),
    cuts2=TWO,
)
case(
    "logsumexp_of_infinities",
    lambda x: known(torch.cat([x.clamp_min(0).log(), x * 1e3], 2).logsumexp(1)),
    (X,),
    EACH,
    cuts2=TWO,
    differentiable=(),
)
case("logsumexp_sent", lambda x: x.logsumexp(1), (X,), ((1,),), wire=("all_reduce",) * 2)
case(
    "softmax_forms",
    lambda x: (
        *(torch.softmax(x, 1), x.softmax(-1), F.softmin(x, 1), x.log_softmax(0), F.log_softmax(x, -1)),
        *(torch.special.softmax(x, 2), torch.nn.Softmax2d()(x), F.softmax(x.float(), 1, dtype=torch.float64)),
    ),
    (X,),
    EACH + (("P",),),
    cuts2=TWO,
    atol=1e-6,
)
case(
    "softmax_of_holes",
    lambda x: known(x.softmax(1)) + known(x.log_softmax(2)),
    (X,),
    EACH,
    cuts2=TWO,
    make={0: holes},
    differentiable=(),
)
case(
    "second_derivatives",
    lambda x: torch.autograd.grad(
        sum(
            (f**2).sum()
            for f in (x.std(1), x.prod(1), x.amax(1), x.max(1)[0], x.logsumexp(1), x.softmax(1), x.norm(dim=1), x.var())
        ),
        x,
        create_graph=True,
    )[0].square(),
    (X,),
    EACH,
    cuts2=TWO,
)

refuse("mean of whole numbers", lambda x: x.int().mean())
refuse("variance of whole numbers", lambda x: x.int().var(1))
refuse("norm of nothing", lambda x: x[:, :0].norm(INF, 1))
refuse("trace of no matrix", lambda x: x.trace())
