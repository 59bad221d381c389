"""Rows of layer, RMS and group norm."""

import torch
import torch.nn.functional as F
from cases import case

X, V = (2, 7, 6), (2, 4, 7, 5)
TWO = ("all_reduce", "all_reduce")


def far(g, shape):
    """Values whose mean is large against their spread."""
    return torch.randn(shape, dtype=torch.float64, generator=g) + 1e6


case(
    "layer_norm",
    lambda x, w, b: F.layer_norm(x, (6,), w, b),
    (X, (6,), (6,)),
    ((0, None, None), (1, None, None)),
    cuts2=(((0, 1), None, None),),
    wire=(),
)
case("layer_norm_plain", lambda x: F.layer_norm(x, (6,)), (X,), ((1,),), wire=())
case(
    "layer_norm_weight_only", lambda x, w: F.layer_norm(x, (6,), w, eps=1e-3), (X, (6,)), ((1, None), (2, None), (2, 0))
)
case(
    "layer_norm_cut",
    lambda x, w, b: F.layer_norm(x, (6,), w, b),
    (X, (6,), (6,)),
    ((2, None, None), (2, 0, 0)),
    cuts2=(((1, 2), None, None),),
    wire=TWO,
)
case(
    "layer_norm_cut_two_dims",
    lambda x, w, b: F.layer_norm(x, (7, 6), weight=w, bias=b),
    (X, (7, 6), (7, 6)),
    ((1, None, None), (2, None, None)),
    cuts2=(((1, 2), None, None), ((0, 2), None, None)),
    wire=TWO,
)
case("layer_norm_offset", lambda x: F.layer_norm(x, (7, 6)), (X,), ((1,),), make={0: far}, atol=1e-7)
case(
    "rms_norm", lambda x, w: F.rms_norm(x, (6,), w), (X, (6,)), ((1, None), (0, None)), cuts2=(((0, 1), None),), wire=()
)
case(
    "rms_norm_cut",
    lambda x, w: F.rms_norm(x, (6,), w, 1e-3),
    (X, (6,)),
    ((2, None),),
    cuts2=(((1, 2), None),),
    wire=("all_reduce",),
)
case("rms_norm_cut_eps_left_out", lambda x: F.rms_norm(x, (7, 6)), (X,), ((1,), (2,)))
for _groups in (1, 2, 4):
    case(
        f"group_norm_{_groups}",
        lambda x, w, b, n=_groups: F.group_norm(x, n, w, b),
        (V, (4,), (4,)),
        ((2, None, None), (3, None, None)),
        cuts2=(((2, 3), None, None), ((0, 3), None, None)),
        wire=TWO,
    )
case("group_norm_batch", lambda x, w, b: F.group_norm(x, 2, w, b), (V, (4,), (4,)), ((0, None, None),), wire=())
case(
    "group_norm_channels",
    lambda x, w, b: F.group_norm(x, 4, w, b),
    (V, (4,), (4,)),
    ((1, None, None),),
    cuts2=(((1, 2), None, None),),
    wire=(),
)
case("group_norm_no_affine", lambda x: F.group_norm(x, 2), (V,), ((1,), (2,)))
case("group_norm_offset", lambda x: F.group_norm(x, 2), (V,), ((2,),), make={0: far}, atol=1e-7)
case("group_norm_1d", lambda x, w: F.group_norm(x, 2, w), ((3, 4, 9), (4,)), ((2, None), (1, None)))
# As a DTensor over other axes sees it: below autograd.
case(
    "layer_norm_below",
    lambda x, w, b: torch.native_layer_norm(x, (6,), w, b, 1e-5)[0],
    (X, (6,), (6,)),
    ((0, None, None), (1, None, None), (2, None, None)),
    cuts2=(((0, 1), None, None),),
)
case("layer_norm_below_plain", lambda x: torch.native_layer_norm(x, (7, 6), None, None, 1e-5)[0], (X,), ((0,), (1,)))
case(
    "rms_norm_below",
    lambda x, w: torch._fused_rms_norm(x, (6,), w, 1e-5)[0],
    (X, (6,)),
    ((0, None), (1, None)),
    cuts2=(((0, 1), None),),
)
