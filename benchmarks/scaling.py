"""One device against many: time and memory of attention, a vision transformer, a convolution net, a Transolver.

    torchrun --nproc-per-node 2 -m benchmarks.scaling                    # the table below, on GPUs, bf16
    torchrun --nproc-per-node 2 -m benchmarks.scaling --how captured     # the same, recorded and replayed
    torchrun --nproc-per-node 2 -m benchmarks.scaling --how blocks       # the same, its blocks compiled; or: compiled
    torchrun --nproc-per-node 2 -m benchmarks.scaling --volume 1024      # one step of a volume that no GPU holds
    torchrun --nproc-per-node 8 -m benchmarks.scaling --suite many       # every size from 1 GPU to 8, more models
    torchrun --nproc-per-node 2 -m benchmarks.scaling --suite aero       # what a whole car costs; also on 1 GPU
    torchrun --nproc-per-node 2 -m benchmarks.scaling --small            # on gloo and a CPU, toy sizes

Efficiency is (time on one device) / (ranks x time on all), in the same run; "one" is the faster of plain torch with the
whole input and of the same module on shards of one rank. Medians after warm-up, the slowest rank counted. Of the time
that its messages take alone a step hides the share 1 - (step - step without messages) / messages alone, each measured
(:mod:`benchmarks.wire`); of eager steps only.
"""

import argparse
import json
import os
import subprocess
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import Shard

from apps.aero.model import ModelConfig as TransolverConfig
from apps.aero.model import Transolver
from benchmarks import car, many, models, suites
from benchmarks.curves import draw_curves
from benchmarks.measure import HOW, forward_and_step, made_fast, measure, median_ms, peak_gib, start_of_peak
from benchmarks.wire import Tape
from core import (
    DistributedManager,
    ShardTensor,
    neighborhood_attention,
    scatter_tensor,
    set_attention_strategy,
)
from core.debug import trace
from core.gradients import gather_in_buckets
from core.ops import strategies
from core.ops.slots import slot_read, slot_sums
from core.parallelize import shard_spatial_params_


class Slots(nn.Module):
    """What a layer of a Transolver does between points and slots, and nothing else."""

    def __init__(self, slots, heads=8, channels=32):
        super().__init__()
        self.k = nn.Parameter(torch.randn(1, heads, slots, channels))

    def forward(self, q, v):
        return slot_read(q, self.k, slot_sums(q, self.k, v).to(q.dtype))


class Near(nn.Module):
    """Neighborhood attention, and nothing else."""

    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel

    def forward(self, q, k, v):
        return neighborhood_attention(q, k, v, self.kernel)


def cases(small):
    """name -> (module, input shapes, dim that is cut)"""
    config = TransolverConfig(features=6, outputs=4, width=256, layers=4, heads=8, slices=128)
    yield from models.cases(small, lambda: Transolver(config))
    for n, slots in ((256, 16),) if small else ((300_000, 128), (1_200_000, 128), (1_200_000, 512)):
        yield f"slots {n} x {slots}", lambda s=slots: Slots(s), [(1, 8, n, 32)] * 2, 2
    for kernel, *shape in ((5, 16, 16, 2, 8),) if small else ((31, 256, 448, 16, 48), (49, 256, 448, 6, 128)):
        yield f"neighborhood {kernel}", lambda k=kernel: Near(k), [(1, *shape)] * 3, 1


