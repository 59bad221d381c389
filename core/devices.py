"""How long operations and messages take on a GPU: a small model, for planning.

An operation takes the longer of its arithmetic and its memory traffic, a message a latency and its bytes over the link.
The CPU runs ahead of the GPU, so a step takes the longer of what the GPU does and what Python needs to ask for it.
Messages are counted in full, as if nothing hid them. Peaks are the makers' data sheets; what is *fitted* was measured
on two H200s under torch 2.11 (``benchmarks/scaling_model.py`` prints how well it fits) and taken over for the others.
"""

from dataclasses import dataclass

import torch

from core.errors import InputError

_HALF = torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Device:
    """Data sheet of a GPU: dense half-precision, fp32 and fp64 operations per second, memory in bytes and bytes per
    second, bytes per second that it sends over NVLink within a node and over the network of its usual node, and bytes
    of memory that cuBLAS keeps for each thread that uses it."""

    half: float
    single: float
    double: float
    memory: float
    bandwidth: float
    nvlink: float
    network: float
    workspace: int

    def link(self, ranks):
        """Bytes per second of messages among so many ranks that are neighbours."""
        return self.nvlink if ranks <= NODE else self.network


NODE = 8  # GPUs
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv"}
_OURS = "slot_", "neighborhood_"
DEVICES = {
    "h200": Device(989e12, 67e12, 67e12, 139 * 2**30, 4.8e12, 450e9, 50e9, 32 * 2**20),
    "h100": Device(989e12, 67e12, 67e12, 79 * 2**30, 3.35e12, 450e9, 50e9, 32 * 2**20),
    "a100": Device(312e12, 19.5e12, 19.5e12, 79 * 2**30, 2.04e12, 300e9, 25e9, 8 * 2**20),
}


@dataclass(frozen=True)
class Fitted:
    """Shares of the peaks that are reached, and seconds of what has no data sheet."""

    products: float = 0.33  # of arithmetic, in matrix products and convolutions of half precision
    wide: float = 0.061  # of arithmetic, in those of fp32 and fp64
    attention: float = 0.46  # of arithmetic
    windows: float = 0.27  # of arithmetic, in neighbourhood attention
    slots: float = 0.25  # of arithmetic, between points and slots
    bandwidth: float = 0.49  # of memory traffic
    group: float = 4.3e9  # bytes per second that torch's group norm reads and writes of one group of channels
    link: float = 0.74  # of the link
    latency: float = 20e-6  # of a message on its way; taken as usual, what was measured hardly tells
    send: float = 100e-6  # of Python and NCCL, for a message
    operation: float = 11.4e-6  # of Python and torch, for an operation on plain tensors
    wrapped: float = 124e-6  # of Python, for an operation on ShardTensors beside the plain ones it makes
    launch: float = 666e-6  # of Python and Triton, for an operation that kernels of our own compute


FITTED = Fitted()


@dataclass(frozen=True)
class Seconds:
    """Of a step: what the GPU computes, what it waits for messages, what Python needs."""

    compute: float
    wire: float
    python: float

    @property
    def total(self):
        return max(self.compute + self.wire, self.python)


def device_named(name):
    """A :class:`Device` of the table. Raises InputError for a name that is not in it."""
    if name not in DEVICES:
        raise InputError(f"no device {name!r}", remedy=f"Choose one of {', '.join(DEVICES)}.")
    return DEVICES[name]


def workspaces(work, device):
    """Bytes that stay with cuBLAS once matrices were multiplied: forward and backward pass are a thread each."""
    return 2 * device.workspace if any(w.name in _PRODUCTS for w in work) else 0


def seconds(work, calls, wrapped, messages, link, device, fitted=FITTED):
    """Of what a :class:`core.meter.Meter` counted, and of messages of ``core.debug.trace`` over ``link``.

    Returns:
        :class:`Seconds`
    """
    own = sum(n for w, n in work.items() if w.name.startswith(_OURS))
    python = calls * fitted.operation + wrapped * fitted.wrapped + own * fitted.launch + len(messages) * fitted.send
    return Seconds(
        sum(n * _of_work(w, device, fitted) for w, n in work.items()),
        sum(of_message(m.bytes, link, fitted) for m in messages),
        python,
    )


def of_message(nbytes, link, fitted=FITTED):
    """Seconds of a message of which this rank sends so many bytes over a link of so many bytes per second."""
    return fitted.latency + nbytes / (link * fitted.link)


def _of_work(work, device, fitted):
    half = work.dtype in _HALF
    peak = device.half if half else device.double if work.dtype == torch.float64 else device.single
    if work.name.startswith("slot"):
        share = fitted.slots
    elif work.name.startswith("neighborhood"):
        share = fitted.windows
    elif "attention" in work.name:
        share = fitted.attention
    else:
        share = fitted.products if half else fitted.wide
    bandwidth = device.bandwidth * fitted.bandwidth
    if work.groups:
        bandwidth = min(bandwidth, work.groups * fitted.group)
    return max(work.flops / (peak * share), work.nbytes / bandwidth)
