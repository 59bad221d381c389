"""What a view of a ShardTensor remembers: whether its rows are copies, and how the whole would lie in memory.

A wrapper's stride is the same on all ranks and knows few orders (:meth:`ShardTensorSpec.restrided`). So what torch
reads off a stride is kept beside it: whether ``contiguous`` or ``reshape`` would copy, after which a write must not
reach the source; and a view whose rows were fetched from other ranks is a copy, in which a write would be lost. Of the
operations that are no views attention keeps the order of its queries, so that heads go back to channels without a copy.
"""

import itertools

import torch

from core._torch import NoTorchFunction
from core.strides import contiguous_stride


def remember(orders, call, source, results):
    """Notes on the results of a view of ``source`` what they are; ``call(tensor)`` is the view of a plain tensor, and
    ``orders`` what is known of calls like this: the order of the source -> those of the results."""
    results = results if isinstance(results, (tuple, list)) else [results]
    if type(source._local_tensor) is not torch.Tensor:  # being traced
        return
    memory, order = source._local_tensor.untyped_storage()._cdata, source._order
    known = orders.get(order)
    if known is None:
        known = orders[order] = _orders_after(call, source)
    for r, after in zip(results, known):
        r._is_copy = source._is_copy or r._local_tensor.untyped_storage()._cdata != memory
        r._order = after


def lay(result, like):
    """The result lies in memory in the order of the dims of ``like``, on all ranks, if that has as many."""
    if not getattr(like, "_order", None) or like.ndim != result.ndim or type(result._local_tensor) is not torch.Tensor:
        return
    dims = sorted(range(result.ndim), key=lambda d: -like._order[d])
    back = [dims.index(d) for d in range(result.ndim)]
    result._local_tensor = result._local_tensor.permute(dims).contiguous().permute(back)
    dense = contiguous_stride([result.shape[d] for d in dims])
    result._order = tuple(dense[i] for i in back)


def _orders_after(call, source):
    """Strides of the whole results where these are not contiguous, as torch would have them."""
    try:
        out = call(_stand_in(source, source._order))
    except RuntimeError:  # a view where torch would have had to copy
        return itertools.repeat(None)
    out = out if isinstance(out, (tuple, list)) else [out]
    return [None if o.stride() == contiguous_stride(o.shape) else o.stride() for o in out]


def _stand_in(tensor, order):
    """A tensor without memory that lies as the whole would."""
    with NoTorchFunction():
        stride = order or tensor.stride()
        return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device="meta")


def copied_as_torch_would(func, tensor, args, kwargs):
    """The tensor, or a copy of it where ``func`` of the whole gives no view."""
    if tensor._order is None:
        return tensor
    meta = _stand_in(tensor, tensor._order)
    out = func(meta, *args, **kwargs)
    return tensor if out is meta or out._is_view() else tensor.clone(memory_format=torch.contiguous_format)
