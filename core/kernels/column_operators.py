"""The operators through which kernels over columns are called, and which sums and gradients they are for.

As those of neighbourhoods are: what they return is known without computing it, and Triton is loaded when they do.
"""

from typing import NamedTuple

import torch

from core.kernels import reads

LEAST_ROWS, WIDEST_NORM, WIDEST_PRODUCT = 2**12, 2**12, 768  # columns of a norm in one pass, of sums by a product

_library = torch.library.Library("core", "FRAGMENT")
_library.define("column_sums(Tensor grad, Tensor? x, Tensor? mean, Tensor? rstd) -> Tensor")
_library.define("norm(Tensor x, Tensor? weight, Tensor? bias, float eps, bool centred) -> (Tensor, Tensor, Tensor)")
_library.define(
    "norm_gradients(Tensor grad, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, bool[2] wanted)"
    " -> (Tensor, Tensor)"
)
_ops, _aten = torch.ops.core, torch.ops.aten


def has_column_kernel(*tensors):
    """Whether sums over all rows of these have a kernel: where there are many, of which torch's own sums are slow."""
    return all(many_rows(t) and t.is_contiguous() for t in tensors)


def has_norm_kernel(x):
    """Whether norms of the rows of ``x`` have one: where it has all of a row at once. Heads may lie in wider rows."""
    return x.ndim > 0 and x.shape[-1] <= WIDEST_NORM and many_rows(x) and rows_of(x) is not None


def many_rows(t):
    """Whether it has rows enough for a kernel, of a kind that kernels read."""
    return t.numel() > 0 and t.shape[:-1].numel() >= LEAST_ROWS and reads(t)


class Rows(NamedTuple):
    """Where the rows of a matrix begin: every ``per`` of them ``inner`` apart, such groups ``outer`` apart."""

    per: int
    outer: int
    inner: int


def rows_of(x):
    """`Rows` of ``x`` along its last dim, or None where they are scattered otherwise."""
    if x.is_contiguous():
        return Rows(1, x.shape[-1], 0)
    outer = [(n, stride) for n, stride in zip(x.shape[:-2], x.stride()[:-2]) if n > 1]
    even = all(stride == n * below for (_, stride), (n, below) in zip(outer, outer[1:]))
    if x.stride(-1) != 1 or not even or x.shape[:-1].numel() >= 2**31:
        return None
    return Rows(x.shape[-2], outer[-1][1] if outer else 0, x.stride(-2))


def by_product(kind, dtype, rows, columns):
    """Whether a product with a row of ones gives the sums of a matrix, on this type of device: cuBLAS multiplies half
    precision exactly and adds in fp32, unless it was allowed to add fp16 in fp16, and counts rows in 32 bits. Of few
    columns it is faster than our kernel."""
    halves = torch.bfloat16, *(() if torch.backends.cuda.matmul.allow_fp16_accumulation else (torch.float16,))
    return kind == "cuda" and dtype in halves and rows < 2**31 and columns <= WIDEST_PRODUCT


def product_with_ones(grad):
    """(rows, columns) of half precision -> (1, columns), fp32."""
    return torch.mm(grad.new_ones(1, len(grad)), grad, out_dtype=torch.float32)


def sum_of_rows(grad):
    """(rows, columns) -> (columns,), in fp32 where we compute it."""
    return _ops.column_sums(grad, None, None, None)[0] if has_column_kernel(grad) else grad.sum(0)


def norm_forward(x, weight, bias, eps):
    """Layer norm over the last dim, and the mean and the inverse deviation of each row (..., 1). weight, bias:
    (columns,) of the dtype of x, or None."""
    if not has_norm_kernel(x):
        return _aten.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    return norm(x, weight, bias, eps)


def norm(x, weight, bias, eps, centred=True):
    """The kernel's norm of the rows of ``x``, their means, none where it takes none off, and inverse deviations."""
    return _ops.norm(x, *(t if t is None else t.contiguous() for t in (weight, bias)), eps, centred)


def norm_backward(grad, x, mean, rstd, weight, wanted):
    """Gradients of x, weight and bias of a layer norm over the last dim, None for those not ``wanted``; of weight and
    bias in fp32. For operands that have a column kernel, and rows that the norm's kernel has not: of x torch's."""
    columns, found, only = x.shape[-1], [None] * 3, [True, False, False]
    if wanted[0]:
        found[0] = _aten.native_layer_norm_backward(grad, x, [columns], mean, rstd, weight, None, only)[0]
    if wanted[1]:
        both = grad.view(-1, columns), x.view(-1, columns), mean.flatten(), rstd.flatten()
        found[2], found[1] = _ops.column_sums(*both)
    elif wanted[2]:
        found[2] = sum_of_rows(grad.view(-1, columns))
    return [f if w else None for f, w in zip(found, wanted)]


def norm_gradients(grad, x, mean, rstd, weight, wanted):
    """The kernel's gradients of x, weight and bias, in one pass with that of x."""
    weight = weight if weight is None else weight.contiguous()
    grad_x, sums = _ops.norm_gradients(grad.contiguous(), x, mean, rstd, weight, wanted[1:])
    sums = iter(sums)
    return [grad_x if wanted[0] else None, *(next(sums) if w else None for w in wanted[1:])]


# -- what they do -----------------------------------------------------------------------------------------------------
def _sums(grad, x, mean, rstd):
    if x is None and by_product(grad.device.type, grad.dtype, *grad.shape):
        return product_with_ones(grad)
    from core.kernels import columns

    return columns.sums(grad, x, mean, rstd)


def _normed(x, weight, bias, eps, centred):
    from core.kernels import columns

    return columns.normed(x, weight, bias, eps, centred)


def _norm(grad, x, mean, rstd, weight, wanted):
    from core.kernels import columns

    return columns.norm(grad, x, mean, rstd, weight, wanted)


for _kind in ("CUDA", "CPU"):
    _library.impl("column_sums", _sums, _kind)
    _library.impl("norm", _normed, _kind)
    _library.impl("norm_gradients", _norm, _kind)


@torch.library.register_fake("core::column_sums", lib=_library)
def _(grad, x, mean, rstd):
    return grad.new_empty(1 + (x is not None), grad.shape[1], dtype=torch.float32)


@torch.library.register_fake("core::norm", lib=_library)
def _(x, weight, bias, eps, centred):
    rstd = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    return x.new_empty(x.shape), torch.empty_like(rstd) if centred else rstd.new_empty(0), rstd


@torch.library.register_fake("core::norm_gradients", lib=_library)
def _(grad, x, mean, rstd, weight, wanted):
    return x.new_empty(x.shape), x.new_empty(sum(wanted), x.shape[-1], dtype=torch.float32)
