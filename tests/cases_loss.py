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


def signs(g, shape):
    return torch.randint(0, 2, shape, generator=g).double() * 2 - 1


def labels(g, shape):
    """Class indices below five; every fourth is ignored."""
    chosen = torch.randint(0, 5, shape, generator=g)
    return chosen.where(torch.rand(shape, generator=g) > 0.25, -100)


def probabilities(g, shape):
    return torch.randn(shape, dtype=torch.float64, generator=g).softmax(1)


PLAIN, WEIGHTED = (F.mse_loss, F.l1_loss, F.huber_loss, F.smooth_l1_loss), (F.mse_loss, F.huber_loss)
for _r, _wire in (("mean", ("all_reduce",)), ("sum", ("all_reduce",)), ("none", ())):
    for _name, _pairs, _two, _sent in (
        ("", PAIRS[:2], TWO[:1], _wire * 4),
        ("_cut_otherwise", PAIRS[2:], TWO[1:], None),
    ):
        case(
            f"terms_{_r}{_name}",
            lambda x, y, r=_r: tuple(f(x, y, reduction=r) for f in PLAIN),
            (X, X),
            _pairs,
            cuts2=_two,
            wire=_sent,
        )
    case(
        f"terms_{_r}_weighted",
        lambda x, y, w, r=_r: tuple(f(x, y, reduction=r, weight=w) for f in WEIGHTED),
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
    ((1, 1), (1, None), (2, 2)),
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

# -- losses that torch composes of others -----------------------------------------------------------------------------
case(
    "kl_div",
    lambda x, t: (
        *(F.kl_div(x, t, reduction=r) for r in ("none", "sum", "mean", "batchmean")),
        F.kl_div(x, t.log(), reduction="batchmean", log_target=True),
    ),
    (X, X),
    ((0, 0), (1, 1), (2, None), (1, 2)),
    cuts2=TWO[:2],
    make={1: positive},
)
case(
    "losses_of_likelihoods",
    lambda x, t, v: (
        *(F.poisson_nll_loss(x, t, reduction=r, full=r != "sum") for r in ("none", "sum", "mean")),
        *(F.gaussian_nll_loss(x, t, v, reduction=r, full=True) for r in ("none", "sum", "mean")),
        F.poisson_nll_loss(t, v, log_input=False),
    ),
    (X, X, X),
    ((0, 0, 0), (1, 1, 1), (2, None, 1)),
    cuts2=(((1, 2), None, (1, 2)),),
    make={1: positive, 2: positive},
    differentiable=(0, 2),
)
case(
    "losses_of_signs",
    lambda x, y, s: (
        *(F.soft_margin_loss(x, s, reduction=r) for r in ("none", "sum", "mean")),
        *(F.hinge_embedding_loss(x, s, 0.5, reduction=r) for r in ("none", "sum", "mean")),
        *(F.margin_ranking_loss(x, y, s, 0.2, reduction=r) for r in ("none", "sum", "mean")),
    ),
    (X, X, X),
    ((0, 0, 0), (1, 1, 1), (2, None, 1), (1, 1, None)),
    cuts2=(((1, 2), (1, 2), None),),
    make={2: signs},
    differentiable=(0, 1),
)
case(
    "losses_of_embeddings",
    lambda x, y, z, s: (
        *(F.cosine_embedding_loss(x, y, s, 0.1, reduction=r) for r in ("none", "sum", "mean")),
        *(F.triplet_margin_loss(x, y, z, reduction=r, swap=r == "sum") for r in ("none", "sum", "mean")),
        F.triplet_margin_with_distance_loss(x, y, z, distance_function=lambda a, b: 1 - F.cosine_similarity(a, b)),
    ),
    ((7, 6), (7, 6), (7, 6), (7,)),
    ((0, 0, 0, 0), (1, 1, 1, None), (0, None, 1, 0), (None, 0, 0, None)),
    cuts2=(((0, 1), (0, 1), None, None),),
    make={3: signs},
    differentiable=(0, 1, 2),
)
case(
    "losses_of_margins",
    lambda x, t, w, m: (
        *(F.multi_margin_loss(x, t, weight=w, reduction=r) for r in ("none", "sum", "mean")),
        *(F.multilabel_margin_loss(x, m, reduction=r) for r in ("none", "sum", "mean")),
        *(F.multilabel_soft_margin_loss(x, m.clamp(0, 1).double(), w, reduction=r) for r in ("none", "sum", "mean")),
        F.multi_margin_loss(x[0], t[0], p=2, margin=0.5),
    ),
    ((7, 5), (7,), (5,), (7, 5)),
    ((0, 0, None, 0), (1, 0, None, None), (None, 0, None, 1), (0, None, 0, 0)),
    cuts2=(((0, 1), None, None, (0, 1)),),
    make={
        1: lambda g, s: torch.randint(0, 5, s, generator=g),
        2: positive,
        3: lambda g, s: torch.randint(-1, 5, s, generator=g),
    },
    differentiable=(0,),
)
case(
    "classes_of_planes",
    lambda x, t, w: (
        F.nll_loss(x.log_softmax(1), t, w),
        F.cross_entropy(x[:, :, 0], t[:, 0], reduction="none"),
        F.cross_entropy(x[:, :, 0, 0], t[:, 0, 0], w, label_smoothing=0.3),
        F.cross_entropy(x[0, :, 0, 0], t[0, 0, 0].clamp(0)),
    ),
    (C, (2, 7, 3), (5,)),
    ((0, 0, None), (2, 1, None), (1, None, 0), (3, 2, None)),
    cuts2=(((2, 3), (1, 2), None),),
    make={1: labels, 2: positive},
    differentiable=(0,),
)
for _name, _loss in (
    ("kl_div", F.kl_div),
    ("poisson_nll_loss", F.poisson_nll_loss),
    ("soft_margin_loss", F.soft_margin_loss),
):
    case(f"{_name}_sent", _loss, (X, X), ((1, 1),), make={1: positive}, differentiable=(0,), wire=("all_reduce",))
case(
    "classes_checked",
    lambda x, t: F.cross_entropy(x, t, reduction="none"),
    ((7, 5), (7,)),
    ((0, 0),),
    make={1: labels},
    differentiable=(0,),
    wire=("all_reduce",),
)
