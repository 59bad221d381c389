"""Which way keys travel: told by the model, from sizes alone, and what a person asks for comes first."""

from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from cases_attention import with_strategy
from test_interior import Calls
from torch.distributed.tensor import Replicate, Shard

from core import ShardingError, scatter_tensor
from core.debug import trace
from core.ops import strategies
from core.ops.attention import layout
from core.ops.dealt import deal
from core.plan import fake_mesh
from core.spec import make_spec

FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def _chosen(ranks, heads, rows, causal=False, channels=64, mask=None, shared=None, cut=2):
    with fake_mesh((1, ranks)) as mesh:
        q = make_spec(mesh, [Shard(cut)], (1, heads, rows, channels))
        k = make_spec(mesh, [Shard(cut)], (1, shared or heads, rows, channels))
        mask = mask and make_spec(mesh, [mask], (rows, rows))
        at = layout(q, k, k, mask, 0.0, causal, None, shared is not None)
        return at.axis is not None and strategies.choose(at.scores, q, k, k, mask, causal, at.axis)


@pytest.mark.parametrize(
    "expected, call",
    [
        (False, dict(ranks=2, heads=16, rows=2**17, cut=1)),  # heads are cut already
        ("gather", dict(ranks=2, heads=16, rows=2**14)),
        ("heads", dict(ranks=8, heads=16, rows=2**14)),  # a quarter of the bytes
        ("heads", dict(ranks=2, heads=16, rows=2**17, causal=True)),  # the same work for both
        ("gather", dict(ranks=8, heads=12, rows=2**17)),  # four ranks would have two heads, four one
        ("gather", dict(ranks=8, heads=4, rows=2**17)),
        ("dealt", dict(ranks=8, heads=4, rows=2**17, causal=True)),  # too few heads for as many ranks
        ("gather", dict(ranks=8, heads=4, rows=2**10, causal=True)),  # the messages would take longer
        ("ring", dict(ranks=8, heads=4, rows=2**24)),  # all keys would be 16 GiB
        ("gather", dict(ranks=4, heads=16, rows=2**17, shared=2)),  # two heads of keys for four ranks
        ("gather", dict(ranks=8, heads=16, rows=2**14, mask=Shard(0))),  # the mask would have to travel
        ("heads", dict(ranks=8, heads=16, rows=2**14, mask=Replicate())),
    ],
)
def test_what_is_least(expected, call):
    assert _chosen(**call) == expected


def test_the_model_is_about_messages_and_the_slowest_rank():
    with fake_mesh((1, 4)) as mesh:
        q = make_spec(mesh, [Shard(2)], (1, 8, 2**16, 64))
        scores = layout(q, q, q, None, 0.0, False, None, False).scores
        whole, kept = strategies.seconds(scores, q, q, q, False, 0)
        causal, _ = strategies.seconds(scores, q, q, q, True, 0)
    assert kept == 2 * 8 * 2**16 * 64 * 2
    assert causal["heads"] / whole["heads"] == pytest.approx(0.5, rel=0.1)
    assert causal["gather"] / whole["gather"] == pytest.approx(7 / 8, rel=0.1)  # the last quarter of the rows
    assert causal["dealt"] / whole["dealt"] == pytest.approx(0.5, rel=0.1)
    uneven = q.with_axis(0, Shard(2), (2**15, 2**14, 2**14, 0))
    slow, _ = strategies.seconds(scores.with_axis(0, Shard(2), uneven.sizes[0]), uneven, uneven, uneven, False, 0)
    assert slow["gather"] / whole["gather"] == pytest.approx(2, rel=0.1)
    assert slow["dealt"] == pytest.approx(whole["dealt"], rel=0.01)


def test_ranks_choose_alike_between_equals(monkeypatch):
    """Whatever order the ranks' sets have, which differs from process to process."""
    for pair in combinations(("gather", "ring", "heads", "dealt"), 2):
        times = {name: 1.0 if name in pair else 2.0 for name in ("gather", "ring", "heads", "dealt")}
        monkeypatch.setattr(strategies, "seconds", lambda *args, times=times: (times, 0))
        assert _chosen(ranks=2, heads=16, rows=64) == pair[0]


@pytest.mark.parametrize("sizes", [(5, 4), (3, 0, 6, 1), (1, 0, 0), (0, 0), (7,), (2, 11, 1)])
def test_every_row_is_dealt_once_and_comes_home(sizes):
    dealt, rows = deal(sizes), list(range(sum(sizes)))
    laid = [row for parts in dealt.parts for low, high in parts for row in rows[low:high]]
    assert sorted(laid) == rows and sum(dealt.sizes) == len(rows)
    assert [[row for low, high in home for row in laid[low:high]] for home in dealt.home] == [
        rows[sum(sizes[:r]) :][:n] for r, n in enumerate(sizes)
    ]
    seen = [sum(row + 1 for low, high in parts for row in rows[low:high]) for parts in dealt.parts]
    assert max(seen) - min(seen) <= 2 * len(rows)  # of a causal mask: a row more or less


def asked_for(meshes):
    q = scatter_tensor(torch.randn(1, 4, 8, 2), None, meshes["2"], [Shard(2)])
    kinds = {}
    for name in strategies.NAMES:
        with trace() as wire:
            with_strategy(name, F.scaled_dot_product_attention)(q, q, q)
        kinds[name] = [m.kind for m in wire.messages]
    assert kinds["auto"] == kinds["gather"] == ["all_gather"]
    assert kinds["ring"] == ["all_to_all"] and kinds["heads"] == ["all_to_all"] * 4
    assert kinds["dealt"] == ["all_gather", "all_to_all", "all_to_all"]
    with pytest.raises(ShardingError, match="auto, gather, ring, heads, dealt"):
        strategies.set_attention_strategy("tree")


def in_flight(meshes):
    """In a ring of four the next block of keys is under way while one is computed with, in both passes."""
    q = scatter_tensor(torch.randn(1, 2, 12, 4), None, meshes["4"], [Shard(2)], requires_grad=True)
    with Calls() as forward:
        out = with_strategy("ring", F.scaled_dot_product_attention)(q, q, q)
    with Calls() as backward:
        out.backward(torch.ones_like(out))
    for calls, attention in ((forward, FLASH), (backward, f"{FLASH}_backward")):
        order = calls.order("all_to_all_single", "wait_tensor", attention)
        before = [order[:i] for i, name in enumerate(order) if name == attention]
        assert [b.count("all_to_all_single") - b.count("wait_tensor") for b in before] == [1, 1, 1, 0], order


@pytest.mark.parametrize("check", [asked_for, in_flight])
def test_what_is_asked_for(pool, check):
    pool.run(check)
