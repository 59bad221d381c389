"""The kernels of slots on one GPU: are they right, how fast are they beside torch's, and which cut of them is fastest.

    python -m benchmarks.slots                # about two minutes: checks, times, then a sweep over the cuts
    python -m benchmarks.slots --slots 512    # of so many slots only

Errors are relative to torch in fp64. Times are medians in milliseconds; GB/s count what has to be read and
written once. Every cut of the sweep must give the results of the first one. What wins belongs in ``CONFIGS`` and
``PROGRAMS`` of ``core/kernels/slots.py``.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from os import cpu_count

import torch

from benchmarks.neighborhood import milliseconds
from core.kernels import slots as kernels
from core.kernels.slots import Config
from core.ops import slot_tiles
from core.ops.slots import slot_read, slot_sums

HEADS, CHANNELS, KEY = 8, 40, (64, 2)
SIZES = [(1_200_000, 128), (1_200_000, 512), (75_000, 128)]  # points, slots
CHECKS = [  # batch, heads, points, slots, channels, values
    (1, 8, 20_011, 128, 40, 40),
    (1, 8, 9_000, 512, 40, 40),
    (1, 8, 20_000, 128, 40, 32),  # as the Transolver reads
    (2, 3, 5_001, 33, 40, 32),
    (2, 3, 5_001, 33, 33, 17),
    (1, 2, 3_000, 200, 128, 128),
]
BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}
NAMES = ("read", "sums", "backward of points", "backward of slots")
GIVEN = tuple(kernels.CONFIGS[KEY])
CUTS = {  # tile, block, warps, stages
    "read": [
        (64, 256, 8, 2),
        (128, 128, 8, 2),
        (128, 128, 4, 2),
        (64, 128, 4, 2),
        (128, 64, 4, 2),
        (128, 64, 4, 3),
        (64, 64, 4, 2),
    ],
    "sums": [
        (32, 256, 8, 2),
        (64, 256, 8, 2),
        (64, 128, 4, 3),
        (64, 128, 4, 2),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
        (64, 128, 8, 3),
        (64, 64, 4, 3),
    ],
    "backward of slots": [
        *[(64, 128, 8, 2), (64, 128, 8, 3), (64, 128, 4, 2), (128, 128, 8, 2), (32, 128, 4, 2)],
        *[(64, 64, 4, 2), (128, 64, 8, 2), (64, 64, 8, 2), (32, 256, 8, 2), (64, 256, 8, 1), (32, 128, 8, 2)],
    ],
    "backward of points": [(128, 64, 8, 2), (128, 64, 4, 2), (64, 64, 4, 2), (64, 128, 4, 2), (128, 128, 8, 2)],
}


class Calls:
    """The calls of ``core.kernels.slots`` on random numbers, as a Transolver makes them."""

    def __init__(self, points, slots):
        torch.manual_seed(0)
        q, v = torch.randn(2, 1, points, HEADS, CHANNELS, device="cuda", dtype=torch.bfloat16).transpose(2, 3).unbind()
        k = torch.randn(1, 1, slots, CHANNELS, device="cuda", dtype=torch.bfloat16) / 4
        w = torch.randn(1, HEADS, slots, CHANNELS, device="cuda", dtype=torch.bfloat16)
        out, dq = (torch.empty_like(q.transpose(1, 2)) for _ in range(2))
        level = q.new_empty(q.shape[:3], dtype=torch.float32)
        self.operands = q, k, v, w

        def backward(read):
            dk, dw = kernels.backward(q, k, v, w, level, dq, out if read else None)
            return dq, dk.sum((0, 1, 2)), out if read else dw.sum(0)

        def both():
            return *backward(True), *backward(False)

        def read():
            kernels.read(q, k, w, out, level)
            return out, level

        self.calls = dict(zip(NAMES, (read, lambda: (kernels.sums(q, k, v, level),), both, both)))
        read()


def use(name, cut):
    kernels.CONFIGS[KEY][NAMES.index(name)] = Config(*cut)


def compiled(slots, name, cut):
    """Leaves one cut in Triton's cache on disk; why that failed, or None."""
    kernels.CONFIGS[KEY] = list(GIVEN)
    if name == "backward of points":  # which are a kernel of their own where slots are in several blocks
        use("backward of slots", (64, 64, 4, 2))
    use(name, cut)
    try:
        calls = Calls(256, slots).calls
        calls[name]()
        if name == "read":  # it finds the normalisers of sums over several blocks, too
            calls["sums"]()
        torch.cuda.synchronize()
    except Exception as error:  # a cut may ask for more than the device has: that is what a sweep finds out
        return f"{type(error).__name__}: {error}".splitlines()[0][:90]


def drawn(batch, heads, points, slots, channels, values, dtype):
    """Operands of both functions; all heads share k, as the slices of a Transolver do."""
    torch.manual_seed(0)
    at = dict(device="cuda", dtype=torch.float64)
    q, v = (torch.randn(batch, points, heads, n, **at).transpose(1, 2) for n in (channels, values))
    k, w = torch.randn(1, 1, slots, channels, **at) / channels**0.5, torch.randn(batch, heads, slots, values, **at)
    return [t.to(dtype) for t in (q, k, v, w)]


