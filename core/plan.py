"""How much memory and which messages a training step needs on every rank, before anybody rents the GPUs.

:func:`plan` runs the real model, forward and backward, on fake tensors as one rank of a fake process group, so that
nothing is computed and a model of any size is planned on a laptop; a :class:`core.meter.Meter` follows what is alive,
``core.debug.trace`` the messages. It does so for one GPU and for the mesh, and says which is the better choice::

    python -m core.plan benchmarks.models:ViT --arguments 2048 --input 1x3x2048x2048@2 --mesh 1 2
    python -m apps.weather.plan --preset regional --domain 2          # and apps.aero.plan
"""

import argparse
import ast
import importlib
from contextlib import contextmanager, nullcontext
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard

from core import dispatch
from core._torch import FakeTensorMode, join_fake_world, release_groups
from core.command import command
from core.debug import trace
from core.devices import device_named, workspaces
from core.errors import InputError
from core.gradients import gather_in_buckets
from core.kernels import as_on_a_gpu
from core.meter import Meter
from core.planned import Report, Share
from core.precision import gpu_autocast
from core.shard_tensor import ShardTensor
from core.spec import make_spec

STATES = {"adamw": 2, "adam": 2, "momentum": 1, "muon": 1, "sgd": 0, None: 0}  # numbers that are kept for a weight


def plan(
    make_model,
    inputs,
    placements,
    mesh_shape=(1, 2),
    *,
    dtype=torch.bfloat16,
    device="h200",
    optimizer="adamw",
    ema=False,
    step=None,
    autocast=None,
    input_gradients=False,
    sizes=None,
    rank=None,
):
    """Memory, messages and time of a training step on one GPU and on a mesh, predicted.

    Args:
        make_model: makes the plain ``nn.Module``; nothing in it may ask for the value of a tensor.
        inputs: of one sample (a batch of one data group): global shapes, or tensors on ``meta`` where the dtype is not
            ``dtype``.
        placements: for each input its placements over the domain, None for what stays plain.
        mesh_shape: (ddp, domain) or (ddp, domain_h, domain_w).
        dtype: of parameters and inputs.
        device: a name in :data:`core.devices.DEVICES`.
        optimizer: a key of :data:`STATES`, by which the numbers kept for each weight are counted.
        ema: whether averaged weights are kept.
        step: ``step(model, *inputs)`` gives the loss; by default the mean square of the result.
        autocast: a dtype, or None.
        input_gradients: whether the inputs ask for gradients.
        sizes: for each input a dict axis -> extents, or None for torch.chunk's.
        rank: the rank to play; by default one with two neighbours, where there is one.

    Returns:
        :class:`core.planned.Report`; print it.

    Raises:
        InputError: an unknown device or optimizer, or where a process group is there already.
    """
    states, how = _states(optimizer), dict(dtype=dtype, device=device, step=step, autocast=autocast, sizes=sizes)
    how["input_gradients"] = input_gradients
    one = share(make_model, inputs, placements, (1,) * len(mesh_shape), **how)
    cut = share(make_model, inputs, placements, mesh_shape, rank=rank, **how)
    for s in (one, cut):
        s.optimizer, s.ema = states * s.gradients, ema * s.gradients
    return Report(one, cut, device_named(device))


def _states(optimizer):
    if optimizer not in STATES:
        raise InputError(f"no optimizer {optimizer!r}", remedy=f"Choose one of {', '.join(map(str, STATES))}.")
    return STATES[optimizer]


def _mean_square(model, *inputs):
    return model(*inputs).float().square().mean()


