"""Rows of operations along a dim: running sums, order, flips and rolls, repetitions."""

import torch
from cases import case, refuse

X = (2, 7, 6)
FREE, CUT = ((0,), (2,)), ((1,),)
BOTH = (((1, 2),), ((0, 1),))


def _with_zeros(g, shape):
    return torch.randn(shape, dtype=torch.float64, generator=g).where(torch.rand(shape, generator=g) > 0.3, 0)


def _with_nan(g, shape):
    x = torch.randn(shape, dtype=torch.float64, generator=g)
    return x.where(torch.rand(shape, generator=g) > 0.2, float("nan"))


def _few(g, shape):
    return torch.randint(0, 4, shape, generator=g)


# -- all together -----------------------------------------------------------------------------------------------------
def _line(x):
    sums = x.cumsum(0), x.cumprod(-1), torch.logcumsumexp(x, 0)
    return *sums, *x.sort(), *x.topk(4), x.median(), *x.median(0), *x.mode(), x.repeat(3), x.repeat(2, 2), x.tile(4)


def _missing(x):
    medians = *x.nanmedian(1), *torch.nanmedian(x, dim=1, keepdim=True), x.nanmedian(), torch.median(x)
    quantiles = x.nanquantile(0.3, 1), torch.nanquantile(x, 0.5), x.quantile(0.5, 1)
    return tuple(out.nan_to_num(9.0) for out in (*medians, *quantiles, *x.cummax(1), *x.sort(1), x.cumsum(1)))


def _by_name(x):
    found = x.sort(dim=1), torch.topk(x, 2, dim=1), x.median(1), x.cummax(1), torch.mode(x, 1), x.kthvalue(2, 1)
    return tuple(part for f in found for part in (f.values, f.indices))


case("along_line", _line, ((7,),), ((0,),))
case("along_missing", _missing, (X,), (*FREE, *CUT), cuts2=BOTH, make={0: _with_nan})
case("along_names", _by_name, (X,), (*FREE, *CUT))
case(
    "along_wire",
    lambda x: (x.cumsum(1), *x.topk(2, 1), *x.median(1), *x.sort(1), x.flip(1), x.roll(1, 1)),
    (X,),
    CUT,
    wire=("all_gather",) * 3 + ("all_to_all",) * 6,
)


# -- running sums -----------------------------------------------------------------------------------------------------
def _sums(x):
    below = torch.ops.aten.cumsum(x, 1), x.clone().cumsum_(1)
    return torch.cumsum(x, 1), x.cumsum(dim=-2), (x > 0).cumsum(1, dtype=x.dtype), *below


def _running(x):
    return *x.cummax(1), *torch.cummin(x, 1), torch.logcumsumexp(x, 1), x.logcumsumexp(dim=1)


case("running_free", lambda x: (x.cumsum(1), torch.cumprod(x, 1), *_running(x)), (X,), FREE, wire=())
case("running_cut", _running, (X,), CUT, cuts2=BOTH)
case("cumsum_cut", _sums, (X,), (*CUT, ("R",), ("P",)), cuts2=BOTH)
case("cumsum_whole_numbers", lambda x: (x.cumsum(1), (x > 1).cumsum(1), x.cumprod(1)), (X,), CUT, make={0: _few})
case(
    "cumprod_cut", lambda x: (torch.cumprod(x, 1), x.clone().cumprod_(1)), (X,), CUT, cuts2=BOTH, make={0: _with_zeros}
)


# -- order ------------------------------------------------------------------------------------------------------------
def _sorted(x):
    return *torch.sort(x, 1), *x.sort(dim=1, descending=True), x.argsort(1), torch.argsort(x, dim=1, descending=True)


def _ties(x):
    stable = *x.sort(dim=1, stable=True), *torch.sort(x, dim=1, descending=True, stable=True)
    values = x.topk(5, 1)[0], x.topk(2, 2, largest=False, sorted=True)[0]
    return *stable, x.argsort(dim=1, stable=True), *values, *x.mode(1), *torch.mode(x, dim=1, keepdim=True)


def _largest(x):
    return *x.topk(3, 1), *torch.topk(x, k=5, dim=1, largest=False), *x.topk(7, 1)


def _chosen(x):
    return *x.kthvalue(3, 1), *torch.kthvalue(x, 7, dim=1, keepdim=True), *x.median(1), *torch.median(x, 1, True)


