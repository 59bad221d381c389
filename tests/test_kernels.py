"""The kernel of attention over neighbourhoods, in Triton's interpreter: held against the tiles of plain torch in fp64.

Whether a process interprets kernels is settled before it loads Triton, so one process of its own, this file, computes
all cases and prints how far they are off; on a GPU ``benchmarks/neighborhood.py`` holds the compiled kernel against
the same tiles.
"""

import json
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from launch import interpreted

TOLERANCE = {"float32": 2e-6, "float16": 4e-3}


class Case(NamedTuple):
    """A call; ``rows`` are the queries at hand along each dim, all where None, ``boxes`` those of the kernel."""

    shape: tuple
    size: tuple
    dilation: tuple
    causal: tuple
    rows: tuple = None
    dtype: str = "float32"
    boxes: tuple = (32, 16)


CASES = {
    "row, batch, heads": Case((2, 37, 3, 5), (7,), (1,), (0,)),
    "row, even, part": Case((1, 61, 1, 5), (6,), (1,), (0,), ((9, 49),)),
    "row, dilated, causal, part": Case((1, 90, 1, 5), (5,), (2,), (1,), ((4, 81),), boxes=(16, 16)),
    "boxes as they are": Case((1, 4, 19, 1, 48), (3, 5), (1, 1), (0, 0), boxes=None),
    "even": Case((1, 7, 9, 1, 5), (4, 2), (1, 1), (0, 0)),
    "first rows": Case((1, 13, 9, 1, 5), (4, 5), (1, 1), (0, 0), ((0, 3), (0, 9))),
    "last rows": Case((1, 13, 9, 1, 5), (5, 4), (1, 1), (0, 0), ((9, 13), (2, 9))),
    "rows between": Case((1, 13, 9, 1, 5), (6, 3), (1, 1), (0, 0), ((4, 9), (3, 4)), boxes=(16, 32)),
    "dilated": Case((1, 10, 9, 1, 5), (3, 4), (2, 2), (0, 0), ((3, 10), (0, 9))),
    "dilated, fewer rows than classes": Case((1, 12, 7, 1, 5), (3, 3), (4, 1), (0, 0), ((5, 7), (0, 7))),
    "causal": Case((1, 9, 8, 1, 5), (5, 3), (1, 2), (1, 0)),
    "causal, even, part": Case((1, 9, 8, 1, 5), (3, 4), (1, 1), (0, 1), ((2, 9), (1, 7))),
    "whole grid": Case((1, 6, 7, 1, 48), (6, 7), (1, 1), (0, 0)),
    "one point": Case((1, 4, 5, 1, 5), (1, 1), (1, 1), (0, 0)),
    "solid": Case((1, 4, 4, 5, 1, 5), (3, 2, 3), (1, 1, 1), (0, 0, 0)),
    "solid, all at once": Case((1, 5, 4, 6, 1, 5), (2, 3, 2), (2, 1, 2), (0, 1, 0), ((1, 5), (0, 3), (2, 6))),
    "half": Case((1, 7, 8, 1, 48), (3, 5), (1, 1), (0, 0), dtype="float16", boxes=(32, 32)),
}


@pytest.fixture(scope="module")
def errors():
    """case -> relative errors of the result and of the gradients of q, k and v."""
    return interpreted(__file__)


@pytest.mark.parametrize("name", CASES)
def test_against_tiles(errors, name):
    assert len(errors[name]) == 4 and max(errors[name]) < TOLERANCE[CASES[name].dtype], errors[name]


@pytest.mark.parametrize("name", ["strided", "autocast", "compiled", "pieces"])
def test_ways_to_call_it(errors, name):
    assert max(errors[name]) < TOLERANCE["float16" if name == "autocast" else "float32"], errors[name]


# -- the process that interprets --------------------------------------------------------------------------------------
def _drawn(case):
    """q, k and v at hand, and the axes."""
    from core.ops.windows import Axis, Window

    tensors = list(torch.randn(3, *case.shape, dtype=torch.float64).to(getattr(torch, case.dtype)).unbind())
    axes = []
    for dim, call in enumerate(zip(case.size, case.dilation, map(bool, case.causal), case.shape[1:]), 1):
        window = Window(*call)
        start, stop = case.rows[dim - 1] if case.rows else (0, window.total)
        low, high = window.reach(start, stop)
        for i, (first, last) in enumerate([(start, stop), (low, high), (low, high)]):
            tensors[i] = tensors[i].narrow(dim, first, last - first)
        axes.append(Axis(window, start, stop - start, low, high - low))
    return tensors, tuple(axes)


def _far(got, wanted):
    return [
        ((a.double() - b).abs().max() / b.abs().max().clamp_min(1)).item() for a, b in zip(got, wanted, strict=True)
    ]


