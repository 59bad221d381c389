"""Rows of interpolation, of blocks that move between channels and space, and of sampling at given positions."""

import torch
import torch.nn.functional as F
from cases import case, refuse
from torch import nn

S, I, V = (2, 3, 13), (2, 3, 9, 8), (2, 2, 6, 5, 4)
SPATIAL = {3: ((2,), (0,)), 4: ((2,), (3,)), 5: ((2,), (4,))}
TWO = {3: (((1, 2),),), 4: (((2, 3),), ((0, 2),)), 5: (((2, 3),), ((3, 4),))}


def resized(name, calls, shape=I, cuts=None, cuts2=None, **kwargs):
    n = len(shape)
    case(
        f"interpolate_{name}",
        lambda x: tuple(F.interpolate(x, **k) for k in calls),
        (shape,),
        cuts or SPATIAL[n],
        cuts2=TWO[n] if cuts2 is None else cuts2,
        **kwargs,
    )


def calls(mode, *wanted, **kwargs):
    """Explicit extents as tuples of whole numbers, factors as numbers or lists."""
    return [dict(mode=mode, **{"size" if isinstance(w, tuple) else "scale_factor": w}, **kwargs) for w in wanted]


UP, DOWN, ODD, FACTORS = (18, 13), (4, 3), (9, 11), (1.7, [0.6, 3.0])
for _mode in ("nearest", "nearest-exact"):
    resized(_mode, calls(_mode, UP, DOWN, ODD, *FACTORS))
    resized(f"{_mode}_1d", calls(_mode, (5,), (29,), 2.0, 1.2), S)
    resized(f"{_mode}_3d", calls(_mode, (3, 7, 4), 1.5), V)
for _align in (False, True):
    for _mode in ("bilinear", "bicubic"):
        resized(f"{_mode}_{_align}", calls(_mode, UP, DOWN, ODD, (1, 1), *FACTORS, align_corners=_align))
        resized(
            f"{_mode}_smooth_{_align}", calls(_mode, UP, DOWN, (9, 3), *FACTORS, align_corners=_align, antialias=True)
        )
    resized(f"linear_{_align}", calls("linear", (5,), (29,), (1,), 2, 1.3, 0.4, align_corners=_align), S)
    resized(f"trilinear_{_align}", calls("trilinear", (3, 7, 4), (12, 10, 2), 1.5, align_corners=_align), V)
resized("area", calls("area", UP, DOWN, (2, 9), *FACTORS))
resized("area_1d_3d", calls("area", (3, 7, 4), 0.5), V)
resized("recomputed", calls("bilinear", 1.7, 0.45, recompute_scale_factor=True))
resized("others", calls("bilinear", UP, 0.45), cuts=((0,), (1,)), cuts2=(((0, 1),),), wire=())
resized("along_cut_rows", calls("bilinear", (9, 20)) + calls("area", (9, 20)), cuts=((2,),), cuts2=(), wire=())
resized("twice", calls("nearest", 2, 3), cuts=((2,), (3,)), shape=(2, 3, 8, 8), wire=())
resized("halo", calls("bilinear", 2), cuts=((2,),), cuts2=(), wire=("all_to_all",))
case(
    "interpolate_bfloat16",
    lambda x: (
        F.interpolate(x.bfloat16(), scale_factor=1.5, mode="bicubic"),
        F.interpolate((x * 9).int().to(torch.uint8), size=(5, 20)),
        nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)(x.float()),
        F.interpolate(x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), size=UP, mode="bilinear"),
    ),
    (I,),
    SPATIAL[4],
    cuts2=TWO[4],
    atol=0.1,
)
refuse("linear in two dims", lambda x: F.interpolate(x[..., 0], size=3, mode="linear"))
refuse("extents of three dims", lambda x: F.interpolate(x[..., 0], size=(3, 3, 3)))
refuse("extents and factors", lambda x: F.interpolate(x[..., 0], size=3, scale_factor=2.0))
refuse("corners of the nearest", lambda x: F.interpolate(x[..., 0], size=3, align_corners=True))
refuse("a smooth nearest", lambda x: F.interpolate(x[..., 0], size=3, antialias=True))
refuse("extents of nought", lambda x: F.interpolate(x[..., 0], scale_factor=0.01, mode="bilinear"))

