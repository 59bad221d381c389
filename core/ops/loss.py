"""Losses: every part adds up its own terms, and one all-reduce of a single number makes the loss of the whole.

A mean divides by what the whole has, so a part counts by its number of terms (of any size, none included) or by their
weights. Operands that are cut otherwise than the largest are cut as it is.
"""

import torch.nn.functional as F

from core import collectives as c
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


@op(F.l1_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.mse_loss)
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
    if reduction == "none":
        return Plan(inputs, terms)
    count = terms.shape.numel()

    def local(input, target, **kwargs):
        args = input, target
        if by_weight and reduction == "mean":
            total = kwargs["weight"].sum()
            for group in _groups(inputs[2]):
                total = c.all_reduce(total, group)
            return _call(func, args, kwargs, "sum") / total
        here = terms.local_shape().numel()
        if reduction == "sum" or not count:
            return _call(func, args, kwargs, reduction)
        # the part's mean and not its sum, which half precision may not hold; of no terms the sum, which is zero
        return _call(func, args, kwargs, "mean" if here else "sum") * (here / count)

    return Plan(inputs, _scalar(terms), local)


@op(F.cross_entropy, F.nll_loss)
def by_class(
    func, input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", **rest
):
    """One term a row of classes, which must be whole. A mean divides by the weights of the rows that count, one each
    if there are none; with probabilities as targets by the number of rows."""
    reduction = _reduction(func, reduction, size_average, reduce)
    classes = min(input.ndim - 1, 1)
    rows = {d: d - (d > classes) for d in range(input.ndim) if d != classes}
    x, shape = input.whole(classes), [n for d, n in enumerate(input.shape) if d != classes]
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
    if reduction == "none":
        return Plan(inputs, out)
    count, groups = out.shape.numel(), _groups(out)

    def local(input, target, **kwargs):
        loss = _call(func, (input, target), kwargs, "sum")
        if reduction == "sum":
            return loss
        return loss / (count if dense else _counting(target, kwargs.get("weight"), ignore_index, groups).to(loss.dtype))

    return Plan(inputs, _scalar(out), local)


def _counting(target, weight, ignore_index, groups):
    """Weights of all rows that are not ignored."""
    counts = target != ignore_index
    total = counts.sum() if weight is None else weight.detach()[target.where(counts, 0)].where(counts, 0).sum()
    for group in groups:
        total = c.send_all_reduce(total, group)
    return total