def results(function, tensors):
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = function(*leaves)
    cotangent = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    return out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))


def check(size, dtype, wrap=lambda function: function):
    """Relative errors of results and gradients."""
    q, k, v, w = drawn(*size, dtype)
    off = []
    for function, tensors in ((slot_sums, (q, k, v)), (slot_read, (q, k, w))):
        wanted = results(function, [t.double() for t in tensors])
        got = results(wrap(function), tensors)
        off += [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, wanted)]
    return off


def torchs(which):
    """The same of torch's kernels."""
    return lambda q, k, x: which.apply(q, *(t.expand(*q.shape[:2], -1, -1) for t in (k, x)))


def times(points, slots, rivals=True):
    """Forward, and forward + backward, of both functions; beside torch's kernels."""
    q, k, v, w = Calls(points, slots).operands
    rows = q.numel() * q.element_size() / 1e6  # MB that all points have
    for name, ours, theirs, x, moved in (
        ("sums", slot_sums, torchs(slot_tiles.Sums), v, (2, 6)),  # q, v; q, v, dq, dv
        ("read", slot_read, torchs(slot_tiles.Read), w, (2, 5)),  # q, out; q, gradient, dq
    ):
        leaves = [t.detach().requires_grad_() for t in (q, k, x)]
        for who, function in (("ours", ours), ("torch's", theirs))[: 1 + rivals]:
            with torch.no_grad():
                forward = milliseconds(lambda f=function, t=leaves: f(*t))
            grad = torch.ones_like(function(*leaves))
            both = milliseconds(lambda f=function, t=leaves, g=grad: torch.autograd.grad(f(*t), t, g))
            speed = [f"{n * rows / ms:.0f} GB/s" for n, ms in zip(moved, (forward, both))]
            print(
                f"{points} points x {slots} slots, {name}, {who}: forward {forward:.2f} ms ({speed[0]}),"
                f" forward + backward {both:.2f} ms ({speed[1]})",
                flush=True,
            )


def sweep(points, slots, failed):
    """Prints the time of every cut and keeps the fastest of each kernel."""
    calls = Calls(points, slots).calls
    for name, cuts in CUTS.items():
        best, first = None, None
        for cut in cuts:
            if failed[slots, name, cut]:
                print(f"  {name} {cut}: {failed[slots, name, cut]}")
                continue
            use(name, cut)
            found = [t.float() for t in calls[name]()]
            first = first or found
            off = max(((a - b).norm() / b.norm()).item() for a, b in zip(found, first))
            time = milliseconds(calls[name], 5)
            print(f"  {name} {cut}: {time:.2f} ms" + (f", WRONG by {off:.1e}" if not off < 0.01 else ""), flush=True)
            if off < 0.01 and (best is None or time < best[0]):
                best = time, cut
        use(name, best[1])
    print(f"{points} points x {slots} slots, best:", ", ".join(f"Config{tuple(c)}" for c in kernels.CONFIGS[KEY]))
    given = kernels.PROGRAMS
    for count in (1, 2, 4, 8):
        kernels.PROGRAMS = count
        kernels.programs.cache_clear()
        both = [f"{milliseconds(calls[name], 5):.2f} ms" for name in ("sums", "backward of slots")]
        print(f"  {count} programs a multiprocessor: sums {both[0]}, backward {both[1]}", flush=True)
    kernels.PROGRAMS = given
    kernels.programs.cache_clear()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, choices=[128, 512], help="only sizes of so many slots")
    only = parser.parse_args().slots
    sizes = [size for size in SIZES if only in (None, size[1])]
    jobs = [
        (slots, name, cut) for slots in sorted({s for _, s in sizes}) for name, cuts in CUTS.items() for cut in cuts
    ]
    with ProcessPoolExecutor(min(cpu_count(), 16), get_context("fork")) as pool:  # before this process has a device
        checks = [pool.submit(check, size, dtype) for size in CHECKS for dtype in BOUNDS]
        failed = dict(zip(jobs, pool.map(compiled, *zip(*jobs))))
        found = [c.result() for c in checks]
    for (size, dtype), off in zip(((s, d) for s in CHECKS for d in BOUNDS), found):
        print(size, dtype, *(f"{x:.1e}" for x in off), "" if max(off) < BOUNDS[dtype] else "WRONG", flush=True)
    off = check(CHECKS[0], torch.bfloat16, lambda function: torch.compile(lambda *t: function(*t), fullgraph=True))
    print("compiled", *(f"{x:.1e}" for x in off), "" if max(off) < 2e-2 else "WRONG", flush=True)
    for size in sizes:
        times(*size)
    for size in [size for size in sizes if size in SIZES[:2]]:
        kernels.CONFIGS[KEY] = list(GIVEN)
        sweep(*size, failed)
        times(*size, rivals=False)


if __name__ == "__main__":
    main()
