"""Attention that the table of cases does not see: autocast, dropped weights by the numbers, DTensors, compiled code."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from cases_attention import with_strategy
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from core import ShardingError, ShardTensor, knn, neighborhood_attention, radius_search, scatter_tensor, set_fallback
from core.ops import kernel, neighborhood
from core.ops.around import pieces
from core.ops.windows import Axis, Window

SEQUENCE, HEADS, KEYS = (2, 2, 2), (1, 1, 1), (None, 2, 2)


def drawn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def cut(x, mesh, dim):
    """A leaf: ``x`` cut along ``dim``, or plain."""
    if dim is None:
        return x.detach().clone().requires_grad_()
    return scatter_tensor(x.detach(), None, mesh, [Shard(dim)], requires_grad=True)


def whole(x):
    return x.full_tensor() if isinstance(x, ShardTensor) else x


# -- memory ------------------------------------------------------------------------------------------------------------
def heads_become_channels(meshes, strategy):
    """The result lies as the queries do, so that heads go back to channels by a view of the part and of the whole."""
    attend = with_strategy(strategy, F.scaled_dot_product_attention)
    plain = drawn(2, 3, 4, 8).requires_grad_()
    for pick in (lambda x: x.transpose(1, 2), lambda x: x.chunk(2, -1)[0].transpose(1, 2)):
        (expected,) = torch.autograd.grad(_channels(attend, pick(plain))[1].sin().sum(), plain)
        for name, places in (("1", [1]), ("2", [1]), ("4", [1]), ("2x2", [1, 0]), ("2x2", [0, 1])):
            x = scatter_tensor(plain.detach(), None, meshes[name], [Shard(d) for d in places], requires_grad=True)
            for seen in (pick(x), pick(x).detach()):
                out, channels = _channels(attend, seen)
                parts = [t._local_tensor.untyped_storage().data_ptr() for t in (out, channels)]
                assert parts[0] == parts[1], (name, places)
                torch.testing.assert_close(whole(channels), _channels(attend, pick(plain))[1])
                if seen.requires_grad:
                    channels.sin().sum().backward()
            torch.testing.assert_close(whole(x.grad), expected)
            channels.zero_()
            assert not whole(out).any()


def _channels(attend, q):
    out = attend(q, q, q)
    return out, out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("strategy", ["gather", "ring", "heads", "dealt"])
def test_heads_become_channels(pool, strategy):
    pool.run(heads_become_channels, strategy)


# -- half precision ----------------------------------------------------------------------------------------------------
def under_autocast(meshes, strategy):
    """The type of the result is autocast's and that of the gradients the operands'; both are as near as bf16 is."""
    plain = [drawn(1, 2, 24, 8, dtype=torch.float32, seed=i).requires_grad_() for i in range(3)]
    wide = [t.detach().double().requires_grad_() for t in plain]
    expected = F.scaled_dot_product_attention(*wide)
    expected.sum().backward()
    fn = with_strategy(strategy, F.scaled_dot_product_attention)
    for name in ("1", "2", "4"):
        for dims in (SEQUENCE, HEADS, KEYS, (2, None, None)):
            operands = [cut(t, meshes[name], d) for t, d in zip(plain, dims)]
            with torch.autocast("cpu", torch.bfloat16):
                out = fn(*operands)
                assert out.dtype == torch.bfloat16
                dropped = fn(*operands, dropout_p=0.5)
                assert dropped.dtype == torch.bfloat16
                around = fn(*(t.double() for t in operands))
                assert around.dtype == torch.float64  # torch leaves double precision alone
            torch.testing.assert_close(whole(out).double(), expected, atol=0.02, rtol=0.02)
            torch.testing.assert_close(whole(around), expected, atol=1e-6, rtol=1e-6)
            out.float().sum().backward()
            for a, b in zip(operands, wide):
                assert a.grad.dtype == torch.float32
                torch.testing.assert_close(whole(a.grad).double(), b.grad, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("strategy", ["gather", "ring", "heads", "dealt"])
def test_autocast(pool, strategy):
    pool.run(under_autocast, strategy)


def half_merges(meshes):
    """Merged outputs and gradients of bf16 and fp16 are as near to fp64 on four ranks as on one."""
    for dtype, tolerance in ((torch.bfloat16, 0.03), (torch.float16, 0.004)):
        plain = [drawn(1, 2, 24, 8, dtype=dtype, seed=i) for i in range(3)]
        wide = [t.double().requires_grad_() for t in plain]
        expected = F.scaled_dot_product_attention(*wide)
        expected.sum().backward()
        for name in ("1", "2", "4"):
            operands = [cut(t, meshes[name], d) for t, d in zip(plain, KEYS)]
            out = F.scaled_dot_product_attention(*operands)
            assert out.dtype == dtype
            torch.testing.assert_close(whole(out).double(), expected, atol=tolerance, rtol=tolerance)
            out.sum().backward()
            for a, b in zip(operands, wide):
                torch.testing.assert_close(whole(a.grad).double(), b.grad, atol=2 * tolerance, rtol=tolerance)


def test_half_precision_merges(pool):
    pool.run(half_merges)


def half_neighbourhood(meshes):
    """Cut or whole, in half precision or under autocast, it is one computation; types that differ meet as elsewhere."""
    x = drawn(2, 9, 8, 2, 4, dtype=torch.bfloat16)
    y = cut(x, meshes["2"], 1).detach()
    for size, dilation, causal in ((3, 1, False), ((4, 3), (2, 1), (False, True))):
        expected = neighborhood_attention(x, x, x, size, dilation, causal)
        got = neighborhood_attention(y, y, y, size, dilation, causal)
        assert got.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(whole(got), expected)
        assert neighborhood_attention(y, y.float(), y, size).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert neighborhood_attention(y.float(), y.float(), y.float(), size).dtype == torch.bfloat16


def test_half_precision_neighbourhood(pool):
    pool.run(half_neighbourhood)


def test_tables_of_inference_serve_training():
    x = drawn(2, 23, 2, 4).requires_grad_()
    with torch.inference_mode():
        expected = neighborhood_attention(x, x, x, 3, 2)
    out = neighborhood_attention(x, x, x, 3, 2)
    out.sum().backward()
    torch.testing.assert_close(out, expected.clone())


def mixed_types(meshes):
    q, k = cut(drawn(1, 2, 8, 4), meshes["2"], 2), cut(drawn(1, 2, 8, 4), meshes["2"], 2).float()
    with pytest.raises(ShardingError, match="types"):
        F.scaled_dot_product_attention(q, k, k)


def test_mixed_types_are_refused(pool):
    pool.run(mixed_types)


def terms_add_up_in_fp32(meshes, strategy):
    """Of four ranks one gives 256 to the gradient of a value and three give 0.5, which bf16 would lose each time."""
    q, k, v = (cut(torch.zeros(1, 4, 4, 8, dtype=torch.bfloat16), meshes["4"], 2) for _ in range(3))
    grad = torch.tensor([1024.0, 2, 2, 2]).bfloat16().view(1, 1, 4, 1).expand(1, 4, 4, 8)
    out = with_strategy(strategy, F.scaled_dot_product_attention)(q, k, v)
    out.backward(cut(grad.contiguous(), meshes["4"], 2).detach())
    assert (whole(v.grad) == 258).all(), whole(v.grad)  # 257.5, rounded once


@pytest.mark.parametrize("strategy", ["gather", "ring", "heads", "dealt"])
def test_terms_add_up_in_fp32(pool, strategy):
    pool.run(terms_add_up_in_fp32, strategy)


# -- dropped weights ---------------------------------------------------------------------------------------------------
def dropped_weights(meshes):
    """With equal scores and values that name their key, the result shows which weights fell."""
    n, p = 48, 0.3
    q, k, v = torch.zeros(2, 3, n, 4), torch.zeros(2, 3, n, 4), torch.eye(n).expand(2, 3, n, n).contiguous()
    fields = []
    for name, dims in (("1", SEQUENCE), ("2", SEQUENCE), ("4", HEADS), ("4", KEYS), ("1", SEQUENCE)):
        operands = [t if d is None else cut(t, meshes[name], d).detach() for t, d in zip((q, k, v), dims)]
        torch.manual_seed(len(fields) // 4)  # the last one has another seed
        kept = whole(F.scaled_dot_product_attention(*operands, dropout_p=p)) * n * (1 - p)
        torch.testing.assert_close(kept, kept.round())
        fields.append(kept.round() > 0)
    assert all(torch.equal(f, fields[0]) for f in fields[:4])
    assert not torch.equal(fields[4], fields[0])
    kept = fields[0].double()
    assert abs(kept.mean() - (1 - p)) < 0.01
    for dim in (0, 1, 2, 3):  # no row, head or sample repeats another
        a, b = kept.narrow(dim, 0, 1), kept.narrow(dim, 1, 1)
        assert abs((a * b).mean() - (1 - p) ** 2) < 0.05


def test_dropped_weights(pool):
    pool.run(dropped_weights)


# -- inside the DTensors of another mesh -------------------------------------------------------------------------------
def heads_over_tp(meshes):
    """Heads cut over ``tp``, batch or sequence over ``domain``."""
    domain, tp = meshes["domain x tp"]["domain"], meshes["domain x tp"]["tp"]
    mine = slice(2 * tp.get_local_rank(), 2 * tp.get_local_rank() + 2)
    set_fallback("error")
    try:
        for dim in (0, 2):
            for options in ({}, {"is_causal": True}):
                plain = [drawn(2, 4, 7, 8, seed=i).requires_grad_() for i in range(3)]
                leaves = [cut(t[:, mine], domain, dim) for t in plain]
                out = F.scaled_dot_product_attention(
                    *(DTensor.from_local(t, tp, [Shard(1)]) for t in leaves), **options
                )
                assert out.placements == (Shard(1),)
                out = out.to_local()
                expected = F.scaled_dot_product_attention(*plain, **options)
                torch.testing.assert_close(whole(out), expected[:, mine])
                weight = drawn(*expected.shape, seed=4)
                (out * weight[:, mine]).sum().backward()
                (expected * weight).sum().backward()
                for a, b in zip(leaves, plain):
                    torch.testing.assert_close(whole(a.grad), b.grad[:, mine])
    finally:
        set_fallback("warn")


def test_heads_over_another_mesh(pool):
    pool.run(heads_over_tp)


def test_the_compiler_is_not_loaded_with_core():
    code = "import core, sys; assert 'torch._dynamo' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


# -- compiled code -----------------------------------------------------------------------------------------------------
def compiled(meshes):
    q, k, x = drawn(2, 4, 7, 6), drawn(2, 4, 9, 6), drawn(2, 7, 8)
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True).double()
    attention = F.scaled_dot_product_attention
    rows = (
        (with_strategy("ring", lambda q, k: attention(q, k, k, is_causal=True)), (q, k), (2, 2)),
        (lambda q, k: attention(q, k, k, dropout_p=0.3), (q, k), (None, 2)),
        (layer, (x,), (1,)),
        (lambda x: neighborhood_attention(x, x, x, (4, 3), (2, 1), (False, True)), (drawn(1, 9, 5, 2, 4),), (1,)),
        (lambda p, q: (*knn(p, q, 3), *radius_search(p, q, 1.0, 4)[1:]), (x[0], drawn(5, 8)), (0, 0)),
    )
    for fn, operands, dims in rows:
        torch._dynamo.reset()
        found = []
        for call in (fn, torch.compile(fn, fullgraph=True, dynamic=False, backend="aot_eager")):
            leaves = [cut(t, meshes["2"], d) for t, d in zip(operands, dims)]
            torch.manual_seed(1)
            outs = call(*leaves)
            outs = outs if isinstance(outs, tuple) else (outs,)
            outs[0].sum().backward()
            found.append([whole(o).detach() for o in outs] + [whole(t.grad) for t in leaves])
        for eager, graph in zip(*found):
            torch.testing.assert_close(graph, eager, atol=1e-10, rtol=1e-10)


@pytest.mark.nightly  # whole compiled models are seen in every run
def test_compiled_in_one_graph(pool):
    pool.run(compiled, timeout=240)


# -- channels that a kernel does not take ------------------------------------------------------------------------------
def test_channels_are_filled_up(monkeypatch):
    """As on a GPU, whose kernels take multiples of eight: the values and gradients of the channels that there are."""
    tensors = [drawn(2, 3, 5, 6, seed=i).requires_grad_() for i in range(3)]
    monkeypatch.setitem(kernel._channels, "cpu", 8)
    seen = []
    forward = kernel._FORWARD[kernel.CPU]
    monkeypatch.setitem(kernel._FORWARD, kernel.CPU, lambda q, *rest: seen.append(q.shape[-1]) or forward(q, *rest))
    out, total = kernel.forward(kernel.CPU, *tensors, True, 0.4)
    expected = F.scaled_dot_product_attention(*tensors, is_causal=True, scale=0.4)
    torch.testing.assert_close(out, expected)
    grad = drawn(2, 3, 5, 6, seed=7)
    found = kernel.backward(kernel.CPU, grad, *tensors, out, total, True, 0.4)
    torch.testing.assert_close(found, list(torch.autograd.grad(expected, tensors, grad)))
    assert seen == [8]


def no_channels(meshes):
    """Torch gives no channels, and so do shards."""
    for fn, dim in (
        (lambda x: F.scaled_dot_product_attention(x, x, x), 2),
        (lambda x: neighborhood_attention(x, x, x, 3), 1),
    ):
        x = scatter_tensor(torch.ones(2, 5, 5, 2, 0), None, meshes["2"], [Shard(dim)], requires_grad=True)
        fn(x).sum().backward()
        assert fn(x).shape == x.grad.shape == x.shape


def test_no_channels(pool):
    pool.run(no_channels)


@pytest.mark.parametrize(
    "total, ranks, size, dilation", [(256, 2, 31, 1), (250, 3, 31, 1), (60, 3, 5, 1), (300, 2, 7, 3)]
)
def test_pieces_of_a_neighborhood_cost_no_box_more(total, ranks, size, dilation):
    """All queries once, the inner ones within own keys, and the boxes of a kernel as many as without pieces."""
    window, rows, box = Window(size, dilation, False, total), -(-total // ranks), 8 * dilation
    for start in range(0, total, rows):
        stop = min(total, start + rows)
        low, high = window.reach(start, stop)
        found = pieces(Axis(window, start, stop - start, low, high - low))
        queries = [range(p.axis.first_query, p.axis.first_query + p.axis.queries) for p in found]
        assert [i for r in queries for i in r] == list(range(start, stop))
        inner = [i for p, r in zip(found, queries) for i in r if p.own]
        assert inner and start <= min(map(window.first, inner)) and max(map(window.last, inner)) < stop
        assert sum(-(-len(r) // box) for r in queries) == -(-(stop - start) // box)


def test_a_checkpoint_around_a_neighborhood_in_pieces(monkeypatch):
    """What a pass has saved is read once: a checkpoint computes it anew and gives it once."""
    monkeypatch.setattr(neighborhood, "_most_scores", 1500)
    neighborhood._pieces.cache_clear()
    q, k, v = torch.randn(3, 1, 40, 9, 2, 4, dtype=torch.float64).requires_grad_()
    outs = neighborhood_attention(q, k, v, 5), checkpoint(neighborhood_attention, q, k, v, 5, use_reentrant=False)
    plain, again = (torch.autograd.grad(out.sin().sum(), (q, k, v)) for out in outs)
    assert all(map(torch.equal, plain, again))
    neighborhood._pieces.cache_clear()
