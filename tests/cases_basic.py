"""Rows of pointwise operations, products, reductions, views and joins."""

import torch
import torch.nn.functional as F
from cases import case

X, Y = (2, 7, 6), (2, 6, 9)
CUTS = ((0, 0), (1, 1), (2, 2))

case(
    "add",
    lambda x, y: x + y,
    (X, X),
    ((1, 1), (2, 2), (1, 2), (1, None), (None, 1), (0, 0)),
    cuts2=(((1, 2), (1, 2)), ((1, 2), None)),
)
MIXED = (
    (1, "R"),
    ("R", 1),
    ("R", "R"),
    (1, "P"),
    ("P", 1),
    ("P", "P"),
    ("P", "R"),
    ("R", "P"),
    ("P", None),
    (None, "P"),
)
MIXED2 = (((1, 2), "P"), ("P", "R"), ("P", "P"))
case("add_mixed", lambda x, y: x + y, (X, X), MIXED, cuts2=MIXED2)
case("sub_mixed", lambda x, y: x - 3 * y, (X, X), MIXED, cuts2=MIXED2)
case("mul_mixed", lambda x, y: x * y, (X, X), MIXED, cuts2=MIXED2)
case("div_mixed", lambda x, y: x / (2 + y.sin()), (X, X), MIXED, cuts2=MIXED2)
case("chain_mixed", lambda x, y: F.gelu(x + y).transpose(1, 2) @ (x * 2 + 1), (X, X), MIXED, cuts2=MIXED2)
case(
    "linear_whole", F.linear, (X, (4, 6), (4,)), (("R", None, None), ("P", None, None), ("R", "R", "R"), (1, "R", "P"))
)
case(
    "matmul_mixed",
    lambda a, b: a @ b,
    (X, Y),
    ((0, "R"), (1, "R"), (2, "R"), ("R", 1), ("R", 2), ("P", 2), ("R", "R"), ("P", "P")),
)
case("views_whole", lambda x: x.view(2, 42).unsqueeze(0)[:, :, 3:9].expand(3, 2, 6), (X,), (("R",), ("P",)))
case("reductions_whole", lambda x: (x.sum(), x.mean(1), x.amax(1), x.softmax(1)), (X,), (("R",), ("P",)))
case("add_scalar_whole", lambda x: 2 * x + 1, (X,), (("R",), ("P",)))

case("add_bias", lambda x, b: x + b, (X, (6,)), ((1, None), (2, None)), cuts2=(((1, 2), None), ((0, 1), None)), wire=())
case(
    "add_position",
    lambda x, p: x + p,
    (X, (1, 7, 6)),
    ((1, None), (1, 1), (2, None), (None, 1)),
    cuts2=(((1, 2), None),),
)
case("broadcast_both", lambda x, y: x * y, ((7, 1, 6), (1, 5, 6)), ((0, 1), (0, None), (None, 1), (2, 2)))
case("sub_div", lambda x, y: (x - 2.0) / (y * y + 1) - 1 / (x * x + 2), (X, X), ((1, 1), (1, None)))
case("gelu", lambda x: F.gelu(x), (X,), ((0,), (1,), (2,)), cuts2=(((1, 2),),), wire=())
case("silu_tanh_exp", lambda x: F.silu(x) + x.tanh() * x.exp(), (X,), ((1,),), wire=())
case("where", lambda x, y: torch.where(x > 0, x, y), (X, X), ((1, 1), (1, None), (None, 1)))
case("clamp", lambda x: x.clamp(-0.5, 0.5), (X,), ((1,),))
case("inplace", lambda x, y: (x * 1).add_(y).mul_(2), (X, X), ((1, 1), (1, None), (1, 2)))
case("pow_scalar", lambda x: x**2 + 3 * x, (X,), ((1,),))

case("linear", F.linear, (X, (4, 6), (4,)), ((0, None, None), (1, None, None)), cuts2=(((0, 1), None, None),), wire=())
case("linear_cut_features", F.linear, (X, (4, 6), (4,)), ((2, None, None),), cuts2=(((1, 2), None, None),))
case("linear_no_bias", F.linear, (X, (4, 6)), ((1, None),))
case("matmul_plain", lambda a, b: a @ b, (X, (6, 3)), ((1, None), (2, None), (0, None), (2, 0)))
case(
    "matmul_batched",
    lambda a, b: a @ b,
    (X, Y),
    ((0, 0), (1, None), (None, 2), (2, 1), (1, 2)),
    cuts2=(((0, 1), None),),
)
case("mm_contract", lambda a, b: torch.mm(a.transpose(0, 1), b), ((7, 3), (7, 4)), ((0, 0), (0, None)), wire=None)
case("bmm", torch.bmm, (X, Y), ((0, 0), (2, 1), (1, None)))
case(
    "einsum_slices",
    lambda w, x: torch.einsum("bnhg,bnhd->bhgd", w, x),
    ((2, 7, 2, 3), (2, 7, 2, 4)),
    ((1, 1), (1, None), (0, 0)),
    wire=None,
)
case("vector_dot", lambda a, b: a @ b, ((7,), (7,)), ((0, 0),))

