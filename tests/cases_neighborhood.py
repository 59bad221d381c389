"""Rows of attention over neighbourhoods."""

import torch
from cases import case

from core import ShardTensor, neighborhood_attention
from core.ops import around, neighborhood


def window(i, n, size, step, causal):
    """The keys that query ``i`` of ``n`` sees, by counting along its own class."""
    own = list(range(i % step, n, step))
    at = own.index(i)
    if causal:
        return own[max(at - size + 1, 0) : at + 1]
    start = min(max(at - size // 2, 0), len(own) - size)
    return own[start : start + size]


def brute_force(q, k, v, sizes, steps, causal, scale=None):
    """Neighbourhood attention by an explicit N x N mask."""
    grid, near = q.shape[1:-2], None
    for dim, n in enumerate(grid):
        inside = torch.zeros(n, n, dtype=torch.bool, device=q.device)
        for i in range(n):
            inside[i, window(i, n, sizes[dim], steps[dim], causal[dim])] = True
        inside = inside.view([n if d % len(grid) == dim else 1 for d in range(2 * len(grid))])
        near = inside if near is None else near & inside
    points = near.shape[: len(grid)].numel()
    q, k, v = (t.flatten(1, -3).transpose(1, 2) for t in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~near.reshape(points, points), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).unflatten(1, grid)


def neighbourhood(name, size, shape, cuts, cuts2=(), wire=None, called=lambda f: f, **kwargs):
    """A row; on one process the function is held against brute force, whose gradients count."""

    def fn(q, k, v):
        out = called(neighborhood_attention)(q, k, v, size, **kwargs)
        if any(isinstance(t, ShardTensor) for t in (q, k, v)):
            return out
        n = q.ndim - 3
        each = [
            (x,) * n if isinstance(x, int) else x for x in (size, kwargs.get("dilation", 1), kwargs.get("is_causal", 0))
        ]
        expected = brute_force(q, k, v, *each, kwargs.get("scale"))
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-10)
        return expected

    case(
        f"neighborhood_{name}",
        fn,
        (shape,) * 3,
        [c if type(c) is tuple else (c,) * 3 for c in cuts],
        cuts2=[(c,) * 3 for c in cuts2],
        wire=wire,
    )


def piecewise(fn):
    """The same in many pieces along the first dim."""

    def run(*args, **kwargs):
        most, neighborhood._most_scores = neighborhood._most_scores, 1500
        neighborhood._pieces.cache_clear()
        try:
            return fn(*args, **kwargs)
        finally:
            neighborhood._most_scores = most
            neighborhood._pieces.cache_clear()

    return run


def in_pieces(fn):
    """What needs own rows only is computed while others travel, however few they are."""

    def run(*args, **kwargs):
        most, around._most_kept = around._most_kept, 0
        try:
            return fn(*args, **kwargs)
        finally:
            around._most_kept = most

    return run


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
neighbourhood("even", (4, 2), GRID, (1, 2), ((1, 2), (2, 1)), wire=("all_to_all",))
neighbourhood("even_whole_grid", (8, 4), (2, 8, 4, 2, 4), (1, 2), ((1, 2),), scale=0.3)
neighbourhood("even_1d", 6, ROW, (1,), ((0, 1),))
neighbourhood("dilated", (3, 4), GRID, (1, 2), ((1, 2), (0, 2)), dilation=(3, 2))
neighbourhood("dilated_1d", 3, ROW, (1,), ((1, 2),), dilation=5)
neighbourhood("dilated_to_the_brim", (3, 2), GRID, (1, 2), ((1, 2),), dilation=(3, 5))
neighbourhood("dilated_many_tiles", 3, (1, 20, 19, 1, 2), (1,), ((1, 2),), dilation=2)
neighbourhood("causal", (5, 3), GRID, (1, 2), ((1, 2),), is_causal=True)
neighbourhood("causal_first_dim", (4, 3), GRID, (1, 2, 0), ((1, 2),), is_causal=(True, False), dilation=(2, 1))
neighbourhood("causal_1d", 8, ROW, (1,), ((1, 0),), is_causal=True, dilation=2)
neighbourhood(
    "3d_all", (2, 3, 2), (2, 5, 4, 6, 1, 2), (1, 2, 3), ((1, 3), (2, 1)), dilation=(2, 1, 3), is_causal=(0, 1, 0)
)
neighbourhood("piecewise", (4, 3), GRID, (1, 2), ((1, 2),), dilation=(2, 1), called=piecewise)
neighbourhood("piecewise_3d", (3, 2, 3), (1, 7, 4, 5, 1, 2), (1, 2), ((2, 1),), called=piecewise)
neighbourhood("pieces", (5, 3), GRID, (1, 2), ((1, 2), (2, 1)), wire=("all_to_all",), called=in_pieces)
neighbourhood("pieces_causal", 3, GRID, (1, (None, 1, 1)), (), dilation=2, is_causal=(0, 1), called=in_pieces)
neighbourhood("pieces_1d", 5, ROW, (1,), ((1, 2),), called=in_pieces)
neighbourhood("pieces_dilated", 2, (2, 27, 2, 4), (1,), (), dilation=3, called=in_pieces)
neighbourhood("pieces_of_whole_boxes", (5, 3), (1, 100, 3, 1, 2), (1,), ((1, 2),), called=in_pieces)
neighbourhood("pieces_whole_grid", (9, 11), GRID, (1,), ((1, 2),), called=in_pieces)
