"""Step time and efficiency on 4 to 512 GPUs, projected from what was measured on one and two.

    python -m benchmarks.scaling_model          # a minute on one core, no GPU

The model is that of ``core.devices``: arithmetic, memory traffic, messages and Python of a step, of which
``core.plan`` counts how many there are, and a few constants. They are fitted here to the measured steps, in the
logarithm; the table shows how well. A node holds 8 GPUs; what goes beyond takes the network.
"""

import argparse
from dataclasses import asdict, replace
from itertools import product, zip_longest
from math import log

from torch.distributed.tensor import Shard

from benchmarks.scaling import cases
from core.devices import FITTED, device_named
from core.plan import share

# ms of a training step, GiB of its peak, on one GPU (plain torch) and on two: two H200s with NVLink, bf16, eager, torch
# 2.11. Rows of two numbers are README.md's, the others plain torch on the same machine, another day. The memory of two
# GPUs is None where the operations of core have changed since.
MEASURED = {
    "attention 16384": ((9.2,), ()),
    "attention 65536": ((136.5,), ()),
    "attention 131072": ((552, 282), (3.5, None)),
    "ViT 512": ((19, 103), (1.89, 1.45)),
    "ViT 1024": ((141, 107), (6.6, 4.7)),
    "ViT 2048": ((1786, 945), (25, 17)),
    "conv 2048": ((301, 105), (17.6, 11.1)),
    "Transolver 75000": ((32.3,), (4.53, 2.60)),
    "Transolver 300000": ((113.8,), ()),
    "Transolver 1200000": ((500, 248), (71, None)),
}
PROJECTED = ("attention 131072", "ViT 2048", "Transolver 1200000")
MESHES = ((1, 4), (1, 8), (8, 8), (1, 64), (64, 8), (8, 64))
FIT = ("products", "wide", "attention", "bandwidth", "group", "operation", "wrapped")
STEPS = (0.5, 0.8, 0.93, 1.07, 1.25, 2.0)


def shares(case, ranks):
    """What rank does what in a step of a case of ``benchmarks.scaling`` on a domain of so many."""
    make, shapes, dim = case
    return share(make, shapes, [[Shard(dim)]] * len(shapes), (1, ranks), input_gradients=True)


def fit(measured, device, start=FITTED, rounds=12):
    """The constants with the smallest sum of squared logarithms of estimate / measured.

    Args:
        measured: pairs of a :class:`core.planned.Share` and seconds.
    """

    def loss(constants):
        return sum(log(s.seconds(device, constants) / wanted) ** 2 for s, wanted in measured)

    best = loss(start)
    for _ in range(rounds):
        for name, factor in product(FIT, STEPS):
            tried = replace(start, **{name: getattr(start, name) * factor})
            if loss(tried) < best:
                start, best = tried, loss(tried)
    return start


def fitted_rows(planned):
    """(name, GPUs, share, measured seconds or None, measured GiB or None) of every measured step."""
    for name, measured in MEASURED.items():
        for i, (ms, gib) in enumerate(zip_longest(*measured)):
            yield name, i + 1, planned[name, i + 1], ms and ms / 1e3, gib


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="h200", help="of core.devices; the constants are those of H200s")
    args = parser.parse_args(argv)
    table, h200, device = {n: case for n, *case in cases(False)}, device_named("h200"), device_named(args.device)
    planned = {(n, r + 1): shares(table[n], r + 1) for n, both in MEASURED.items() for r in range(max(map(len, both)))}
    rows = list(fitted_rows(planned))
    constants = fit([(s, wanted) for _, _, s, wanted, _ in rows if wanted], h200)
    print("fitted: " + ", ".join(f"{k} {v:.3g}" for k, v in asdict(constants).items()))
    print(f"\n{'measured on H200s':<22}{'GPUs':>5}{'ms':>9}{'model':>9}{'error':>8}{'GiB':>9}{'plan':>8}{'error':>8}")
    for name, n, s, wanted, gib in rows:
        got, held = s.seconds(h200, constants), s.step_peak / 2**30
        time = f"{1e3 * wanted:>9.1f}{1e3 * got:>9.1f}{got / wanted - 1:>8.0%}" if wanted else f"{'':>26}"
        memory = f"{gib:>9.2f}{held:>8.2f}{held / gib - 1:>8.0%}" if gib else ""
        print(f"{name:<22}{n:>5}{time}{memory}")
    print(f"\n{'PROJECTED on ' + args.device:<22}{'ddp x domain':>14}{'ms':>9}{'efficiency':>12}{'GiB':>9}")
    for name in PROJECTED:
        alone = planned[name, 1].seconds(device, constants)
        parts = {ranks: shares(table[name], ranks) for ranks in sorted({m[1] for m in MESHES})}
        for ddp, domain in MESHES:
            s = replace(parts[domain], mesh_shape=(ddp, domain))
            took = s.seconds(device, constants)
            shape = f"{ddp} x {domain}"
            print(f"{name:<22}{shape:>14}{1e3 * took:>9.1f}{alone / (domain * took):>12.2f}{s.peak / 2**30:>9.2f}")


if __name__ == "__main__":
    main()
