"""Operations on lists of tensors, which optimizers use: each tensor meets its partners as pointwise operands do."""

import torch
from torch.distributed.tensor.placement_types import Shard

from core import collectives as c
from core.dispatch import Plan, op
from core.errors import MissingShardPatch, ShardingError
from core.ops.pointwise import fits, meet, operand
from core.spec import ShardTensorSpec
from core.writes import mutates

aten = torch.ops.aten

UNARY = (
    *("abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor", "frac"),
    *("lgamma", "log", "log10", "log1p", "log2", "neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign"),
    *("sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)
ARITHMETIC = (
    *("add", "sub", "mul", "div", "pow", "maximum", "minimum", "clamp_max", "clamp_min", "lerp", "addcmul"),
    "addcdiv",
)
_EACH = [f"_foreach_{name}{form}" for name in UNARY + ARITHMETIC for form in ("", "_")]
_EACH += ["_foreach_clone", "_foreach_copy_", "_foreach_zero_"]
_EACH = [name for name in _EACH if hasattr(aten, name)]  # torch 2.11 has not all of them
_FUSED = {aten._fused_sgd_, aten._fused_adam_, aten._fused_adamw_, aten._fused_adagrad_}


@op(*(getattr(aten, name) for name in _EACH), *_FUSED)
def each(func, *args, **kwargs):
    lists = [a for a in args if _is_list(a)]
    if len({len(a) for a in lists}) != 1:
        raise ShardingError(f"lists of {[len(a) for a in lists]} tensors", op=str(func))
    columns, writes = list(zip(*lists)), mutates(func)
    targets = [column[0] if writes else meet(column) for column in columns]
    if writes:
        for column in columns:
            fits(func, column)
        _keep_their_cuts(func, args, targets, kwargs.get("grad_scale"))
    inputs = []
    for a in (*args, *kwargs.values()):
        if _is_list(a):
            inputs += [operand(s, target) for s, target in zip(a, targets)]
        elif isinstance(a, ShardTensorSpec):  # a value without dims for all
            inputs.append(a.replicated())
    local = _laid_out_alike(func) if func.overloadpacket in _FUSED else None
    return Plan(tuple(inputs), None if writes else tuple(targets), local)


def _is_list(a):
    return isinstance(a, (list, tuple)) and len(a) > 0 and isinstance(a[0], ShardTensorSpec)


def _keep_their_cuts(func, args, targets, grad_scale):
    """What is written besides the first list (an optimizer's moments) must lie where its target does. Gradients are
    written only where they are to be unscaled."""
    for described, a in zip(func._schema.arguments, args):
        written = described.alias_info is not None and described.alias_info.is_write
        if _is_list(a) and written and (described.name != "grads" or grad_scale is not None):
            for s, target in zip(a, targets):
                if s.sizes != operand(s, target).sizes:
                    raise ShardingError("writes into tensors that are cut differently", op=str(func), operands=[s])


def _laid_out_alike(func):
    """Torch's fused optimizers run through the memory of parameters and gradients without a look at their strides."""

    def local(params, grads, *args, **kwargs):
        grads = [g if g.stride() == p.stride() else torch.empty_like(p).copy_(g) for p, g in zip(params, grads)]
        return func(params, grads, *args, **kwargs)

    return local


@op(aten._foreach_norm)
def norms(func, tensors, ord=2, dtype=None):
    """One small message an axis for all tensors that it cuts."""
    if not ord > 0:
        raise MissingShardPatch(f"a norm of order {ord}", op="_foreach_norm", remedy="Use torch.linalg.vector_norm.")

    def local(parts, *args, **kwargs):
        found = [torch.linalg.vector_norm(t, ord, dtype=dtype) if t.numel() else _zero(t, dtype) for t in parts]
        for axis in range(tensors[0].mesh.ndim):
            cut = [i for i, s in enumerate(tensors) if isinstance(s.placements[axis], Shard)]
            if cut:
                together = _combined([found[i] for i in cut], ord, c.axis_group(tensors[0].mesh, axis))
                for i, value in zip(cut, together):
                    found[i] = value.to(found[i].dtype)
        return found

    return Plan(tuple(tensors), None, local)


def _zero(t, dtype):
    return torch.zeros((), dtype=dtype, device=t.device) if dtype else t.new_zeros(()).abs()


def _combined(norms, ord, group):
    wide = max((n.dtype for n in norms), key=lambda d: torch.finfo(d).bits)
    values = torch.stack([n.to(wide) for n in norms])
    if ord == float("inf"):
        return c.send_all_reduce(values, group, "max")
    return c.send_all_reduce(values.pow(ord), group).pow(1 / ord)


@op(aten._amp_foreach_non_finite_check_and_unscale_)
def unscale(func, tensors, found_inf, inv_scale):
    """A gradient scaler must see on every rank what is not finite on one."""
    cut = sorted({axis for s in tensors for axis, _ in s.cuts()})

    def local(parts, found_inf, inv_scale):
        func(parts, found_inf, inv_scale)
        for axis in cut:
            found_inf.copy_(c.send_all_reduce(found_inf, c.axis_group(tensors[0].mesh, axis), "max"))

    return Plan((*tensors, found_inf.replicated(), inv_scale.replicated()), None, local)
