"""Rows of attention over neighbourhoods."""

import torch
from cases import case

from core import neighborhood_attention


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