case(
    "pixel_shuffle",
    lambda x: (torch.pixel_shuffle(x, 2), nn.PixelShuffle(2)(x[0])),
    ((2, 8, 5, 3),),
    ((0,), (2,), (3,)),
    cuts2=(((2, 3),), ((1, 2),)),
)
case("pixel_shuffle_in_place", lambda x: torch.pixel_shuffle(x, 2), ((2, 8, 4, 4),), ((1,), (2,), (3,)), wire=())
case(
    "pixel_unshuffle",
    lambda x: (torch.pixel_unshuffle(x, 3), nn.PixelUnshuffle(2)(x[0, :, :, :4])),
    ((2, 3, 12, 6),),
    ((0,), (1,), (2,), (3,)),
    cuts2=(((2, 3),), ((1, 2),)),
)
case("pixel_unshuffle_in_place", lambda x: torch.pixel_unshuffle(x, 2), ((2, 4, 8, 4),), ((1,), (2,), (3,)), wire=())
case("pixel_shuffle_channels", lambda x: torch.pixel_shuffle(x, 2), ((2, 12, 3, 3),), ((1,),), cuts2=(((1, 3),),))
case(
    "channel_shuffle",
    lambda x: (torch.channel_shuffle(x, 3), nn.ChannelShuffle(2)(x), torch.native_channel_shuffle(x.detach(), 2)),
    ((2, 6, 5, 4),),
    ((0,), (1,), (2,)),
    cuts2=(((1, 2),), ((0, 3),)),
)
case("channel_shuffle_in_place", lambda x: torch.channel_shuffle(x, 2), ((2, 4, 5),), ((0,), (2,)), wire=())

COLUMNS = (
    dict(kernel_size=3, padding=1),
    dict(kernel_size=(2, 3), stride=(2, 3), dilation=(2, 1)),
    dict(kernel_size=(5, 2), padding=(3, 1), stride=3),
)
case(
    "unfold_image",
    lambda x: tuple(F.unfold(x, **k) for k in COLUMNS),
    (I,),
    ((0,), (1,), (2,), (3,)),
    cuts2=(((2, 3),), ((0, 2),), ((1, 2),)),
)
case("unfold_no_batch", lambda x: nn.Unfold(3, padding=1)(x), (I[1:],), ((0,), (1,), (2,)), cuts2=(((0, 1),),))
case("unfold_tiles", lambda x: F.unfold(x, 2, stride=2), ((2, 3, 8, 6),), ((0,), (1,), (2,)), wire=())
case("unfold_halo", lambda x: F.unfold(x, 3, padding=1), (I,), ((2,),), wire=("all_to_all",))
case(
    "fold_image",
    lambda x, y, z: tuple(F.fold(t, (9, 8), **k) for t, k in zip((x, y, z), COLUMNS)),
    ((2, 18, 72), (2, 12, 8), (2, 20, 12)),
    ((0, 0, 0), (1, 1, 1), (2, 2, 2)),
    cuts2=(((1, 2),) * 3, ((0, 2),) * 3),
)
case("fold_no_batch", lambda x: nn.Fold((9, 8), 3, padding=1)(x), ((18, 72),), ((0,), (1,)), cuts2=(((0, 1),),))
case(
    "fold_back", lambda x: F.fold(F.unfold(x, 2, stride=2), (8, 6), 2, stride=2) * x, ((2, 3, 8, 6),), ((2,),), wire=()
)
refuse("channels of a shuffle", lambda x: torch.pixel_shuffle(x[..., 0], 3))
refuse("extents of a shuffle", lambda x: torch.pixel_unshuffle(x[..., 0], 3))
refuse("groups of a shuffle", lambda x: torch.channel_shuffle(x, 3))
refuse("windows larger than the image", lambda x: F.unfold(x[..., 0], 9))
refuse("windows of another image", lambda x: F.fold(x[:, :, :, 0, 0], (5, 5), 2))