def share(
    make_model,
    inputs,
    placements,
    mesh_shape,
    *,
    dtype=torch.bfloat16,
    device="h200",
    step=None,
    autocast=None,
    input_gradients=False,
    sizes=None,
    rank=None,
):
    """The :class:`core.planned.Share` of one rank of a mesh, without an optimizer; arguments as of :func:`plan`."""
    kind, rank = device_named(device), rank if rank is not None else int(prod(mesh_shape[1:]) > 2)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_mesh(tuple(mesh_shape), rank) as mesh, as_on_a_gpu(), fake, Meter() as meter:
        model = _converted(make_model(), dtype)
        if mesh_shape[0] == 1:
            gather_in_buckets(model)  # as core.parallelize does
        weights = meter.now
        sample = zip(inputs, placements, sizes or [None] * len(inputs))
        sample = [_part(*cut, mesh, dtype, input_gradients) for cut in sample]
        held = meter.now
        meter.restart()
        with gpu_autocast(autocast) if autocast else nullcontext():  # backward too, for blocks that are recomputed
            with trace() as forward:
                loss = (step or _mean_square)(model, *sample)
            with trace() as backward, torch.autocast("cpu", enabled=False):
                loss.backward()
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        memory = weights, held - weights, gradients, meter.peak - held
        counted = meter.work, meter.calls, meter.wrapped
        return Share(tuple(mesh_shape), rank, *memory, forward, backward, *counted, workspaces(meter.work, kind))


def _converted(model, dtype):
    """``model.to(dtype)``, which torch has not for fake tensors."""
    made = {}
    for part in model.modules():
        for name, p in part.named_parameters(recurse=False, remove_duplicate=False):
            value = p.detach().to(dtype) if p.is_floating_point() else p.detach()
            setattr(part, name, made.setdefault(id(p), nn.Parameter(value, p.requires_grad)))
        for name, b in part.named_buffers(recurse=False):
            setattr(part, name, b.to(dtype) if b.is_floating_point() else b)
    return model


@contextmanager
def fake_mesh(shape, rank=0):
    """The domain, one axis or two, of a mesh whose other ranks are not there; None for a mesh of one rank."""
    if prod(shape) == 1:
        yield None
        return
    if dist.is_initialized():
        raise InputError("a plan makes a process group of its own, and there is one", remedy="Call it before the start")
    names = ("ddp", "domain") if len(shape) == 2 else ("ddp", "domain_h", "domain_w")
    join_fake_world(prod(shape), rank)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    dispatch.forget_plans()  # of another rank, or of a real mesh that looks like this one
    try:
        yield mesh[names[1:]] if len(names) > 2 else mesh["domain"]
    finally:
        dispatch.forget_plans()
        release_groups(mesh)
        dist.destroy_process_group()


def _part(x, placements, sizes, mesh, dtype, wants_gradient):
    """This rank's part of an input."""
    shape, dtype = (x.shape, x.dtype) if isinstance(x, torch.Tensor) else (x, dtype)
    wants_gradient = wants_gradient and dtype.is_floating_point
    if mesh is None or placements is None:
        return torch.empty(shape, dtype=dtype, requires_grad=wants_gradient)
    spec = make_spec(mesh, placements, shape, sizes)
    return ShardTensor(torch.empty(spec.local_shape(), dtype=dtype), spec).requires_grad_(wants_gradient)


# -- the command --------------------------------------------------------------------------------------------------
def _input(text):
    """``1x3x512x512@2``: a shape, and the dims that the axes of the domain cut."""
    shape, _, dims = text.partition("@")
    return tuple(map(int, shape.split("x"))), [Shard(int(d)) for d in dims.split(",")] if dims else None


@command
def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m core.plan", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="package.module:name of a class or function that makes the model")
    parser.add_argument("--arguments", nargs="*", default=[], help="its arguments, as Python writes them")
    parser.add_argument("--input", nargs="+", required=True, type=_input, help="shape@dim that is cut: 1x3x512x512@2")
    parser.add_argument("--mesh", nargs="+", type=int, default=[1, 2], help="ddp and domain (one axis or two)")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and inputs")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--optimizer", default="adamw", choices=[s for s in STATES if s])
    parser.add_argument("--ema", action="store_true", help="keep averaged weights")
    args = parser.parse_args(argv)
    module, _, name = args.model.partition(":")
    make, values = getattr(importlib.import_module(module), name), [ast.literal_eval(a) for a in args.arguments]
    shapes, placements = zip(*args.input)
    report = plan(
        lambda: make(*values), shapes, placements, tuple(args.mesh), dtype=getattr(torch, args.dtype),
        device=args.device, optimizer=args.optimizer, ema=args.ema,
    )  # fmt: skip
    print(report)


if __name__ == "__main__":
    main()
