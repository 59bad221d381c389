"""Step time and efficiency on 4 to 512 GPUs, projected from what was measured on one and two.

    python -m benchmarks.scaling_model                      # a minute on one core, no GPU
    python -m benchmarks.scaling_model --measured FILE      # of "python -m benchmarks.scaling --out FILE"

The model is that of ``core.devices``: arithmetic, memory traffic, messages and Python of a step, of which
``core.plan`` counts how many there are, and a few constants. They are fitted here to the measured steps, in the
logarithm, those of messages to what was sent alone, and printed as ``core/devices.py`` has them; the table shows how
well they fit, and what core.plan said of memory. A node holds 8 GPUs; what goes beyond takes the network.
"""

import argparse
import json
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from math import log
from pathlib import Path
from typing import NamedTuple

from torch.distributed.tensor import Shard

from benchmarks.scaling import cases
from benchmarks.suites import many
from core.devices import FITTED, device_named
from core.errors import InputError
from core.plan import share

MEASURED = Path(__file__).with_name("measured.json")
PROJECTED = ("attention 131072", "ViT 2048", "Transolver 1200000")
MESHES = ((1, 4), (1, 8), (8, 8), (1, 64), (64, 8), (8, 64))
GOAL = 0.15  # of what core.plan predicts
OF_STEPS = ("products", "wide", "attention", "slots", "bandwidth", "group", "operation", "wrapped", "launch")
OF_MESSAGES = ("link", "send")
STEPS = (0.5, 0.8, 0.93, 1.07, 1.25, 2.0)


def known_cases(small=False):
    """name -> (ranks of the domain, data groups) -> the :class:`core.planned.Share` of a rank in a step."""
    curves = {
        label: partial(case.share, strategy=way or "auto") for case in many(small) for label, way in case.labels()
    }
    return curves | {name: partial(shares, case) for name, *case in cases(small)}


def shares(case, ranks, groups=1):
    """What rank does what in a step of a case of ``benchmarks.scaling`` on a domain of so many; groups do not meet."""
    make, shapes, dim = case
    return share(make, shapes, [[Shard(dim)]] * len(shapes), (1, ranks), input_gradients=True)


def fit(names, estimate, measured, start=FITTED, rounds=12):
    """The constants with the smallest sum of squared logarithms of estimate / measured.

    Args:
        names: of the constants that may change.
        estimate: (share, constants) -> seconds.
        measured: pairs of a :class:`core.planned.Share` and seconds.
    """

    def loss(constants):
        return sum(log(estimate(share, constants) / wanted) ** 2 for share, wanted in measured)

    best = loss(start)
    for _ in range(rounds):
        for name, factor in product(names, STEPS):
            tried = replace(start, **{name: getattr(start, name) * factor})
            if loss(tried) < best:
                start, best = tried, loss(tried)
    return start


def fitted(rows, device):
    """Constants from pairs of a :class:`Step` and its share."""

    def alone(share, c):
        messages = [*share.forward.messages, *share.backward.messages]
        return sum(c.send + m.bytes / (device.nvlink * c.link) for m in messages)

    constants = fit(OF_MESSAGES, alone, [(share, s.alone / 1e3) for s, share in rows if s.alone])
    steps = [(share, s.ms / 1e3) for s, share in rows if s.ms]
    return fit(OF_STEPS, lambda share, c: share.seconds(device, c), steps, constants)


class Step(NamedTuple):
    """A measured training step: of which case, on how many GPUs that share a sample; ms, GiB at the peak, and ms that
    its messages take alone, None where not measured; groups of so many GPUs, in case they average gradients."""

    name: str
    ranks: int
    ms: float | None
    gib: float | None = None
    alone: float | None = None
    groups: int = 1


def measured_steps(path):
    """The steps of eager rows that ``benchmarks.scaling`` wrote: plain torch on one GPU, and shards on more.

    Raises:
        InputError: a file of other rows.
    """
    table = json.loads(Path(path).read_text())
    if not table.get("how", "").startswith("eager") or "rows" not in table:
        raise InputError(f"{path} has no rows of eager steps", remedy="Write it by benchmarks.scaling --out.")
    for name, row in table["rows"].items():
        if "curve" in row:  # of --suite many
            for point in row["curve"]:
                ms, gib = point.get("ms", (None, None))[1], point.get("gib")
                if ms:
                    yield Step(name, point["domain"], ms, gib, groups=point["ddp"])
            continue
        gib = row.get("gib", (None, None))
        for ranks, times, held in ((1, "plain", gib[0]), (table["ranks"], "all", gib[1])):
            ms = row[times][1] if times in row else None
            if ms or held:
                yield Step(name, ranks, ms, held, row.get("messages_alone") if times == "all" else None)


def compared(step, share, device, constants):
    """A line of the table, and how far off are time by core.plan, time refitted, memory; None where not measured."""
    ms, refitted = (1e3 * share.seconds(device, c) for c in (FITTED, constants))
    both = (ms, step.ms), (refitted, step.ms), ((share.step_peak + share.workspaces) / 2**30, step.gib)
    off = [got / wanted - 1 if wanted else None for got, wanted in both]
    time = f"{step.ms:>9.1f}{ms:>9.1f}{off[0]:>8.0%}{refitted:>9.1f}{off[1]:>8.0%}" if step.ms else f"{'':>43}"
    memory = f"{step.gib:>9.2f}{both[2][0]:>8.2f}{off[2]:>8.0%}" if step.gib else ""
    return f"{step.name:<22}{step.ranks:>5}{time}{memory}", off


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="h200", help="of core.devices; the constants are those of H200s")
    parser.add_argument(
        "--measured", default=MEASURED, help="JSON of benchmarks.scaling; else the rows kept beside this"
    )
    args = parser.parse_args(argv)
    table, h200, device = known_cases(), device_named("h200"), device_named(args.device)
    rows = [(s, table[s.name](s.ranks, s.groups)) for s in measured_steps(args.measured) if s.name in table]
    constants = fitted(rows, h200)
    print("fitted: " + ", ".join(f"{k} {v:.3g}" for k, v in asdict(constants).items()))
    times, memory = f"{'ms':>9}{'plan':>9}{'error':>8}{'refit':>9}{'error':>8}", f"{'GiB':>9}{'plan':>8}{'error':>8}"
    print(f"\n{'measured on H200s':<22}{'GPUs':>5}{times}{memory}")
    lines = [compared(s, share, h200, constants) for s, share in rows]
    print("\n".join(line for line, _ in lines))
    for what, errors in zip(("time, plan", "time, refit", "memory"), zip(*(off for _, off in lines))):
        known = [abs(e) for e in errors if e is not None]
        within = sum(e <= GOAL for e in known)
        print(f"{what}: {within} of {len(known)} within {GOAL:.0%}, the worst off by {max(known, default=0):.0%}")
    print(f"\n{'PROJECTED on ' + args.device:<22}{'ddp x domain':>14}{'ms':>9}{'efficiency':>12}{'GiB':>9}")
    for name in PROJECTED:
        alone = table[name](1).seconds(device, constants)
        parts = {ranks: table[name](ranks) for ranks in sorted({m[1] for m in MESHES})}
        for ddp, domain in MESHES:
            s = replace(parts[domain], mesh_shape=(ddp, domain))
            took = s.seconds(device, constants)
            shape = f"{ddp} x {domain}"
            print(f"{name:<22}{shape:>14}{1e3 * took:>9.1f}{alone / (domain * took):>12.2f}{s.peak / 2**30:>9.2f}")


if __name__ == "__main__":
    main()