SAMPLED, AT, AT3 = (2, 5, 6, 7), (2, 4, 9, 2), (2, 3, 4, 5, 3)
GRID_CUTS = (
    (2, None),
    (None, 1),
    (2, 1),
    (3, 2),
    (0, 0),
    (0, 1),
    (1, 1),
    (1, None),
    (2, 0),
    (3, 3),
    ("R", 2),
    (2, "P"),
)


def sampled(modes, padding_modes=("zeros",)):
    def run(x, grid):
        at = 1.3 * grid.tanh()
        calls = [
            dict(mode=m, padding_mode=p, align_corners=a) for m in modes for p in padding_modes for a in (False, True)
        ]
        return tuple(F.grid_sample(x, at, **k) for k in calls)

    return run


case(
    "grid_sample",
    sampled(("bilinear",)),
    (SAMPLED, AT),
    GRID_CUTS,
    cuts2=(((2, 3), None), (None, (1, 2)), ((2, 3), (1, 2)), ((1, 2), (1, 2)), ((0, 2), (1, 0))),
)
case(
    "grid_sample_modes",
    sampled(("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")),
    (SAMPLED, AT),
    ((2, 1), (None, 2)),
    cuts2=(((2, 3), (1, 2)),),
)
case("grid_sample_3d", sampled(("bilinear",)), ((2, 2, 4, 5, 3), AT3), ((2, 1), (4, None)), cuts2=(((2, 3), (1, 2)),))
case(
    "grid_sample_whole_image", sampled(("bilinear",)), (SAMPLED, AT), ((None, 1), ("R", 2), (0, 0), (1, None)), wire=()
)
case("grid_sample_one_channel", sampled(("bilinear",)), ((1, 1, 6, 7), (1, 6, 9, 2)), ((2, 1), (2, None), (2, 2)))
case(
    "grid_sample_warp",
    lambda x, flow: x + F.grid_sample(x, 0.1 * flow.permute(0, 2, 3, 1), align_corners=False),
    ((2, 4, 6, 7), (2, 2, 6, 7)),
    ((2, 2), (3, 3), (2, None)),
    cuts2=(((2, 3), (2, 3)),),
)
case(
    "grid_sampler",
    lambda x, grid, y, at: (
        torch.grid_sampler(x, grid, 0, 1, True),
        torch.grid_sampler_2d(x, grid, 2, 0, False),
        torch.grid_sampler_3d(y, at, 0, 2, True),
    ),
    (SAMPLED, AT, (2, 2, 4, 5, 3), AT3),
    ((2, 1, 2, 1), (None, 2, None, 3)),
)
case(
    "affine_grid",
    lambda t, x: (
        F.affine_grid(t, (3, 2, 4, 5), align_corners=False),
        torch.affine_grid_generator(t, (3, 2, 4, 5), True),
        F.grid_sample(x, F.affine_grid(t, list(x.shape), align_corners=True), align_corners=True),
    ),
    ((3, 2, 3), (3, 2, 6, 4)),
    ((0, 0), (None, 2), (1, 3), (2, None), ("R", 2)),
    cuts2=(((0, 1), (2, 3)),),
)
refuse("positions of another batch", lambda x: F.grid_sample(x[..., 0], torch.zeros(3, 2, 2, 2, dtype=x.dtype)))
refuse("positions of another space", lambda x: F.grid_sample(x[..., 0], torch.zeros(2, 2, 2, 3, dtype=x.dtype)))
refuse("cubic samples in space", lambda x: F.grid_sample(x, torch.zeros(2, 2, 2, 2, 3, dtype=x.dtype), mode="bicubic"))
refuse("transformations of an image", lambda x: F.affine_grid(x[:, :2, :3, 0, 0], (2, 1, 4, 4, 4)), cut=0)
