"""Rows of views, parts, joins, diagonals, shapes changed in place and recurrent layers."""

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

# -- parts -----------------------------------------------------------------------------------------------------------
case(
    "slices",
    lambda x: (
        x[1:, :, ::3],
        x[:, 2:-1:2],
        x[:, 5:100],
        x[:, 4:2],
        x[..., -4:-1],
        x[:, :, None, 1:2],
        x.narrow(1, 3, 2),
        torch.narrow(x, dim=-1, start=-2, length=2),
        x[-1:, 6:],
        x[slice(None), slice(0, 7, 4)],
    ),
    (X,),
    (*EACH, ("R",), ("P",)),
    cuts2=TWO,
    wire=(),
)
case(
    "rows",
    lambda x: (x[1], x[:, -2], x[0, 3], x[..., 5], x[1, 2, 3], x.select(2, 0), torch.select(x, 1, 6), x[-1, :, 2:4]),
    (X,),
    EACH,
    cuts2=TWO,
)
case("row_wire", lambda x: x[:, 4], (X,), ((1,),), wire=("all_to_all",))
case(
    "pieces",
    lambda x: (
        *x.split(3, 1),
        *torch.split(x, [1, 6], 1),
        *x.split(split_size=4, dim=-1),
        *x.chunk(4, 1),
        *torch.tensor_split(x, 3, 1),
        *x.tensor_split((1, 3, 5), dim=1),
        *x.hsplit([2, 4]),
        *x.vsplit(2),
        *x.dsplit(3),
        *torch.chunk(x, 2),
        *torch.unsafe_split(x, 3, 1),
        *torch.unsafe_split_with_sizes(x, [2, 5], 1),
    ),
    (X,),
    EACH,
    cuts2=TWO,
    wire=(),
)
case("unbound", lambda x: (*x.unbind(1), *torch.unbind(x), *list(x[..., 0])), (X,), EACH, cuts2=TWO)
case("unbound_wire", lambda x: x.unbind(1), (X,), ((1,),), wire=("all_to_all",))
case(
    "windows",
    lambda x: (
        x.unfold(1, 3, 1),
        x.unfold(1, 2, 3),
        x.unfold(-2, 7, 1),
        x.unfold(1, 5, 2).unfold(2, 4, 2),
        x.unfold(2, 1, 2),
    ),
    (X,),
    EACH,
    cuts2=TWO,
)
case("windows_wire", lambda x: x.unfold(1, 3, 1), (X,), ((1,),), wire=("all_to_all",))
case("windows_uncut", lambda x: (x.unfold(1, 3, 1), x.unfold(0, 2, 1)), (X,), ((2,),), wire=())

# -- joins -----------------------------------------------------------------------------------------------------------
JOINS = ((1, 1, None), (1, None, "R"), (0, 0, 0), (2, 1, 0), (None, 2, 2), ("R", 1, "P"))
case(
    "joined",
    lambda x, y, z: (
        torch.cat([x, y, z, x[:, :2]], 1),
        torch.cat((x, y, z, y, x), dim=-1),
        torch.concat([z, y]),
        torch.cat([x]),
        torch.stack([x, y, z], -1),
        torch.stack((x, z), dim=1),
    ),
    (X, X, X),
    JOINS,
    cuts2=(((1, 2), (1, 2), None), ((0, 1), (1, 2), "R")),
)
case(
    "joined_lengths",
    lambda x, y, z: (torch.cat([x, y, z], 1), torch.cat([z, x, z[:, :0], y], 1), torch.cat([y, x], 1)),
    (X, (2, 1, 6), (2, 4, 6)),
    ((1, 1, 1), (1, None, 1), (None, 1, None), (0, 0, 0), (1, 2, 0)),
    cuts2=(((1, 2), (1, 2), (1, 2)), ((0, 1), None, None)),
)
case("joined_wire", lambda x, y: (torch.cat([x, y], 2), torch.stack([x, y], 1)), (X, X), ((1, 1), (0, None)), wire=())
case(
    "joined_stacks",
    lambda x, y: (
        torch.hstack([x, y]),
        torch.vstack((x, y)),
        torch.dstack([x[..., 0], y[..., 0]]),
        torch.column_stack([x[0, :, 0], y[0]]),
        torch.row_stack([x[0, :, 0], y[0, :, 1]]),
        torch.block_diag(x[0], y[1, :, :2], x[0, 0]),
    ),
    (X, X),
    ((1, 1), (0, None), (2, 2), (1, None)),
    cuts2=(((1, 2), (1, 2)),),
)
case(
    "grids",
    lambda x, y: (
        *torch.meshgrid(x, y, indexing="ij"),
        *torch.meshgrid(y, x, indexing="xy"),
        torch.cartesian_prod(x, y),
        torch.combinations(y),
        torch.combinations(x, r=3, with_replacement=True),
    ),
    ((7,), (5,)),
    ((0, None), (0, 0), (None, 0)),
)

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
        x * torch.ones(7, 6, dtype=torch.bool).tril(),
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
        )
        for out in _changed(change)(x)
    ),
    (X,),
    EACH,
    cuts2=TWO,
)
case("matrix_in_place", lambda x: _changed(lambda y: y.t_().add_(1))(x), ((7, 6),), ((0,), (1,)), wire=())

# -- recurrent layers ------------------------------------------------------------------------------------------------


def _layer(kind, *args, **kwargs):
    def fn(x, *weights):
        torch.manual_seed(3)
        layer = kind(*args, **kwargs, dtype=x.dtype, device=x.device)
        out, state = layer(x)
        return (out, *(state if isinstance(state, tuple) else (state,)))

    return fn


for _name, _kind, _more in (("gru", nn.GRU, {}), ("lstm", nn.LSTM, {}), ("rnn", nn.RNN, {"nonlinearity": "relu"})):
    case(f"{_name}_batch", _layer(_kind, 6, 4, 2, batch_first=True, bidirectional=True), ((5, 7, 6),), ((0,),), wire=())
    case(_name, _layer(_kind, 6, 4, **_more), ((7, 5, 6),), ((0,), (1,), (2,)), cuts2=(((1, 2),), ((0, 1),)))


def _cells(x, h, c, w):
    gru, lstm, rnn = (kind(6, 4, dtype=x.dtype, device=x.device) for kind in (nn.GRUCell, nn.LSTMCell, nn.RNNCell))
    for cell in (gru, lstm, rnn):
        for p in cell.parameters():
            p.data = w.detach().flatten()[: p.numel()].view(p.shape).clone()
    hard = nn.RNNCell(6, 4, nonlinearity="relu", dtype=x.dtype, device=x.device)
    hard.load_state_dict(rnn.state_dict())
    return gru(x, h), *lstm(x, (h, c)), rnn(x), hard(x)


case(
    "recurrent_cells",
    _cells,
    ((5, 6), (5, 4), (5, 4), (16, 6)),
    ((0, 0, 0, None), (0, None, None, None), (1, 0, None, None)),
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
