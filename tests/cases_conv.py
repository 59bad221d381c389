"""Rows of convolutions and padding."""

import torch.nn.functional as F
from cases import case

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
