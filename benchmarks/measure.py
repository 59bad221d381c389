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
LONG = 2000  # ms; calls that take longer differ little: one is enough to warm up, and three to measure


def median_ms(call, device, repeats, warm=2):
    """Of the slowest rank; all ranks of the world call it together."""
    if _slowest([_ms(call, device)], device) > LONG:
        repeats = min(repeats, 3)
    else:
        for _ in range(warm - 1):
            call()
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
    gc.collect()
    if device.type == "cuda":
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
