"""Questions that have one answer for the whole tensor, alike on every rank; those about memory are refused, and so are
messages that a person sends of their own."""

import torch

from core import collectives as c
from core.dispatch import Plan, op
from core.errors import MissingShardPatch
from core.ops.pointwise import meet, operand

aten = torch.ops.aten


@op(aten.equal, aten.allclose)
def equal(func, a, b, *tolerances, **kwargs):
    """True where all parts say so. Tensors of other shapes are not equal, but may be close."""
    if func.overloadpacket is aten.equal and a.shape != b.shape:
        return Plan((a, b), None, lambda x, y: False)
    target = meet((a, b))

    def local(*args, **kwargs):
        same = torch.tensor(int(func(*args, **kwargs)), device=args[0].device)
        for axis, _ in target.cuts():
            same = c.send_all_reduce(same, c.axis_group(target.mesh, axis), "min")
        return bool(same)

    return Plan((operand(a, target), operand(b, target)), None, local)


@op(aten._local_scalar_dense)
def one_value(func, x):
    return Plan((x.replicated(),), None)


@op(aten.is_same_size)
def is_same_size(func, a, b):
    return Plan((a, b), None, lambda x, y: a.shape == b.shape)


@op(aten.is_set_to, aten.is_pinned)
def of_the_parts(func, *specs, **kwargs):
    return Plan(specs, None)


@op(aten._pin_memory)
def pin_memory(func, x, *args, **kwargs):
    return Plan((x,), x)


@op(torch.Tensor.apply_, torch.Tensor.map_, torch.Tensor.map2_, names=("self",))
@op(torch.Tensor.share_memory_, torch.Tensor.__dlpack__, names=("self",))
def memory(func, x, *args, **kwargs):
    raise MissingShardPatch(
        "reads the memory of a tensor whose parts lie on many ranks",
        op=func.__name__,
        operands=[x],
        remedy="Call it on .to_local().",
    )


_MESSAGES = (
    "broadcast_ allreduce_ reduce_ allgather_ _allgather_base_ reduce_scatter_ _reduce_scatter_base_ gather_ scatter_"
    " alltoall_ alltoall_base_ send recv_"
)


@op(*(getattr(torch.ops.c10d, name) for name in _MESSAGES.split()))
def message(func, *args, **kwargs):
    raise MissingShardPatch(
        "sends a tensor whose parts lie on many ranks, as DDP does with a module's parameters",
        op=str(func),
        remedy="Let core.parallelize.parallelize wrap the module; send .to_local() or .full_tensor().",
    )
