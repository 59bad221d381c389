"""Rows of attention, over everything and over neighbourhoods."""

import torch
import torch.nn.functional as F
from cases import case

from core import neighborhood_attention
from core.ops.attention import set_strategy


def brute_force(q, k, v, window):
    """Neighbourhood attention by an explicit N x N mask."""
    grid, near = q.shape[1:-2], None
    for dim, (n, w) in enumerate(zip(grid, window)):
        i = torch.arange(n, device=q.device)
        ahead = i[None] - (i - w // 2).clamp(0, n - w)[:, None]
        inside = ((ahead >= 0) & (ahead < w)).view([n if d % len(grid) == dim else 1 for d in range(2 * len(grid))])
        near = inside if near is None else near & inside
    points = near.shape[: len(grid)].numel()
    q, k, v = (t.flatten(1, -3).transpose(1, 2) for t in (q, k, v))
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~near.reshape(points, points), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).unflatten(1, grid)


def neighbourhood(name, window, shape, cuts, cuts2=(), wire=None):
    def fn(q, k, v):
        out = neighborhood_attention(q, k, v, window)
        if type(out) is not torch.Tensor:
            return out
        expected = brute_force(q, k, v, window)
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-10)
        return expected  # its gradients too

    case(
        f"neighborhood_{name}",
        fn,
        (shape,) * 3,
        [c if type(c) is tuple else (c,) * 3 for c in cuts],
        cuts2=[(c,) * 3 for c in cuts2],
        wire=wire,
    )


GRID, ROW = (2, 9, 11, 2, 4), (2, 21, 2, 4)
neighbourhood("3x3", (3, 3), GRID, (1, 2), ((1, 2), (2, 1), (0, 1)), wire=("all_to_all",))
neighbourhood("7x5", (7, 5), GRID, (1, 2), ((1, 2),))
neighbourhood("whole_grid", (9, 11), GRID, (1, 2), ((1, 2),))
neighbourhood("batch_heads", (5, 3), GRID, (0, 3), ((0, 3),), wire=())
neighbourhood("channels", (5, 3), GRID, (4,))
neighbourhood("operands_differ", (3, 5), GRID, ((1, 2, None), (None, 1, 1), (1, None, None)))
neighbourhood("1x1", (1, 1), GRID, (1,), wire=())
neighbourhood("many_tiles", (5, 3), (1, 20, 19, 1, 2), (1, 2), ((1, 2),))
neighbourhood("1d", (7,), ROW, (0, 1, 2), ((0, 1), (1, 2)))
neighbourhood("1d_many_tiles", (5,), (1, 150, 1, 2), (1,))
neighbourhood("3d", (3, 1, 5), (1, 5, 4, 6, 1, 2), (1, 3), ((1, 3),))


# -- over everything --------------------------------------------------------------------------------------------------
Q, K = (2, 4, 7, 6), (2, 4, 9, 6)
SEQUENCE, HEADS, BATCH = (2, 2, 2), (1, 1, 1), (0, 0, 0)


def holes(g, shape):
    """A boolean mask; two of its rows see nothing."""
    mask = torch.rand(shape, generator=g) > 0.4
    mask[..., 1, :] = mask[..., -1, :] = False
    return mask


def with_strategy(name, fn):
    def run(*operands):
        set_strategy(name)
        try:
            return fn(*operands)
        finally:
            set_strategy("gather")

    return run


def attention(name, shapes, cuts, cuts2=(), wires=(None, None), make=None, differentiable=None, **kwargs):
    """A row for each strategy."""
    for strategy, wire in zip(("gather", "ring"), wires):
        fn = with_strategy(strategy, lambda q, k, v, m=None: F.scaled_dot_product_attention(q, k, v, m, **kwargs))
        case(
            f"attention_{name}_{strategy}",
            fn,
            shapes,
            cuts,
            cuts2=cuts2,
            wire=wire,
            make=make or {},
            differentiable=differentiable,
        )


attention(
    "sequence",
    (Q, Q, Q),
    (SEQUENCE,),
    (((0, 2),) * 3, ((1, 2),) * 3, ((2, 1),) * 3),
    (("all_gather",), ("all_to_all",)),
)
attention("local", (Q, K, K), (HEADS, BATCH), (((0, 1),) * 3,), ((), ()))
attention("queries_only", (Q, K, K), ((2, None, None),), (((1, 2), None, None),), ((), ()))
attention("keys_only", (Q, K, K), ((None, 2, 2), (None, 2, None), (None, None, 2), (1, 2, 2)))
attention(
    "lengths_differ", (Q, K, (2, 4, 9, 3)), (SEQUENCE, (2, 2, 1)), (((1, 2), (1, 2), (1, 2)), ((2, 1), (1, 2), (2, 0)))
)
attention("channels", (Q, K, K), ((3, 3, 3), (2, 3, 1)))
attention("causal", (Q, Q, Q), (SEQUENCE, HEADS, (2, None, None), (None, 2, 2)), (((1, 2),) * 3,), is_causal=True)
attention("causal_more_keys", (Q, K, K), (SEQUENCE,), is_causal=True, scale=0.3)
attention("causal_fewer_keys", (K, Q, Q), (SEQUENCE,), is_causal=True)
attention(
    "bool_mask",
    (Q, K, K, (7, 9)),
    ((2, 2, 2, None), (1, 1, 1, None), (None, 2, 2, None)),
    (((0, 2),) * 3 + (None,),),
    make={3: holes},
)
attention("bool_mask_cut", (Q, K, K, (2, 1, 7, 9)), ((2, 2, 2, 2), (2, 2, 2, 3), (0, 0, 0, 0)), make={3: holes})
attention(
    "bias",
    (Q, K, K, (4, 7, 9)),
    ((2, 2, 2, None), (1, 1, 1, None), (1, 1, 1, 0), (2, 2, 2, 1)),
    (((1, 2),) * 3 + (None,),),
)
attention("bias_of_keys", (Q, K, K, (2, 4, 1, 9)), ((2, 2, 2, None), (None, 2, 2, 3)))
attention(
    "grouped",
    (Q, (2, 2, 9, 6), (2, 2, 9, 6)),
    (SEQUENCE, HEADS, BATCH, (1, None, None)),
    (((1, 2),) * 3,),
    enable_gqa=True,
)
attention("shared_keys", (Q, (1, 1, 9, 6), (1, 1, 9, 6)), (SEQUENCE, (0, None, None), (1, 2, 2)))
attention("three_dims", ((3, 7, 6), (3, 9, 6), (3, 9, 6)), ((1, 1, 1), (0, 0, 0)))
attention(
    "large_scores", (Q, Q, Q), (SEQUENCE,), make={0: lambda g, s: 60 * torch.randn(s, dtype=torch.float64, generator=g)}
)
case(
    "attention_of_transposed",
    lambda x: F.scaled_dot_product_attention(
        *(x.unflatten(-1, (3, 2, 2)).unbind(2)[i].transpose(1, 2) for i in range(3))
    ),
    ((2, 7, 12),),
    ((1,),),
)
