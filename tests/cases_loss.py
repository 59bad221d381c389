"""Rows of losses."""

import torch
import torch.nn.functional as F
from cases import case

X, C = (2, 7, 6), (2, 5, 7, 3)
PAIRS = ((0, 0), (1, 1), (1, None), (None, 2), (1, 2))
TWO = (((1, 2), (1, 2)), ((1, 2), None), ((0, 1), (1, 2)))
TRIPLES = ((1, 1, 1), (1, 1, None), (2, None, 1))


def positive(g, shape):
    return torch.rand(shape, dtype=torch.float64, generator=g) + 0.1


def unit(g, shape):
    return torch.rand(shape, dtype=torch.float64, generator=g) * 0.98 + 0.01


def labels(g, shape):
    """Class indices below five; every fourth is ignored."""
    chosen = torch.randint(0, 5, shape, generator=g)
    return chosen.where(torch.rand(shape, generator=g) > 0.25, -100)


def probabilities(g, shape):
    return torch.randn(shape, dtype=torch.float64, generator=g).softmax(1)


for _r, _wire in (("mean", ("all_reduce",)), ("sum", ("all_reduce",)), ("none", ())):
    for _f in (F.mse_loss, F.l1_loss, F.huber_loss, F.smooth_l1_loss):
        _name = f"{_f.__name__}_{_r}"
        case(_name, lambda x, y, f=_f, r=_r: f(x, y, reduction=r), (X, X), PAIRS[:2], cuts2=TWO[:1], wire=_wire)
        case(f"{_name}_cut_otherwise", lambda x, y, f=_f, r=_r: f(x, y, reduction=r), (X, X), PAIRS[2:], cuts2=TWO[1:])
    for _f in (F.mse_loss, F.huber_loss):
        case(
            f"{_f.__name__}_{_r}_weighted",
            lambda x, y, w, f=_f, r=_r: f(x, y, reduction=r, weight=w),
            (X, X, X),
            TRIPLES,
            cuts2=(((1, 2), None, (1, 2)),),
            make={2: positive},
        )
    case(
        f"binary_cross_entropy_with_logits_{_r}",
        lambda x, y, w, p, r=_r: F.binary_cross_entropy_with_logits(x, y, w, reduction=r, pos_weight=p),
        (X, X, (7, 1), (6,)),
        ((1, 1, None, None), (1, 1, 0, None), (2, 2, None, 0), (0, None, None, None)),
        cuts2=(((1, 2), (1, 2), None, None),),
        make={1: unit, 2: positive, 3: positive},
        differentiable=(0,),
    )
    case(
        f"cross_entropy_{_r}",
        lambda x, t, w, r=_r: F.cross_entropy(x, t, w, reduction=r, label_smoothing=0.1),
        (C, (2, 7, 3), (5,)),
        ((0, 0, None), (2, 1, None), (2, None, None), (None, 1, None), (1, None, None), (3, 1, None)),
        cuts2=(((2, 3), (1, 2), None), ((0, 2), None, None)),
        make={1: labels, 2: positive},
        differentiable=(0,),
    )
    case(
        f"cross_entropy_dense_{_r}",
        lambda x, t, r=_r: F.cross_entropy(x, t, reduction=r),
        (C, C),
        ((0, 0), (2, 2), (2, None), (None, 3), (1, 1)),
        cuts2=(((2, 3), (2, 3)),),
        make={1: probabilities},
    )
case(
    "binary_cross_entropy",
    lambda x, y: F.binary_cross_entropy(x, y),
    (X, X),
    ((1, 1), (1, None)),
    make={0: unit, 1: unit},
    differentiable=(0,),
)
case(
    "cross_entropy_rows",
    lambda x, t: F.cross_entropy(x, t),
    ((7, 5), (7,)),
    ((0, 0), (0, None)),
    make={1: labels},
    differentiable=(0,),
    wire=("all_reduce",) * 2,
)
case(
    "nll_loss",
    lambda x, t, w: F.nll_loss(x.log_softmax(1), t, w, ignore_index=2),
    ((7, 5), (7,), (5,)),
    ((0, 0, None), (1, None, None)),
    make={1: lambda g, s: torch.randint(0, 5, s, generator=g), 2: positive},
    differentiable=(0,),
)
case(
    "loss_of_old_style",
    lambda x, y: F.mse_loss(x, y, size_average=False) + F.l1_loss(x, y, reduce=False),
    (X, X),
    ((1, 1),),
)
case("mse_of_broadcast", lambda x, y: F.mse_loss(x, y), (X, (7, 1)), ((1, 0), (2, None), (1, None)))
