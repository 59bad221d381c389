"""Convolution of own rows while the rows of others travel, with no array of both.

Own rows are convolved between zeros. That is right for all windows that lie within them; the few that reach over a
border are computed again, from a strip of the rows around it, and written over, so that they are rounded as any other.
The way back is the transpose: a convolution is linear in its rows, so what foreign rows contributed to the gradients is
found from strips in which own rows are zero. That is computed first and sent; the gradients of own rows between zeros
are computed meanwhile, and what comes from others is added to a few of their rows.

Where a second dim is cut, own rows are convolved in this way along it, and so are strips, which brings the corners.
Own rows must line up with own outputs (:func:`reaching`). A second derivative goes the way of one array.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from core import collectives as c
from core.formulas import Formula
from core.strides import memory_format_of

aten = torch.ops.aten


class Border(NamedTuple):
    """Output rows whose windows reach over a border, and the rows below them: half-open ranges of own outputs, of own
    rows, and of the foreign rows at hand, which lie ``before`` or after the own."""

    outs: tuple
    own: tuple
    foreign: tuple
    before: bool


class Halo(NamedTuple):
    """Foreign rows along a cut dim, as :func:`core.collectives.exchange` takes them, and what they are for."""

    dim: int
    sizes: tuple
    wanted: tuple
    group: Any
    borders: tuple


class Convolution(NamedTuple):
    """One kind of call of this rank.

    Attributes:
        call: stride, padding, dilation, transposed, output padding and groups, where nothing travels.
        halo: of the first dim along which something does.
        own, strip: as which own rows are then convolved, and strips; they may have a halo along another dim.
        joined: ``joined(x, weight)`` computes the same from one array and without bias; differentiable twice.
    """

    call: tuple = ()
    halo: Halo | None = None
    own: "Convolution | None" = None
    strip: "Convolution | None" = None
    joined: Callable | None = None


def reaching(dim, sizes, ends, span, stride, padding, group):
    """The :class:`Halo` of windows over a cut dim, or None where rows do not line up; alike on all ranks.

    They do where on every rank that has rows the plain operation, with its own padding, makes the own output rows, and
    no window reaches over two borders.

    Args:
        sizes: extents of the ranks.
        ends: the first output row of every rank, and the number of rows.
    """
    if padding >= span:
        return None
    at, total, wanted = 0, sum(sizes), []
    for n, start, stop in zip(sizes, ends, ends[1:]):
        rows, low, high = stop - start, at, at + n
        if n or rows:
            made = (n + 2 * padding - span) // stride + 1
            if n < span - 1 or start * stride != at or made != rows or not rows:
                return None
            low, high = max(at - padding, 0), min(max((stop - 1) * stride - padding + span, high), total)
        wanted.append(((low, at), (at + n, high)))
        at += n
    (low, start), (stop, high) = wanted[group.rank]
    rows, came, borders = ends[group.rank + 1] - ends[group.rank], start - low, []
    if came:
        first = -(-padding // stride)
        borders.append(Border((0, first), (0, (first - 1) * stride - padding + span), (0, came), True))
    if stop < high:
        first = (stop - start + padding - span) // stride + 1
        own = first * stride - padding, stop - start
        borders.append(Border((first, rows), own, (came, came + high - stop), False))
    return Halo(dim, sizes, tuple(wanted), group, tuple(borders))


def forward(how, x, weight, bias=None, *args, **kwargs):
    """The own output, and the foreign rows that it took."""
    if how.halo is None:
        return [_convolved(how.call, x, weight, bias)]
    dim, sizes, wanted, group, borders = how.halo
    coming = c.start_exchange([x], dim, sizes, wanted, group)
    out, *others = forward(how.own, x, weight, bias)
    foreign = coming()[0].contiguous(memory_format=memory_format_of(x))
    taken = [foreign]
    for border in borders:
        strip = _strip(border, dim, _rows(x, dim, border.own), foreign)
        rows, *corners = forward(how.strip, strip, weight, bias)
        _rows(out, dim, border.outs).copy_(rows)
        for corner in corners:  # of which those beside own rows are among what these took
            _own_part(border, dim, corner).zero_()
        taken += corners
    return [out, *taken, *others]


def backward(how, grad, extra, wanted, x, weight, bias=None, *args, **kwargs):
    """Gradients of ``x``, ``weight`` and ``bias``; None where ``wanted`` says so."""
    mask = [*wanted, False][:3]
    if not (mask[0] or mask[1]):
        return [None, None, _of_bias(grad)]
    return _gradients(how, grad, iter(extra), mask, x, weight)[: len(wanted)]


def _gradients(how, grad, taken, mask, x, weight):
    if how.halo is None:
        return _of_convolved(how.call, grad, mask, x, weight)
    dim, sizes, wanted, group, borders = how.halo
    foreign, terms = next(taken), []
    home = torch.empty_like(foreign)
    for border in borders:
        strip = _strip(border, dim, torch.zeros_like(_rows(x, dim, border.own)), foreign)
        rows = _rows(grad, dim, border.outs)
        to_strip, to_weight, _ = _gradients(how.strip, rows, taken, [*mask[:2], False], strip, weight)
        terms.append(to_weight)
        if mask[0]:
            _rows(home, dim, border.foreign).copy_(_foreign_part(border, dim, to_strip))
    add_theirs = c.start_return([home], dim, sizes, wanted, group) if mask[0] else None
    found = _gradients(how.own, grad, taken, mask, x, weight)
    if mask[1]:
        for term in terms:
            found[1].add_(term)
    if mask[0]:
        add_theirs(found[:1])
    return found


# -- where nothing travels ------------------------------------------------------------------------------------------
def _convolved(call, x, weight, bias):
    if 0 not in x.shape[2:]:
        return aten.convolution(x, weight, bias, *call)
    geometry = zip(x.shape[2:], weight.shape[2:], *call[:3])
    rows = [
        n and (n + 2 * padding - dilation * (k - 1) - 1) // stride + 1 for n, k, stride, padding, dilation in geometry
    ]
    return x.new_empty((x.shape[0], weight.shape[0], *rows))


def _of_convolved(call, grad, mask, x, weight):
    if 0 not in x.shape[2:]:
        return list(aten.convolution_backward(grad, x, weight, weight.shape[:1], *call, mask))
    zeros = torch.zeros_like(x), torch.zeros_like(weight), weight.new_zeros(weight.shape[:1])
    return [zero if wanted else None for zero, wanted in zip(zeros, mask)]


def _of_bias(grad):
    return grad.sum([d for d in range(grad.ndim) if d != 1])


def _rows(t, dim, ends):
    return t.narrow(dim, ends[0], ends[1] - ends[0])


def _strip(border, dim, own, foreign):
    foreign = _rows(foreign, dim, border.foreign)
    return torch.cat([foreign, own] if border.before else [own, foreign], dim)


def _foreign_part(border, dim, strip):
    n = border.foreign[1] - border.foreign[0]
    return strip.narrow(dim, 0 if border.before else strip.shape[dim] - n, n)


def _own_part(border, dim, strip):
    n = border.own[1] - border.own[0]
    return strip.narrow(dim, strip.shape[dim] - n if border.before else 0, n)


class Interior(torch.autograd.Function):
    """:func:`forward` and :func:`backward` for torch's graph, of a convolution with a halo."""

    @staticmethod
    def forward(ctx, x, weight, bias, how):
        out, *taken = forward(how, x, weight, bias)
        ctx.save_for_backward(x, weight, *taken)
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, *taken = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if not torch.is_grad_enabled():
            return *backward(ctx.how, grad, taken, wanted, x, weight), None
        found = [None, None, _of_bias(grad) if wanted[2] else None]
        both = [i for i in (0, 1) if wanted[i]]
        if both:
            out = ctx.how.joined(x, weight)
            for i, g in zip(both, torch.autograd.grad(out, [(x, weight)[i] for i in both], grad, create_graph=True)):
                found[i] = g
        return *found, None


def formula(how):
    """For :class:`core.dispatch.Plan`."""
    return Formula(partial(forward, how), partial(backward, how), ((0, 1), (0, 1), ()))