# -- one row of the table ---------------------------------------------------------------------------------------------
def compare(make, shapes, dim, meshes, args):
    """Plain, on shards of one rank, on shards of all; and what the messages of the last do."""
    device = DistributedManager().device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    module = make().to(device, dtype)
    gather_in_buckets(module)
    times, inputs = [], None
    for mesh in (None, *meshes):
        del inputs  # those of before, and the whole ones below, must not count as memory of a rank
        inputs = [torch.randn(s, device=device, dtype=dtype) for s in shapes]
        if mesh is not None:
            inputs = [scatter_tensor(x, None, mesh, [Shard(dim)]) for x in inputs]
        with made_fast(module, args.how) as run:
            times.append(measure(run, inputs, device, args.repeats))
    plain, one, many = times
    row = {"plain": plain[:2], "one_rank": one[:2], "all": many[:2], "gib": [plain[2], many[2]]}
    row["efficiency"] = [min(a, b) / (meshes[1].size() * c) for a, b, c in zip(plain[:2], one[:2], many[:2])]
    return row | messages(
        forward_and_step(module, inputs)[1], many[1] if args.how == "eager" else None, device, args.repeats
    )


def messages(step, total, device, repeats):
    """Bytes that this rank sends in an eager step, and for its ``total`` ms the share of the messages' time hidden."""
    tape = Tape()
    with trace() as wire, tape.recording():
        step()
    found = {"bytes": wire.bytes()}
    if total is None or not wire.count():
        return found
    with tape.silent():
        found["without_messages"] = median_ms(step, device, repeats)
    found["messages_alone"] = median_ms(tape.send_again, device, repeats)
    return found | {"hidden": 1 - (total - found["without_messages"]) / found["messages_alone"]}


def line(row, peer):
    """A row as the table shows it; ``peer``: whether there is a column for the other library."""
    names = ["plain", "one_rank", "all", *["peer"] * bool(peer)]
    times = [" / ".join(f"{t:.2f}" for t in row.get(name, ())) for name in names]
    hidden = f"{row['hidden']:.2f} of {row['messages_alone']:.2f}" if "hidden" in row else ""
    share = "/".join(f"{x:.2f}" for x in row["efficiency"])
    cells = [f"{share:>14}{row['gib'][0]:>9.2f}{row['gib'][1]:>7.2f}{hidden:>18}  {row['bytes']:,}"]
    return "".join([*(f"{t:>18}" for t in times), *cells])


