"""The kernel of attention over neighbourhoods on one GPU: is it right, and which cut of it is fastest.

    python -m benchmarks.neighborhood            # about a minute: checks, then a sweep over the cuts
    python -m benchmarks.neighborhood --flex     # and what torch's flex_attention needs, tokens in the order of tiles

Errors are relative to the tiles of plain torch in fp64. Times are medians in milliseconds; every cut of the sweep must
give the results of the first one. What wins belongs in ``CONFIGS`` of ``core/kernels/neighborhood.py``. Where natten is
installed, its time is printed too.
"""

import argparse
import statistics
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from os import cpu_count

import torch

from core import neighborhood_attention, set_neighborhood_kernel
from core.kernels import neighborhood as kernels
from core.kernels.neighborhood import Config
from core.ops.windows import Axis, Window

GRID = (256, 448)
CASES = {"kernel 31, 16 heads x 48": (31, 16, 48), "kernel 49, 6 heads x 128": (49, 6, 128)}
CHECKS = [  # shape, size, dilation, causal
    ((1, 40, 56, 4, 48), (31, 31), 1, False),
    ((2, 37, 41, 3, 48), (6, 7), (2, 1), (False, True)),
    ((1, 50, 60, 2, 128), (49, 49), 1, False),
    ((1, 999, 3, 80), 64, 3, False),
    ((2, 9, 20, 17, 2, 32), (3, 8, 5), 1, False),
]
FORWARD = [(128, 64, 8, 3), (128, 64, 4, 3), (128, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2), (128, 128, 8, 2)]
FORWARD += [(64, 128, 4, 2), (128, 32, 4, 3), (64, 32, 4, 4), (128, 64, 8, 2)]
QUERIES = [(128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 3), (128, 32, 8, 3), (64, 32, 4, 3)]
QUERIES += [(64, 128, 8, 2), (128, 32, 4, 2), (64, 128, 4, 2), (128, 128, 8, 2)]
KEYS = [(128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 3), (128, 32, 8, 2), (64, 32, 4, 2)]
KEYS += [(64, 32, 4, 3), (128, 32, 8, 3), (64, 64, 8, 2), (128, 32, 4, 2)]


def cuts(channels):
    """Triples of cuts for the three kernels."""
    splits = (False, True) if channels == 48 else (False,)
    return [[Config(*c, split) for c in row] for split in splits for row in zip(FORWARD, QUERIES, KEYS)]


def use(channels, row):
    most, size = min(key for key in kernels.CONFIGS if key[0] >= channels and key[1] == 2)
    kernels.CONFIGS[most, size] = row


class Calls:
    """The three kernels of a case on random numbers, one after the other."""

    def __init__(self, size, heads, channels):
        torch.manual_seed(0)
        q, k, v, grad = torch.randn(4, 1, *GRID, heads, channels, device="cuda", dtype=torch.bfloat16).unbind()
        self.axes = tuple(Axis(Window(size, 1, False, n), 0, n, 0, n) for n in GRID)
        out, dq, dk, dv = (torch.empty_like(q) for _ in range(4))
        sums = torch.empty(1, heads, *GRID, device="cuda")
        both, call = sums.new_empty(*sums.shape, 2), (self.axes, channels**-0.5)
        self.kernels = {
            "forward": lambda: kernels.forward(q, k, v, out, sums, *call),
            "queries": lambda: kernels.backward_queries(grad, q, k, v, out, sums, both, dq, *call),
            "keys": lambda: kernels.backward_keys(grad, q, k, v, both, dk, dv, *call),
        }
        self.results = {"forward": (out,), "queries": (dq,), "keys": (dk, dv)}


def compiled(case, row):
    """Leaves a triple in Triton's cache on disk; what failed."""
    use(case[2], row)
    failed = {}
    for name, call in Calls(*case).kernels.items():
        try:
            call()
        except Exception as error:  # a cut may ask for more than the device has: that is what a sweep finds out
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:90]
    torch.cuda.synchronize()
    return failed


