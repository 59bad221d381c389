"""natten's kernels: the same windows as ours on every rank, and asked for only where they are faster.

natten is no dependency. Here a module of its name computes what its documentation says of ``na1d`` to ``na3d``, on
whole grids, by a mask of all pairs; it refuses what natten refuses.
"""

import sys
from contextlib import contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
from cases_neighborhood import brute_force
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import Shard

from core import ShardingError, neighborhood_attention, scatter_tensor, set_neighborhood_kernel
from core.kernels import natten
from core.ops import around
from core.ops.windows import Axis, Window

CASES = {  # shape, size, dilation, causal
    "plane": ((1, 12, 7, 2, 3), (5, 3), 1, False),
    "even": ((2, 11, 6, 1, 3), (4, 2), (2, 3), False),
    "causal": ((1, 13, 5, 1, 3), (3, 4), (2, 1), (True, False)),
    "row": ((1, 23, 2, 3), 6, 3, False),
    "solid": ((1, 9, 4, 5, 1, 3), (3, 2, 3), (1, 2, 1), False),
}
SPLITS = {"two": (0.5, 0.5), "uneven": (0.75, 0.25), "empty": (1, 0)}


def _stand_in(calls, built=True):
    """A module in natten's place; ``calls`` takes the grids that it is given."""
    module = ModuleType("natten")
    module.__spec__ = ModuleSpec("natten", None)
    module.HAS_LIBNATTEN = built

    def attend(q, k, v, kernel_size, dilation, is_causal, scale):
        grid = q.shape[1:-2]
        assert q.shape == k.shape == v.shape and len(grid) == len(kernel_size)
        assert all(s * d <= n for s, d, n in zip(kernel_size, dilation, grid))
        calls.append(tuple(grid))
        return brute_force(q, k, v, kernel_size, dilation, is_causal, scale)

    module.na1d = module.na2d = module.na3d = attend
    for name in natten._CONFIGS:
        setattr(module, name, lambda q, k, v: [(64, 64)] if q.shape == k.shape == v.shape else [])
    return module


@contextmanager
def _installed(calls, asked, **more):
    sys.modules["natten"] = _stand_in(calls, **more)
    natten._library.cache_clear()
    try:
        set_neighborhood_kernel(asked)
        yield
    finally:
        set_neighborhood_kernel("auto")
        del sys.modules["natten"]
        natten._library.cache_clear()
        natten._faster.clear()


def _results(operands, call):
    out = neighborhood_attention(*operands, *call, scale=0.7)
    return out, *torch.autograd.grad((out * out).sum(), operands)


def cut(meshes, name, split, again):
    """How often natten was called; ``again``: in pieces, each once more for the backward pass."""
    shape, *call = CASES[name]
    rows = [round(shape[1] * part) for part in SPLITS[split]]
    rows[1] = shape[1] - rows[0]
    whole = [t.requires_grad_() for t in torch.randn(3, *shape, dtype=torch.float64)]
    wanted, calls = _results(whole, call), []
    shards = [
        scatter_tensor(t.detach(), None, meshes["2"], [Shard(1)], sizes={0: tuple(rows)}, requires_grad=True)
        for t in whole
    ]
    with _installed(calls, "natten"), patch.object(around, "_most_kept", 0 if again else around._most_kept):
        found = _results(shards, call)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.full_tensor(), b, atol=1e-12, rtol=1e-10)
    return len(calls)


@pytest.mark.parametrize("split", SPLITS)
def test_windows_are_those_of_the_whole_grid(pool, split):
    for name in CASES:
        for again in (False, True):
            used = pool.run(cut, name, split, again)[:2]
            there = [1, split != "empty"]
            assert [n > 1 for n in used] == there if again else used == there, (name, used)


def _call(dtype=torch.bfloat16, grad=True, rows=(0, 12)):
    """Operands of some rows of a grid of 12 x 7 points, their axes, and the factor."""
    low, high = Window(3, 1, False, 12).reach(*rows)
    axes = (
        Axis(Window(3, 1, False, 12), rows[0], rows[1] - rows[0], low, high - low),
        Axis(Window(3, 1, False, 7), 0, 7, 0, 7),
    )
    q, k, v = (
        torch.randn(1, n, 7, 2, 4, dtype=dtype, requires_grad=grad) for n in (axes[0].queries, *[axes[0].keys] * 2)
    )
    return q, k, v, axes, 0.5


def _own(q, k, v, axes, scale):
    return q * k.sum() * v.sum()


@pytest.fixture
def timed(monkeypatch):
    """What is timed, and how long it is said to take."""
    asked, times = [], {natten.attention: 2.0, _own: 1.0}
    monkeypatch.setattr(natten, "_seconds", lambda attend, *call: asked.append(attend) or times[attend])
    return asked, times


def test_the_faster_one_is_taken_and_each_kind_timed_once(timed):
    asked, times = timed
    with _installed([], "auto"):
        assert not natten.preferred(*_call(), _own) and asked == [_own, natten.attention]
        times[natten.attention] = 0.5
        assert not natten.preferred(*_call(), _own) and len(asked) == 2
        assert not natten.preferred(*_call(), _own, again=True)  # 0.5 twice is no less than 1
        times[natten.attention] = 0.4
        assert natten.preferred(*_call(rows=(0, 6)), _own, again=True) and asked[5:] == [_own, *[natten.attention] * 2]
        asked[2:] = []
        for i, other in enumerate((_call(grad=False), _call(torch.float16), _call(rows=(0, 5)), _call(rows=(3, 9)))):
            assert natten.preferred(*other, _own) and natten.preferred(*other, _own) and len(asked) == 4 + 2 * i


@pytest.mark.parametrize("why", ["fp32", "no kernel of ours", "own", "compiling", "fake", "narrow", "none compiled"])
def test_not_asked_for(timed, why, monkeypatch):
    timed[1][natten.attention] = 0.5
    *operands, axes, scale = _call(torch.float32 if why == "fp32" else torch.bfloat16)
    mode = FakeTensorMode() if why == "fake" else nullcontext()
    if why == "compiling":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    if why == "narrow":
        axes = axes[0]._replace(window=Window(3, 5, False, 15)), axes[1]
    with _installed([], "own" if why == "own" else "auto", built=why != "none compiled"), mode:
        assert not natten.preferred(*operands, axes, scale, None if why == "no kernel of ours" else _own)
    assert not timed[0]


def test_both_passes_are_timed():
    calls = []
    passes = {"forward": 0, "backward": 0}

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, axes, scale):
            passes["forward"] += 1
            ctx.save_for_backward(q, k, v)
            return q.clone()

        @staticmethod
        def backward(ctx, grad):
            passes["backward"] += 1
            return *ctx.saved_tensors, None, None

    with _installed(calls, "auto"):
        for grad in (True, False):
            natten.preferred(*_call(grad=grad, rows=(3, 9)), Counted.apply)
    assert passes["forward"] == 2 * passes["backward"] > 0
    assert set(calls) == {(8, 7)}  # six rows of queries, and one more of keys at either end


def test_what_is_refused():
    with pytest.raises(ShardingError, match="auto, own, natten"):
        set_neighborhood_kernel("flash")
    older = ModuleType("natten")
    older.__spec__ = ModuleSpec("natten", None)
    with _installed([], "auto"):
        sys.modules["natten"] = older
        natten._library.cache_clear()
        with pytest.raises(ShardingError, match="older than 0.20"):
            set_neighborhood_kernel("natten")
