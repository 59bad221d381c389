"""What a view of a ShardTensor remembers: whether its rows are copies, and how the whole would lie in memory.

A wrapper's stride is the same on all ranks and knows few orders (:meth:`ShardTensorSpec.restrided`). So what torch
reads off a stride is kept beside it: whether ``contiguous`` or ``reshape`` would copy, after which a write must not
reach the source; and a view whose rows were fetched from other ranks is a copy, in which a write would be lost.
"""

import itertools

import torch

from core._torch import NoTorchFunction
from core.spec import contiguous_stride

_orders: dict = {}
_MOST_ORDERS = 20_000


def is_copy(tensor):
    return getattr(tensor, "_is_copy", False)


def remember(key, call, source, results):
    """Notes on the results of a view of ``source`` what they are; ``call(tensor)`` is the view of a plain tensor."""
    results = results if isinstance(results, (tuple, list)) else [results]
    if type(source._local_tensor) is not torch.Tensor:  # being traced
        return
    for r, order in zip(results, _orders_after(key, call, source)):
        r._is_copy = is_copy(source) or not _same_memory(r._local_tensor, source._local_tensor)
        if order is not None:
            r._order = order


def _same_memory(a, b):
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _orders_after(key, call, source):
    """Strides of the whole results where these are not contiguous, as torch would have them."""
    order = getattr(source, "_order", None)
    try:
        if (key, order) not in _orders:
            if len(_orders) >= _MOST_ORDERS:  # shapes that change every step would fill it
                _orders.clear()
            out = call(_stand_in(source, order))
            out = out if isinstance(out, (tuple, list)) else [out]
            _orders[key, order] = [None if o.stride() == contiguous_stride(o.shape) else o.stride() for o in out]
        return _orders[key, order]
    except (TypeError, RuntimeError):  # arguments that cannot be a key; a view where torch would have had to copy
        return itertools.repeat(None)


def _stand_in(tensor, order):
    """A tensor without memory that lies as the whole would."""
    with NoTorchFunction():
        stride = order or tensor.stride()
        return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device="meta")


def copied_as_torch_would(func, tensor, args, kwargs):
    """The tensor, or a copy of it where ``func`` of the whole gives no view."""
    order = getattr(tensor, "_order", None)
    if order is None:
        return tensor
    meta = _stand_in(tensor, order)
    out = func(meta, *args, **kwargs)
    return tensor if out is meta or out._is_view() else tensor.clone(memory_format=torch.contiguous_format)
