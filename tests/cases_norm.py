"""Rows of layer, RMS, group, batch, instance and local response norm."""

import torch
import torch.nn.functional as F
from cases import case, refuse
from torch import nn
from torch.utils.checkpoint import checkpoint

from core import ShardTensor

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

case(
    "group_norm_inside_groups",
    lambda x, w, b: (
        F.group_norm(x, 2, w, b),
        F.group_norm(x, 1, w, b),
        F.group_norm(x, 3),
        nn.GroupNorm(2, 6, device=x.device, dtype=x.dtype)(x),
    ),
    ((2, 6, 5, 4), (6,), (6,)),
    ((1, None, None), (1, 0, None)),
    cuts2=(((1, 2), None, None), ((3, 1), None, None), ((2, 3), None, None)),
)
case("group_norm_inside_groups_wire", lambda x: F.group_norm(x, 1), (V,), ((1,),), wire=TWO)
case(
    "norms_by_position",
    lambda x, w, b: (
        torch.layer_norm(x, (5,), w[:5], b[:5]),
        torch.rms_norm(x, (5,), w[:5]),
        torch.group_norm(x, 2, w, b),
        torch.batch_norm(x, w, b, None, None, True, 0.1, 1e-5, False),
        torch.instance_norm(x, w, b, None, None, True, 0.1, 1e-5, False),
    ),
    ((2, 6, 7, 5), (6,), (6,)),
    ((1, None, None), (2, None, None), (3, None, None)),
)

BUFFERS = {3: lambda g, shape: torch.rand(shape, dtype=torch.float64, generator=g) + 0.5}


def with_buffers(function, **kwargs):
    """The result and the buffers after two steps."""

    def run(x, w, mean, var, b):
        y = function(x, mean, var, w, b, **kwargs)
        return y, function(x * 2 + y.detach(), mean, var, w, b, momentum=0.3, **kwargs), mean, var

    return run


def normalised(name, shape, cuts, cuts2, function, wire=None, **kwargs):
    c = (shape[1],)
    case(
        name,
        with_buffers(function, **kwargs),
        (shape, c, c, c, c),
        [(cut, None, None, None, None) for cut in cuts],
        cuts2=[(cut, None, None, None, None) for cut in cuts2],
        make=BUFFERS,
        differentiable=(0, 1, 4),
        wire=wire,
    )


normalised("batch_norm", V, (0, 2, 3, "R"), ((2, 3), (0, 2)), F.batch_norm, wire=None, training=True)
normalised("batch_norm_wire", V, (0, 2, 3), (), F.batch_norm, wire=TWO + TWO, training=True)
normalised("batch_norm_channels", V, (1,), ((1, 2), (0, 1)), F.batch_norm, training=True)
normalised("batch_norm_1d", (9, 4), (0, 1), ((0, 1),), F.batch_norm, training=True)
normalised("batch_norm_3d", (2, 3, 2, 5, 4), (0, 3, 4), ((3, 4), (1, 3)), F.batch_norm, training=True)
normalised("batch_norm_fixed", V, (0, 1, 2), ((1, 2), (2, 3)), F.batch_norm, wire=(), training=False)
case("batch_norm_no_buffers", lambda x: F.batch_norm(x, None, None, training=True), (V,), ((0,), (1,), (2,), (3,)))
case("batch_norm_offset", lambda x: F.batch_norm(x, None, None, training=True), (V,), ((2,),), make={0: far}, atol=1e-7)
normalised("instance_norm", V, (0, 1, 2, 3), ((2, 3), (0, 2), (1, 3)), F.instance_norm)
normalised("instance_norm_1d", (3, 4, 9), (0, 1, 2), ((1, 2), (0, 2)), F.instance_norm)
normalised("instance_norm_fixed", V, (0, 1, 2), ((1, 2),), F.instance_norm, wire=(), use_input_stats=False)
case("instance_norm_no_buffers", lambda x: F.instance_norm(x), (V,), ((0,), (1,)), wire=())
case("instance_norm_wire", lambda x: F.instance_norm(x), (V,), ((2,), (3,)), wire=TWO)


def buffers(kind, run=lambda m, x: m(x), **kwargs):
    """A module after three batches, of which one is in evaluation, and its buffers."""

    def steps(x):
        m = kind(x.shape[1], dtype=x.dtype, device=x.device, **kwargs)
        outs = [run(m, x), run(m, 3 * x + 1)]
        outs.append(run(m.eval(), x))
        return *outs, *(b.clone() for b in m.buffers())

    return steps


