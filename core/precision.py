"""Autocast of a GPU, on the CPU: which operations go to fp32 differs, and with it what a model keeps.

Torch's documentation lists them ("CUDA Ops that can autocast to float32"). What the CPU's autocast widens itself (most
losses) is left to it.
"""

from contextlib import contextmanager, nullcontext

import torch

from core._torch import autocast_knows, scoped_library

_WIDENED = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log1p",
    "log2",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "softplus",
    "layer_norm",
    "group_norm",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "norm.Scalar",
    "norm.ScalarOpt_dim",
    "cosine_similarity",
    "dist",
    "renorm",
    *["rms_norm"] * autocast_knows("rms_norm"),
]
_SUMMED = ("softmax.int", "log_softmax.int", "cumsum", "cumprod", "sum", "sum.dim_IntList")  # asked for fp32
_NARROW = torch.float16, torch.bfloat16
_as_gpu = False


def autocasts(kind):
    """Whether autocast is enabled for this type of device; torch has none for tensors without numbers, and says so."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def autocast_now(kind):
    """Arguments of ``torch.autocast`` with which a backward pass computes as is done now."""
    return ("cpu", torch.bfloat16, False) if kind == "meta" else (kind, torch.get_autocast_dtype(kind), autocasts(kind))


def widens(kind, norm="layer_norm"):
    """Whether autocast of this type of device computes such normalisations in fp32."""
    return (kind == "cuda" or _as_gpu) and norm in _WIDENED


@contextmanager
def gpu_autocast(dtype):
    """``torch.autocast`` to ``dtype`` for tensors of the CPU, as for those of a GPU."""
    global _as_gpu
    before, _as_gpu = _as_gpu, True
    try:
        with nullcontext() if before else _widened_library(), torch.autocast("cpu", dtype):
            yield
    finally:
        _as_gpu = before


@contextmanager
def _widened_library():
    with scoped_library("aten", "IMPL") as library:
        for names, kernel in ((_WIDENED, _widened), (_SUMMED, _summed)):
            for name in names:
                library.impl(name, kernel(_operator(name)), "AutocastCPU")
        yield


def _operator(name):
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _widened(operator):
    def call(*args, **kwargs):
        with torch.autocast("cpu", enabled=False):
            return operator(*[a.float() if _narrow(a) else a for a in args], **kwargs)

    return call


def _summed(operator):
    def call(x, *args, dtype=None, **kwargs):
        if "softmax" in operator.name() and len(args) > 1:
            args, dtype = args[:1], args[1]
        with torch.autocast("cpu", enabled=False):
            return operator(x, *args, dtype=torch.float32 if dtype is None and _narrow(x) else dtype, **kwargs)

    return call


def _narrow(a):
    return isinstance(a, torch.Tensor) and a.dtype in _NARROW
