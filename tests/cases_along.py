"""Rows of operations along a dim: running sums, order, flips and rolls, repetitions."""

import torch
from cases import case

X = (2, 7, 6)
FREE, CUT = ((0,), (2,)), ((1,),)
BOTH = (((1, 2),), ((0, 1),))


def _by_name(x):
    found = x.sort(dim=1), torch.topk(x, 2, dim=1), x.median(1), x.cummax(1), torch.mode(x, 1), x.kthvalue(2, 1)
    return tuple(part for f in found for part in (f.values, f.indices))


def _with_zeros(g, shape):
    return torch.randn(shape, dtype=torch.float64, generator=g).where(torch.rand(shape, generator=g) > 0.3, 0)


def _with_nan(g, shape):
    x = torch.randn(shape, dtype=torch.float64, generator=g)
    return x.where(torch.rand(shape, generator=g) > 0.2, float("nan"))


def _few(g, shape):
    return torch.randint(0, 4, shape, generator=g)


def _numbers(*outs):
    return tuple(out.nan_to_num(9.0) for out in outs)


# -- running sums -----------------------------------------------------------------------------------------------------
def _sums(x):
    return torch.cumsum(x, 1), (x > 0).cumsum(dim=-2, dtype=torch.float64), torch.ops.aten.cumsum(x, 1)


case("cumsum_free", lambda x: (torch.cumsum(x, 1), x.cumprod(1)), (X,), FREE, wire=())
case("cumsum_cut", lambda x: x.cumsum(1), (X,), CUT, cuts2=BOTH, wire=("all_gather",))
case("cumsum_forms", _sums, (X,), (*CUT, ("R",), ("P",)), cuts2=BOTH)
case("cumsum_line", lambda x: (x.cumsum(0), x.cumprod(-1), torch.logcumsumexp(x, 0)), ((7,),), ((0,),))
case("cumsum_whole_numbers", lambda x: (x.cumsum(1), (x > 1).cumsum(1), x.cumprod(1)), (X,), CUT, make={0: _few})
case("cumprod_cut", lambda x: (torch.cumprod(x, 1), x.cumprod(1)), (X,), CUT, cuts2=BOTH, make={0: _with_zeros})
case("running_free", lambda x: (*x.cummax(1), *torch.cummin(x, 1), x.logcumsumexp(1)), (X,), FREE, wire=())
case("running_cut", lambda x: (*x.cummax(1), *torch.cummin(x, 1), torch.logcumsumexp(x, 1)), (X,), CUT, cuts2=BOTH)
case("running_nan", lambda x: _numbers(*x.cummax(1), *x.sort(1), x.cumsum(1)), (X,), CUT, make={0: _with_nan})


# -- order ------------------------------------------------------------------------------------------------------------
def _sorted(x):
    return *torch.sort(x, 1), *x.sort(dim=1, descending=True), x.argsort(1), torch.argsort(x, dim=1, descending=True)


def _stable(x):
    return (
        *x.sort(dim=1, stable=True),
        *torch.sort(x, dim=1, descending=True, stable=True),
        x.argsort(dim=1, stable=True),
    )


def _largest(x):
    return *x.topk(3, 1), *torch.topk(x, k=5, dim=1, largest=False), *x.topk(7, 1)


def _chosen(x):
    return (*x.kthvalue(3, 1), *torch.kthvalue(x, 7, dim=1, keepdim=True), *x.median(1), *torch.median(x, 1, True))


def _medians_of_numbers(x):
    return _numbers(*x.nanmedian(1), *torch.nanmedian(x, dim=1, keepdim=True), x.nanmedian(), torch.median(x))


def _quantiles(x, q):
    ways = ("lower", "higher", "midpoint", "nearest")
    return (
        torch.quantile(x, 0.3, dim=1),
        x.quantile(q, 1, keepdim=True),
        torch.quantile(x, q=q[1], dim=-2, keepdim=True),
        *(x.quantile(q, dim=1, interpolation=way) for way in ways),
    )


def _quantiles_of_all(x, q):
    return x.quantile(0.4), torch.quantile(x, q), x.quantile(q, keepdim=True), torch.nanquantile(x, 0.6), x.median()


