"""Flips, rolls and repetitions: the same rows in another order. Along a cut dim only what changes owner travels."""

import torch

from core import collectives as c
from core.dispatch import Plan, op
from core.errors import ShardingError
from core.ops.reduction import reduced_dims
from core.ops.view import viewed

aten = torch.ops.aten


def _cyclic(start, rows, n):
    """Ranges of ``rows`` rows (at most ``n``) from ``start`` on, around the end of ``n``."""
    start %= max(n, 1)
    return (start, min(start + rows, n)), (0, max(start + rows - n, 0))


# -- flips ------------------------------------------------------------------------------------------------------------
@op(aten.flip, pending=True)
def flip(func, x, dims):
    reverse = _reversed(x, reduced_dims(x, tuple(dims)) if dims else ())
    return Plan((x,), x, lambda t, *a: reverse(t))


@op(aten.rot90, pending=True)
def rot90(func, x, k=1, dims=(0, 1)):
    """A quarter turn is a flip and a transposition; the cut follows its dim."""
    a, b = reduced_dims(x, tuple(dims))
    if a == b:
        raise ShardingError(f"needs two different dims, not {tuple(dims)}", op="rot90", operands=[x])
    turned, swaps = ((), (b,), (a, b), (a,))[k % 4], k % 2
    order = list(range(x.ndim))
    if swaps:
        order[a], order[b] = b, a
    reverse = _reversed(x, turned)
    out = x.reshaped([x.shape[d] for d in order], {d: i for i, d in enumerate(order)})
    return Plan((x,), out, lambda t, *rest: reverse(t).permute(order).contiguous())


def _reversed(x, dims):
    """Fetches the rows that mirror this rank's own and turns them round."""
    steps = []
    for axis, dim in x.cuts():
        if dim in dims:
            n, offsets = x.shape[dim], x.offsets(axis)
            wanted = [((n - b, n - a),) for a, b in zip(offsets, offsets[1:])]
            steps.append((dim, x.sizes[axis], wanted, c.axis_group(x.mesh, axis)))

    def local(t):
        for step in steps:
            t = c.send_exchange(t, *step)
        return torch.flip(t, dims)

    return local


# -- rolls ------------------------------------------------------------------------------------------------------------
@op(aten.roll, pending=True)
def roll(func, x, shifts, dims=()):
    """Without dims the flattened tensor rolls: dims that are cut behind the first are made whole for it."""
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    dims = [dims] if isinstance(dims, int) else list(dims)
    if len(shifts) != (len(dims) or 1):
        problem, remedy = f"{len(shifts)} shifts for {len(dims)} dims", "Give one shift for each dim."
        raise ShardingError(problem, op="roll", operands=[x], remedy=remedy)
    if dims:
        rolled = _rolled(x, shifts, [reduced_dims(x, d)[0] for d in dims])
        return Plan((x,), x, lambda t, *a: rolled(t))
    source, flat = viewed(x, [x.shape.numel()])
    rolled = _rolled(flat, shifts, [0])
    return Plan((source,), source, lambda t, *a: rolled(t.reshape(-1)).view(t.shape), final=x)


def _rolled(x, shifts, dims):
    def local(t):
        for shift, dim in zip(shifts, dims):
            axis = x.axis_of(dim)
            if axis is None:
                t = torch.roll(t, shift, dim)
            else:
                wanted = [_cyclic(a - shift, n, x.shape[dim]) for a, n in zip(x.offsets(axis), x.sizes[axis])]
                t = c.send_exchange(t, dim, x.sizes[axis], wanted, c.axis_group(x.mesh, axis))
        return t

    return local


# -- repetitions ------------------------------------------------------------------------------------------------------
@op(torch.Tensor.repeat, torch.Tensor.tile, torch.tile, aten.repeat)
def repeat(func, x, *times, repeats=None, dims=None):
    """Along a cut dim a part of n rows becomes one of ``times * n`` and fetches each row that it lacks once."""
    times = times or (repeats if repeats is not None else dims)
    times = list(times[0] if times and not isinstance(times[0], int) else times)
    if "tile" in func.__name__:
        times = [1] * (x.ndim - len(times)) + times
    lead = len(times) - x.ndim
    if lead < 0 or min(times, default=0) < 0:
        problem, remedy = f"cannot be repeated {times} times", "Give one number for each dim at least."
        raise ShardingError(problem, op="repeat", operands=[x], remedy=remedy)
    cuts = [(axis, dim, times[dim + lead]) for axis, dim in x.cuts() if times[dim + lead] != 1]
    rest = [1 if d - lead in (cut for _, cut, _ in cuts) else n for d, n in enumerate(times)]
    out = x.reshaped(
        [*times[:lead], *(m * n for m, n in zip(times[lead:], x.shape))],
        {d: d + lead for d in range(x.ndim)},
        {axis: tuple(m * n for n in x.sizes[axis]) for axis, _, m in cuts},
    )

    def local(t, *args, **kwargs):
        for cut in cuts:
            t = _repeated(t, x, *cut)
        return t.repeat(rest)

    return Plan((x,), out, local)


def _repeated(t, x, axis, dim, times):
    """Own rows of the repetition, from at most one period of it."""
    n, group = x.shape[dim], c.axis_group(x.mesh, axis)
    wanted = [_cyclic(a * times, min(m * times, n), n) for a, m in zip(x.offsets(axis), x.sizes[axis])]
    rows = t.shape[dim] * times
    t = c.exchange(t, dim, x.sizes[axis], wanted, group)
    if rows > n:
        t = torch.cat([t] * -(-rows // n), dim).narrow(dim, 0, rows)
    return t


@op(aten.repeat_interleave.Tensor)
def repeat_interleave(func, repeats, **kwargs):
    """The row that each row of the result repeats; how many there are only the values say."""
    return Plan((repeats.replicated(),), None)
