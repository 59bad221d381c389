"""The operator through which the kernel of rotary embeddings is called, and what it is for."""

import torch

from core.kernels.column_operators import WIDEST_NORM, many_rows, rows_of

_library = torch.library.Library("core", "FRAGMENT")
_library.define("rotary(Tensor x, Tensor cos, Tensor sin, bool back) -> Tensor")


def has_rotary_kernel(x, cos, sin):
    """Whether heads turned as their tokens are have a kernel: angles of the last of the dims before the heads."""
    half, tokens = x.shape[-1] // 2, cos.shape[:-2]
    return (
        many_rows(x)
        and all(t.dtype == x.dtype and t.device == x.device for t in (cos, sin))
        and cos.shape == sin.shape
        and cos.shape[-2:] == (1, half)
        and tokens == x.shape[x.ndim - 2 - len(tokens) : -2]
        and x.shape[:-1].numel() < 2**31
        and x.shape[-1] <= WIDEST_NORM
        and rows_of(x) is not None
    )


def turned(x, cos, sin, back=False):
    return torch.ops.core.rotary(x, cos.contiguous(), sin.contiguous(), back)


def _turned(x, cos, sin, back):
    from core.kernels import rotary

    return rotary.turned(x, cos, sin, back)


for _kind in ("CUDA", "CPU"):
    _library.impl("rotary", _turned, _kind)


@torch.library.register_fake("core::rotary", lib=_library)
def _(x, cos, sin, back):
    return x.new_empty(x.shape)
