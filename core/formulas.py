"""Derivatives written out, of the plain operations that models are full of.

Where the operation of the parts is the operation itself, a node with such a formula (:class:`core.region.Written`)
needs no graph of its own, which is most of what a node costs; it keeps what torch would keep. Everywhere else, and for
second derivatives, torch differentiates the local computation (:class:`core.region.Region`).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from core.kernels.column_operators import (
    has_column_kernel,
    has_norm_kernel,
    norm,
    norm_backward,
    norm_forward,
    norm_gradients,
    sum_of_rows,
)
from core.precision import widens

aten = torch.ops.aten


class Formula(NamedTuple):
    """How one operation of plain tensors is computed and differentiated.

    Attributes:
        forward: called as the operation is; gives a list of the result and of what the backward needs beside operands.
        backward: ``backward(grad, extra, wanted, *args, **kwargs)``, called as the operation is otherwise; gives the
            gradients of its tensors in order, of any dtype, None where ``wanted`` says so. Operands it does not need
            may be None.
        needs: for each tensor of the operation, for the gradients of which tensors its value is needed.
        fits: whether it holds for these arguments; None: always.
        autocast: type of device -> the dtype that autocast gives the operands, None to leave them; without it the
            formula is not for autocast. The first operand comes in that dtype, others may also be fp32 still.
        promotes: autocast does nothing to operands of one dtype.
    """

    forward: Callable
    backward: Callable
    needs: tuple
    fits: Callable | None = None
    autocast: Callable | None = None
    promotes: bool = False

    def kept(self, tensors, wanted):
        """The tensors whose values the gradients ``wanted`` need, None for the others."""
        return [t if any(wanted[j] for j in needs) else None for t, needs in zip(tensors, self.needs)]


def _rows(x):
    """As a matrix of all rows."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _linear(x, weight, bias=None):
    """Weights are cast here: autocast would remember those that it cast, without gradient, for whoever comes next."""
    return [F.linear(x, weight.to(x.dtype), bias if bias is None else bias.to(x.dtype))]


def _linear_backward(grad, extra, wanted, x, weight, bias=None):
    grad_x = grad @ weight.to(grad.dtype) if wanted[0] else None
    rows = _rows(grad)
    grad_weight = rows.mT @ _rows(x) if wanted[1] else None
    return [grad_x, grad_weight, *(sum_of_rows(rows) if w else None for w in wanted[2:])]


# of a matrix of weights
LINEAR = Formula(_linear, _linear_backward, ((1,), (0,), ()), autocast=torch.get_autocast_dtype)


def addcmul(*shapes):
    """Of ``x + value * a * b``, of these local shapes, which broadcast."""
    return Formula(_addcmul, partial(_addcmul_backward, shapes=shapes), ((), (2,), (1,)), promotes=True)


def _addcmul(x, a, b, *, value=1):
    return [torch.addcmul(x, a, b, value=value)]


def _addcmul_backward(grad, extra, wanted, x, a, b, *, value=1, shapes):
    found = [grad, *(grad * t if w else None for t, w in zip((b, a), wanted[1:]))]
    found[1:] = [f * value if f is not None and value != 1 else f for f in found[1:]]
    return [_summed(f, shape) if w else None for f, shape, w in zip(found, shapes, wanted)]


def _summed(grad, shape):
    """The gradient of what was broadcast from ``shape``; of one row that is all rows together."""
    if shape == grad.shape:
        return grad
    one_row = len(shape) and shape[-1] == grad.shape[-1] == shape.numel()
    return sum_of_rows(_rows(grad)).view(shape) if one_row else grad.sum_to_size(shape)


def _layer_norm(x, shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    sizes, weight, bias = _sizes(shape), like(x, weight), like(x, bias)
    if is_of_rows(x, sizes, weight, bias):  # torch says what is wrong with others
        return norm_forward(x, weight, bias, eps)
    return aten.native_layer_norm(x, sizes, weight, bias, eps)


def _layer_norm_backward(grad, extra, wanted, x, shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    mask, sizes, weight, bias = [*wanted, *[False] * (3 - len(wanted))], _sizes(shape), like(x, weight), like(x, bias)
    if len(sizes) == 1 and wanted[0] and has_norm_kernel(x):
        found = norm_gradients(grad, x, *extra, weight, mask)
    elif len(sizes) == 1 and has_column_kernel(grad, x):
        found = norm_backward(grad, x, *extra, weight, mask)
    else:
        found = aten.native_layer_norm_backward(grad, x, sizes, *extra, weight, bias, mask)
    return list(found[: len(wanted)])


def _rms_norm(x, shape, weight=None, eps=None):
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    out, _, rstd = norm(x, like(x, weight), None, eps, centred=False)
    return [out, rstd]


def _rms_norm_backward(grad, extra, wanted, x, shape, weight=None, eps=None):
    found = norm_gradients(grad, x, grad.new_empty(0), *extra, like(x, weight), [*wanted, False, False][:3])
    return found[: len(wanted)]


def is_of_rows(x, shape, *affine):
    """Whether a norm is over the last dim alone, with weights of its size."""
    given = [list(t.shape) for t in affine if t is not None]
    return all(shape == list(x.shape[-1:]) for shape in ([*_sizes(shape)], *given))


def like(x, weight):
    """A norm's weight as kernels take it beside ``x``: cast here, it is the model's own outside. All else as it is."""
    return weight.to(x.dtype) if isinstance(weight, torch.Tensor) else weight


def _sizes(shape):
    return [shape] if isinstance(shape, int) else shape


def _of_norms(kind):
    return torch.float32 if widens(kind) else None


def _of_rms_norms(kind):
    return torch.float32 if widens(kind, "rms_norm") else None


# with a weight if there is a bias
LAYER_NORM = Formula(_layer_norm, _layer_norm_backward, ((0, 1, 2), (0, 1), (2,)), autocast=_of_norms)
# of rows that have a kernel, with a weight of their size
RMS_NORM = Formula(
    _rms_norm, _rms_norm_backward, ((0, 1), (0, 1)), lambda x, weight=None: has_norm_kernel(x), _of_rms_norms
)  # fmt: skip
