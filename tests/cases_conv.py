"""Rows of convolutions and padding."""

import torch
import torch.nn.functional as F
from cases import case, refuse
from torch import nn

S, I, V = (2, 4, 11), (2, 4, 9, 8), (1, 2, 5, 6, 4)
PAIR = ((2, None, None), (3, None, None))
BOTH = (((2, 3), None, None), ((0, 2), None, None))


def conv2d(name, weight, cuts=PAIR, cuts2=BOTH, shape=I, wire=None, **kwargs):
    case(
        f"conv2d_{name}",
        lambda x, w, b: F.conv2d(x, w, b, **kwargs),
        (shape, weight, (weight[0],)),
        cuts,
        cuts2=cuts2,
        wire=wire,
    )


conv2d("3x3", (3, 4, 3, 3), padding=1, wire=("all_to_all",))
conv2d("valid", (3, 4, 3, 3), padding="valid")
conv2d("batch", (3, 4, 3, 3), padding=1, cuts=((0, None, None),), cuts2=(), wire=())
conv2d("channels", (3, 4, 3, 3), padding=1, cuts=((1, None, None),), cuts2=(((1, 2), None, None),))
conv2d("1x1", (3, 4, 1, 1), wire=())
conv2d("patch", (3, 4, 2, 2), stride=2, shape=(2, 4, 8, 8), wire=())
conv2d("patch_ragged", (3, 4, 4, 4), stride=4, shape=(2, 4, 11, 9))
conv2d("even_same", (3, 4, 4, 2), padding="same")
conv2d("wide", (3, 4, 7, 7), padding=3)
conv2d("wider_than_grid", (3, 4, 9, 9), padding=(5, 6))
conv2d("strided", (3, 4, 3, 3), stride=2, padding=1)
conv2d("strided_far", (3, 4, 2, 3), stride=(4, 3))
conv2d("padding_wider_than_kernel", (3, 4, 2, 2), padding=4, stride=3)
conv2d("dilated", (3, 4, 3, 3), padding=(2, 4), dilation=(2, 3))
conv2d("dilated_same", (3, 4, 4, 3), padding="same", dilation=(1, 2))
conv2d("depthwise", (4, 1, 5, 3), padding=(2, 1), groups=4)
conv2d("grouped_strided", (6, 2, 3, 3), stride=2, padding=1, dilation=2, groups=2)
conv2d("cut_weight", (3, 4, 3, 3), padding=1, cuts=((2, 0, 0), (None, 0, 0), (2, 2, None)), cuts2=())
case(
    "conv2d_no_batch",
    lambda x, w: F.conv2d(x, w, padding=1),
    ((4, 9, 8), (3, 4, 3, 3)),
    ((1, None), (2, None)),
    cuts2=(((1, 2), None),),
)
case(
    "conv2d_strided_view",
    lambda x, w: F.conv2d(x.transpose(2, 3)[:, ::2], w, padding=1),
    (I, (3, 2, 3, 3)),
    ((2, None), (3, None)),
)
case(
    "conv2d_channels_last",
    lambda x, w: F.conv2d(x.permute(0, 3, 1, 2), w, padding=1),
    ((2, 9, 8, 4), (3, 4, 3, 3)),
    ((1, None), (2, None)),
    cuts2=(((1, 2), None),),
)
case(
    "conv1d",
    lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=2),
    (S, (3, 4, 5), (3,)),
    ((2, None, None), (0, None, None)),
    cuts2=(((0, 2), None, None),),
)
case(
    "conv3d",
    lambda x, w, b: F.conv3d(x, w, b, padding=1),
    (V, (3, 2, 3, 3, 3), (3,)),
    ((2, None, None), (4, None, None)),
    cuts2=(((2, 3), None, None),),
    wire=("all_to_all",),
)
case(
    "conv_twice",
    lambda x, w: F.conv2d(F.silu(F.conv2d(x, w, padding=1)), w, padding=1),
    (I, (4, 4, 3, 3)),
    ((2, None),),
    cuts2=(((2, 3), None),),
)

for _name, _kwargs in {
    "twice": dict(stride=2),
    "padded": dict(stride=2, padding=1, output_padding=1),
    "same_size": dict(padding=1),
    "gaps": dict(stride=4, output_padding=2),
    "dilated": dict(stride=(2, 3), dilation=2, padding=2),
}.items():
    case(
        f"conv_transpose2d_{_name}",
        lambda x, w, b, k=_kwargs: F.conv_transpose2d(x, w, b, **k),
        ((2, 4, 5, 6), (4, 3, 3, 2), (3,)),
        PAIR,
        cuts2=BOTH,
    )
case(
    "conv_transpose2d_unpatch",
    lambda x, w: F.conv_transpose2d(x, w, stride=2),
    (I, (4, 3, 2, 2)),
    ((2, None), (3, None)),
    cuts2=(((2, 3), None),),
    wire=(),
)
case(
    "conv_transpose1d_groups",
    lambda x, w, b: F.conv_transpose1d(x, w, b, 2, 1, 0, 2),
    (S, (4, 3, 4), (6,)),
    ((2, None, None), (0, None, None)),
)

case(
    "conv_transpose3d",
    lambda x, w, b: F.conv_transpose3d(x, w, b, stride=(2, 1, 2), padding=1, output_padding=(1, 0, 0)),
    (V, (2, 3, 3, 3, 2), (3,)),
    ((2, None, None), (3, None, None), (0, None, None)),
    cuts2=(((2, 3), None, None), ((3, 4), None, None)),
)

