"""The one door from files to ShardTensor: every rank reads its own index range and nothing else."""

import numpy as np
import torch

from core import InputError, ShardTensor, make_spec


def spec_of(shape, mesh, placements, sizes=None):
    """Spec of an array of ``shape``; refuses a cut that would leave ranks without rows.

    Raises:
        InputError: more ranks along an axis than rows to cut.
    """
    spec = make_spec(mesh, placements, shape, sizes)
    for axis, dim in spec.cuts():
        if mesh.size(axis) > spec.shape[dim]:
            raise InputError(
                f"{mesh.size(axis)} ranks cannot share the {spec.shape[dim]} rows of dim {dim}",
                remedy="Use a smaller domain (--domain) or a larger input.",
            )
    return spec


def read_sharded(reader, sample, name, mesh, placements, sizes=None, dtype=None):
    """This rank's part of one named array as a ShardTensor; no rank holds the whole and nothing is sent.

    Args:
        reader: a :class:`data.reader.Reader`.
        sample, name: what to read.
        mesh, placements: how it is cut; ``sizes`` gives the extents of an axis where torch.chunk's do not fit.
        dtype: of the result, on the mesh's device; the stored one when left out.
    """
    spec = spec_of(reader.shape(sample, name), mesh, placements, sizes)
    local = torch.from_numpy(np.ascontiguousarray(reader.read(sample, name, local_index(spec))))
    if mesh.device_type == "cuda":
        local = local.pin_memory()  # so that the copy need not be waited for
    return ShardTensor(local.to(mesh.device_type, dtype, non_blocking=True), spec)


def local_index(spec):
    """This rank's part of an array as one slice a dim."""
    return tuple(slice(*spec.local_range(dim)) for dim in range(spec.ndim))
