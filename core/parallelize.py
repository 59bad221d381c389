"""A model on a (ddp, domain) mesh: the same weights on every rank of a domain, DDP or FSDP2 over the data axis."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from core.gradients import gather_in_buckets


@torch.no_grad()
def sync_module_over_mesh(module, mesh):
    """Gives every rank of ``mesh`` the parameters and buffers of its first rank. Plain tensors only; DTensors stay."""
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        if mesh.size(axis) == 1:
            continue
        src = dist.get_global_rank(group, 0)
        for tensor in [*module.parameters(), *module.buffers()]:
            if not isinstance(tensor, DTensor):
                whole = tensor.detach().contiguous()
                dist.broadcast(whole, src=src, group=group)
                tensor.copy_(whole)


def parallelize(module, mesh, *, fsdp=False, blocks=()):
    """Wraps ``module`` for a mesh with axes ``ddp`` and ``domain``.

    The gradient of each parameter is the sum over ``domain`` (sent by the operations themselves, in few large messages
    where no wrapper reads them one by one) and the mean over ``ddp`` (by the wrapper).

    Args:
        fsdp: shard the parameters over ``ddp`` with FSDP2 instead of replicating them with DDP.
        blocks: submodules that FSDP2 gathers one at a time.
    """
    sync_module_over_mesh(module, mesh)
    data = mesh["ddp"]
    if fsdp:
        for block in blocks:
            fully_shard(block, mesh=data)
        return fully_shard(module, mesh=data)
    if data.size() == 1:
        gather_in_buckets(module)
        return module
    device = [torch.cuda.current_device()] if mesh.device_type == "cuda" else None
    return DistributedDataParallel(module, device_ids=device, process_group=data.get_group())


def reshard(module):
    """Puts the parameters that FSDP2 left gathered after a forward pass back into their shards."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def unwrapped(module):
    """The user's module inside a wrapper."""
    return module.module if isinstance(module, DistributedDataParallel) else module
