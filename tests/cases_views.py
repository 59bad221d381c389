"""Rows of views of the whole, of shapes changed in place and of diagonals."""

import torch
from cases import case, refuse
from torch import nn

X = (2, 7, 6)
EACH = ((0,), (1,), (2,))
TWO = (((1, 2),), ((0, 1),))

# -- dims that change place ------------------------------------------------------------------------------------------
case(
    "dims_moved",
    lambda x: (
        x.permute(dims=(2, 0, 1)),
        torch.permute(x, [1, -1, 0]),
        x.permute(0, 2, 1),
        torch.movedim(x, 0, -1),
        x.moveaxis((0, 1), (2, 0)),
        x.swapaxes(0, 2),
        torch.swapdims(x, 1, 2),
        x.mT,
        x.transpose(-1, 0),
        x[0].T,
        x[0].t(),
        x.mH,
        x[..., 0].adjoint(),
    ),
    (X,),
    ((0,), (1,), ("R",)),
    cuts2=TWO,
)
case("dims_moved_wire", lambda x: (x.mT, x.movedim(0, 2), x.permute(2, 1, 0).contiguous()), (X,), EACH, wire=())
case(
    "dims_of_one",
    lambda x: (
        x.unsqueeze(0),
        x.unsqueeze(-1).squeeze(-1),
        x[None, :, None].squeeze(),
        torch.unsqueeze(x, dim=2).squeeze((0, 2)),
        x.squeeze(1),
        *torch.atleast_3d(x, x[0, 0]),
        torch.atleast_2d(x[0, :, 0]),
        torch.atleast_1d(x.sum()),
    ),
    (X,),
    EACH,
    cuts2=TWO,
)
case(
    "squeezed_cut",
    lambda x: (x.squeeze(), x.squeeze(1), x.squeeze((1, 2))),
    ((7, 1, 6),),
    ((1,), (0,), (2,)),
    cuts2=(((0, 1),),),
)
case(
    "expanded",
    lambda x, y: (
        x.expand(3, 2, 7, 6),
        x[:, :1].expand(-1, 5, -1),
        x[:, :1].expand_as(y),
        x[:1].broadcast_to(4, 7, 6),
        torch.broadcast_to(x, (1, *x.shape)),
        *torch.broadcast_tensors(x[:1], y),
        x[0, 0].expand(size=(7, 6)),
    ),
    (X, X),
    ((0, 0), (1, 1), (2, None), (None, 1)),
    cuts2=(((1, 2), (1, 2)),),
)

# -- split and merged ------------------------------------------------------------------------------------------------
case(
    "reshaped",
    lambda x: (
        x.view(2, 42),
        x.view((2, 7, 2, 3)),
        x.reshape(shape=(2, -1, 3)),
        x.reshape(-1),
        x.reshape(14, 6),
        torch.reshape(x, (84,)),
        x.view(size=(2, 7, 6, 1)),
        x.view(1, 2, 1, 7, 6),
        x.flatten(1),
        torch.flatten(x),
        x.ravel(),
        x.unflatten(2, (3, -1)),
        x.unflatten(-1, [2, 3]),
        x.view_as(x.detach() + 1),
        x.flatten(1).reshape_as(x),
    ),
    (X,),
    (*EACH, ("R",)),
    cuts2=TWO,
)


def _inferred(x):
    with torch.inference_mode():
        y = x * 1
        return y.reshape(2, 42) + 0, torch.ops.aten._reshape_alias(y, (2, 42), (42, 1)) + 0


case("reshaped_by_name", _inferred, (X,), ((0,), (1,)), wire=(), differentiable=())
case("merged_wire", lambda x: (x.flatten(1), x.reshape(2, 7, 3, 2), x.view(1, -1, 7, 6)), (X,), ((0,), (1,)), wire=())
case(
    "rearranged",  # what einops calls
    lambda x: (
        x.permute(0, 2, 3, 1).reshape(2, 24, 3),  # b c h w -> b (h w) c
        x.reshape(2, 3, 2, 2, 3, 2).permute(0, 2, 4, 1, 3, 5).reshape(2, 6, 12),  # patches of 2 x 2
        x.permute(0, 2, 3, 1).reshape(-1, 3),
        x.reshape(2, 3, 4, 6, 1, 1).permute(0, 1, 2, 4, 3, 5).reshape(2, 3, 4, 6),
        x.reshape(2, 3, -1).transpose(1, 2),
    ),
    ((2, 3, 4, 6),),
    ((0,), (1,), (2,), (3,)),
    cuts2=(((2, 3),), ((0, 2),)),
)
case(
    "heads",
    lambda x: (
        x.unflatten(-1, (2, 3)).transpose(1, 2).flatten(0, 1),
        x.view(2, 7, 3, 2).permute(2, 0, 1, 3).unbind(0)[1],
        x.reshape(2, 7, 3, 2).transpose(1, 2).contiguous().view(2, 3, 14),
    ),
    (X,),
    ((0,), (1,)),
    cuts2=(((0, 1),),),
)
case(
    "numbers_of_other_size",
    lambda x: (
        x.view(torch.int64),
        x.view(torch.int32),
        x.view(torch.int32).view(torch.float64),
        torch.view_as_real(torch.view_as_complex(x.unflatten(2, (3, 2)))),
        x.contiguous(),
        x.as_strided(x.size(), x.stride()),
    ),
    (X,),
    EACH,
    cuts2=TWO,
    differentiable=(),
)

