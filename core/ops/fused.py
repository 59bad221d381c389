"""Attention below autograd, as ShardTensors inside the DTensors of another mesh meet it: torch's fused operations.

They return the logarithm of the normaliser too and take it in their backward, as attention by blocks does. Where heads
or batches alone are cut, each rank calls torch's kernel on its part; where a sequence is, or weights are dropped,
blocks compute (:mod:`core.ops.ring`) on the same terms.
"""

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from core import collectives as c
from core import rng
from core.dispatch import Plan, op
from core.errors import MissingShardPatch
from core.ops import block, ring
from core.ops.attention import layout
from core.ops.extremes import extreme_of_parts
from core.ops.reduction import finish_local
from core.spec import PARTIAL, REPLICATE, ShardTensorSpec

aten = torch.ops.aten
NAMES = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


@op(*(getattr(aten, name) for name in NAMES))
def fused(func, *args, **kwargs):
    given = _named(func, args, kwargs)
    at, own = _layout(func, given)
    empty = not at.out.local_shape().numel()
    meta = func(*_on_meta(args), **dict(zip(kwargs, _on_meta(kwargs.values()))))
    rows = _rows(at.out, at.scores.shape[:3] if own else meta[1].shape)
    others = [(m.shape, m.dtype) if isinstance(m, torch.Tensor) else m for m in meta[2:]]
    seeds = [r.name in ("philox_seed", "rng_state") for r in func._schema.returns[2:]]

    def local(*args, **kwargs):
        given = _named(func, args, kwargs)
        q, k, v = (given[n] for n in ("query", "key", "value"))
        key = rng.draw_key() if at.call.dropout else None
        out, total = ring.forward(q, k, v, _mask(given), key, at.call)
        rest = [torch.zeros(x[0], dtype=x[1], device=q.device) if isinstance(x, tuple) else x for x in others]
        rest = [key if key is not None and seed else x for seed, x in zip(seeds, rest)]
        return out, total.new_zeros(rows.local_shape()) if empty else total.squeeze(-1), *rest

    specs = (at.out, rows, *(None,) * len(others))
    return Plan(_inputs(given, at, args, kwargs, func), specs, local if own or empty else None)


@op(*(getattr(aten, f"{name}_backward") for name in NAMES))
def fused_backward(func, *args, **kwargs):
    """Gradients of operands that are whole where the scores are cut are sums over the ranks, finished here."""
    given = _named(func, args, kwargs)
    at, own = _layout(func, given)
    pending = [_pending(s, at.scores) for s in at.inputs][: len(func._schema.returns)]
    done = [s.finished() for s in pending]
    missing = (None,) * (len(func._schema.returns) - len(done))
    own = own or not at.out.local_shape().numel()
    wants_mask = _mask(given) is not None and given.get("grad_input_mask", (False,))[-1]

    def local(*args, **kwargs):
        if own:
            given = _named(func, args, kwargs)
            q, k, v, out, total = (given[n] for n in ("query", "key", "value", "out", "logsumexp"))
            grad, total = given.get("grad_out", given.get("grad_out_")), total.reshape(*q.shape[:-1], 1)
            call, key = at.call._replace(merge=None), given.get("philox_seed")
            found = ring.backward(grad, q, k, v, _mask(given), key, out, total, call, wants_mask)
        else:
            found = func(*args, **kwargs)
        summed = [finish_local(g, s) if g is not None and g.numel() else g for g, s in zip(found, pending)]
        return *summed, *missing

    specs = (*(None if s.is_replicated() else s for s in done), *missing)
    return Plan(_inputs(given, at, args, kwargs, func), specs, local)


def _named(func, args, kwargs):
    """All arguments by name."""
    schema = func._schema.arguments
    return {a.name: a.default_value for a in schema} | {a.name: x for a, x in zip(schema, args)} | dict(kwargs)


def _mask(given):
    return given.get("attn_mask", given.get("attn_bias"))


def _layout(func, given):
    """The layout, and whether blocks compute: torch's kernels know neither positions nor fields of a whole."""
    q, k, v = (given[n] for n in ("query", "key", "value"))
    grouped = q.shape[-3] != k.shape[-3]
    at = layout(q, k, v, _mask(given), given["dropout_p"], given["is_causal"], given["scale"], grouped)
    if at.pick:
        raise MissingShardPatch("a cut between heads that share keys", op=str(func), operands=[q, k, v])
    cut = at.scores.axis_of(-2) is not None or at.scores.axis_of(-1) is not None
    return at, cut or bool(given["dropout_p"])


def _rows(out, shape):
    """Spec of what has one number a row; some kernels pad the rows."""
    return out.reshaped(shape, {d: d for d in range(3)})


def _inputs(given, at, args, kwargs, func):
    wanted = dict(zip(("query", "key", "value"), at.inputs))
    wanted |= dict.fromkeys(("attn_mask", "attn_bias"), at.inputs[-1])
    wanted |= dict.fromkeys(("grad_out", "grad_out_", "out"), at.out)
    if isinstance(given.get("logsumexp"), ShardTensorSpec):
        wanted["logsumexp"] = _rows(at.out, given["logsumexp"].shape)
    names = (*(a.name for a, _ in zip(func._schema.arguments, args)), *kwargs)
    tensors = [(n, x) for n, x in zip(names, (*args, *kwargs.values())) if isinstance(x, ShardTensorSpec)]
    return tuple(wanted.get(n) or x.replicated() for n, x in tensors)


def _pending(spec, scores):
    for axis, _ in scores.cuts():
        if spec.placements[axis] == REPLICATE:
            spec = spec.with_axis(axis, PARTIAL)
    return spec


def _on_meta(args):
    return [torch.empty(a.shape, device="meta") if isinstance(a, ShardTensorSpec) else a for a in args]


@op(aten._safe_softmax)
def safe_softmax(func, x, dim, dtype=None):
    """Of which attention without a kernel is made: a row of minus infinity gives zero."""
    axis = x.axis_of(dim)
    if axis is None:
        return Plan((x,), x)
    group = c.axis_group(x.mesh, axis)

    def local(t, dim, dtype=None):
        scores = t.to(torch.promote_types(dtype or t.dtype, torch.float32))
        weights = block.exponentials(scores, extreme_of_parts(scores, (dim % x.ndim,), False, [group]))
        total = c.send_all_reduce(weights.sum(dim, True), group)
        return (weights / total.masked_fill(total == 0, 1)).to(dtype or t.dtype)

    return Plan((x,), x, local)


# -- the other mesh ---------------------------------------------------------------------------------------------------
def _alike(operands, mask, results):
    """What DTensor knows of the kernels of GPUs and not of that of CPUs: batches and heads are independent."""
    ways = [([Replicate()] * results, [Replicate()] * (len(operands) + (mask is not None)))]
    for dim in (0, 1):
        cut = [Shard(dim)] * len(operands)
        if mask is not None:
            cut.append(Shard(dim) if len(mask.shape) == 4 and mask.shape[dim] > 1 else Replicate())
        ways.append(([Shard(dim)] * results, cut))
    return ways


@register_sharding(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _(q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    return _alike((q, k, v), attn_mask, 2)


@register_sharding(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _(grad, q, k, v, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None):
    return _alike((grad, q, k, v, out, logsumexp), attn_mask, 3)
