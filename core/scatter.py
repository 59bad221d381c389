"""scatter_tensor: what one rank holds, or all, to every rank its own part."""

import torch
import torch.distributed as dist

from core import collectives as c
from core.errors import ShardingError, UndeterminedShardingError
from core.redistribute import move
from core.shard_tensor import ShardTensor
from core.spec import make_spec
from core.strides import memory_format_of


def scatter_tensor(
    tensor, src=None, mesh=None, placements=None, global_shape=None, dtype=None, requires_grad=False, sizes=None
):
    """Sends every rank of ``mesh`` its own part of a tensor that rank ``src`` holds.

    Args:
        tensor: the whole on ``src`` (ignored, may be None, elsewhere); with ``src=None`` the whole on every rank, and
            nothing is sent.
        src: global rank of the source, which must belong to the mesh.
        placements: ``Shard(dim)`` or ``Replicate()`` per axis.
        global_shape, dtype: taken from the source when left out (one small broadcast).
        sizes: a dict axis -> extents for cuts other than torch.chunk's.

    Returns:
        ShardTensor that owns its storage, with the source's memory format.
    """
    if src is None:
        spec = make_spec(mesh, placements, tensor.shape, sizes)
        local = move(tensor.detach(), spec.replicated(), spec)
        local = local.to(dtype or local.dtype, copy=True)
    else:
        local, spec = _send_parts(tensor, src, mesh, placements, global_shape, dtype, sizes)
    return ShardTensor(local, spec).requires_grad_(requires_grad)


def _send_parts(tensor, src, mesh, placements, global_shape, dtype, sizes):
    ranks = mesh.mesh.flatten().tolist()
    if src not in ranks:
        raise ShardingError(f"source rank {src} is not in the mesh {ranks}", op="scatter_tensor")
    facts = [None]
    if dist.get_rank() == src:
        source = tensor.detach() if dtype is None else tensor.detach().to(dtype)
        facts = [(tuple(source.shape), source.dtype, memory_format_of(source))]
    facts = _tell(facts, src, mesh)
    shape, dtype, memory_format = facts
    if global_shape is not None and tuple(global_shape) != shape:
        raise UndeterminedShardingError(f"the source has shape {shape}, not {tuple(global_shape)}", op="scatter_tensor")
    spec = make_spec(mesh, placements, shape, sizes)
    parts = [spec.local_shape(_coordinate(mesh, r)) for r in ranks]
    local = torch.empty(spec.local_shape(), dtype=dtype, device=mesh.device_type)
    if dist.get_rank() == src:
        requests = []
        for r, part in zip(ranks, parts):
            index = tuple(slice(*spec.local_range(d, _coordinate(mesh, r))) for d in range(spec.ndim))
            if r == src:
                local.copy_(source[index])
            elif part.numel():
                requests.append(dist.isend(c.as_bytes(source[index].to(mesh.device_type).reshape(-1)), r))
        for q in requests:
            q.wait()
    elif local.numel():
        buffer = c.as_bytes(local.reshape(-1))
        dist.recv(buffer, src)
    return local.contiguous(memory_format=memory_format), spec


def _tell(facts, src, mesh):
    """The source's facts on every rank of the mesh: along each axis in turn, from those who know."""
    home = _coordinate(mesh, src)
    at = tuple(mesh.get_coordinate())
    for axis in range(mesh.ndim):
        if all(at[a] == home[a] for a in range(axis + 1, mesh.ndim)):
            group = mesh.get_group(axis)
            dist.broadcast_object_list(facts, src=dist.get_global_rank(group, home[axis]), group=group)
    return facts[0]


def _coordinate(mesh, rank):
    return tuple((mesh.mesh == rank).nonzero()[0].tolist())