def peer_rows(args):
    """case -> [forward ms, step ms] of the other library, which runs in a Python and processes of its own."""
    launch = [args.peer_python, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"], str(Path(__file__).with_name("peer.py"))]
    flags = [
        "--repeats",
        str(args.repeats),
        "--suite",
        args.suite,
        "--only",
        args.only,
        *(["--small"] if args.small else []),
    ]
    ours = ("RANK", "LOCAL_", "WORLD_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "PYTHONPATH")
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    done = subprocess.run([*launch, *flags], env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"the peer ended with {done.returncode}; what it printed before counts", flush=True)
    rows = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    return {row["case"]: row["ms"] for row in rows}


# -- a volume that no GPU holds ---------------------------------------------------------------------------------------
def volume(size, mesh, small):
    """One warm and one timed training step of a vision transformer on a volume of which every rank makes its part."""
    device, local = DistributedManager().device, mesh.get_local_rank()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    sizes = dict(width=48, depth=2, heads=2) if small else dict(width=768, depth=16, heads=12)
    with device:
        model = models.ViT(size, patch=16, channels=1, dims=3, **sizes).to(dtype)
    shard_spatial_params_(model, mesh, {"position": [Shard(1)]})
    gather_in_buckets(model)
    planes = size // mesh.size()
    torch.manual_seed(1 + local)
    part = torch.randn(1, 1, planes, size, size, device=device, dtype=dtype)
    x = ShardTensor.from_local(part, mesh, [Shard(2)], "chunk", global_shape=(1, 1, size, size, size))

    def step():
        for p in model.parameters():
            p.grad = None
        model(x).float().square().mean().backward()

    start_of_peak(device)
    ms = median_ms(step, device, 1, warm=1)
    assert all(p.grad is not None for p in model.parameters())
    return {"all": [None, ms], "gib": [None, peak_gib(device)], "points": x.numel()}


def two(peer, args, say, keep):
    """The table of one device against all, or the volume."""
    manager = DistributedManager()
    ranks, rows = manager.world_size, {}
    meshes = [manager.initialize_mesh(shape, ("ddp", "domain"))["domain"] for shape in ((ranks, 1), (1, ranks))]
    if args.volume:
        row = rows[f"volume {args.volume}"] = volume(args.volume, meshes[1], args.small)
        say(f"{row['points']:,} points: {row['all'][1]:.1f} ms a step, {row['gib'][1]:.2f} GiB a rank at its peak")
        return keep(rows)
    heads = f"{'plain':>18}{'one rank':>18}{'all':>18}" + f"{'peer':>18}" * bool(peer)
    say(f"{'':<22}{heads}{'efficiency':>14}{'GiB one':>9}{'all':>7}{'hidden of ms':>18}  bytes sent")
    for name, make, shapes, dim in cases(args.small):
        if args.only in name:
            rows[name] = compare(make, shapes, dim, meshes, args) | ({"peer": peer[name]} if name in peer else {})
            say(f"{name:<22}{line(rows[name], peer)}", flush=True)
            keep(rows)


def options(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--suite", default="usual", choices=("usual", *suites.SUITES), help="of cases")
    parser.add_argument("--only", default="", help="part of the case's name")
    parser.add_argument("--how", default="eager", choices=HOW, help="modules as they are, compiled, or replayed")
    parser.add_argument("--strategy", default="auto", choices=strategies.NAMES, help="of attention")
    parser.add_argument("--volume", type=int, metavar="SIDE", help="only a volume of so many points a side")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--peer-python", metavar="PATH", help="a Python that has nvidia-physicsnemo")
    parser.add_argument("--out", type=Path, help="write the table here as JSON too")
    parser.add_argument("--plot", type=Path, help="of the other suites: time against ranks, a PNG")
    parser.add_argument(
        "--gib", type=float, help="of the other suites: what a rank may hold; left out: its GPU's memory"
    )
    args = parser.parse_args(argv)
    if args.suite in suites.SUITES and (args.volume or args.how not in ("eager", "captured")):
        parser.error(f"--suite {args.suite} goes with --how eager or captured, and without --volume")
    if args.suite not in suites.SUITES and (args.plot or args.gib):
        parser.error("--plot and --gib are for --suite many and aero")
    if args.suite not in models.SUITES and args.peer_python:
        parser.error(f"the peer has no --suite {args.suite}")
    return args


def main(argv=None):
    args = options(argv)
    suite = list(suites.SUITES[args.suite](args.small)) if args.suite in suites.SUITES else []
    planned = many.planned_peaks(suite, args)
    peer = peer_rows(args) if args.peer_python and os.environ.get("RANK", "0") == "0" else {}
    DistributedManager.initialize(timeout=timedelta(minutes=240 if args.peer_python else 10))  # who waits for the peer
    manager = DistributedManager()
    torch.backends.cudnn.benchmark = True
    set_attention_strategy(args.strategy)
    how = f"{args.how}, attention {args.strategy}"
    machine = torch.cuda.get_device_name() if manager.device.type == "cuda" else "CPU"
    say = print if manager.rank == 0 else lambda *a, **k: None
    say(f"{manager.world_size} x {machine}, {how}, torch {torch.__version__}; ms forward / step", flush=True)
    facts = {"machine": machine, "ranks": manager.world_size, "how": how, "torch": torch.__version__}

    def keep(rows):
        """After each case: what comes later may fail."""
        if args.out and manager.rank == 0:
            told = {"summary": car.summary(rows)} if args.suite == "aero" else {}
            args.out.write_text(json.dumps(facts | {"rows": rows} | told, indent=1) + "\n")

    if suite:
        rows = many.run(suite, planned, peer, args, say, keep)
        for what, number in car.summary(rows).items() if args.suite == "aero" else ():
            say(f"{what:<60}{number:>10.3g}", flush=True)
        if args.plot and manager.rank == 0:
            draw_curves(args.plot, rows, facts)
    else:
        two(peer, args, say, keep)
    manager.cleanup()


if __name__ == "__main__":
    main()