def checkpointed(m, x):
    y = checkpoint(m, x, use_reentrant=False)
    return torch.autograd.grad((y * y.sin()).sum(), x, retain_graph=True)[0] if y.requires_grad else y


case(
    "batch_norm_module",
    lambda x: (
        *buffers(nn.BatchNorm2d)(x),
        *buffers(nn.BatchNorm2d, momentum=None)(x),
        *buffers(nn.BatchNorm2d, track_running_stats=False, affine=False)(x),
    ),
    (V,),
    ((0,), (1,), (2,)),
    cuts2=(((0, 2),), ((1, 2),)),
)
case("batch_norm_module_1d", buffers(nn.BatchNorm1d), ((3, 4, 9),), ((0,), (2,)), cuts2=(((1, 2),),))
case("batch_norm_module_3d", buffers(nn.BatchNorm3d), ((2, 3, 2, 5, 4),), ((1,), (3,)), cuts2=(((2, 3),),))
case(
    "batch_norm_checkpointed",
    buffers(nn.BatchNorm2d, checkpointed),
    (V,),
    ((0,), (1,), (2,)),
    cuts2=(((2, 3),), ((1, 2),)),
)


def synchronised(x):
    """Over a process group that has the ranks of the mesh: the same as one process without any."""
    if not isinstance(x, ShardTensor):
        return buffers(nn.BatchNorm2d)(x)
    group = None if x.device_mesh.ndim > 1 else x.device_mesh.get_group()
    return buffers(nn.SyncBatchNorm, process_group=group)(x)


case("batch_norm_synchronised", synchronised, (V,), ((0,), (1,), (2,), ("R",)), cuts2=(((2, 3),), ((1, 2),)))
case(
    "instance_norm_module",
    lambda x: (
        *buffers(nn.InstanceNorm2d)(x),
        *buffers(nn.InstanceNorm2d, affine=True, track_running_stats=True)(x),
        nn.InstanceNorm2d(4)(x[0]),
    ),
    (V,),
    ((0,), (1,), (2,)),
    cuts2=(((2, 3),), ((0, 2),)),
)
case(
    "local_response_norm",
    lambda x: tuple(nn.LocalResponseNorm(n, 0.3, 0.6, 0.7)(x) for n in (1, 2, 5, 9)),
    ((2, 7, 5, 3),),
    ((0,), (1,), (2,)),
    cuts2=(((1, 2),), ((2, 3),)),
)
case("local_response_norm_1d", lambda x: F.local_response_norm(x, 3), ((2, 7, 5),), ((1,), (2,)), cuts2=(((1, 2),),))
case("local_response_norm_wire", lambda x: F.local_response_norm(x, 3), ((2, 7, 5),), ((0,), (2,)), wire=())


def far(x):
    """A mean of fifty deviations. One process computes in fp64: on a GPU torch's group norm keeps the mean in bf16."""
    t = (x + 1e3).bfloat16()
    t = t if isinstance(x, ShardTensor) else t.double()
    return [f.bfloat16() for f in (F.layer_norm(t, (7, 5)), F.rms_norm(t, (7, 5)), F.group_norm(t, 2))]


case(
    "norms_far_in_bfloat16",
    far,
    (V,),
    ((1,), (2,), (3,)),
    cuts2=(((2, 3),),),
    make={0: lambda g, shape: 20 * torch.randn(shape, dtype=torch.float64, generator=g)},
    atol=0.02,
)
case(
    "layer_norm_no_wire",
    lambda x, w: nn.LayerNorm(6, device=x.device, dtype=x.dtype, bias=False)(x) + F.layer_norm(x, [6], weight=w),
    (X, (6,)),
    ((0, None), (1, None)),
    wire=(),
)
refuse("one value a channel", lambda x: F.batch_norm(x[:1, :, 0, 0, 0], None, None, training=True))
refuse("one value a sample and channel", lambda x: F.instance_norm(x[:, :, 0, 0, :1]))
refuse("buffers of no batch norm", lambda x: F.batch_norm(x, None, None))
refuse("weights of other channels", lambda x: F.batch_norm(x, None, None, torch.ones(3), training=True))
refuse("no channels around", lambda x: F.local_response_norm(x, 0))