def milliseconds(call, repeats=9):
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def sweep(case, rows, failed):
    """Prints the time of every kernel in every cut; the fastest three."""
    calls, best, first = Calls(*case), {}, {}
    for row, errors in zip(rows, failed):
        use(case[2], row)
        for (name, call), cut in zip(calls.kernels.items(), row):
            if name in errors:
                print(f"  {name:8} {tuple(cut)}: {errors[name]}")
                continue
            time = milliseconds(call)
            results = [t.float() for t in calls.results[name]]
            off = max(((a - b).norm() / b.norm()).item() for a, b in zip(results, first.setdefault(name, results)))
            print(f"  {name:8} {tuple(cut)}: {time:.2f} ms" + (f", WRONG by {off:.2e}" if not off < 0.01 else ""))
            if off < 0.01 and time < best.get(name, (time + 1,))[0]:
                best[name] = time, cut
    return [best[name][1] for name in calls.kernels]


def step(function, size, heads, channels):
    """Forward and forward + backward in ms, and the peak of memory beyond the operands in GiB."""
    q, k, v, grad = torch.randn(4, 1, *GRID, heads, channels, device="cuda", dtype=torch.bfloat16).unbind()
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    with torch.no_grad():
        forward = milliseconds(lambda: function(q, k, v))
    both = milliseconds(lambda: torch.autograd.grad(function(*leaves), leaves, grad))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(function(*leaves), leaves, grad)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    return f"forward {forward:.2f} ms, forward + backward {both:.2f} ms, {peak:.2f} GiB beyond the operands"


def check():
    for shape, *call in CHECKS:
        torch.manual_seed(0)
        tensors = torch.randn(4, *shape, device="cuda", dtype=torch.float64)
        for dtype, most in ((torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)):
            found = []
            for kind in (torch.float64, dtype):
                *leaves, grad = tensors.to(dtype).to(kind).unbind()
                leaves = [t.requires_grad_() for t in leaves]
                out = neighborhood_attention(*leaves, *call)
                found.append((out, *torch.autograd.grad(out, leaves, grad)))
            off = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found[1], found[0])]
            print(shape, *call, dtype, *(f"{x:.1e}" for x in off), "" if max(off) < most else "WRONG", flush=True)


def flex(size):
    """torch's flex_attention with tokens in the order of tiles of 8 x 16."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    (height, width), (a, b) = GRID, (8, 16)

    def place(token):
        tile, i = token // (a * b), token % (a * b)
        return tile // (width // b) * a + i // b, tile % (width // b) * b + i % b

    def near(_, __, query, key):
        (qh, qw), (kh, kw) = place(query), place(key)
        top, left = (qh - size // 2).clamp(0, height - size), (qw - size // 2).clamp(0, width - size)
        return (kh >= top) & (kh < top + size) & (kw >= left) & (kw < left + size)

    points = height * width
    mask = torch.compile(create_block_mask)(near, None, None, points, points, device="cuda")
    attend = torch.compile(flex_attention, dynamic=False)

    def run(*tensors):
        q, k, v = (t.flatten(1, 2).transpose(1, 2) for t in tensors)
        return attend(q, k, v, block_mask=mask).transpose(1, 2).reshape(tensors[0].shape)

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flex", action="store_true")
    args = parser.parse_args()
    set_neighborhood_kernel("own")
    rows = {name: cuts(case[2]) for name, case in CASES.items()}
    workers = min(cpu_count(), 14)
    with ProcessPoolExecutor(workers, get_context("fork")) as pool:  # before this process has a device
        jobs = {name: [pool.submit(compiled, case, r) for r in rows[name]] for name, case in CASES.items()}
        failed = {name: [j.result() for j in jobs[name]] for name in jobs}
    check()
    for name, case in CASES.items():
        print(f"{name}: defaults: {step(lambda *t, s=case[0]: neighborhood_attention(*t, s), *case)}", flush=True)
        best = sweep(case, rows[name], failed[name])
        use(case[2], best)
        print(f"{name}: best: {step(lambda *t, s=case[0]: neighborhood_attention(*t, s), *case)}", flush=True)
        print("   ", ", ".join(f"Config{tuple(c)}" for c in best), flush=True)
        if find_spec("natten"):
            set_neighborhood_kernel("natten")
            print(f"{name}: natten: {step(lambda *t, s=case[0]: neighborhood_attention(*t, s), *case)}", flush=True)
            set_neighborhood_kernel("own")
        if args.flex:
            print(f"{name}: flex_attention: {step(flex(case[0]), *case)}", flush=True)


if __name__ == "__main__":
    main()
