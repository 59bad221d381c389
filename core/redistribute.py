"""Moves between specs of one mesh. On global values a move is the identity; only where the parts lie changes."""

from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from core import collectives as c
from core.errors import ShardingError


def move(local, src, dst):
    """The local tensor under spec ``dst`` of what ``local`` is under ``src``. No autograd.

    Sums are finished first, then cuts are moved or undone, then new cuts are made, so that no dim is ever cut twice.
    """
    if src.placements == dst.placements and src.sizes == dst.sizes:
        return local
    if dst is src._finished:
        for axis, p in enumerate(src.placements):
            if isinstance(p, Partial):
                local = c.send_all_reduce(local, c.axis_group(src.mesh, axis))
        return local
    if src.mesh != dst.mesh or src.shape != dst.shape:
        raise ShardingError("cannot redistribute between meshes or shapes", operands=(src, dst))
    if src._nested or dst._nested:
        return _move_nested(local, src, dst)
    at, spec = range(src.mesh.ndim), src
    for axis in at:
        if isinstance(spec.placements[axis], Partial) and not isinstance(dst.placements[axis], Partial):
            local, spec = _finish(local, spec, dst, axis)
    for axis in at:
        if isinstance(spec.placements[axis], Shard) and not _same(spec, dst, axis):
            local, spec = _move_cut(local, spec, dst, axis)
    for axis in at:
        if not _same(spec, dst, axis):
            local, spec = _cut(local, spec, dst, axis)
    return local


def _move_nested(local, src, dst):
    """Second cuts are undone first and made last."""
    once = src.cut_once()
    for axis, p in enumerate(src.placements):
        if once.placements[axis] != p:
            local = c.send_gather(local, p.dim, src.extents(axis), c.axis_group(src.mesh, axis))
    local = move(local, once, dst.cut_once())
    for axis, p in enumerate(dst.placements):
        if dst.cut_once().placements[axis] != p:
            extents, rank = dst.extents(axis), c.axis_group(dst.mesh, axis).rank
            local = local.narrow(p.dim, sum(extents[:rank]), extents[rank])
    return local


def _same(a, b, axis):
    return a.placements[axis] == b.placements[axis] and a.sizes[axis] == b.sizes[axis]


def _finish(local, spec, dst, axis):
    """Partial to Replicate by all-reduce, or straight to Shard by reduce-scatter."""
    group, to = c.axis_group(spec.mesh, axis), dst.placements[axis]
    if isinstance(to, Shard) and spec.axis_of(to.dim) is None:
        local = c.send_reduce_scatter(local, to.dim, dst.sizes[axis], group)
        return local, spec.with_axis(axis, to, dst.sizes[axis])
    return c.send_all_reduce(local, group), spec.with_axis(axis, Replicate())


def _move_cut(local, spec, dst, axis):
    group = c.axis_group(spec.mesh, axis)
    here, there, sizes = spec.placements[axis], dst.placements[axis], spec.sizes[axis]
    if isinstance(there, Shard) and there.dim == here.dim:
        wanted = [((a, b),) for a, b in zip(dst.offsets(axis), dst.offsets(axis)[1:])]
        return c.send_exchange(local, here.dim, sizes, wanted, group), spec.with_axis(axis, there, dst.sizes[axis])
    if isinstance(there, Shard) and spec.axis_of(there.dim) is None:
        local = c.send_all_to_all(local, there.dim, here.dim, dst.sizes[axis], sizes, group)
        return local, spec.with_axis(axis, there, dst.sizes[axis])
    return c.send_gather(local, here.dim, sizes, group), spec.with_axis(axis, Replicate())


def _cut(local, spec, dst, axis):
    """Replicate to Shard: own rows; Replicate to Partial: the first rank keeps the value, the others hold zero."""
    to, group = dst.placements[axis], c.axis_group(spec.mesh, axis)
    if isinstance(to, Shard):
        start = dst.offsets(axis)[group.rank]
        return local.narrow(to.dim, start, dst.sizes[axis][group.rank]), spec.with_axis(axis, to, dst.sizes[axis])
    if isinstance(to, Partial):
        return (local if group.rank == 0 else local.new_zeros(local.shape)), spec.with_axis(axis, to)
    raise AssertionError(f"no move from {spec} to {dst}")
