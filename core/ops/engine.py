"""The autograd engine on ShardTensors: ``backward``, ``autograd.grad``, and ``x.data = y``."""

from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from core._torch import NoTorchFunction
from core.dispatch import composed
from core.errors import ShardingError
from core.gradients import running
from core.shard_tensor import ShardTensor

_DATA: Any = torch.Tensor.data  # of the class: what gets and sets it


# Gradient edges instead of tensors: a backward pass may recompute a checkpointed forward, so it must run with
# ``__torch_function__`` switched on, and edges have none of their own.
def _edges(tensors):
    with NoTorchFunction():
        return [get_gradient_edge(t) if isinstance(t, ShardTensor) else t for t in tensors]


def _seeds(outputs, grads):
    grads = [None] * len(outputs) if grads is None else grads
    grads = [grads] if isinstance(grads, torch.Tensor) else grads
    return [torch.ones_like(o) if g is None and o.numel() == 1 else g for o, g in zip(outputs, grads)]


@composed(torch.autograd.grad)
def _grad(outputs, inputs, grad_outputs=None, *, materialize_grads=False, allow_unused=None, **kwargs):
    allow_unused = bool(allow_unused or materialize_grads)
    seeds = _seeds(outputs, grad_outputs)
    with running(stores=False):  # what is asked for goes to the caller
        found = torch.autograd.grad(_edges(outputs), _edges(inputs), seeds, allow_unused=allow_unused, **kwargs)
    if materialize_grads:
        found = tuple(torch.zeros_like(t) if g is None else g for t, g in zip(inputs, found))
    return found


@composed(torch.autograd.backward)
def _backward(tensors, grad_tensors=None, retain_graph=None, create_graph=False, inputs=None):
    inputs = _edges(inputs) if inputs is not None else None
    seeds = _seeds(tensors, grad_tensors)
    with running(stores=inputs is None and not create_graph):
        torch.autograd.backward(_edges(tensors), seeds, retain_graph, create_graph, inputs=inputs)


@composed(_DATA.__set__)
def _set_data(tensor, data):
    """``x.data = y``: torch changes the wrapper, and the part must change with it."""
    if not isinstance(tensor, ShardTensor) or not isinstance(data, ShardTensor):
        raise ShardingError("one is a ShardTensor and the other is not", op="data", remedy="Scatter the new values.")
    with NoTorchFunction():
        torch.Tensor.data.__set__(tensor, data)
    tensor._local_tensor, tensor._spec = data._local_tensor, data._spec
