"""Running sums and the like: each part's own, joined to what the parts before it came to.

Of a cumsum or cumprod only one row a rank travels, its total; gradients return as the same rows. Those whose total is
not one exact row (running extremes with their indices, sums of exponentials) turn the cut aside: one all-to-all there,
one back.
"""

import torch

from core import collectives as c
from core.dispatch import TARGET, Plan, op
from core.ops.reduction import reduced_dims

aten = torch.ops.aten


def aside(x, dim):
    """The dim without its sign, and ``x`` with that dim whole and its cut on another."""
    dim = reduced_dims(x, dim)[0]
    return dim, x.aside(dim)


@op(torch.cumsum, torch.Tensor.cumsum, aten.cumsum)
def cumsum(func, x, dim, *, dtype=None):
    return _running(func, x, dim, dtype, torch.sum, torch.add)


@op(torch.cumprod, torch.Tensor.cumprod, aten.cumprod)
def cumprod(func, x, dim, *, dtype=None):
    return _running(func, x, dim, dtype, torch.prod, torch.mul)


@op(aten.cumsum_, aten.cumprod_)
def running_in_place(func, x, dim, *, dtype=None):
    local = (cumsum if func.overloadpacket is aten.cumsum_ else cumprod)(func, x, dim, dtype=dtype).local
    return Plan((x,), TARGET, local and (lambda t, *args, **kwargs: t.copy_(local(t, *args, **kwargs))))


def _running(func, x, dim, dtype, total, joined):
    """``total`` of no rows is neutral in ``joined``: the first part and empty ones need no case of their own."""
    dim = reduced_dims(x, dim)[0]
    axis = x.axis_of(dim)
    if axis is None:
        return Plan((x,), x)
    group = c.axis_group(x.mesh, axis)

    def local(t, *args, **kwargs):
        totals = c.gather(total(t, dim, True, dtype=dtype), dim, (1,) * group.size, group)
        before = total(totals.narrow(dim, 0, group.rank), dim, True)
        return joined(func(t, dim, dtype=dtype), before)

    return Plan((x,), x, local)


@op(aten.cummax, aten.cummin)
@op(torch.cummax, torch.Tensor.cummax, torch.cummin, torch.Tensor.cummin)
def running_extreme(func, x, dim):
    return logcumsumexp(func, x, dim)


@op(torch.logcumsumexp, torch.Tensor.logcumsumexp, aten.logcumsumexp)
def logcumsumexp(func, x, dim):
    _, turned = aside(x, dim)
    return Plan((turned,), turned, final=x)
