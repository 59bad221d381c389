"""Rows of pooling: windows that overlap, pad, dilate and hang over the edge, maxima with ties and indices."""

import torch
import torch.nn.functional as F
from cases import case, refuse, tensors_of

S, I, V = (2, 3, 13), (2, 3, 9, 8), (2, 2, 6, 5, 4)
SPATIAL = {1: ((2,), (0,)), 2: ((2,), (3,)), 3: ((2,), (4,))}
BOTH = (((2, 3),), ((0, 2),), ((1, 3),))


def ties(g, shape):
    """Few different values, so that most windows hold their maximum twice."""
    return torch.randint(-1, 2, shape, generator=g).double()


def lost(g, shape):
    """Some values are infinitely small and some are no numbers."""
    draw = torch.randint(0, 8, shape, generator=g).double()
    return draw.masked_fill(draw < 3, -torch.inf).masked_fill(draw > 6, torch.nan)


def windows(name, function, calls, shape=I, cuts=SPATIAL[2], cuts2=BOTH, **kwargs):
    """One row of several calls, each a pair of positional and named arguments."""
    case(
        name,
        lambda x: tuple(o for a, k in calls for o in tensors_of(function(x, *a, **k))),
        (shape,),
        cuts,
        cuts2=cuts2,
        **kwargs,
    )


def call(*args, **kwargs):
    return args, kwargs


MAX = (
    call(2),
    call(3, 1, 1),
    call((3, 2), (2, 3), (1, 0), (1, 2), True),
    call(3, 4, ceil_mode=True),
    call((7, 5), 1, (3, 2)),
    call((5, 3), stride=2, padding=(2, 1), dilation=2, return_indices=True),
)
windows("max_pool2d", F.max_pool2d, MAX)
windows("max_pool2d_others", F.max_pool2d, MAX, cuts=((0,), (1,)), cuts2=(((0, 1),),), wire=())
windows("max_pool2d_ties", F.max_pool2d, (call(3, 2, 1, return_indices=True), *MAX[1:3]), make={0: ties})
windows(
    "max_pool2d_lost",
    lambda x: F.max_pool2d(x, (3, 4), 2, (1, 2), return_indices=True)[1],
    (call(),),
    make={0: lost},
    differentiable=(),
)
windows("max_pool2d_tiled", F.max_pool2d, (call(2), call(1, 2)), shape=(2, 3, 8, 8), wire=())
windows("max_pool2d_no_batch", F.max_pool2d, MAX[:3], shape=(3, 9, 8), cuts=((1,), (2,)), cuts2=(((1, 2),),))
windows("max_pool2d_halo", F.max_pool2d, (call(3, 1, 1),), cuts=((2,),), cuts2=(), wire=("all_to_all",))
windows(
    "max_pool1d",
    F.max_pool1d,
    (call(3, 2, 1), call(4, 1, 2, 1, True), call(5, 3, 2, return_indices=True), call(2, dilation=3)),
    S,
    SPATIAL[1],
    (((1, 2),),),
    make={0: ties},
)
windows(
    "max_pool3d",
    F.max_pool3d,
    (call(3, 2, 1), call((2, 1, 3), 1, ceil_mode=True), call(3, 2, 1, return_indices=True)),
    V,
    SPATIAL[3],
    (((2, 3),), ((3, 4),)),
)
windows("max_pool_torch", torch.max_pool2d, (call(3, 2, 1), call([2, 2])))
windows("max_pool1d_torch", torch.max_pool1d_with_indices, (call(3, 2, 1),), S, SPATIAL[1], ())

AVG = (
    call(2),
    call(3, 1, 1),
    call(3, 2, 1, True),
    call((4, 3), (3, 2), (2, 1), True, False),
    call(5, 1, 2, count_include_pad=False),
    call(3, 4, ceil_mode=True, divisor_override=5),
)
windows("avg_pool2d", F.avg_pool2d, AVG)
windows("avg_pool2d_others", F.avg_pool2d, AVG, cuts=((0,), (1,)), cuts2=(((0, 1),),), wire=())
windows("avg_pool2d_tiled", F.avg_pool2d, (call(2), call((4, 2))), shape=(2, 3, 8, 8), wire=())
windows("avg_pool2d_no_batch", F.avg_pool2d, AVG[:4], shape=(3, 9, 8), cuts=((1,), (2,)), cuts2=(((1, 2),),))
windows("avg_pool1d", F.avg_pool1d, (*AVG[:3], call(4, 3, 2, True, False)), S, SPATIAL[1], (((1, 2),),))
windows("avg_pool3d", F.avg_pool3d, (*AVG[:3], call(3, 2, 1, True, False, 7)), V, SPATIAL[3], (((2, 3),), ((3, 4),)))

LP = (call(2, 3), call(3.0, 2, 1, True), call(2, 4, 3, ceil_mode=True))
positive = {0: lambda g, shape: torch.rand(shape, dtype=torch.float64, generator=g) + 0.5}
windows("lp_pool2d", F.lp_pool2d, (*LP, call(2, (3, 2), ceil_mode=True)), make=positive)
windows("lp_pool1d", F.lp_pool1d, LP, S, SPATIAL[1], (((1, 2),),), make=positive)
windows("lp_pool3d", F.lp_pool3d, LP[:3], V, SPATIAL[3], (((2, 3),),), make=positive)


