"""Rows of what a user does that is seldom done: shapes, names and writes at the edge of an operation's contract."""

import torch
import torch.nn.functional as F
from cases import case
from torch import nn

X = (2, 7, 6)


def _attention(x, w, b, v):
    return F.multi_head_attention_forward(
        x, x, x, 6, 2, w, b, None, None, False, 0.0, v, None, need_weights=False
    )[0]  # fmt: skip


def _ones(x):
    """A plain vector on the operand's device."""
    return torch.ones(7, dtype=x.dtype, device=x.device)


# torch's derivatives of these choose their form by strides, which one row or none does not tell.
case("inner", lambda x: torch.inner(x, x), ((7, 3),), ((0,), (1,)))
case("tensordot", lambda x: torch.tensordot(x, x, ([0, 1], [0, 1])), (X,), ((0,), (1,), (2,)))
case("multi_head_attention", _attention, ((7, 2, 6), (18, 6), (18,), (6, 6)), ((0, None, None, None),))
case(
    "module_batch_first",
    lambda x: nn.MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64, device=x.device)(x, x, x)[0],
    (X,),
    ((1,), (0,)),
)

case("einsum_diagonal", lambda x: torch.einsum("bii->bi", x), ((2, 6, 6),), ((0,), (1,), (2,)))
case("einsum_ellipsis", lambda x, y: torch.einsum("...ic,...c->...i", x, y), (X, (2, 6)), ((1, None), (0, 0), (2, 1)))
case("cat_empty_vector", lambda x: torch.cat([x.new_zeros(0), x, x], 1), (X,), ((0,), (1,)))
case("out", lambda x, y: torch.add(x, 1, out=y.clone()), (X, X), ((1, 1), (1, 2)), differentiable=())
case("sum_to_plain", lambda x: _ones(x).index_add_(0, _ones(x).cumsum(0).long() - 1, x[0, :, 0]), (X,), ((1,),))
case("view_dtype", lambda x: x.view(torch.int32), (X,), ((1,),), differentiable=())
case("amax_of_bools", lambda x: ((x > 0).amax(1), (x > 0).amin(2)), (X,), ((1,), (2,)), differentiable=())
case(
    "amax_of_nan",
    lambda x: tuple(f(x.masked_fill(x > 1, float("nan")), 1).isnan() for f in (torch.amax, torch.amin)),
    (X,),
    ((1,), (0,)),
    differentiable=(),
)
case(
    "arguments_by_name",
    lambda x, w: (
        F.linear(input=x, weight=w),
        torch.matmul(input=x, other=x.mT),
        torch.sum(input=x, dim=1),
        F.scaled_dot_product_attention(query=x, value=x, key=x),
    ),
    (X, (4, 6)),
    ((1, None),),
)


def _written(x):
    for write in (
        lambda t: t.add_(1),
        lambda t: t.exp_(),
        lambda t: t.mul_(torch.full_like(t, 2)),
        lambda t: t.copy_(torch.ones(X)),
    ):
        kept = x + 0
        write(kept)
        yield kept


case("writes_into_pending", lambda x: tuple(_written(x)), (X,), (("P",), ("R",)), differentiable=())
case("pending_to_whole_numbers", lambda x: ((x * 9).int(), x.bool()), (X,), (("P",), (1,)), differentiable=())
