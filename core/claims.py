"""What ranks say of a whole of which each holds a part: completed where they leave it open, compared where asked.

Messages are a few numbers along each axis, and travel on the device of the mesh, wherever the parts are.
"""

import zlib
from itertools import product

import torch
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from core import collectives as c
from core.errors import UndeterminedShardingError
from core.spec import make_spec

_MOST_DIMS = 16  # that are compared


def spec_of_local(local, mesh, placements, sharding_shapes, global_shape, check):
    """The spec of the whole, as :meth:`core.ShardTensor.from_local` is asked for it."""
    try:
        spec = _claimed_spec(local, mesh, placements, sharding_shapes, global_shape)
    except (UndeterminedShardingError, IndexError) as error:
        if check:  # the other ranks may have found nothing wrong: they must hear of it
            all_agree(local, None, mesh)
        raise UndeterminedShardingError(str(error), op="from_local") from error
    wrong = spec.local_shape() != local.shape or (global_shape is not None and tuple(global_shape) != tuple(spec.shape))
    if wrong if not check else not all_agree(local, spec, mesh):
        raise UndeterminedShardingError(
            f"local shape {tuple(local.shape)} where placements and sizes say {tuple(spec.local_shape())}"
            + (", here or on another rank" if check else ""),
            op="from_local",
            operands=[spec],
        )
    return spec.restrided(local)


def _claimed_spec(local, mesh, placements, sharding_shapes, global_shape):
    """What this rank's arguments say of the whole."""
    placements = [placements] if isinstance(placements, (Shard, Replicate, Partial)) else list(placements)
    if sharding_shapes == "chunk":
        if global_shape is None:
            raise UndeterminedShardingError("sharding_shapes='chunk' needs global_shape")
        return make_spec(mesh, placements, global_shape)
    cuts = [(a, p.dim % max(local.ndim, 1)) for a, p in enumerate(placements) if isinstance(p, Shard)]
    if sharding_shapes == "infer":
        sizes = _asked_sizes(local, mesh, cuts)
    elif not isinstance(sharding_shapes, dict) or not {a for a, _ in cuts} <= sharding_shapes.keys():
        raise UndeterminedShardingError(
            f"sharding_shapes is {sharding_shapes!r}",
            remedy='Give "infer", "chunk", or a dict with the extents of every axis that cuts.',
        )
    else:
        sizes = {a: [s if isinstance(s, int) else s[d] for s in sharding_shapes[a]] for a, d in cuts}
    shape = list(local.shape)
    for axis, dim in reversed(cuts):  # of two cuts of a dim the first says how long it is
        if isinstance(sizes[axis][0], int):
            shape[dim] = sum(sizes[axis])
    return make_spec(mesh, placements, shape, sizes)


def _asked_sizes(local, mesh, cuts):
    """Extents of all ranks by one small all-gather an axis; where a dim is cut twice, first of the inner cut."""
    sizes = {}
    for axis, dim in reversed(cuts):
        inner = next((a for a, d in cuts if d == dim and a > axis), None)
        mine = sizes[inner] if inner is not None else [local.shape[dim]]
        group = c.axis_group(mesh, axis)
        rows = torch.tensor([mine], dtype=torch.int64, device=mesh.device_type)
        rows = c.send_gather(rows, 0, (1,) * group.size, group).tolist()
        if inner is not None:
            sizes[inner] = [tuple(row) for row in rows]
        sizes[axis] = [sum(row) for row in rows]
    return sizes


def all_agree(local, spec, mesh):
    """Whether all ranks say the same of the whole and hold what it says of them: one small all-gather an axis."""
    facts = spec and (spec.placements, tuple(spec.shape), spec.sizes, local.dtype)
    mine = [zlib.crc32(repr(facts).encode()), local.ndim, *local.shape, *[0] * _MOST_DIMS][: _MOST_DIMS + 2]
    table = torch.tensor([mine], dtype=torch.int64, device=mesh.device_type)
    for axis in reversed(range(mesh.ndim)):
        group = c.axis_group(mesh, axis)
        table = c.send_gather(table, 0, (len(table),) * group.size, group)
    table = table.tolist()
    for row, place in zip(table, product(*(range(n) for n in mesh.shape))):
        if spec is None or row[0] != table[0][0] or tuple(row[2 : 2 + row[1]]) != tuple(spec.local_shape(place)):
            return False
    return True
