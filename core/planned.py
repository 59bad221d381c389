"""What a plan says: what one rank holds, does and sends in a training step, how long that takes, what is better."""

from collections import Counter
from dataclasses import dataclass, replace
from math import prod

from core.debug import Trace
from core.devices import FITTED, Device, of_message, seconds

_BUCKET = 25 * 2**20  # bytes of DDP's messages


@dataclass
class Share:
    """What one rank holds, does and sends in a step. Bytes, as a GPU's allocator counts them.

    Attributes:
        mesh_shape, rank: the mesh, and the rank that was played.
        weights, inputs, gradients, optimizer, ema: of parameters and buffers, of the sample, and so on.
        activations: what else is alive at the peak of forward and backward, gradients among it.
        workspaces: of the library that multiplies matrices, if the model does.
        forward, backward: messages over the domain, as ``core.debug.trace`` records them.
        work, calls, wrapped: of forward and backward, as :class:`core.meter.Meter` counts them.
    """

    mesh_shape: tuple
    rank: int
    weights: int
    inputs: int
    gradients: int
    activations: int
    forward: Trace
    backward: Trace
    work: Counter
    calls: int
    wrapped: int
    workspaces: int = 0
    optimizer: int = 0
    ema: int = 0

    @property
    def ddp(self):
        return self.mesh_shape[0]

    @property
    def buckets(self):
        """The copy of the gradients that DDP sends."""
        return self.gradients if self.ddp > 1 else 0

    @property
    def step_peak(self):
        """Most bytes of tensors alive in forward and backward, without what stays between steps beside the weights."""
        return self.weights + self.inputs + self.activations

    @property
    def peak(self):
        return self.step_peak + self.workspaces + self.buckets + self.optimizer + self.ema

    @property
    def data_messages(self):
        """Bytes that this rank sends in each of DDP's messages, which average the gradients over the data groups."""
        whole, rest = divmod(self.gradients, _BUCKET) if self.ddp > 1 else (0, 0)
        return [2 * n * (self.ddp - 1) // self.ddp for n in [_BUCKET] * whole + [rest] * bool(rest)]

    def time(self, device, fitted=FITTED):
        """:class:`core.devices.Seconds` of forward and backward."""
        messages, link = [*self.forward.messages, *self.backward.messages], device.link(prod(self.mesh_shape[1:]))
        return seconds(self.work, self.calls, self.wrapped, messages, link, device, fitted)

    def seconds(self, device, fitted=FITTED):
        """Estimate of a step. DDP's messages hide behind the backward pass, which is taken as two thirds of it all."""
        time, link = self.time(device, fitted), device.link(prod(self.mesh_shape))
        data = [of_message(n, link, fitted) for n in self.data_messages]
        return time.total + max(sum(data) - 2 / 3 * time.compute, max(data, default=0.0))


@dataclass
class Report:
    """``one``: on one GPU, plain; ``cut``: on the mesh; both on a :class:`core.devices.Device`."""

    one: Share
    cut: Share
    device: Device

    @property
    def mesh_shape(self):
        return self.cut.mesh_shape

    @property
    def samples_per_second(self):
        """Of one GPU, of as many GPUs as the mesh has with DDP alone, and of the mesh."""
        alone = replace(self.one, mesh_shape=(prod(self.mesh_shape), 1))
        return tuple(s.ddp / s.seconds(self.device) for s in (self.one, alone, self.cut))

    def verdict(self):
        """What is the better choice, in words."""
        gib, (one, alone, cut) = self.device.memory / 2**30, self.samples_per_second
        if self.cut.peak > self.device.memory:
            return (
                f"The part of a rank does not fit {gib:.0f} GiB: cut the sample over more ranks, or use a checkpoint."
            )
        if self.one.peak > self.device.memory:
            return f"The sample does not fit one GPU of {gib:.0f} GiB: the domain is needed."
        if prod(self.mesh_shape[1:]) == 1:
            return "Nothing is cut: this is DDP." if self.mesh_shape[0] > 1 else "This is one GPU."
        said, gpus = [], prod(self.mesh_shape)
        if one * self.cut.ddp >= cut:
            said.append("A sample takes the domain longer than one GPU: do not cut it.")
        else:
            said.append(f"A sample takes one GPU {cut / self.cut.ddp / one:.2f} times as long as the domain.")
        if alone > cut:
            said.append(f"Plain DDP gets through {alone / cut:.2f} times more samples, if {gpus} make a batch.")
        return " ".join(said)

    def __str__(self):
        shares, (unit, size) = (self.one, self.cut), ("GiB", 2**30) if self.one.peak > 2**30 else ("MiB", 2**20)
        rows = [("", "one GPU", " x ".join(map(str, self.mesh_shape)) + f", rank {self.cut.rank}")]
        held = ("weights", "gradients", "optimizer", "ema", "buckets", "inputs", "activations", "workspaces", "peak")
        for name in held:
            rows.append((f"{name}, {unit}", *(f"{getattr(s, name) / size:.3f}" for s in shares)))
        for name in ("forward", "backward"):
            wires = [getattr(s, name) for s in shares]
            rows.append((f"{name} messages", *(f"{w.count():,}" for w in wires)))
            rows.append((f"{name} bytes sent", *(f"{w.bytes():,}" for w in wires)))
        rows.append(("DDP's messages", *(f"{len(s.data_messages):,}" for s in shares)))
        rows.append(("DDP's bytes sent", *(f"{sum(s.data_messages):,}" for s in shares)))
        for name in ("compute", "wire", "python"):
            rows.append((f"{name}, ms", *(f"{1e3 * getattr(s.time(self.device), name):.1f}" for s in shares)))
        rows.append(("step, ms", *(f"{1e3 * s.seconds(self.device):.1f}" for s in shares)))
        table = [f"{a:<24}{b:>18}{c:>18}" for a, b, c in rows]
        one, alone, cut = self.samples_per_second
        rates = f"samples per second: {one:.3g} on one GPU, {alone:.3g} by DDP alone, {cut:.3g} on the mesh"
        return "\n".join([*table, rates, self.verdict()])
