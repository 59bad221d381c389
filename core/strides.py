"""The order of a tensor in memory: what of it all ranks can know from a part of one of them."""

from functools import lru_cache

import torch


@lru_cache(maxsize=4096)
def _contiguous_stride(shape):
    stride, step = [], 1
    for n in reversed(shape):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))


def contiguous_stride(shape):
    try:
        return _contiguous_stride(tuple(shape))
    except TypeError:  # symbolic sizes are not hashable
        return _contiguous_stride.__wrapped__(tuple(shape))


def stride_like(local, shape):
    """Strides of a whole of ``shape`` in the memory order of ``local``, a part, where it is channels-last or expanded.

    Any other order is called contiguous: it can be read off the strides of some parts and not of others (one row is
    contiguous in more ways than one).
    """
    if local.is_contiguous() or not (_overlaps(local) or _channels_last(local)):
        return contiguous_stride(shape)
    stride, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (local.stride(d), -d)):
        if local.stride(d) == 0 and local.shape[d] > 1:
            continue  # an expanded dim stays one: whoever writes in place must see that memory overlaps
        stride[d] = step
        step *= max(shape[d], 1)
    return tuple(stride)


def _overlaps(local):
    return any(step == 0 and n > 1 for n, step in zip(local.shape, local.stride()))


def _channels_last(local):
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return local.ndim in formats and local.is_contiguous(memory_format=formats[local.ndim])


def memory_format_of(tensor):
    """Channels-last where that is the order of a plain tensor, contiguous otherwise."""
    if tensor.is_contiguous() or not _channels_last(tensor):
        return torch.contiguous_format
    return torch.channels_last if tensor.ndim == 4 else torch.channels_last_3d
