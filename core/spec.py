"""How a tensor is cut: mesh, placements, global shape and the extent that every rank holds. Pure metadata.

A spec holds no tensor and never communicates. It is immutable and hashable, so it keys the cache of plans and the
guards of ``torch.compile``. The words: *axis* is a mesh axis, *dim* a tensor dimension, ``sizes[axis]`` the extents
along the dim that this axis cuts, one per rank of the axis (``None`` where the axis cuts nothing). Where a later axis
cuts a dim again, its sizes hold such extents for each rank of the earlier axis; only :mod:`core.redistribute` and
operations of single elements see that (:meth:`ShardTensorSpec.cut_once`).
"""

from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from core.collectives import groups_of
from core.errors import UndeterminedShardingError
from core.strides import contiguous_stride, stride_like

REPLICATE = Replicate()
PARTIAL = Partial()


class ShardTensorSpec:
    """Frozen description of a sharded tensor.

    Args:
        mesh: device mesh, one or two axes.
        placements: one of ``Shard(dim)``, ``Replicate()``, ``Partial()`` (a pending sum) per axis.
        shape: global shape.
        sizes: per axis the extents along its sharded dim, one per rank; ``None`` for axes that do not cut; for the
            second axis that cuts a dim one such tuple for each part of the first.
        stride: global stride; contiguous when left out.
    """

    __slots__ = (
        "mesh", "placements", "shape", "sizes", "stride",  # what it says
        "_key", "_hash", "_pending", "_cut", "_nested",  # derived once
        "_restrided", "_cotangent", "_finished", "_replicated",  # made when asked for
    )  # fmt: skip

    def __init__(self, mesh, placements, shape, sizes, stride=None):
        set_ = object.__setattr__
        set_(self, "mesh", mesh)
        set_(self, "placements", tuple(placements))
        set_(self, "shape", torch.Size(shape))
        set_(self, "sizes", tuple(sizes))
        set_(self, "stride", tuple(stride) if stride is not None else contiguous_stride(self.shape))
        set_(self, "_key", None)
        set_(self, "_hash", None)
        set_(self, "_pending", any(isinstance(p, Partial) for p in self.placements))
        set_(self, "_cut", any(isinstance(p, Shard) for p in self.placements))
        set_(self, "_nested", any(bool(s) and isinstance(s[0], tuple) for s in self.sizes))
        set_(self, "_restrided", {})
        set_(self, "_cotangent", None)
        set_(self, "_finished", None if self._pending else self)
        set_(self, "_replicated", None if self._pending or self._cut else self)

    def __setattr__(self, name, value):
        raise AttributeError(f"a ShardTensorSpec is frozen; make a new one to change {name}")

    def __eq__(self, other):
        return self is other or (isinstance(other, ShardTensorSpec) and self._told() == other._told())

    def __hash__(self):
        if self._hash is None:
            object.__setattr__(self, "_hash", hash(self._told()))
        return self._hash

    def _told(self):
        if self._key is None:
            told = self.mesh, groups_of(self.mesh), self.placements, tuple(self.shape), self.sizes, self.stride
            object.__setattr__(self, "_key", told)
        return self._key

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return ShardTensorSpec, (self.mesh, self.placements, self.shape, self.sizes, self.stride)

    def __repr__(self):
        cuts = ", ".join(_placement_text(p, s) for p, s in zip(self.placements, self.sizes))
        return f"ShardTensorSpec(shape={tuple(self.shape)}, [{cuts}], mesh={tuple(self.mesh.shape)})"

    # -- what is where ------------------------------------------------------------------------------------------
    @property
    def ndim(self):
        return len(self.shape)

    @property
    def device_mesh(self):
        return self.mesh

    def axis_of(self, dim):
        """The axis that cuts ``dim``, or None."""
        dim = dim % max(self.ndim, 1)
        for axis, p in enumerate(self.placements):
            if isinstance(p, Shard) and p.dim == dim:
                return axis
        return None

    def cuts(self):
        """Pairs (axis, dim) of all sharded dims."""
        return [(axis, p.dim) for axis, p in enumerate(self.placements) if isinstance(p, Shard)]

    def is_sharded(self):
        return self._cut

    def is_partial(self):
        return self._pending

    def is_replicated(self):
        return not self._cut and not self._pending

    def offsets(self, axis):
        """First global index of every rank of ``axis`` and, last, the global extent."""
        return (0, *accumulate(self.sizes[axis]))

    def local_range(self, dim, coordinate=None):
        """Half-open global index range of ``dim`` on this rank (or at ``coordinate``)."""
        coordinate = coordinate or self.coordinate()
        start, stop = 0, self.shape[dim]
        for axis, d in self.cuts():
            if d == dim % self.ndim:
                extents = self.extents(axis, coordinate)
                start += sum(extents[: coordinate[axis]])
                stop = start + extents[coordinate[axis]]
        return start, stop

    def extents(self, axis, coordinate=None):
        """``sizes[axis]``; of a dim's second cut the part that concerns this rank (or ``coordinate``)."""
        sizes = self.sizes[axis]
        if not self._nested or not isinstance(sizes[0], tuple):
            return sizes
        return sizes[(coordinate or self.coordinate())[self.axis_of(self.placements[axis].dim)]]

    def cut_once(self):
        """The same tensor without the second cut of a dim."""
        if not self._nested:
            return self
        twice = [bool(s) and isinstance(s[0], tuple) for s in self.sizes]
        placements = [REPLICATE if t else p for p, t in zip(self.placements, twice)]
        return self.recut(placements, [None if t else s for s, t in zip(self.sizes, twice)])

    def coordinate(self):
        return tuple(self.mesh.get_coordinate())

    def local_shape(self, coordinate=None):
        coordinate = coordinate or self.coordinate()
        shape = list(self.shape)
        for axis, dim in self.cuts():
            shape[dim] = self.extents(axis, coordinate)[coordinate[axis]]
        return torch.Size(shape)

    @property
    def _sharding_shapes(self):
        """Per sharded axis the local shapes of all its ranks, the others as on this rank."""
        here_at, table = self.coordinate(), {}
        here = self.local_shape(here_at)
        for axis, dim in self.cuts():
            table[axis] = tuple(torch.Size([*here[:dim], n, *here[dim + 1 :]]) for n in self.extents(axis, here_at))
        return table

    # -- specs made from this one -------------------------------------------------------------------------------
    def recut(self, placements, sizes, shape=None, stride=None):
        """Another placement and extents (None: uncut) on each axis, unchecked; the same shape unless one is given."""
        return ShardTensorSpec(self.mesh, placements, self.shape if shape is None else shape, sizes, stride)

    def with_axis(self, axis, placement, sizes=None):
        """The same tensor with another placement on one axis; ``Shard`` without sizes takes torch.chunk's."""
        placements, all_sizes = list(self.placements), list(self.sizes)
        if isinstance(placement, Shard):
            placement = Shard(placement.dim % self.ndim)
            sizes = sizes if sizes is not None else chunk_sizes(self.shape[placement.dim], self.mesh.size(axis))
        placements[axis], all_sizes[axis] = placement, (tuple(sizes) if sizes is not None else None)
        return self.recut(placements, all_sizes)

    def replicated(self):
        """The same tensor, whole on every rank."""
        if self._replicated is None:
            object.__setattr__(self, "_replicated", replicated_spec(self.mesh, self.shape))
        return self._replicated

    def finished(self):
        """The same tensor with every pending sum carried out."""
        if self._finished is None:
            done = [REPLICATE if isinstance(p, Partial) else p for p in self.placements]
            object.__setattr__(self, "_finished", self.recut(done, self.sizes))
        return self._finished

    def whole(self, *dims):
        """The same tensor with ``dims`` uncut."""
        out = self
        for dim in dims:
            axis = out.axis_of(dim) if out.ndim else None
            if axis is not None:
                out = out.with_axis(axis, REPLICATE)
        return out

    def aside(self, *dims):
        """The same tensor with ``dims`` uncut: their cuts go to the longest dim that is free (one all-to-all), or are
        undone where none has a row for every rank."""
        out, dims = self, {d % max(self.ndim, 1) for d in dims}
        for axis, dim in self.cuts():
            if dim in dims:
                free = [d for d in range(self.ndim) if d not in dims and out.axis_of(d) is None]
                to = max(free, key=lambda d: self.shape[d], default=None)
                fits = to is not None and self.shape[to] >= self.mesh.size(axis)
                out = out.with_axis(axis, Shard(to) if fits else REPLICATE)
        return out

    def reshaped(self, shape, dims=None, sizes=None):
        """Spec of an output: global ``shape``, each cut dim moved to ``dims[dim]`` (None: replicated there), by default
        where it was.

        ``sizes`` maps an axis to new extents where they change.
        """
        placements, out_sizes = [], []
        for axis, (p, s) in enumerate(zip(self.placements, self.sizes)):
            to = (p.dim if dims is None else dims.get(p.dim)) if isinstance(p, Shard) else None
            if isinstance(p, Shard) and to is None:
                p, s = REPLICATE, None
            elif isinstance(p, Shard):
                p, s = Shard(to), tuple((sizes or {}).get(axis, s))
            placements.append(p)
            out_sizes.append(s)
        return self.recut(placements, out_sizes, shape)

    def restrided(self, local):
        """This spec with the memory order of ``local``, this rank's part, where it is channels-last or expanded.

        Torch's derivatives of products choose their form by strides, which must be the same form on all ranks.
        """
        try:
            return self._restrided[local.stride()]
        except (KeyError, TypeError):  # TypeError: symbolic strides
            return self._with_stride_of(local)

    def _with_stride_of(self, local):
        stride = stride_like(local, self.shape)
        spec = self if stride == self.stride else self.recut(self.placements, self.sizes, stride=stride)
        if all(isinstance(n, int) for n in local.stride()):
            self._restrided[local.stride()] = spec
        return spec

    def cotangent(self):
        """Where a local graph finds its value's gradient: Shard for Shard, Partial for Replicate and the reverse."""
        if self._cotangent is None:
            dual = [
                PARTIAL if isinstance(p, Replicate) else REPLICATE if isinstance(p, Partial) else p
                for p in self.placements
            ]
            object.__setattr__(self, "_cotangent", self.recut(dual, self.sizes))
        return self._cotangent