Q = {1: lambda g, shape: torch.tensor([0.1, 0.45, 1.0], dtype=torch.float64)}
case("sort_free", lambda x: (*_sorted(x), *_largest(x)), (X,), FREE, wire=())
case("sort_cut", _sorted, (X,), CUT, cuts2=BOTH)
case("sort_wire", lambda x: x.sort(1), (X,), CUT, wire=("all_to_all",) * 3)
case("names_of_results", _by_name, (X,), (*FREE, *CUT))
case("sort_stable", _stable, (X,), (*FREE, *CUT), make={0: _few})
case("sort_first", lambda x: (x.msort(), torch.msort(x)), (X,), ((0,), (1,)), cuts2=BOTH)
case("sort_line", lambda x: (*x.sort(), *x.topk(4), x.median(), *x.median(0), *x.mode()), ((7,),), ((0,),))
case("topk_cut", _largest, (X,), (*CUT, ("R",), ("P",)), cuts2=BOTH)
case("topk_wire", lambda x: x.topk(2, 1), (X,), CUT, wire=("all_gather", "all_gather"))
case("topk_ties", lambda x: (x.topk(5, 1)[0], x.topk(2, 2, largest=False, sorted=True)[0]), (X,), CUT, make={0: _few})
case("chosen_free", lambda x: (*_chosen(x), *x.mode(1)), (X,), FREE, wire=())
case("chosen_cut", _chosen, (X,), CUT, cuts2=BOTH)
case("chosen_wire", lambda x: x.median(1), (X,), CUT, wire=("all_to_all",))
case("mode", lambda x: (*x.mode(1), *torch.mode(x, dim=1, keepdim=True)), (X,), (*FREE, *CUT), make={0: _few})
case("nanmedian", _medians_of_numbers, (X,), (*FREE, *CUT), cuts2=BOTH, make={0: _with_nan})
case("quantile_free", _quantiles, (X, (3,)), ((0, None), (2, "R")), make=Q, differentiable=(0,), wire=())
case("quantile_cut", _quantiles, (X, (3,)), ((1, None),), cuts2=(((1, 2), None),), make=Q, differentiable=(0,))
case("quantile_all", _quantiles_of_all, (X, (3,)), ((0, None), (1, None)), cuts2=(((1, 2), None),), make=Q)
case(
    "nanquantile",
    lambda x: _numbers(x.nanquantile(0.3, 1), x.nanquantile(0.5)),
    (X,),
    ((0,), (1,)),
    make={0: _with_nan},
)


def _distinct(x):
    whole = torch.unique(x, return_inverse=True, return_counts=True)
    runs = torch.unique_consecutive(x, return_inverse=True, return_counts=True)
    return *whole, *runs, x.unique(), x.unique_consecutive(return_counts=True)[1], *x.unique(return_inverse=True)


def _distinct_rows(x):
    rows = torch.unique(x, dim=1, return_inverse=True, return_counts=True)
    runs = x.unique_consecutive(dim=1, return_inverse=True, return_counts=True)
    return *rows, *runs, x.unique(dim=1), x.unique(dim=0)


case("unique", _distinct, (X,), (*FREE, *CUT, ("R",)), cuts2=BOTH, make={0: _few})
case("unique_dim", _distinct_rows, ((1, 9, 2),), ((1,), (2,)), cuts2=(((1, 2),),), make={0: _few})
case(
    "unique_line",
    lambda x: (x.unique(), *torch.unique_consecutive(x, return_inverse=True)),
    ((9,),),
    ((0,),),
    make={0: _few},
)
case("unique_bool", lambda x: x.unique(return_counts=True), (X,), CUT, make={0: lambda g, s: _few(g, s) > 3})


# -- flips, rolls, repetitions ----------------------------------------------------------------------------------------
def _turned(x):
    return x.flip(1), torch.flip(x, (0, -1)), x.flip([1, 2]), x.fliplr(), torch.flipud(x)


def _rolled(x):
    return x.roll(2, 1), torch.roll(x, (-3, 1), (1, 2)), x.roll(shifts=(15, 1), dims=(1, 1)), x.roll(0, 1)


def _quarters(x):
    return *(torch.rot90(x, k, (1, 2)) for k in range(-1, 3)), x.rot90(1, [0, 1])


def _tiled(x):
    return x.repeat(1, 3, 1), x.repeat([2, 1, 2, 2]), torch.tile(x, (2, 1)), x.tile(2, 3, 1, 1), x.repeat(1, 0, 1)


def _each_repeated(x, n):
    return x.repeat_interleave(2, 1), torch.repeat_interleave(x, 3, dim=-1), x.repeat_interleave(n, dim=1)


N = {1: lambda g, shape: torch.tensor([2, 0, 1, 3, 1, 0, 2])}
case("flip_free", lambda x: (x.flip(1), x.roll(3, 1), x.repeat(1, 2, 1)), (X,), FREE, wire=())
case("flip_cut", _turned, (X,), (*CUT, (0,), (2,), ("P",)), cuts2=BOTH)
case("flip_wire", lambda x: (x.flip(1), x.roll(1, 1)), (X,), CUT, wire=("all_to_all",) * 2)
case("roll_cut", _rolled, (X,), (*CUT, (2,), ("P",)), cuts2=BOTH)
case("roll_all", lambda x: (x.roll(5), torch.roll(x, -50)), (X,), ((0,), (1,), (2,)), cuts2=BOTH)
case("roll_leading", lambda x: x.roll(5), (X,), ((0,),), wire=("all_to_all",))
case("rot90", _quarters, (X,), ((0,), (1,), (2,)), cuts2=BOTH)
case("repeat_cut", _tiled, (X,), ((1,), (2,)), cuts2=BOTH)
case("repeat_line", lambda x: (x.repeat(3), x.repeat(2, 2), x.tile(4)), ((7,),), ((0,),))
case("repeat_interleave", _each_repeated, (X, (7,)), ((0, None), (1, None), (2, None)), cuts2=(((1, 2), None),), make=N)
case("diff", lambda x: (x.diff(), torch.diff(x, 2, 1), x.diff(dim=1, prepend=x[:, :2])), (X,), ((0,), (1,), (2,)))
case(
    "trapezoid",
    lambda x, t: (torch.trapezoid(x, dim=1), torch.trapezoid(x, t, dim=1), torch.cumulative_trapezoid(x, dx=2, dim=1)),
    (X, (7,)),
    ((0, None), (1, None), (1, 0)),
    cuts2=(((1, 2), None),),
)