def unpool(n, **kwargs):
    def run(x):
        y, found = getattr(F, f"max_pool{n}d")(x, 2, return_indices=True)
        shift = getattr(F, f"max_unpool{n}d")(y * y, found, 2, output_size=x.shape[2:])
        return shift * x, getattr(F, f"max_unpool{n}d")(y, found, 2)

    return run


windows("max_unpool2d", unpool(2), (call(),), (2, 4, 9, 8), (*SPATIAL[2], (0,), (1,)))
windows("max_unpool1d", unpool(1), (call(),), S, SPATIAL[1], (((1, 2),),))
windows("max_unpool3d", unpool(3), (call(),), (1, 2, 5, 4, 4), SPATIAL[3], (((2, 3),),))

case(
    "fractional_max_pool",
    lambda x, y, a, b: (
        F.fractional_max_pool2d(x, 2, output_size=(4, 5), _random_samples=a),
        *F.fractional_max_pool2d(x, (2, 3), output_ratio=(0.5, 0.4), return_indices=True, _random_samples=a),
        F.fractional_max_pool3d(y, 2, output_size=(3, 3, 2), _random_samples=b),
        *F.fractional_max_pool3d(y, 2, output_ratio=(0.5, 0.6, 0.3), return_indices=True, _random_samples=b),
    ),
    ((2, 4, 9, 8), (2, 2, 6, 5, 4), (2, 4, 2), (2, 2, 3)),
    ((0, 0, None, None), (1, 1, None, 0), (2, 2, 0, None), (3, 4, None, None)),
    cuts2=(((2, 3), (2, 3), None, None), ((0, 2), (1, 4), None, None)),
    make={i: lambda g, shape: torch.rand(shape, dtype=torch.float64, generator=g) for i in (2, 3)},
    differentiable=(0, 1),
)
refuse("fractional windows", lambda x: F.fractional_max_pool2d(x[..., 0], 2, output_size=3))
refuse("fractional windows with indices", lambda x: F.fractional_max_pool3d(x, 2, (3, 3, 1), return_indices=True))
refuse("padding of more than half a window", lambda x: F.max_pool2d(x[..., 0], 3, 1, 2))
refuse("window larger than the rows", lambda x: F.avg_pool2d(x[..., 0], 9))
refuse("stride of nought", lambda x: F.max_pool2d(x[..., 0], 3, 0))
refuse("dims of a pool", lambda x: F.avg_pool1d(x, 3))
refuse("indices of a pool", lambda x: F.max_unpool2d(x[..., 0], torch.zeros(2, 7, 8, 1, dtype=torch.int64), 2))

AVERAGE, LARGEST = F.adaptive_avg_pool2d, F.adaptive_max_pool2d
windows("adaptive_avg_pool2d", AVERAGE, (call(5), call((4, 6)), call((None, 3)), call((12, 1)), call((9, 8)), call(2)))
windows("adaptive_avg_pool2d_one", AVERAGE, (call(1),), cuts2=BOTH[:1], wire=("all_reduce",))
windows("adaptive_avg_pool2d_others", AVERAGE, (call(5), call(1)), cuts=((0,), (1,)), cuts2=(((0, 1),),), wire=())
windows("adaptive_avg_pool2d_tiled", AVERAGE, (call(4), call((4, 8))), shape=(2, 3, 8, 8), wire=())
windows("adaptive_avg_pool1d", F.adaptive_avg_pool1d, (call(5), call(1), call(17)), S, SPATIAL[1], (((1, 2),),))
windows("adaptive_avg_pool3d", F.adaptive_avg_pool3d, (call(3), call((1, 4, None))), V, SPATIAL[3], (((2, 3),),))
SIZES = (call(5), call((4, 6)), call((2, 3), return_indices=True), call((12, 1), return_indices=True), call((9, None)))
windows("adaptive_max_pool2d", LARGEST, SIZES)
windows("adaptive_max_pool2d_ties", LARGEST, (*SIZES, call(2, return_indices=True)), make={0: ties})
windows(
    "adaptive_max_pool2d_lost",
    lambda x: (LARGEST(x, 2, return_indices=True)[1], LARGEST(x, (5, 1), return_indices=True)[1]),
    (call(),),
    make={0: lost},
    differentiable=(),
)
windows("adaptive_max_pool2d_others", LARGEST, SIZES, cuts=((0,), (1,)), cuts2=(((0, 1),),), wire=())
windows(
    "adaptive_max_pool1d",
    F.adaptive_max_pool1d,
    (call(5), call(1, return_indices=True), call(17)),
    S,
    SPATIAL[1],
    (((1, 2),),),
)
windows(
    "adaptive_max_pool3d",
    F.adaptive_max_pool3d,
    (call(3), call((1, 4, 2), return_indices=True)),
    V,
    SPATIAL[3],
    (((2, 3),),),
    make={0: ties},
)
refuse("output rows of none", lambda x: F.adaptive_max_pool2d(x[..., 0], 0))
