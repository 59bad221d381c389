"""What a computation holds and does: the bytes that are alive and their peak, and the work of every operation.

A :class:`Meter` sees the operations on plain tensors below autograd, those of the backward pass too, and follows each
storage from the operation that made it until its last owner lets go. It does not ask what is in a tensor, so fake
tensors, which have no numbers, are measured as real ones are.
"""

import weakref
from collections import Counter
from functools import cache
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from core._torch import DispatchMode, FakeTensor, wire

_BLOCK = 512  # bytes; the allocator of a GPU hands out multiples
_PLAIN = {torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor}
aten = torch.ops.aten
_ALIKE = {  # torch's own count names the kernels of GPUs only
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


class Work(NamedTuple):
    """One operation: its name, floating-point operations, bytes read and written, and the dtype of its first tensor;
    of a group norm how many groups all samples have together, which is all that torch's kernel does side by side."""

    name: str
    flops: int
    nbytes: int
    dtype: torch.dtype
    groups: int = 0


class Meter(DispatchMode):
    """Measures what runs inside the context.

    Attributes:
        now, peak: bytes alive, of what was made inside, and the most there were since the last :meth:`restart`.
        work: a counter of :class:`Work`, of every operation that is more than a view.
        calls: operations on plain tensors, views included.
        wrapped: operations on tensors of other classes, such as ShardTensors, which then made some of the former.
    """

    def __init__(self):
        super().__init__()
        self.now, self._alive = 0, {}
        self.restart()

    def restart(self):
        """Counts anew; what is alive stays so."""
        self.peak, self.calls, self.wrapped, self.work = self.now, 0, 0, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not _PLAIN.issuperset(types):
            self.wrapped += 1
            return NotImplemented
        out = func(*args, **kwargs)
        if func is wire.wait_tensor.default:  # of a fake message that would be another tensor than what is waited for
            out = args[0]
        made = _tensors(out)
        if made:
            self._note(func, args, kwargs, out, made)
        return out

    def _note(self, func, args, kwargs, out, made):
        self.calls += 1
        used = _tensors((args, tuple(kwargs.values())))
        places = {id(t.untyped_storage()) for t in used}
        fresh = [t for t in made if id(t.untyped_storage()) not in places]
        for t in fresh:
            self._follow(t.untyped_storage())
        if (fresh or _writes(func)) and func.namespace != wire.name and func not in _EMPTY:
            name, nbytes = func.overloadpacket.__name__, sum(map(_touched, [*used, *fresh]))
            groups = args[3] * args[6] if func is aten.native_group_norm.default else 0
            self.work[Work(name, _flops(func, args, kwargs, out), nbytes, (used or made)[0].dtype, groups)] += 1

    def _follow(self, storage):
        key = id(storage)
        if key not in self._alive:
            size = self._alive[key] = -(-storage.nbytes() // _BLOCK) * _BLOCK
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key):
        self.now -= self._alive.pop(key)


_EMPTY = {aten.empty.memory_format, aten.new_empty.default, aten.new_empty_strided.default, aten.empty_like.default}


def _tensors(values):
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, (tuple, list)):
        return [t for v in values for t in _tensors(v)]
    return []


@cache
def _writes(func):
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def _touched(t):
    """Bytes of a tensor; of an expanded one those that exist."""
    return min(t.numel() * t.element_size(), t.untyped_storage().nbytes())


def _flops(func, args, kwargs, out):
    packet = func.overloadpacket
    if packet.__name__ in _WINDOWED:
        return _of_windows(packet.__name__, args)
    if packet.__name__ in _SLOTS:
        return _of_slots(packet.__name__, *args)
    count = flop_registry.get(_ALIKE.get(packet, packet))
    return int(count(*args, **kwargs, out_val=out)) if count else 0


_WINDOWED = {"neighborhood_forward": 4, "neighborhood_backward": 10}  # per pair of points and channel
_EDGES = {1: 64, 2: 8, 3: 4}  # of a box, by the tables of core.kernels, which need Triton

_SLOTS = {  # products of points and slots over channels, and over values, where one block holds all slots, and beyond
    "slot_attention_read": ((1, 1), (1, 1)),
    "slot_attention_sums": ((1, 1), (2, 1)),
    "slot_attention_backward": ((3, 2), (5, 3)),
}
_BLOCK_OF_SLOTS = 128


def _of_windows(name, args):
    """A box of queries meets all boxes of keys that cover its windows, whose sizes are the first of eight numbers of an
    axis; channels are filled up to a power of two."""
    q, axes = args[name == "neighborhood_backward"], args[-2]
    edge, channels = _EDGES[len(axes) // 8], q.shape[-1]
    products = q.numel() // channels * 2 ** (channels - 1).bit_length()
    for size in axes[::8]:
        products *= -(-(size + edge - 1) // edge) * edge
    return _WINDOWED[name] * products


def _of_slots(name, q, k, values, *_):
    channels, times = q.shape[-1], _SLOTS[name][k.shape[2] > _BLOCK_OF_SLOTS]
    return 2 * (q.numel() // channels) * k.shape[2] * (times[0] * channels + times[1] * values.shape[-1])
