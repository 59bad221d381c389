"""Time and memory of every case of :mod:`benchmarks.suites` on domains of 1, 2, 4, ... ranks, all in one run.

On a domain of n ranks the others form groups of n too and do the same, so that no GPU is cooler or its host less busy
than in the largest domain; the slowest rank counts. A domain of one is plain torch on the whole input. Efficiency is
the number of points that a rank gets through in a second, over that on the smallest domain which the case fits.

What does not fit is known before: ``core.plan`` predicts the peak of each case and size, each rank of its part of them
before there is a process group, and all skip alike what is beyond a GPU. No rank has to be told of another that ran out
of memory while it waits for a message; should a prediction be wrong, the rank that dies ends the others
(``core.watch``), and what was measured before is kept.
"""

import os
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from apps.aero.predict import outputs
from benchmarks.measure import made_fast, measure, median_ms, peak_gib, start_of_peak
from core import DistributedManager, ShardTensor, make_spec, set_attention_strategy
from core.gradients import gather_in_buckets
from core.parallelize import parallelize

MARGIN = 1.1  # of what is predicted; measured peaks were within 8 % of it, and the allocator needs some room


def sizes(world):
    """Domains of so many ranks in all: 1, 2, 4, ... as far as they divide them, and all."""
    return [n for n in (2**k for k in range(world.bit_length())) if n < world and world % n == 0] + [world]


def labelled(suite, only):
    """(case, label, strategy) of what is measured."""
    return [(case, label, s) for case in suite for label, s in case.labels() if only in label]