# -- shapes changed in place -----------------------------------------------------------------------------------------


def _changed(change):
    def fn(x):
        y = x * 1
        change(y)
        return y, y * 2

    return fn


case(
    "shape_in_place",
    lambda x: tuple(
        out
        for change in (
            lambda y: y.transpose_(1, 2),
            lambda y: y.swapaxes_(0, 1).unsqueeze_(0),
            lambda y: y.unsqueeze_(-1),
            lambda y: y.unsqueeze_(1).squeeze_(1),
            lambda y: y.unsqueeze_(0).squeeze_(),
            lambda y: y.squeeze_((0, 1)).swapdims_(0, 2),
            lambda y: torch.ops.aten.unsqueeze_(y, 2),
        )
        for out in _changed(change)(x)
    ),
    (X,),
    EACH,
    cuts2=TWO,
)
case("matrix_in_place", lambda x: _changed(lambda y: y.t_().add_(1))(x), ((7, 6),), ((0,), (1,)), wire=())

# -- diagonals -------------------------------------------------------------------------------------------------------
case(
    "triangles",
    lambda x: (
        x.tril(),
        torch.triu(x, 1),
        x.tril(diagonal=-2),
        x.triu(-3),
        (x * 1).tril_(1),
        (x * 1).triu_(),
        x[0, :, :3].tril(),
        x * torch.ones(7, 6, dtype=torch.bool, device=x.device).tril(),
    ),
    (X,),
    (*EACH, ("R",)),
    cuts2=TWO,
)
case(
    "diagonals",
    lambda x: (
        x.diagonal(0, 1, 2),
        torch.diagonal(x, 2, 1, 2),
        x.diagonal(-3, 1, 2),
        x.diagonal(dim1=0, dim2=1),
        x.diagonal(1, 2, 1),
        x.diagonal(9, 1, 2),
        torch.linalg.diagonal(x),
        x[0].diag(),
        x[0].diag(-1),
        torch.trace(x[1]),
        x[1, :6].trace(),
    ),
    (X,),
    EACH,
    cuts2=TWO,
)
case(
    "diagonals_wire",
    lambda x: (x.diagonal(0, 1, 2), x.diagonal(-2, 1, 2), x.diag_embed(), x.tril(), x.triu(2)),
    (X,),
    EACH,
    wire=(),
)
case(
    "diagonals_made",
    lambda x: (
        torch.diag_embed(x),
        x.diag_embed(2),
        torch.diag_embed(x, -1, 0, 2),
        x[0, :, 0].diag(),
        x[0, :, 0].diag(-2),
        torch.diagflat(x[0, :3, 0]),
        (x[0] * 1).fill_diagonal_(3.0),
    ),
    ((2, 7, 6),),
    EACH,
    cuts2=TWO,
)

# -- refused ---------------------------------------------------------------------------------------------------------
refuse("strides of another shape", lambda x: x.as_strided((2, 2), (1, 1)))
refuse("windows longer than the dim", lambda x: x.unfold(1, 8, 1))
refuse("one dim as rows and columns", lambda x: x.diagonal(0, 1, 1))
refuse("order of two dims", lambda x: x.permute(0, 1))
refuse("diagonal of many dims in place", lambda x: x.fill_diagonal_(0))
refuse(
    "packed sequences",
    lambda x: nn.GRU(4, 3, dtype=x.dtype)(
        nn.utils.rnn.PackedSequence(x[0, :, :, 0, :].flatten(0, 1), torch.tensor([8] * 7))
    ),
)
refuse("dropout between layers", lambda x: nn.GRU(4, 3, 2, dropout=0.5, dtype=x.dtype)(x[0, :, :, 0]))