for _name, _f in (("sum", torch.sum), ("mean", torch.mean), ("amax", torch.amax), ("amin", torch.amin)):
    for _keep in (False, True):
        case(
            f"{_name}_1_{_keep}",
            lambda x, f=_f, k=_keep: f(x, dim=1, keepdim=k),
            (X,),
            ((0,), (1,), (2,)),
            cuts2=(((1, 2),),),
        )
        case(
            f"{_name}_02_{_keep}",
            lambda x, f=_f, k=_keep: f(x, dim=(0, 2), keepdim=k),
            (X,),
            ((0,), (1,), (2,)),
            cuts2=(((1, 2),),),
        )
case("sum_all", lambda x: x.sum(), (X,), ((0,), (1,), (2,)), cuts2=(((1, 2),),), wire=("all_reduce",))
case("mean_all", lambda x: x.mean(), (X,), ((0,), (1,), (2,)), cuts2=(((1, 2),),), wire=("all_reduce",))
case("mean_of_square", lambda x, y: ((x - y) ** 2).mean(), (X, X), ((1, 1), (1, None)))
case("any_all", lambda x: ((x > 1).any(), (x > -9).all()), (X,), ((1,), (2,)))
case("softmax_local", lambda x: x.softmax(-1), (X,), ((1,),), cuts2=(((0, 1),),), wire=())
case("softmax_cut", lambda x: torch.softmax(x, 1), (X,), ((1,),), cuts2=(((1, 2),),), wire=("all_reduce", "all_reduce"))
case("log_softmax", lambda x: F.log_softmax(x, 1), (X,), ((1,), (2,)))

case("permute", lambda x: x.permute(2, 0, 1), (X,), ((0,), (1,), (2,)), cuts2=(((1, 2),),), wire=())
case("transpose", lambda x: x.transpose(1, 2).contiguous(), (X,), ((1,), (2,)), wire=())
case("unsqueeze_squeeze", lambda x: x.unsqueeze(-1).unsqueeze(1).squeeze(1).squeeze(), (X,), ((0,), (1,)), wire=())
case("flatten_behind", lambda x: x.reshape(2, 7 * 6), (X,), ((0,), (1,)), wire=())
case("flatten_batch", lambda x: x.flatten(0, 1), (X,), ((0,), (1,)))
case("split_heads", lambda x: x.view(2, 7, 2, 3).transpose(1, 2), (X,), ((1,),), wire=())
case("split_cut_dim", lambda x: x.view(2, 2, 4, 6), ((2, 8, 6),), ((1,),))
case("merge_cut_dim", lambda x: x.flatten(1, 2), ((2, 7, 3, 4),), ((1,),), wire=())
case("view_forms", lambda x: (x.view((2, -1)), x.reshape(shape=(14, 6)), x.unflatten(2, (3, 2))), (X,), ((0,), (1,)))
case("expand", lambda x: x.expand(4, 7, 6), ((1, 7, 6),), ((1,),), wire=())
case("slice", lambda x: x[:, 1:5], (X,), ((0,), (1,), (2,)), wire=())
case("slice_step", lambda x: x[:, ::2] * 1, (X,), ((0,), (1,), (2,)), wire=())
case("slice_tail", lambda x: x[:, -3:, 1::2], (X,), ((1,), (2,)), wire=())
case("select", lambda x: x[:, 2], (X,), ((0,), (1,), (2,)))
case("select_negative", lambda x: x.select(1, -1), (X,), ((1,),))
case("split", lambda x: x.split([3, 4], 1), (X,), ((0,), (1,)))
case("chunk", lambda x: x.chunk(3, -1), (X,), ((1,), (2,)))
case("unbind", lambda x: x.unbind(0), (X,), ((1,), (0,)))
case("cat_plain_dim", lambda x, y: torch.cat([x, y], 2), (X, X), ((1, 1), (1, None), (0, 0)))
case("cat_cut_dim", lambda x, y: torch.cat([x, y], 1), (X, (2, 4, 6)), ((1, 1), (1, None)))
case("stack", lambda x, y: torch.stack([x, y], 1), (X, X), ((1, 1), (1, None)))
case("detach_clone", lambda x: x.clone() + x.detach(), (X,), ((1,),), wire=())
case("likes", lambda x: torch.zeros_like(x) + x * torch.ones_like(x), (X,), ((1,),), wire=())
case("to_float", lambda x: x.float().double(), (X,), ((1,),), wire=(), atol=1e-6)

case(
    "keywords_in_any_order",
    lambda x, w, b: F.linear(x, bias=b, weight=w),
    (X, (6, 6), (6,)),
    ((1, None, None), ("R", None, None)),
)
case("aten_called_by_name", lambda x: torch.ops.aten.sum(x) + torch.ops.aten.mul.Tensor(x, x), (X,), ((1,), (2,)))
