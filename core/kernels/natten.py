"""natten's kernels for attention over neighbourhoods, where they are installed, can do a call, and are faster.

natten takes whole grids, with queries and keys at the same points. The keys at hand are such a grid, and its windows
are the true ones for the queries at hand: all keys of such a window are at hand, and where the edge of the whole grid
pushed it inwards, the keys at hand end there as well. So queries are filled up with zeros to the points of the keys,
and their results cut out again; what was added has no gradient.

Which is faster is measured when a kind of call first comes, forward and backward where gradients are wanted. Ranks may
choose unlike each other: no message hangs on it. Documentation: https://natten.org.
"""

from functools import cache
from importlib.util import find_spec
from time import perf_counter

import torch
import torch.nn.functional as F

from core._torch import compiling
from core.errors import ShardingError

NAMES = ("auto", "own", "natten")
_HALF = torch.float16, torch.bfloat16  # in fp32 the products of our kernel are more exact
_CONFIGS = [f"get_configs_for_cutlass_{kind}fna" for kind in ("hopper_", "blackwell_", "")]
_RUNS = 4  # of each; the first one builds kernels

_asked = "auto"
_faster: dict[tuple, bool] = {}  # kind of call -> whether natten is


def set_neighborhood_kernel(name):
    """Whose kernel computes `core.neighborhood_attention`.

    Args:
        name: ``"auto"``, on a GPU in half precision whichever is faster of our kernel and natten's, measured once for
            each kind of call; ``"own"``; ``"natten"`` for every call, on CPUs too, that is not being compiled and has
            at least ``kernel_size * dilation`` points of each dim at hand.

    Raises:
        ShardingError: another name, or ``"natten"`` where no version from 0.20 on is installed.
    """
    global _asked
    say = {"op": "neighborhood_attention", "remedy": f"Use one of {', '.join(NAMES)}."}
    if name not in NAMES:
        raise ShardingError(f"unknown kernel {name!r}", **say)
    if name == "natten" and _library() is None:
        raise ShardingError("natten is not installed, or older than 0.20", **say)
    _asked = name


def preferred(q, k, v, axes, scale, own, again=False):
    """Whether natten should compute this call.

    Args:
        q, k, v: the operands at hand, (batch, *grid, heads, channels), of one dtype.
        axes: one ``core.ops.windows.Axis`` for each dim of the grid.
        scale: factor of the products.
        own: (q, k, v, axes, scale) -> what our kernel gives, or None where we have none for them.
        again: a backward pass will come, and natten's forward pass is then computed once more; ours is not.
    """
    if _asked == "own" or _library() is None or not _eager(q) or not _fits(axes, scale):
        return False
    if _asked == "natten":
        return True
    if own is None or q.dtype not in _HALF or max(q.numel(), k.numel()) >= 2**31:
        return False
    train = again or (torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)))
    strict = torch.are_deterministic_algorithms_enabled()
    kind = q.shape, q.dtype, q.device, axes, train, again, strict
    if kind not in _faster:
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # nothing can be measured: what was not called before takes our kernel
        _faster[kind] = _is_faster((q, k, v), axes, scale, own, train, again)
    return _faster[kind]


def attention(q, k, v, axes, scale):
    """Attention of the queries at hand by natten, shaped as ``q``."""
    fill = [0] * 4
    for a in reversed(axes):
        before = a.first_query - a.first_key
        fill += before, a.keys - a.queries - before
    filled = any(fill)
    windows = {
        "kernel_size": tuple(a.window.size for a in axes),
        "dilation": tuple(a.window.dilation for a in axes),
        "is_causal": tuple(bool(a.window.causal) for a in axes),
    }
    attend = getattr(_library(), f"na{len(axes)}d")
    out = attend(F.pad(q, fill) if filled else q, k, v, **windows, scale=scale)
    for dim, a in enumerate(axes, 1):
        out = out.narrow(dim, a.first_query - a.first_key, a.queries)
    return out.contiguous() if filled else out


@cache
def _library():
    """natten, or None; imported nowhere else."""
    if find_spec("natten") is None:
        return None
    import natten

    return natten if hasattr(natten, _CONFIGS[0]) else None


def _is_compiled(*grids):
    """Whether natten has a compiled kernel for such operands: it would do without one, by writing out all products."""
    return _library().HAS_LIBNATTEN and any(getattr(_library(), name)(*grids) for name in _CONFIGS)


def _eager(q):
    """Whether tensors are real: none is while code is being compiled or planned."""
    return not compiling() and type(torch.empty(0, device=q.device)) is torch.Tensor


def _fits(axes, scale):
    """Whether every point of the keys at hand has a whole window among them, as natten asks."""
    return scale > 0 and all(a.keys >= a.window.size * a.window.dilation for a in axes)


def _is_faster(operands, axes, scale, own, train, again):
    leaves = [t.detach().requires_grad_(train) for t in operands]
    if not _is_compiled(leaves[1], *leaves[1:]):
        return False
    with torch.set_grad_enabled(train):
        ours, theirs = (_seconds(attend, leaves, axes, scale) for attend in (own, attention))
    return theirs + (_seconds(attention, operands, axes, scale) if again else 0) < ours


def _seconds(attend, leaves, axes, scale):
    """The least of a few runs, with the backward pass where there is one."""
    times = []
    for _ in range(_RUNS):
        _wait(leaves[0])
        start = perf_counter()
        out = attend(*leaves, axes, scale)
        if out.requires_grad:
            torch.autograd.grad(out, leaves, out.detach())
        _wait(leaves[0])
        times.append(perf_counter() - start)
    return min(times[1:])


def _wait(tensor):
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()  # messages on other streams go on