def _quantiles(x, q):
    ways = ("lower", "higher", "midpoint", "nearest")
    one = torch.quantile(x, 0.3, dim=1), torch.quantile(x, q=q[1], dim=-2, keepdim=True)
    return *one, x.quantile(q, 1, keepdim=True), *(x.quantile(q, dim=1, interpolation=way) for way in ways)


def _quantiles_of_all(x, q):
    return x.quantile(0.4), torch.quantile(x, q), x.quantile(q, keepdim=True), torch.nanquantile(x, 0.6), x.median()


def _distinct(x):
    whole = torch.unique(x, return_inverse=True, return_counts=True)
    runs = torch.unique_consecutive(x, return_inverse=True, return_counts=True)
    bools = (x > 1).unique(return_counts=True)
    return *whole, *runs, *bools, x.unique(), x.unique_consecutive(return_counts=True)[1]


def _distinct_rows(x):
    rows = torch.unique(x, dim=1, return_inverse=True, return_counts=True)
    runs = x.unique_consecutive(dim=1, return_inverse=True, return_counts=True)
    return *rows, *runs, x.unique(dim=1), x.unique(dim=0)


Q = {1: lambda g, shape: torch.tensor([0.1, 0.45, 1.0], dtype=torch.float64)}
case("order_free", lambda x: (*_sorted(x), *_largest(x), *_chosen(x), *x.mode(1)), (X,), FREE, wire=())
case("order_ties", _ties, (X,), (*FREE, *CUT), make={0: _few})
case("sort_cut", lambda x: (*_sorted(x), x.msort(), torch.msort(x)), (X,), ((0,), (1,)), cuts2=BOTH)
case("topk_cut", _largest, (X,), (*CUT, ("R",), ("P",)), cuts2=BOTH)
case("chosen_cut", _chosen, (X,), CUT, cuts2=BOTH)
case("quantile_free", _quantiles, (X, (3,)), ((0, None), (2, "R")), make=Q, differentiable=(0,), wire=())
case("quantile_cut", _quantiles, (X, (3,)), ((1, None),), cuts2=(((1, 2), None),), make=Q, differentiable=(0,))
case("quantile_all", _quantiles_of_all, (X, (3,)), ((0, None), (1, None)), cuts2=(((1, 2), None),), make=Q)
case("unique", _distinct, (X,), (*FREE, *CUT, ("R",)), cuts2=BOTH, make={0: _few})
case("unique_dim", _distinct_rows, ((1, 9, 2),), ((1,), (2,)), cuts2=(((1, 2),),), make={0: _few})


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


def _areas(x, t):
    sums = torch.cumulative_trapezoid(x, dx=2, dim=1), torch.cumulative_trapezoid(x, t, dim=1)
    return torch.trapezoid(x, dim=1), torch.trapezoid(x, t, dim=1), *sums


N = {1: lambda g, shape: torch.tensor([2, 0, 1, 3, 1, 0, 2])}
case("shift_free", lambda x: (x.flip(1), x.roll(3, 1), x.repeat(1, 2, 1)), (X,), FREE, wire=())
case("flip_cut", _turned, (X,), (*CUT, (0,), (2,), ("P",)), cuts2=BOTH)
case("roll_cut", _rolled, (X,), (*CUT, (2,), ("P",)), cuts2=BOTH)
case("roll_all", lambda x: (x.roll(5), torch.roll(x, -50)), (X,), ((1,), (2,)), cuts2=BOTH)
case("roll_leading", lambda x: x.roll(5), (X,), ((0,),), wire=("all_to_all",))
case("rot90", _quarters, (X,), ((0,), (1,), (2,)), cuts2=BOTH)
case("repeat_cut", _tiled, (X,), ((1,), (2,)), cuts2=BOTH)
case("repeat_interleave", _each_repeated, (X, (7,)), ((0, None), (1, None), (2, None)), cuts2=(((1, 2), None),), make=N)
case("diff", lambda x: (x.diff(), torch.diff(x, 2, 1), x.diff(dim=1, prepend=x[:, :2])), (X,), ((0,), (1,), (2,)))
case("trapezoid", _areas, (X, (7,)), ((0, None), (1, None), (1, 0)), cuts2=(((1, 2), None),))

refuse("topk of more than there are", lambda x: x.topk(9, 1))
refuse("kthvalue of more than there are", lambda x: x.kthvalue(8, dim=1))
refuse("quantile above one", lambda x: torch.quantile(x, 1.5, dim=1))
refuse("roll with a shift too many", lambda x: x.roll((1, 2), 1))
refuse("rot90 in one dim", lambda x: x.rot90(1, (1, 1)))
refuse("repeat of too few dims", lambda x: x.repeat(2, 2))
