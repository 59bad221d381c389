"""The mesh of a command: data groups, and in each the ranks that share a sample, as rows or as rows and columns."""

import torch.distributed as dist

from core import DistributedManager, InputError


def mesh_of(domain=None, columns=1):
    """Joins the process group; axes (ddp, domain), or (ddp, domain_h, domain_w) where ``columns`` is above one.

    domain: ranks that share a sample, None for all. columns: how many of them stand side by side.

    Raises:
        InputError: columns that do not divide the domain, a domain that does not divide the number of processes.
    """
    if not DistributedManager.is_initialized():
        DistributedManager.initialize()
    world = dist.get_world_size()
    if world % (domain or world):
        raise InputError(
            f"--domain {domain} does not divide {world} process{'es' * (world > 1)}",
            remedy=f"Start a multiple of {domain} (torchrun --nproc-per-node), or choose a divisor",
        )
    shape = domain_shape(domain or world, columns)
    names = ("domain",) if len(shape) == 1 else ("domain_h", "domain_w")
    return DistributedManager().initialize_mesh((-1, *shape), ("ddp", *names))


def domain_shape(domain, columns=1):
    """Extents of the axes of a domain. Raises `InputError` where the columns do not divide it."""
    if domain % columns:
        raise InputError(f"--columns {columns} do not divide --domain {domain}", remedy="Choose a divisor")
    return (domain // columns, columns) if columns > 1 else (domain,)


def domain_of(mesh):
    """The part of a mesh of `mesh_of` that shares a sample: its axes cut rows, and columns where there is a second."""
    return mesh["domain" if "domain" in mesh.mesh_dim_names else ("domain_h", "domain_w")]


def share(members, mesh):
    """The numbers of the ``members`` that this data group makes."""
    groups, group = mesh["ddp"].size(), mesh.get_local_rank("ddp")
    return range(members)[group::groups]


def rounds(cases, mesh):
    """This data group's share of ``cases``: pairs (case, whether it counts).

    All groups go through as many rounds, so that collectives meet; where none is left the last case comes again,
    uncounted.
    """
    groups, group = mesh["ddp"].size(), mesh.get_local_rank("ddp")
    for first in range(0, len(cases), groups):
        yield cases[min(first + group, len(cases) - 1)], first + group < len(cases)
