"""What DTensor sends for ShardTensors inside it: its ranks hold like parts, so the parts themselves are sent."""

from core._torch import wire
from core.dispatch import Plan, op


@op(wire.all_reduce, wire.broadcast, names=())
def alike(func, x, *args):
    return Plan((x,), x, lambda t, *rest: wire.wait_tensor(func(t.contiguous(), *rest)))


@op(wire.wait_tensor, *([wire._wrap_tensor_autograd] if hasattr(wire, "_wrap_tensor_autograd") else []), names=())
def wait(func, x):
    """Waited for already."""
    return Plan((x,), x, lambda t: t.view_as(t))


@op(wire.all_gather_into_tensor, names=())
def gather(func, x, ranks, group):
    """Stacks along the first dim, which must be whole; its own cut goes to another dim meanwhile."""
    return _along_first(func, x, x.shape[0] * ranks)


@op(wire.reduce_scatter_tensor, names=())
def scatter(func, x, operation, ranks, group):
    return _along_first(func, x, x.shape[0] // ranks)


@op(wire.all_to_all_single, names=())
def trade(func, x, received, sent, group):
    return _along_first(func, x, sum(received))


def _along_first(func, x, rows):
    x = x.aside(0)
    out = x.reshaped((rows, *x.shape[1:]), {d: d for d in range(1, x.ndim)})
    return Plan((x,), out, lambda t, *rest: wire.wait_tensor(func(t.contiguous(), *rest)))
