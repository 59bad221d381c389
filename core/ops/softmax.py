"""Softmax and its kin. Over a cut dim the largest value and the sum of exponentials are those of all parts."""

import torch

from core import collectives as c
from core.dispatch import Plan, op
from core.ops.extremes import extreme_of_parts
from core.ops.reduction import groups_of, reduced, reduced_dims, squeezed

aten = torch.ops.aten


@op(aten.logsumexp)
def logsumexp(func, x, dim, keepdim=False):
    dims = reduced_dims(x, dim)
    out, axes = reduced(x, dims, keepdim)
    if not axes:
        return Plan((x,), out)
    groups = groups_of(x, axes)

    def local(t, *a, **k):
        dtype = t.dtype if t.is_floating_point() or t.is_complex() else torch.get_default_dtype()
        t = t.to(torch.promote_types(dtype, torch.float32))
        top = extreme_of_parts(t, dims, False, groups)
        top = top.masked_fill(top.abs() == float("inf"), 0)
        total = _total((t - top).exp().sum(dims, True), groups)
        return squeezed((total.log() + top).to(dtype), dims, keepdim)

    return Plan((x,), out.finished(), local)


@op(aten._softmax, aten._log_softmax)
def softmax(func, x, dim, half_to_float):
    dims, groups = _along(x, dim)
    if not groups:
        return Plan((x,), x)

    def local(t, *a):
        wide = t.to(torch.promote_types(t.dtype, torch.float32))
        wide = wide - extreme_of_parts(wide, dims, False, groups)
        total = _total(wide.exp().sum(dims, True), groups)
        out = wide - total.log() if func.overloadpacket is aten._log_softmax else wide.exp() / total
        return out if half_to_float else out.to(t.dtype)

    return Plan((x,), x, local)


@op(aten._softmax_backward_data, aten._log_softmax_backward_data)
def softmax_backward(func, grad, output, dim, dtype):
    dims, groups = _along(output, dim)
    if not groups:
        return Plan((output, output), output)

    def local(grad, output, *a):
        wide = torch.promote_types(grad.dtype, torch.float32)
        grad, output = grad.to(wide), output.to(wide)
        if func.overloadpacket is aten._log_softmax_backward_data:
            return (grad - output.exp() * _total(grad.sum(dims, True), groups)).to(dtype)
        return ((grad - _total((grad * output).sum(dims, True), groups)) * output).to(dtype)

    return Plan((output, output), output, local)


def _along(x, dim):
    dims = reduced_dims(x, dim)
    return dims, groups_of(x, reduced(x, dims, True)[1])


def _total(value, groups):
    for group in groups:
        value = c.send_all_reduce(value, group)
    return value
