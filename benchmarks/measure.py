"""How a forward pass and a training step are measured: median time of the slowest rank, memory at the peak."""

import gc
import statistics
import time
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from core import capture
from core.capture import release

HOW = ("eager", "compiled", "blocks", "captured")
LONG, LONGEST = 2e3, 60e3  # ms; calls that take long differ little: few are measured, and of the longest the first


def median_ms(call, device, repeats, warm=2):
    """Of the slowest rank; all ranks of the world call it together."""
    first = _slowest([_ms(call, device)], device)
    if first > LONGEST:
        return first
    for _ in range(warm - 1 if first < LONG else 0):
        call()
    repeats = repeats if first < LONG else min(repeats, 3)
    return _slowest([_ms(call, device) for _ in range(repeats)], device)


def _ms(call, device):
    settle(device)
    start = time.perf_counter()
    call()
    settle(device)
    return 1e3 * (time.perf_counter() - start)


def _slowest(times, device):
    worst = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def settle(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def forward_and_step(module, inputs, autocast=False):
    """Two functions: the module on inputs, and with its gradients, those of the inputs too; autocast: to bf16."""
    leaves = [x.detach().requires_grad_() for x in inputs]

    def called(inputs):
        with torch.autocast(inputs[0].device.type, torch.bfloat16, enabled=autocast):
            return module(*inputs)

    def forward():
        with torch.no_grad():
            return called(inputs)

    def step():
        for t in [*leaves, *module.parameters()]:
            t.grad = None
        called(leaves).float().square().mean().backward()
        assert all(type(x.grad) is type(x) for x in leaves)

    return forward, step


def start_of_peak(device):
    if device.type == "cuda":
        gc.collect()  # a model that is done with may be part of a cycle
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device):
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0


def measure(module, inputs, device, repeats, autocast=False):
    """(forward ms, step ms, peak GiB of the step)"""
    forward, step = forward_and_step(module, inputs, autocast)
    first = median_ms(forward, device, repeats)
    start_of_peak(device)
    return first, median_ms(step, device, repeats), peak_gib(device)


@contextmanager
def made_fast(module, how):
    """The module as it is, compiled as a whole or block by block, or recorded; on one device too."""
    torch._dynamo.reset()
    parts = list(getattr(module, "blocks", [module])) if how == "blocks" else []
    for part in parts:
        part.compile(fullgraph=True, dynamic=False)
    yield {"compiled": partial(torch.compile, fullgraph=True, dynamic=False), "captured": capture}.get(how, _same)(
        module
    )
    for part in parts:
        part._compiled_call_impl = None
    release(module)


def _same(module):
    return module
