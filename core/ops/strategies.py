"""Which way the keys of a cut sequence reach the queries, by what each way sends and what its slowest rank computes.

``gather``  every rank gets all keys and values in one message, and keeps them for the backward pass.
``ring``    they go round while blocks are computed, and results are merged in fp32; no rank holds all of them.
``heads``   the cut of queries, keys and values changes from rows to heads, and that of the result back, in four
            messages; under a causal mask every rank has the same work, where the last of a cut sequence has almost
            twice its share.
``dealt``   as ``gather``, but the rows of queries are dealt anew (:mod:`core.ops.dealt`), and results come home: every
            rank has the same work under a causal mask and from uneven parts, whatever the number of heads.

Of n ranks that hold b bytes of keys and values and q of queries each, ``gather`` and ``ring`` send (n - 1) b, ``heads``
(n - 1) / n (b + 2 q), ``dealt`` 2 q more than ``gather`` at most. Computing takes the work of the rank that has most;
``ring`` hides its messages behind it. Half precision and a recent GPU are assumed (:mod:`core.devices`): the question
is which is less, not how long it takes.
"""

from math import prod

from torch.distributed.tensor.placement_types import Shard

from core.devices import DEVICES, FITTED, of_message
from core.dispatch import forget_plans
from core.errors import ShardingError
from core.ops.dealt import deal
from core.spec import chunk_sizes

NAMES = ("auto", "gather", "ring", "heads", "dealt")
_BYTES = 2  # of a number
_MOST_GATHERED = 2**33  # bytes of keys and values on one rank
_MERGE, _CALLS = 17, 20  # bytes that merging a block's result in fp32 moves, per byte of it, and its operations
_DEVICE = DEVICES["h200"]

_chosen = "auto"


def set_attention_strategy(name):
    """How attention over a cut sequence is computed: ``"auto"`` takes what the model says is fastest; ``"gather"``,
    ``"ring"``, ``"heads"`` and ``"dealt"`` ask for one. ``"heads"`` needs at least as many uncut heads as ranks and
    ``"dealt"`` no mask but a causal one; elsewhere keys are gathered."""
    global _chosen
    if name not in NAMES:
        raise ShardingError(f"unknown strategy {name!r}", op="attention", remedy=f"Use one of {', '.join(NAMES)}.")
    _chosen = name
    forget_plans()


def choose(scores, q, k, v, mask, causal, axis):
    """The way to go.

    Args:
        scores: spec of queries times keys, (.., heads, queries, keys), its queries cut by mesh ``axis``.
        q, k, v: specs of the operands; ``k`` or ``v`` are cut by ``axis`` along the keys.
        mask: spec of the mask, or None.
    """
    unfit = {"heads"} if not _fits_heads(scores, q, k, v, mask, axis) else set()
    unfit |= {"dealt"} if mask is not None else set()
    if _chosen != "auto":
        return "gather" if _chosen in unfit else _chosen
    times, kept = seconds(scores, q, k, v, causal, axis)
    unfit |= {"gather", "dealt"} if kept > _MOST_GATHERED else set()
    return min((name for name in times if name not in unfit), key=times.get)  # of equal ones the first, on every rank


def _fits_heads(scores, q, k, v, mask, axis):
    """Whether heads can take over the cut of the rows, and every rank then has all that its heads need."""
    ranks = q.mesh.size(axis)
    if min(s.ndim for s in (q, k, v)) < 3 or scores.shape[-3] < ranks or (mask is not None and mask.is_sharded()):
        return False
    alike = all(s.axis_of(-2) == axis and s.axis_of(-3) is None for s in (q, k, v))
    return alike and all(s.shape[-3] == scores.shape[-3] or s.shape[-3] % ranks == 0 for s in (q, k, v))


def by_heads(spec, axis):
    """The spec of an operand or of the result with its heads cut instead of its rows."""
    return spec.with_axis(axis, Shard(spec.ndim - 3))


def seconds(scores, q, k, v, causal, axis):
    """Of the forward pass, by strategy; and bytes of all keys and values on one rank."""
    ranks, rows = q.mesh.size(axis), scores.sizes[axis]
    others = prod(q.mesh.size(a) for a, _ in scores.cuts() if a != axis)
    keys = sum(prod(s.shape) for s in (k, v)) * _BYTES / others
    result = prod(scores.shape[:-1]) * v.shape[-1] * _BYTES / others
    queries = prod(q.shape) * _BYTES / others
    work = 4 * prod(scores.shape[:-2]) * q.shape[-1] / others / (_DEVICE.half * FITTED.attention)
    ends = [sum(rows[:r]) for r in range(ranks + 1)]
    pairs = [_between(a, b, scores.shape[-1], causal) for a, b in zip(ends, ends[1:])]
    dealt = [sum(_between(*part, scores.shape[-1], causal) for part in parts) for parts in deal(tuple(rows)).parts]
    heads = scores.shape[-3] if scores.ndim > 2 else 1
    slowest, balanced = work * max(pairs), work * sum(pairs) * max(chunk_sizes(heads, ranks)) / heads
    share = (ranks - 1) / ranks
    link = _DEVICE.link(ranks)
    gathered = of_message(share * keys, link)
    merges = _MERGE * result / (_DEVICE.bandwidth * FITTED.bandwidth) + ranks * _CALLS * FITTED.operation
    around = (ranks - 1) * of_message(keys / ranks, link)
    turned = of_message(share * (queries + keys + result) / ranks, link) + 3 * FITTED.latency
    moved = of_message(share * (queries + result) / ranks, link) + FITTED.latency
    return {
        "gather": slowest + gathered,
        "ring": max(slowest, around) + merges,
        "heads": balanced + turned,
        "dealt": work * max(dealt) + gathered + moved,
    }, keys


def _between(first, last, keys, causal):
    """How many keys these queries see together."""
    return _pairs(last, keys, causal) - _pairs(first, keys, causal)


def _pairs(rows, keys, causal):
    """How many keys the first ``rows`` queries see together."""
    if not causal:
        return rows * keys
    within = min(rows, keys)
    return within * (within + 1) // 2 + (rows - within) * keys