P = (2, 3, 8, 5)
case("pad_one_side", lambda x: F.pad(x, (0, 0, 2, 0)), (P,), ((2,), (3,)), cuts2=(((2, 3),),), wire=())
case(
    "pad_value",
    lambda x: F.pad(x, (1, 2, 0, 3, 1, 0), value=2.5),
    (P,),
    ((0,), (1,), (2,), (3,)),
    cuts2=(((2, 3),), ((1, 3),)),
    wire=(),
)
case("pad_crop", lambda x: F.pad(x, (-1, -2, -5, 4)), (P,), ((2,), (3,)), cuts2=(((2, 3),),), wire=())
case("pad_and_crop_back", lambda x: F.pad(F.pad(x, (0, 0, 2, 2)), (0, 0, -2, -2)) - x, (P,), ((2,),))
for _mode in ("reflect", "replicate", "circular"):
    case(
        f"pad_{_mode}",
        lambda x, m=_mode: F.pad(x, (3, 1, 2, 4), mode=m),
        (P,),
        ((0,), (1,), (2,), (3,)),
        cuts2=(((2, 3),), ((1, 2),)),
    )
case("pad_circular_one_side", lambda x: F.pad(x, (0, 0, 8, 0), mode="circular"), (P,), ((2,), (3,)))
for _mode, _widths in {
    "constant": ((-1, 2), (3, -2), (-2, -3), (4, -8), (-8, 3)),
    "reflect": ((-1, 6), (3, -5), (4, -10), (-7, 7), (-2, -3)),
    "replicate": ((-1, 2), (9, -5), (2, -9), (-7, 6), (-2, -3)),
    "circular": ((-1, 2), (3, -2), (-2, -3), (0, 8)),
}.items():
    case(
        f"pad_{_mode}_and_crop",
        lambda x, m=_mode, ws=_widths: tuple(F.pad(x, (1, 1, *w), mode=m) for w in ws),
        (P,),
        ((2,), (3,)),
        cuts2=(((2, 3),), ((0, 2),)),
    )


def module(kind, **kwargs):
    """A convolution module that keeps channels and extents, with given weights, and a path around it."""
    n = int(kind.__name__[4])

    def run(x, w, b):
        layer = kind(x.shape[-n - 1], x.shape[-n - 1], w.shape[2:], padding="same", dtype=x.dtype, **kwargs)
        return x + torch.func.functional_call(layer, {"weight": w, "bias": b}, (x,))

    return run


for _mode in ("reflect", "replicate", "circular"):
    case(
        f"conv2d_padding_{_mode}",
        module(nn.Conv2d, padding_mode=_mode),
        (I, (4, 4, 5, 3), (4,)),
        (*PAIR, (0, None, None)),
        cuts2=BOTH,
    )
case(
    "conv2d_padding_keeps_the_cut",
    module(nn.Conv2d, padding_mode="circular"),
    (I, (4, 4, 3, 3), (4,)),
    PAIR,
    wire=("all_to_all", "all_to_all"),
)
case(
    "conv1d_padding",
    lambda x, w, b: (
        module(nn.Conv1d, padding_mode="circular")(x, w, b) + module(nn.Conv1d, padding_mode="reflect")(x, w, b)
    ),
    (S, (4, 4, 7), (4,)),
    ((2, None, None), (0, None, None)),
    cuts2=(((0, 2), None, None),),
)
case(
    "conv3d_padding",
    module(nn.Conv3d, padding_mode="circular"),
    (V, (2, 2, 3, 3, 3), (2,)),
    ((2, None, None), (4, None, None)),
    cuts2=(((2, 3), None, None),),
)
case(
    "pad_modules",
    lambda x: (
        nn.ReflectionPad1d((2, 1))(x),
        nn.ReplicationPad1d(12)(x),
        nn.CircularPad1d((11, 0))(x),
        nn.ZeroPad1d((0, 3))(x),
        nn.ConstantPad1d(2, 1.5)(x),
        F.pad(x[0], (3, 0), mode="circular"),
    ),
    (S,),
    ((0,), (1,), (2,)),
    cuts2=(((1, 2),),),
)
case(
    "pad_modules_3d",
    lambda x: (
        nn.ReflectionPad3d((1, 2, 0, 1, 3, 4))(x),
        nn.ReplicationPad3d(2)(x),
        nn.CircularPad3d((1, 0, 6, 2, 5, 1))(x),
        nn.ZeroPad3d((0, 1, -1, 2, 3, -2))(x),
    ),
    (V,),
    ((0,), (2,), (3,), (4,)),
    cuts2=(((2, 3),), ((3, 4),)),
)
case(
    "conv_others",
    lambda x, w, v: (
        F.conv1d(x[0], v, stride=2, padding=1),
        F.conv1d(torch.complex(x, -x), torch.complex(w, w), padding=2).abs(),
    ),
    (S, (3, 4, 5), (3, 4, 4)),
    ((2, None, None), (2, 2, None)),
)
case(
    "conv_bfloat16",
    lambda x, w: F.conv1d(x.bfloat16(), w.bfloat16(), padding=2),
    (S, (3, 4, 5)),
    ((2, None),),
    atol=0.2,
)
refuse("reflection of too many dims", lambda x: F.pad(x, (1, 1), mode="reflect"), cut=4)
refuse("reflection wider than the rows", lambda x: F.pad(x[..., 0, 0], (0, 0, 7, 0), mode="reflect"))
refuse("wrap wider than what is left", lambda x: F.pad(x[..., 0, 0], (0, 0, 4, -4), mode="circular"))
refuse("mode of a padding", lambda x: F.pad(x, (1, 1), mode="mirror"))
refuse("channels of a transposed convolution", lambda x: F.conv_transpose2d(x[..., 0], torch.ones(3, 2, 1, 1)))
