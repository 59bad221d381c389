"""Fourier transforms: dim after dim, so that a cut dim is made whole only for its own turn.

Dims that are whole come first and send nothing; for each cut one its cut is turned aside, by one all-to-all, to the
longest dim that is free by then. A plane cut along both of its dims never lies whole on a rank.
"""

import torch
from torch.distributed.tensor.placement_types import Shard

from core import collectives as c
from core.dispatch import Plan, op
from core.errors import ShardingError
from core.ops.reduction import reduced_dims

fft = torch.fft

# Transform of the last dim, and of the others: a transform of many dims is one of each. Those of real numbers end with
# the last dim if their result is real, and begin with it if their operand is.
_FAMILIES = {
    "fft": (fft.fft, fft.fftn),
    "ifft": (fft.ifft, fft.ifftn),
    "rfft": (fft.rfft, fft.fftn),
    "irfft": (fft.irfft, fft.ifftn),
    "hfft": (fft.hfft, fft.fftn),
    "ihfft": (fft.ihfft, fft.ifftn),
}
_FAMILY = {getattr(fft, name + end): name for name in _FAMILIES for end in ("", "2", "n")}
_HALVES, _DOUBLES = ("rfft", "ihfft"), ("irfft", "hfft")


@op(*(getattr(fft, name) for name in _FAMILIES))
def transform(func, x, n=None, dim=-1, norm=None):
    return _transformed(func, x, [n], [dim], norm)


@op(*(getattr(fft, name + "2") for name in _FAMILIES))
def transform_plane(func, x, s=None, dim=(-2, -1), norm=None):
    return transform_many(func, x, s, dim, norm)


@op(*(getattr(fft, name + "n") for name in _FAMILIES))
def transform_many(func, x, s=None, dim=None, norm=None):
    s, dim = ([v] if isinstance(v, int) else v for v in (s, dim))
    dim = range(-len(s) if s is not None else -x.ndim, 0) if dim is None else dim
    return _transformed(func, x, s if s is not None else [None] * len(dim), dim, norm)


def _transformed(func, x, lengths, dims, norm):
    family, dims = _FAMILY[func], [reduced_dims(x, d)[0] for d in dims]
    if len(lengths) != len(dims) or len(set(dims)) != len(dims) or not dims or x.ndim == 0:
        raise _refused(func, x, f"lengths {list(lengths)} for dims {dims}", "Give one length for each of unlike dims.")
    if norm not in (None, "forward", "backward", "ortho"):
        raise _refused(func, x, f"norm {norm!r}", "Use 'forward', 'backward' or 'ortho'.")
    lengths = dict(zip(dims, (-1 if n is None else n for n in lengths)))
    shape = [lengths[d] if lengths.get(d, -1) != -1 else n for d, n in enumerate(x.shape)]
    last = dims[-1]
    if family in _HALVES:
        shape[last] = shape[last] // 2 + 1
    elif family in _DOUBLES and lengths[last] == -1:
        shape[last] = 2 * (shape[last] - 1)
    if 0 in lengths.values() or min(shape[d] for d in dims) < 1:
        raise _refused(func, x, f"no rows along a dim of {dims}", "Give lengths of at least one.")
    if all(x.axis_of(d) is None for d in dims):
        return Plan((x,), x.reshaped(shape), lambda t, *a, **k: _of_part(func, t, *a, **k))
    steps, at = _steps(x, family, dims, shape)
    kept = all(shape[d] == x.shape[d] for _, d in x.cuts())
    out = x.reshaped(shape) if kept else at

    def local(t, *args, **kwargs):
        for source, turned, whole, final in steps:
            t = _turned(t, source, turned)
            one, many = _FAMILIES[family]
            if final:
                t = _of_part(one, t, None if lengths[last] == -1 else lengths[last], last, norm)
            else:
                t = _of_part(many, t, [lengths[d] for d in whole], whole, norm)
        return t

    return Plan((x,), at, local, out)


def _refused(func, x, problem, remedy):
    return ShardingError(problem, op=func.__name__, operands=[x], remedy=remedy)


def _steps(x, family, dims, shape):
    """Turns of the dims: (spec before, spec with these dims whole, dims, whether it is the last dim's); and the spec
    after all."""
    *others, last = dims
    turns, steps, todo = [(others, False), ([last], True)], [], list(dims)
    if family in ("fft", "ifft"):
        turns = [(todo, False)]
    for left, final in reversed(turns) if family in _HALVES else turns:
        while left:
            turned = x if any(x.axis_of(d) is None for d in left) else _aside(x, left[0], todo)
            ready = [d for d in left if turned.axis_of(d) is None]
            steps.append((x, turned, ready, final))
            x = turned.reshaped([shape[d] if d in ready else n for d, n in enumerate(x.shape)])
            left, todo = ([d for d in ds if d not in ready] for ds in (left, todo))
    return steps, x


def _aside(x, dim, todo):
    """All dims that are still to do made whole at once, if others can take their cuts; if not, this one."""
    turned = x.aside(*todo)
    return turned if len(turned.cuts()) == len(x.cuts()) else x.aside(dim)


def _of_part(transform, t, *args, **kwargs):
    """Libraries refuse a part without rows: it is transformed as one row, of which none is kept. A conjugate is carried
    out in the memory, that of a gradient too, which is why complex numbers pass as pairs of real ones."""
    if t.is_complex():
        t = torch.view_as_complex(torch.view_as_real(t.resolve_conj()))
    none = [d for d, n in enumerate(t.shape) if n == 0]
    t = transform(t.sum(none, keepdim=True) if none else t, *args, **kwargs).resolve_conj()
    for d in none:
        t = t.narrow(d, 0, 0)
    return t


def _turned(t, source, target):
    """``t`` with its cuts turned aside, in the local graph."""
    for axis, dim in source.cuts():
        to, sizes, group = target.placements[axis], source.sizes[axis], c.axis_group(source.mesh, axis)
        if isinstance(to, Shard) and to.dim != dim:
            t = c.all_to_all(t, to.dim, dim, target.sizes[axis], sizes, group)
        elif to != source.placements[axis]:
            t = c.gather(t, dim, sizes, group)
    return t