def _both(function, tensors, wanted=None, dtype=torch.float64):
    """Errors of a function, result and gradients, where the truth is ``wanted``, or itself in fp64."""
    found = []
    cotangent = torch.randn(tensors[0].shape, dtype=torch.float64)
    for f, kind in ((wanted or function, dtype), (function, tensors[0].dtype)):
        leaves = [t.detach().to(kind).requires_grad_() for t in tensors]
        out = f(*leaves)
        found.append((out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))))
    return _far(found[1], found[0])


class _TwoRanks(torch.autograd.Function):
    """Attention in pieces on two ranks, one after the other: rows of others are cut from the whole, and gradients of
    these are added to its own."""

    @staticmethod
    def forward(ctx, q, k, v):
        from core.ops.around import Around, Halo
        from core.ops.windows import Axis, Window

        window, n = Window(4, 1, False, q.shape[1]), q.shape[1] // 2
        reach, across = (window.reach(0, n), window.reach(n, 2 * n)), Window(3, 1, False, q.shape[2])
        ctx.leaves, ctx.outs, ctx.messages = [], [], _Messages(k, v)
        for rank, (low, high) in enumerate(reach):
            own = [t[:, rank * n : rank * n + n].detach().requires_grad_() for t in (q, k, v)]
            axes = Axis(window, rank * n, n, low, high - low), Axis(across, 0, q.shape[2], 0, q.shape[2])
            halo = Halo(1, (n, n), reach, SimpleNamespace(rank=rank, size=2))
            with torch.enable_grad(), patch("core.ops.around.c", ctx.messages):
                ctx.outs.append(Around.apply(*own, [halo], None, axes, 0.4))
            ctx.leaves.append(own)
        return torch.cat(ctx.outs, 1)

    @staticmethod
    def backward(ctx, grad):
        found = []
        with patch("core.ops.around.c", ctx.messages):
            for out, leaves, part in zip(ctx.outs, ctx.leaves, grad.chunk(2, 1)):
                found.append(torch.autograd.grad(out, leaves, part))
        dq, dk, dv = (torch.cat(parts, 1) for parts in zip(*found))
        return dq, dk + ctx.messages.home[0], dv + ctx.messages.home[1]


class _Messages:
    def __init__(self, *whole):
        self.whole, self.home = whole, [torch.zeros_like(t) for t in whole]

    def start_exchange(self, tensors, dim, sizes, wanted, group):
        rows = wanted[group.rank]
        return lambda: [torch.cat([t[:, low:high] for low, high in rows], 1) for t in self.whole]

    def start_return(self, grads, dim, sizes, wanted, group):
        rows = wanted[group.rank]
        for total, grad in zip(self.home, grads):
            for (low, high), part in zip(rows, grad.split([high - low for low, high in rows], 1)):
                total[:, low:high] += part
        return lambda tensors: tensors


def _interpreted():
    from core import neighborhood_attention
    from core.kernels import neighborhood
    from core.ops.neighborhood import _attention

    table, far = neighborhood.CONFIGS, {}
    for name, case in CASES.items():
        torch.manual_seed(0)
        neighborhood.CONFIGS = table
        if case.boxes:
            neighborhood.CONFIGS = {key: [neighborhood.Config(*case.boxes, 4, 1, True)] * 3 for key in table}
        tensors, axes = _drawn(case)
        far[name] = _both(lambda q, k, v, axes=axes: _attention(q, k, v, axes, 0.4), tensors)

    neighborhood.CONFIGS = {key: [neighborhood.Config(32, 32, 4, 1)] * 3 for key in table}
    x = torch.randn(3, 1, 6, 7, 2, 4)
    turned = [t.transpose(1, 3).contiguous() for t in x]
    far["strided"] = _both(
        lambda q, k, v: neighborhood_attention(
            q.transpose(1, 3), k.transpose(1, 3), v.transpose(1, 3).mT.contiguous().mT, 3
        ).transpose(1, 3),
        turned,
    )
    with torch.autocast("cpu", torch.float16):
        far["autocast"] = _both(lambda *t: neighborhood_attention(*t, 3), x.unbind())
    step = torch.compile(lambda *t: neighborhood_attention(*t, (3, 4)), fullgraph=True, backend="aot_eager")
    far["compiled"] = _both(step, x.unbind(), lambda *t: neighborhood_attention(*t, (3, 4)))
    grids = torch.randn(3, 1, 14, 6, 2, 4).unbind()
    far["pieces"] = _both(_TwoRanks.apply, grids, lambda *t: neighborhood_attention(*t, (4, 3), scale=0.4))
    return far


if __name__ == "__main__":
    print(json.dumps(_interpreted()))
