"""Losses: every part adds up its own terms, and one all-reduce of a single number makes the loss of the whole.

A mean divides by what the whole has, so a part counts by its number of terms (of any size, none included) or by their
weights. Operands that are cut otherwise than the largest are cut as it is. Values that torch refuses, such as a class
that is none, are counted with a small all-reduce, so that one of them on one rank raises on all.

Losses that torch composes of pointwise operations and reductions need no rule.
"""

import torch
import torch.nn.functional as F

from core import collectives as c
from core._torch import compiling
from core.dispatch import Plan, op
from core.errors import ShardingError
from core.ops.pointwise import meet, operand
from core.ops.reduction import reduced


def _reduction(func, reduction, size_average=None, reduce=None):
    """The reduction's name, with torch's two older arguments taken into account."""
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    if reduction not in ("none", "mean", "sum"):
        raise ShardingError(f"{reduction!r} is no reduction", op=func.__name__, remedy="Use 'none', 'mean' or 'sum'.")
    return reduction


def _call(func, args, kwargs, reduction):
    kwargs = {k: v for k, v in kwargs.items() if k not in ("size_average", "reduce")}
    return func(*args, **{**kwargs, "reduction": reduction})


def _scalar(spec):
    """One number that is pending on every axis that cuts ``spec``."""
    return reduced(spec, tuple(range(spec.ndim)), False)[0]


def _groups(spec):
    return [c.axis_group(spec.mesh, axis) for axis, _ in spec.cuts()]


def _refused_everywhere(func, problem, bad, groups, weights=0.0):
    """Raises on every rank if one rank holds what is ``bad``; gives the sum of ``weights`` over the ranks."""
    totals = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=bad.device) for v in (weights, bad.sum())])
    for group in groups:
        totals = c.send_all_reduce(totals, group)
    if not compiling() and totals[1]:  # compiled code leaves the check to torch
        raise ShardingError(f"{int(totals[1])} {problem}", op=func.__name__)
    return totals[0]


@op(F.l1_loss, F.smooth_l1_loss, F.mse_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
@op(F.soft_margin_loss)
def by_term(
    func, input, target, weight=None, size_average=None, reduce=None, reduction="mean", pos_weight=None, **rest
):
    """One term an element. A mean is over the elements; only a weighted mse_loss divides by the sum of its weights."""
    specs = [s for s in (input, target, weight, pos_weight) if s is not None]
    reduction = _reduction(func, reduction, size_average, reduce)
    return _by_term(func, specs, reduction, func is F.mse_loss and weight is not None)


@op(F.huber_loss)
def huber_loss(func, input, target, reduction="mean", delta=1.0, weight=None):
    return _by_term(func, [s for s in (input, target, weight) if s is not None], _reduction(func, reduction), False)


def _by_term(func, specs, reduction, by_weight):
    terms = meet(specs)
    inputs = tuple(operand(s, terms) for s in specs)
    probabilities = func is F.binary_cross_entropy
    if reduction == "none" and not probabilities:
        return Plan(inputs, terms)
    count = terms.shape.numel()

    def local(input, target, **kwargs):
        if probabilities:
            bad = ~((input >= 0) & (input <= 1) & (target >= 0) & (target <= 1))
            _refused_everywhere(func, "probabilities outside 0 to 1", bad, _groups(terms))
        args = input, target
        if by_weight and reduction == "mean":
            total = kwargs["weight"].sum()
            for group in _groups(inputs[2]):
                total = c.all_reduce(total, group)
            return _call(func, args, kwargs, "sum") / total
        here = terms.local_shape().numel()
        if reduction != "mean" or not count:
            return _call(func, args, kwargs, reduction)
        # the part's mean and not its sum, which half precision may not hold; of no terms the sum, which is zero
        return _call(func, args, kwargs, "mean" if here else "sum") * (here / count)

    return Plan(inputs, terms if reduction == "none" else _scalar(terms), local)


@op(F.cross_entropy, F.nll_loss)
def by_class(
    func, input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", **rest
):
    """One term a row of classes, whole on one rank. A mean divides by the weights of the rows that count, one each
    if there are none; with probabilities as targets by the number of rows."""
    reduction = _reduction(func, reduction, size_average, reduce)
    classes = min(input.ndim - 1, 1)
    rows = {d: d - (d > classes) for d in range(input.ndim) if d != classes}
    x, shape = input.aside(classes), [n for d, n in enumerate(input.shape) if d != classes]
    dense = target.shape == input.shape
    if tuple(target.shape) != tuple(shape) and not dense:
        raise ShardingError(
            "the target has neither one index nor one row of probabilities for each row of the input",
            op=func.__name__,
            operands=[input, target],
        )
    if not x.is_sharded():
        x = target.whole(classes) if dense else target.reshaped(x.shape, {to: d for d, to in rows.items()})
    out = x.reshaped(shape, rows)
    inputs = (x, x if dense else out, *((weight.replicated(),) if weight is not None else ()))
    if dense and reduction == "none":
        return Plan(inputs, out)
    classes, count, groups = input.shape[classes], out.shape.numel(), _groups(out)

    def local(input, target, **kwargs):
        total = count if dense else _counted(func, target, classes, kwargs.get("weight"), ignore_index, groups)
        return _reduced(_call(func, (input, target), kwargs, "none"), reduction, total)

    return Plan(inputs, out if reduction == "none" else _scalar(out), local)


def _counted(func, target, classes, weight, ignore_index, groups):
    """Weights of all rows that are not ignored, all of which must name a class."""
    counts = target != ignore_index
    named = (target >= 0) & (target < classes)
    weights = counts if weight is None else weight.detach()[target.where(counts & named, 0)].where(counts, 0)
    problem = f"indices that are none of {classes} classes"
    return _refused_everywhere(func, problem, counts & ~named, groups, weights.sum())


def _reduced(terms, reduction, total):
    """Terms of rows added up in fp32 or wider, since half precision may not hold the sum."""
    if reduction == "none":
        return terms
    value = terms.sum(dtype=torch.promote_types(terms.dtype, torch.float32))
    return (value / total if reduction == "mean" else value).to(terms.dtype)


@op(F.multi_margin_loss, F.multilabel_margin_loss)
def by_margin(func, input, target, p=1, margin=1.0, weight=None, size_average=None, reduce=None, reduction="mean"):
    """One term a row of classes, whole on one rank; the targets are indices, of several labels ended by -1."""
    reduction = _reduction(func, reduction, size_average, reduce)
    several = func is F.multilabel_margin_loss
    if input.ndim not in (1, 2) or target.shape != (input.shape if several else input.shape[:-1]):
        raise ShardingError("no target for each row of the input", op=func.__name__, operands=[input, target])
    x = input.aside(-1)
    if not x.is_sharded():
        rows = target.whole(-1) if several else target
        x = rows.reshaped(x.shape, {0: 0} if x.ndim == 2 else {})
    out = x.reshaped(x.shape[:-1], {0: 0})
    count, classes, groups = out.shape.numel(), x.shape[-1], _groups(out)
    inputs = (x, x if several else out, *((weight.replicated(),) if weight is not None else ()))

    def local(input, target, **kwargs):
        bad = (target < (-1 if several else 0)) | (target >= classes)
        _refused_everywhere(func, f"indices that are none of {classes} classes", bad, groups)
        return _reduced(_call(func, (input, target), kwargs, "none"), reduction, count)

    return Plan(inputs, out if reduction == "none" else _scalar(out), local)
