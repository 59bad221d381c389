"""Rows of parts, windows and joins, and of recurrent layers."""

import torch
from cases import case
from cases_views import EACH, TWO, X
from torch import nn

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