def _placement_text(placement, sizes):
    return f"Shard({placement.dim}) {list(sizes)}" if sizes is not None else type(placement).__name__


@lru_cache(maxsize=4096)
def chunk_sizes(extent, ranks):
    """Extents of ``torch.chunk``: ceil(extent / ranks) each until nothing is left; the last ranks may hold none."""
    step = -(-extent // ranks)
    return tuple(max(0, min(step, extent - i * step)) for i in range(ranks))


def replicated_spec(mesh, shape):
    """A tensor of ``shape``, whole on every rank."""
    return ShardTensorSpec(mesh, (REPLICATE,) * mesh.ndim, shape, (None,) * mesh.ndim)


def make_spec(mesh: DeviceMesh, placements, shape, sizes=None, stride=None):
    """A spec after checking that it makes sense; ``sizes`` maps an axis to extents, torch.chunk's where missing.

    Raises:
        UndeterminedShardingError: wrong number of placements, a dim out of range or cut thrice, or extents that do
            not add up to the global shape.
    """
    shape, sizes = torch.Size(shape), dict(sizes or {})
    if isinstance(placements, Placement):
        placements = (placements,)
    placements = list(placements)
    if len(placements) != mesh.ndim:
        raise UndeterminedShardingError(
            f"{len(placements)} placements for a mesh of {mesh.ndim} axes", remedy="Give one placement per mesh axis."
        )
    table: list[Any] = []
    outer: dict[int, list] = {}
    for axis, p in enumerate(placements):
        if not isinstance(p, Shard):
            table.append(None)
            continue
        if not -len(shape) <= p.dim < len(shape):
            raise UndeterminedShardingError(f"Shard({p.dim}) of a tensor of shape {tuple(shape)}")
        dim, ranks = p.dim % len(shape), mesh.size(axis)
        placements[axis] = Shard(dim)
        if dim not in outer:
            table.append(_checked_extents(sizes.get(axis), shape[dim], ranks, axis, dim))
        elif isinstance(outer[dim][0], tuple):
            raise UndeterminedShardingError(f"dim {dim} is cut by three axes", remedy="Cut two different dims.")
        else:
            parts = sizes.get(axis) or [None] * len(outer[dim])
            if len(parts) != len(outer[dim]):
                raise UndeterminedShardingError(
                    f"the second cut of dim {dim} has extents for {len(parts)} of {len(outer[dim])} parts"
                )
            table.append(tuple(_checked_extents(s, n, ranks, axis, dim) for s, n in zip(parts, outer[dim])))
        outer[dim] = table[-1]
    return ShardTensorSpec(mesh, placements, shape, table, stride)


def _checked_extents(extents, n, ranks, axis, dim):
    extents = tuple(int(e) for e in extents) if extents else chunk_sizes(n, ranks)
    if len(extents) != ranks or sum(extents) != n or min(extents, default=0) < 0:
        raise UndeterminedShardingError(
            f"extents {extents} of axis {axis} ({ranks} ranks) do not make {n} along dim {dim}"
        )
    return extents
