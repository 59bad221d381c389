"""Rows of the largest and smallest values, and of where they are."""

import torch
from cases import case, refuse
from cases_reduction import EACH, TWO, X, flat, holes, known


def ties(g, shape):
    """Few different values, many of them extreme."""
    return torch.randint(-2, 3, shape, generator=g).double()


case(
    "extremes",
    lambda x: (x.amax(()), torch.amin(x, (0, -1)), x.amax(1, True), x.max(), torch.min(x), *x.detach().aminmax(dim=1)),
    (X,),
    EACH + (("P",),),
    cuts2=TWO,
    make={0: ties},
)
case(
    "extremes_with_indices",
    lambda x: flat(x.max(1), torch.min(x, -1, True), torch.max(x, dim=0), x.min(axis=2).values, x.max(1).indices),
    (X,),
    EACH + (("R",),),
    cuts2=TWO,
    make={0: ties},
)
case(
    "arguments",
    lambda x: (x.argmax(), x.argmin(), torch.argmax(x, 1), x.argmin(-1, True), x.argmax(0), x.argmin(keepdim=True)),
    (X,),
    EACH,
    cuts2=TWO,
    make={0: ties},
)
case(
    "extremes_of_holes",
    lambda x: flat(
        *(known(v) for v in (x.amax(1), x.max(), x.min(), *x.detach().aminmax(dim=2), x.max(1)[0], x.min(2).values)),
        (x.max(1)[1], x.min(2)[1], x.argmax(), x.argmin(), x.argmax(1), x.argmin(2)),
    ),
    (X,),
    EACH,
    cuts2=TWO,
    make={0: holes},
    differentiable=(),
)
case(
    "extreme_of_holes_backward",
    lambda x: x.max().nan_to_num() + x.max(1)[0].nan_to_num().sum(),
    (X,),
    EACH,
    cuts2=TWO,
    make={0: holes},
)
case(
    "extremes_of_two",
    lambda x, y: (torch.max(x, y), x.min(other=y), torch.maximum(y, x), torch.fmin(x, y)),
    (X, X),
    ((1, 1), (None, 2), ("P", 0)),
    cuts2=(((1, 2), None),),
)
case("amax_sent", lambda x: x.amax(1), (X,), ((1,),), wire=("all_reduce",))
case("max_sent", lambda x: x.max(1), (X,), ((1,),), wire=("all_reduce",) * 2)
case(
    "extremes_sent_nothing",
    lambda x: flat(
        x.max(2), x.amax((0, 2)), x.argmin(2), x.detach().aminmax(dim=0), x.prod(2), x.var(2), x.norm(dim=2)
    ),
    (X,),
    ((1,),),
    wire=(),
)

refuse("extreme of nothing", lambda x: x[:, :0].amax(1))
refuse("index of nothing", lambda x: x[:, :0].max(1))