# -- what fits --------------------------------------------------------------------------------------------------------
def planned_peaks(suite, args):
    """{(label, n): GiB at the peak of a step} of this rank's part of the cases, before there is a process group;
    none where nobody knows what a rank may hold."""
    if not (args.gib or torch.cuda.is_available()):
        return {}
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    found = {}
    wanted = [(*one, n) for one in labelled(suite, args.only) if not one[0].inference for n in sizes(world)]
    for case, label, strategy, n in wanted[rank::world]:
        share = case.share(n, world // n, strategy or args.strategy, dtype)
        found[label, n] = share.peak / 2**30
    return found


def everybodys(found):
    """What the ranks found, together."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, found)
    return {key: value for part in parts for key, value in part.items()}


def limit_gib(args, device):
    """What a rank may hold, the least of all; None where nobody knows."""
    if args.gib or device.type != "cuda":
        return args.gib
    return min(everybodys({dist.get_rank(): torch.cuda.get_device_properties(device).total_memory / 2**30}).values())


# -- one point of a curve ---------------------------------------------------------------------------------------------
def parts(case, mesh, dtype):
    """The inputs of a case, each rank making its own part; plain on a domain of one."""
    like = dict(device=DistributedManager().device, dtype=dtype)
    for shape, dim in zip(case.shapes(mesh.size()), case.cuts):
        spec = make_spec(mesh, [Replicate() if dim is None else Shard(dim)], shape)
        local = torch.full(shape, 0.5, **like) if dim is None else torch.randn(spec.local_shape(), **like)
        yield local if mesh.size() == 1 else ShardTensor(local, spec)


def trained(case, mesh, args):
    """(forward ms, step ms, GiB) on the domain of a mesh (ddp, domain)."""
    device, domain = DistributedManager().device, mesh["domain"]
    dtype = torch.bfloat16 if device.type == "cuda" and not case.autocast else torch.float32
    torch.manual_seed(0)
    with device:
        model = case.make().to(dtype)
    if domain.size() > 1 and not case.ddp:
        gather_in_buckets(model)
    torch.manual_seed(1 + mesh.get_local_rank("domain"))
    inputs = list(parts(case, domain, dtype))
    with made_fast(model, "eager" if case.recomputed else args.how) as run:
        run = parallelize(run, mesh) if case.ddp else run
        return measure(run, inputs, device, args.repeats, case.autocast)


def inferred(case, mesh, args):
    """(ms, None, GiB) of exact inference: in one pass, or first slice states of all points, then the answer of each."""
    device, domain = DistributedManager().device, mesh["domain"]
    _, *shape = case.shapes(domain.size())[0]
    torch.manual_seed(0)
    with device:
        model = case.make().eval()
    spec, dtype = make_spec(domain, [Shard(0)], shape), next(model.parameters()).dtype
    cloud = ShardTensor(torch.randn(spec.local_shape(), device=device, dtype=dtype), spec)
    room = torch.cuda.mem_get_info(device)[0] / 2**31 if device.type == "cuda" else None  # as the command has at first
    ms = median_ms(lambda: outputs(model, [cloud], domain, case.chunk, room), device, args.repeats)
    return ms, None, peak_gib(device)


def curve(case, label, strategy, meshes, fits, alone, args):
    """The points of a case: a dict for each size, with times where it fits.

    fits: label, n -> (whether it fits, GiB predicted or None); alone: what was measured on a domain of one, by name of
    the case, which no strategy of attention changes.
    """
    set_attention_strategy(strategy or args.strategy)
    points = []
    for n, mesh in meshes.items():
        good, planned = fits(label, n)
        point = {"domain": n, "ddp": mesh["ddp"].size(), "points": prod(case.shapes(n)[0]), "planned_gib": planned}
        if good:
            found = alone.get(case.name) if n == 1 else None
            start_of_peak(DistributedManager().device)
            found = found or (inferred if case.inference else trained)(case, mesh, args)
            if n == 1:
                alone[case.name] = found
            point |= {"ms": list(found[:2]), "gib": found[2]}
        points.append(point)
    return with_efficiency(points)


def with_efficiency(points):
    """Points with "efficiency" of forward pass and step, against the first that has times."""
    first = None
    for point in points:
        if "ms" not in point:
            continue
        rates = [ms and point["points"] / (point["domain"] * ms) for ms in point["ms"]]
        first = first or rates
        point["efficiency"] = [rate and rate / most for rate, most in zip(rates, first)]
    return points


# -- the tables -------------------------------------------------------------------------------------------------------
def table(label, row, limit):
    """A case as lines of text."""
    heads = zip(("domain", "groups", "forward / step, ms", "efficiency", "GiB", "planned"), (8, 8, 24, 14, 9, 9))
    lines = [f"\n{label}", "".join(f"{head:>{width}}" for head, width in heads)]
    for point in row["curve"]:
        where, planned = f"{point['domain']:>8}{point['ddp']:>8}", point["planned_gib"]
        if "ms" not in point:
            lines.append(f"{where}  does not fit: {planned:.3g} GiB planned, {limit:.3g} at hand")
            continue
        ms, share = (" / ".join(f"{x:.2f}" for x in point[k] if x is not None) for k in ("ms", "efficiency"))
        last = "" if planned is None else f"{planned:>9.2f}"
        lines.append(f"{where}{ms:>24}{share:>14}{point['gib']:>9.2f}{last}")
    if "peer" in row:
        lines.append(f"{'peer, on all':>16}{' / '.join(f'{x:.2f}' for x in row['peer']):>24}")
    return "\n".join(lines)


def run(suite, planned, peer, args, say, keep):
    """Measures the suite; ``keep(rows)`` is called after each case.

    Args:
        planned: of :func:`planned_peaks` on this rank.
        peer: case -> ms of the other library.
    """
    manager = DistributedManager()
    world, alone, rows = manager.world_size, {}, {}
    meshes = {n: manager.initialize_mesh((world // n, n), ("ddp", "domain")) for n in sizes(world)}
    limit, planned = limit_gib(args, manager.device), everybodys(planned)

    def fits(label, n):
        gib = planned.get((label, n))
        return gib is None or limit is None or MARGIN * gib <= limit, gib

    for case, label, strategy in labelled(suite, args.only):
        row = {"kind": case.kind, "name": case.name, "curve": curve(case, label, strategy, meshes, fits, alone, args)}
        rows[label] = row | ({"peer": peer[case.name]} if case.name in peer else {})
        say(table(label, rows[label], limit), flush=True)
        keep(rows)
    return rows
