"""The arguments of a call: their tensors in order, a key that describes them, and the call with other tensors."""

from itertools import repeat

import torch

from core.shard_tensor import ShardTensor
from core.spec import ShardTensorSpec

_NUMBERS = {int, float, bool, type(None), str, torch.dtype}  # looked at first: most arguments are one, tensors are few


def scan(args, tensors):
    """Hashable description of the arguments; collects their tensors in order."""
    key = []
    for a in args:
        kind = type(a)
        if kind in _NUMBERS:
            key.append((kind, a))
        elif kind is ShardTensor:
            tensors.append(a)
            key.append(a._spec)
        elif kind is list or kind is tuple:
            key.append(scan(a, tensors))
        elif isinstance(a, torch.Tensor):
            tensors.append(a)
            key.append(a._spec if isinstance(a, ShardTensor) else a.shape)
        else:
            key.append((kind, a))
    return tuple(key)


_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "x": "input"}


def positional(rule, args, kwargs):
    """The first arguments without their names, the others in the order of the rule's parameters, which is that of
    ``Plan.inputs``; names that torch takes from numpy become its own."""
    if not kwargs.keys().isdisjoint(_NUMPY_NAMES):
        kwargs = {k if k in rule.order else _NUMPY_NAMES.get(k, k): v for k, v in kwargs.items()}
    first = rule.names[len(args)] if len(args) < len(rule.names) else None
    if first in kwargs:
        args, kwargs = list(args), dict(kwargs)
        while first in kwargs:
            args.append(kwargs.pop(first))
            first = rule.names[len(args)] if len(args) < len(rule.names) else None
    if len(kwargs) > 1:
        kwargs = {name: kwargs[name] for name in (*rule.order, *kwargs) if name in kwargs}
    return args, kwargs


def collect(args, tensors):
    """The tensors among (nested) arguments, in order."""
    for a in args:
        if isinstance(a, torch.Tensor):
            tensors.append(a)
        elif type(a) is list or type(a) is tuple:
            collect(a, tensors)


def _fill(args, values):
    """The arguments with their tensors replaced by the next ones of an iterator."""
    return [
        a
        if type(a) in _NUMBERS
        else next(values)
        if isinstance(a, torch.Tensor)
        else type(a)(_fill(a, values))
        if type(a) is tuple or type(a) is list
        else a
        for a in args
    ]


def call(function, args, kwargs, values):
    values = iter(values)
    args = _fill(args, values)
    if kwargs:
        kwargs = dict(zip(kwargs, _fill(kwargs.values(), values)))
    return function(*args, **kwargs)


_HOLE = torch.empty(0)


def emptied(args, kwargs):
    """The arguments without their tensors, which a node of the graph must not keep alive."""
    holes = repeat(_HOLE)
    return _fill(args, holes), dict(zip(kwargs, _fill(kwargs.values(), holes))) if kwargs else kwargs


def tensors_in(args, kwargs=None):
    """All specs among (nested) arguments, in order."""
    found = []
    for a in (*args, *(kwargs or {}).values()):
        if isinstance(a, ShardTensorSpec):
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found.extend(tensors_in(a))
    return tuple(found)


def shards(tensors):
    return [t for t in tensors if isinstance(t, ShardTensor)]


def local_of(tensor):
    """The part of this rank; of a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, ShardTensor) else tensor


def described(tensors):
    return [t._spec if isinstance(t, ShardTensor) else tuple(t.shape) for t in tensors]


def name_of(func):
    return getattr(func, "__name__", str(func))
