"""A model on a (ddp, domain) mesh: the same weights on every rank of a domain, DDP or FSDP2 over the data axis.

Parameters that lie on the grid, such as an embedding of positions, may be cut as the activations are
(:func:`shard_spatial_params_`). They belong to their rank of the domain, and neither wrapper takes them: their
gradients are averaged over ``ddp`` as they arrive.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from core import collectives as c
from core._torch import ddp_ignores
from core.errors import ShardingError
from core.gradients import gather_in_buckets
from core.scatter import scatter_tensor
from core.shard_tensor import ShardTensor


def parallelize(module, mesh, *, fsdp=False, blocks=()):
    """Wraps ``module`` for a mesh with axes ``ddp`` and ``domain``.

    The gradient of each parameter is the sum over ``domain`` (sent by the operations themselves, in few large messages
    where no wrapper reads them one by one) and the mean over ``ddp`` (by the wrapper).

    Args:
        fsdp: shard the parameters over ``ddp`` with FSDP2 instead of replicating them with DDP.
        blocks: submodules that FSDP2 gathers one at a time.

    Raises:
        ShardingError: a module that is wrapped already.
    """
    _must_be_bare(module, "parallelize")
    sync_module_over_mesh(module, mesh)
    data = mesh["ddp"]
    spatial = {name: p for name, p in module.named_parameters() if isinstance(p, ShardTensor)}
    if data.size() > 1:
        for p in spatial.values():
            p.register_hook(_mean_over(c.axis_group(data, 0)))
    if fsdp:
        for p in module.parameters():
            p.data = p.data.contiguous()  # FSDP2 takes no other
        for part in (*blocks, module):
            fully_shard(part, mesh=data, ignored_params=set(spatial.values()))
        return module
    if data.size() == 1:
        gather_in_buckets(module)
        return module
    ddp_ignores(module, list(spatial))
    device = [torch.cuda.current_device()] if mesh.device_type == "cuda" else None
    return DistributedDataParallel(module, device_ids=device, process_group=data.get_group())


def _must_be_bare(module, op):
    for part in module.modules():
        if isinstance(part, (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)):
            raise ShardingError(f"{type(part).__name__} is wrapped already", op=op, remedy="Give the module itself.")


def _mean_over(group):
    def mean(grad):
        return ShardTensor(c.send_all_reduce(grad._local_tensor, group) / group.size, grad._spec)

    return mean


# -- weights --------------------------------------------------------------------------------------------------------
@torch.no_grad()
def sync_module_over_mesh(module, mesh):
    """Gives every rank of ``mesh`` the parameters and buffers of its first rank; DTensors stay, and so do ShardTensors
    over the axis that cuts them.

    Raises:
        ShardingError: on every rank alike, naming a tensor that the ranks still do not agree on.
    """
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        if mesh.size(axis) == 1:
            continue
        src = dist.get_global_rank(group, 0)
        for tensor in _replicas(tensors_of(module), mesh, axis).values():
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, src=src, group=group)
            tensor.copy_(whole)
    verify_replicas(module, mesh)


@torch.no_grad()
def verify_replicas(module, mesh):
    """Compares parameters and buffers of all ranks of ``mesh`` bit by bit, by small messages.

    Raises:
        ShardingError: on every rank alike, naming the first tensor that differs.
    """
    for axis in range(mesh.ndim):
        for name in unequal(tensors_of(module), mesh, axis):
            raise ShardingError(
                f"{name} differs between ranks of axis {mesh.mesh_dim_names[axis]}",
                op="verify_replicas",
                remedy="Call sync_module_over_mesh, and give every rank of a domain the same gradients.",
            )


@torch.no_grad()
def unequal(tensors, mesh, axis):
    """Names of ``tensors`` (name -> tensor) that should be the same bits on all ranks along an axis and are not; one
    answer for all ranks of the mesh, by a small message, and one more for every other axis."""
    replicas, group = _replicas(tensors, mesh, axis), c.axis_group(mesh, axis)
    if group.size == 1 or not replicas:
        return []
    digests = torch.stack([_digest(t).to(mesh.device_type) for t in replicas.values()])
    all_digests = c.send_gather(digests[None], 0, [1] * group.size, group)
    differ = (all_digests != all_digests[:1]).any(-1).any(0).long()
    for other in set(range(mesh.ndim)) - {axis}:  # there may be other ranks along the axis, and they agree
        differ = c.send_all_reduce(differ, c.axis_group(mesh, other), "max")
    return [name for name, differs in zip(replicas, differ.tolist()) if differs]


def tensors_of(module):
    """Name -> parameter or buffer."""
    return dict([*module.named_parameters(), *module.named_buffers()])


def _replicas(tensors, mesh, axis):
    """What ranks along an axis hold alike, by name: the plain tensors, and the parts of those cut over other axes."""
    found, ranks = {}, dist.get_process_group_ranks(mesh.get_group(axis))
    for name, t in tensors.items():
        if isinstance(t, ShardTensor):
            cut = [t._spec.mesh.get_group(a) for a, _ in t._spec.cuts()]
            if not t._spec.is_partial() and all(dist.get_process_group_ranks(group) != ranks for group in cut):
                found[name] = t._local_tensor
        elif not isinstance(t, DTensor):
            found[name] = t
    return found


def _digest(tensor):
    """Two whole numbers of the bits of a tensor and of where they are."""
    bits, total = tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8), 0
    for i, piece in enumerate(bits.split(2**24)):
        place = torch.arange(len(piece), device=bits.device) % 65521 + 1 + i
        total = total + torch.stack([piece.sum(), (piece * place).sum()])
    return total if len(bits) else bits.new_zeros(2, dtype=torch.int64)


@torch.no_grad()
def shard_spatial_params_(module, mesh, placements, sizes=None):
    """Cuts parameters that lie on the grid, in place, as the activations that they meet are cut.

    Args:
        mesh: the domain, with one axis or two.
        placements: name of a parameter -> its placements, one per axis of ``mesh``.
        sizes: name -> dict axis -> extents of all ranks; torch.chunk's where there is none.

    Raises:
        ShardingError: no parameter of that name, or a module that is wrapped already.
    """
    _must_be_bare(module, "shard_spatial_params_")
    sizes, names = sizes or {}, dict(module.named_parameters(remove_duplicate=False))
    for name, cut in placements.items():
        if name not in names:
            known = ", ".join(names)
            raise ShardingError(f"no parameter {name!r}", op="shard_spatial_params_", remedy=f"There are: {known}.")
        whole = names[name]
        part = scatter_tensor(whole.detach(), None, mesh, cut, sizes=sizes.get(name))
        part = nn.Parameter(part, requires_grad=whole.requires_grad)
        for owner in module.modules():  # tied weights stay tied
            for leaf, p in owner.named_parameters(recurse=False, remove_duplicate=False):
                if p is whole:
                    setattr(owner, leaf, part)


def param_groups(module, **options):
    """Parameters for an optimizer, those of one mesh in one group, so that foreach forms meet tensors of one kind.

    Args:
        options: of every group, as optimizers take them (``lr=...``).
    """
    kinds = {}
    for p in module.parameters():
        mesh = p.device_mesh if isinstance(p, (ShardTensor, DTensor)) else None
        kinds.setdefault((type(p) if mesh is not None else None, mesh), []).append(p)
    return [{"params": params, **options} for params in kinds.values()]


def reshard(module):
    """Puts the parameters that FSDP2 left gathered after a forward pass back into their shards."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def unwrapped(module):
    """The user's module inside a wrapper."""
    return module.module if isinstance(module, DistributedDataParallel) else module
