"""Rotary embedding: pairs of channels of queries and keys turned by angles, so that their products see distances.

Every row by itself, so nothing is sent, except for channels that are cut: their pairs lie on different ranks.
"""

import torch
from torch.overrides import handle_torch_function, has_torch_function

from core.alone import alone
from core.dispatch import Plan, op
from core.errors import ShardingError
from core.formulas import Formula
from core.kernels.rotary_operators import has_rotary_kernel, turned
from core.ops.pointwise import operand


def rotary_embedding(x, cos, sin):
    """Channels ``a`` of the first half and ``b`` of the second become ``a cos - b sin`` and ``b cos + a sin``.

    Works on plain tensors and on ShardTensors. Source: Su et al., RoFormer, 2021, with halves in place of neighbours.

    Args:
        x: (..., channels), an even number of them.
        cos, sin: of the angles, shapes that broadcast to (..., channels / 2): (tokens, 1, channels / 2) for heads.

    Returns:
        as x

    Raises:
        ShardingError: an odd number of channels, or shapes that do not broadcast to one half.
    """
    if has_torch_function((x, cos, sin)):
        return handle_torch_function(rotary_embedding, (x, cos, sin), x, cos, sin)
    _check(x, cos, sin)
    return _embedded(x, cos, sin)


@op(rotary_embedding)
def rule(func, x, cos, sin):
    half = _check(x, cos, sin)
    x = x.aside(-1)
    angles = [operand(s, x.reshaped(half)) for s in (cos, sin)]
    return Plan((x, *angles), x, _embedded, formula=ROTARY)


def _check(x, cos, sin):
    """The shape of a half."""
    half = torch.Size([*x.shape[:-1], x.shape[-1] // 2]) if x.ndim else None
    try:
        good = half is not None and x.shape[-1] % 2 == 0
        good = good and torch.broadcast_shapes(half, cos.shape, sin.shape) == half
    except RuntimeError:
        good = False
    if not good:
        raise ShardingError(
            "cos and sin must broadcast to (..., channels / 2)",
            op="rotary_embedding", operands=[tuple(t.shape) for t in (x, cos, sin)],
        )  # fmt: skip
    return half


def _embedded(x, cos, sin):
    return alone(ROTARY, _written_out, lambda: has_rotary_kernel(x, cos, sin), x, cos, sin)


def _written_out(x, cos, sin):
    a, b = x.chunk(2, -1)
    out = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return out.to(x.dtype) if x.is_floating_point() else out


def _forward(x, cos, sin):
    return [turned(x, cos, sin) if has_rotary_kernel(x, cos, sin) else _written_out(x, cos, sin)]


def _backward(grad, extra, wanted, x, cos, sin):
    found, grad = [None] * 3, grad.contiguous()
    if wanted[0]:
        found[0] = turned(grad, cos, sin, True) if has_rotary_kernel(grad, cos, sin) else _written_out(grad, cos, -sin)
    if any(wanted[1:]):
        wide = torch.promote_types(x.dtype, (cos if wanted[1] else sin).dtype)  # angles may have more digits
        (a, b), (for_a, for_b) = x.to(wide).chunk(2, -1), grad.to(wide).chunk(2, -1)
        if wanted[1]:
            found[1] = (for_a * a + for_b * b).sum_to_size(cos.shape)
        if wanted[2]:
            found[2] = (for_b * a - for_a * b).sum_to_size(sin.shape)
    return found


ROTARY = Formula(_forward, _backward, ((1, 2), (0, 1), (0, 2)), promotes=True)
