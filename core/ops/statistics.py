"""Variances and norms: sums of powers of the parts, added up over the axes that cut a reduced dim.

Variances are centred on the global mean, in fp32 or wider: sums of plain squares lose everything where the mean is
large against the spread.
"""

import torch

from core import collectives as c
from core.dispatch import Plan, op
from core.errors import ShardingError
from core.ops.extremes import extreme_of_parts
from core.ops.pointwise import meet, operand
from core.ops.reduction import count_of, groups_of, reduced, reduced_dims, squeezed

aten = torch.ops.aten


def _wide(t):
    return torch.promote_types(t.dtype, torch.float32)


# -- variance ---------------------------------------------------------------------------------------------------------
class _Moments(torch.autograd.Function):
    """Variance and mean over ``dims`` (kept) of all parts. The backward pass needs the part and the mean alone."""

    @staticmethod
    def forward(ctx, t, dims, count, freedom, groups):
        mean = t.sum(dims, True, dtype=_wide(t))
        for group in groups:
            mean = c.send_all_reduce(mean, group)
        mean = mean / count
        var = (t - mean).abs().square().sum(dims, True)
        for group in groups:
            var = c.send_all_reduce(var, group)
        ctx.save_for_backward(t, mean)
        ctx.call = count, freedom, groups
        return var / freedom, mean

    @staticmethod
    def backward(ctx, grad_var, grad_mean):
        t, mean = ctx.saved_tensors
        count, freedom, groups = ctx.call
        grads = torch.stack([grad_var.to(mean.dtype), grad_mean])
        for group in groups:
            grads = c.all_reduce(grads, group)
        grad_var, grad_mean = grads
        grad = (t - mean) * (2 / freedom if freedom else float("inf")) * grad_var + grad_mean / count
        return grad.to(t.dtype), None, None, None, None


@op(torch.var, torch.Tensor.var, torch.std, torch.Tensor.std, torch.var_mean, torch.std_mean)
def variance(func, x, dim=None, unbiased=True, keepdim=False, *, correction=None, axis=None):
    if isinstance(dim, bool):  # x.var(False)
        dim, unbiased = None, dim
    dims = reduced_dims(x, dim if axis is None else axis)
    out, axes = reduced(x, dims, keepdim)
    outputs = (out.finished(),) * 2 if "mean" in func.__name__ else out.finished()
    if not axes and x.local_shape().numel():  # torch warns of an empty part
        return Plan((x,), outputs)
    count, groups = count_of(x, dims), groups_of(x, axes)
    freedom = max(count - (int(unbiased) if correction is None else correction), 0)

    def local(t, *a, **k):
        if not (t.is_floating_point() or t.is_complex()):
            raise ShardingError(f"of {t.dtype}", op=func.__name__, remedy="Convert to floating point.")
        value, mean = _Moments.apply(t, dims, count, freedom, groups)
        if "std" in func.__name__:
            value = root(value)
        value, mean = (squeezed(v, dims, keepdim) for v in (value.to(t.dtype.to_real()), mean.to(t.dtype)))
        return (value, mean) if "mean" in func.__name__ else value

    return Plan((x,), outputs, local)


op(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)(variance)


def root(value):
    """Square root whose gradient at zero is zero, as torch has it for deviations and norms."""
    zero = value == 0
    return value.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


# -- norms ------------------------------------------------------------------------------------------------------------
def norm_of_parts(t, ord, dims, groups, dtype=None):
    """The vector norm over ``dims`` (kept) of all parts, in fp32 or wider."""
    if abs(ord) == float("inf"):
        return extreme_of_parts(t.abs(), dims, ord < 0, groups)
    wide = torch.promote_types(dtype or t.dtype, torch.float32)
    if ord < 0 and not t.numel():
        total = t.sum(dims, True, dtype=wide).abs()
    else:
        value = torch.linalg.vector_norm(t, ord, dims, True, dtype=wide)
        total = value**ord if ord else value
    for group in groups:
        total = c.send_all_reduce(total, group)
    return total ** (1 / ord) if ord else total


@op(aten.linalg_vector_norm, aten.norm)
def norm(func, x, ord=2, dim=None, keepdim=False, *, dtype=None):
    dims, ord = reduced_dims(x, dim), 2 if ord is None else ord
    out, axes = reduced(x, dims, keepdim)
    if not axes:
        return Plan((x,), out)
    groups = groups_of(x, axes)
    if not count_of(x, dims) and (ord < 0 or ord == float("inf")):
        raise ShardingError(f"no values to take the {ord} norm of", op="norm", operands=[x])

    def local(t, *a, **k):
        value = norm_of_parts(t, ord, dims, groups, dtype)
        return squeezed(value, dims, keepdim).to((dtype or t.dtype).to_real())

    return Plan((x,), out.finished(), local)


@op(aten.dist)
def dist(func, a, b, p=2):
    target = meet((a, b))
    dims = tuple(range(target.ndim))
    out, axes = reduced(target, dims, False)
    groups = groups_of(target, axes)

    def local(a, b, *args):
        value = norm_of_parts(a - b, p, dims, groups)
        return squeezed(value, dims, False).to(torch.promote_types(a.dtype, b.dtype).to_real())

    return Plan((operand(a, target), operand(b, target)), out.finished(), local)


@op(aten.renorm)
def renorm(func, x, p, dim, maxnorm):
    (dim,) = reduced_dims(x, dim)
    dims = tuple(d for d in range(x.ndim) if d != dim)
    groups = groups_of(x, reduced(x, dims, True)[1])

    def local(t, *a):
        value = norm_of_parts(t, p, dims, groups)
        return (t * torch.where(value > maxnorm, maxnorm / (value + 1e-7), 1)).to(t.dtype)

    return Plan((x,), x, local if groups else None)
