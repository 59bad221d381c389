"""Attention between many points and few slots, both ways, without the matrix of their weights.

Every point belongs softly to all slots, w = softmax over the slots of q k^T. ``slot_read`` is what points take from
slots, attention as usual with the points as queries. ``slot_sums`` is what slots get from points, the weights
transposed. Kernels of our own compute both on a GPU, and their derivatives (:mod:`core.kernels.slots`), those of
torch's attention everywhere else (:mod:`core.ops.slot_tiles`); no weight is ever stored.

Where points are cut the sums are pending, one small all-reduce; reading sends nothing. Source: the slices of Wu et al.,
Transolver, arXiv 2402.02366.
"""

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function

from core.dispatch import Plan, op
from core.errors import ShardingError
from core.kernels import is_gpu
from core.kernels.slot_operators import SlotRead, SlotSums, has_slot_kernel
from core.ops import slot_tiles
from core.ops.block import result_dtype
from core.ops.graph import operator
from core.ops.matmul import contract


def slot_sums(q, k, v):
    """Sums of values by slot, ``sum_i softmax_g(q_i . k_g) v_i``.

    Args:
        q: (batch, heads, points, channels), scaled as it should be.
        k: (batch or 1, heads or 1, slots, channels).
        v: (batch or 1, heads or 1, points, values).

    Returns:
        (batch, heads, slots, values) in fp32 or wider. Differentiable once.
    """
    if torch.compiler.is_dynamo_compiling():
        return _sums_operator(q, k, v)
    _must_be_floating(q, k, v)
    if has_torch_function((q, k, v)):
        return handle_torch_function(slot_sums, (q, k, v), q, k, v)
    _check(q, k, v, q)
    q, k, v = _of_one_type(q, k, v)
    if has_slot_kernel(q, k, v):
        return SlotSums.apply(q, k, _for_all(v, q))
    return slot_tiles.Sums.apply(q, _for_all(k, q), _for_all(v, q))


def slot_read(q, k, values):
    """What points take from slots, ``sum_g softmax_g(q_i . k_g) values_g``.

    Args:
        q: (batch, heads, points, channels), scaled as it should be.
        k: (batch or 1, heads or 1, slots, channels).
        values: (batch or 1, heads or 1, slots, values).

    Returns:
        (batch, heads, points, values). Differentiable once.
    """
    if torch.compiler.is_dynamo_compiling():
        return _read_operator(q, k, values)
    _must_be_floating(q, k, values)
    if has_torch_function((q, k, values)):
        return handle_torch_function(slot_read, (q, k, values), q, k, values)
    _check(q, k, values, k)
    q, k, values = _of_one_type(q, k, values)
    if has_slot_kernel(q, k, values):
        return SlotRead.apply(q, k, values)
    missing = q.shape[-1] - values.shape[-1]  # torch's kernels take as many values as channels
    filled = F.pad(values, (0, missing)) if missing > 0 else values
    return slot_tiles.Read.apply(q, _for_all(k, q), _for_all(filled, q))[..., : values.shape[-1]]


def with_one(channels, device):
    """How many channels make room for a one after so many others: on a GPU, whose kernels read rows fastest that begin
    at multiples of 16 bytes, the next multiple of eight."""
    return channels // 8 * 8 + 8 if is_gpu(device) else channels + 1


_sums_operator = operator("slot_sums(Tensor q, Tensor k, Tensor v) -> Tensor", slot_sums)
_read_operator = operator("slot_read(Tensor q, Tensor k, Tensor values) -> Tensor", slot_read)


@op(slot_sums)
def sums_rule(func, q, k, v):
    _check(q, k, v, q)
    return Plan(*contract(func, [(q, "bhnc"), (k, "bhgc"), (v, "bhnd")], "bhgd", stretches="bh", whole="cgd"))


@op(slot_read)
def read_rule(func, q, k, values):
    _check(q, k, values, k)
    cuts = contract(func, [(q, "bhnc"), (k, "bhgc"), (values, "bhgd")], "bhnd", stretches="bh", whole="cgd")
    return Plan(*cuts, order_of=0)


def _check(q, k, values, alike):
    fit = q.ndim == k.ndim == values.ndim == 4 and q.shape[-1] == k.shape[-1] and values.shape[2] == alike.shape[2]
    lead = fit and all(t.shape[i] in (1, q.shape[i]) for t in (k, values) for i in (0, 1))
    if not lead:
        raise ShardingError(
            "shapes are not (batch, heads, points, channels), (batch, heads, slots, channels) and values of either",
            op="slots",
            operands=[tuple(t.shape) for t in (q, k, values)],
        )


def _must_be_floating(*tensors):
    for t in tensors:
        if not t.dtype.is_floating_point:
            raise ShardingError(f"of {t.dtype}", op="slots", remedy="Give floating-point numbers.")


def _of_one_type(q, k, values):
    """In the type that torch's attention computes in."""
    wide = torch.promote_types(torch.promote_types(q.dtype, k.dtype), values.dtype)
    dtype = result_dtype(q.new_empty(0, dtype=wide))
    return [t.to(dtype) for t in (q, k, values)]


def _for_all(t, q):
    """With all batches and heads."""
    return t.expand(*q.shape[:2], -1, -1)
