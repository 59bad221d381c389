"""Batch and instance norm: statistics over all parts of a sample, and buffers that stay equal on all ranks.

``F.batch_norm`` sees one batch, however it is cut over the mesh of its tensor; ranks outside that mesh (data parallel)
have batches of their own. ``nn.SyncBatchNorm`` joins those of its process group as well. Its own forward refuses
tensors on a CPU and calls an autograd function that never asks what its input is, so for ShardTensors this file puts
another in its place.
"""

import math
from functools import wraps
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import handle_torch_function

from core import collectives as c
from core._torch import group_name, group_named, no_modes
from core.dispatch import Plan, op
from core.errors import ShardingError
from core.ops.graph import operator
from core.ops.norm import along_channels
from core.ops.normalise import Normalise, Over
from core.shard_tensor import ShardTensor


class Channels:
    """How batch and instance norm treat the channels of one call, which may be cut."""

    def __init__(self, func, x, running, affine, dims):
        if x.ndim < 2 or any(s is not None and tuple(s.shape) != (x.shape[1],) for s in (*running, *affine)):
            raise ShardingError("wants one number a channel", op=func.__name__, operands=[x, *affine])
        self.x, self.dims, axis = x, dims, x.axis_of(1)
        self.groups = [c.axis_group(x.mesh, a) for a, dim in x.cuts() if dim in dims]
        self.join = None if axis is None else (x.sizes[axis], c.axis_group(x.mesh, axis))
        self.affine = tuple(along_channels(x, s) for s in affine if s is not None)
        self.running = tuple(s for s in running if s is not None)

    def over(self):
        return Over(self.dims, math.prod([self.x.shape[d] for d in self.dims]), self.groups)

    def apply(self, t, weight, bias, over, eps):
        shape = (-1, *[1] * (t.ndim - 2))
        weight, bias = (None if s is None else s.view(shape) for s in (weight, bias))
        return Normalise.apply(t, weight, bias, over, eps)

    def plain(self, func):
        """The operation itself; of no elements, where it would look for the first weight, a sum that has them too."""

        def local(t, *args, **kwargs):
            if t.numel():
                return func(t, *args, **kwargs)
            operands = [
                s.view(-1, *[1] * (t.ndim - 2)) for s in (*args, *kwargs.values()) if isinstance(s, torch.Tensor)
            ]
            return sum(operands, t)

        return local if self.x.is_sharded() else None

    def track(self, buffers, mean, var, count, momentum):
        """Moves the buffers towards the statistics of all channels."""
        with torch.no_grad():
            for buffer, value in zip(buffers, (mean, var * (count / (count - 1)))):
                if buffer is not None:
                    value = value.reshape(-1)
                    value = c.send_gather(value, 0, *self.join) if self.join else value
                    buffer.lerp_(value.to(buffer.dtype), momentum)


def _several(func, x, count):
    if count < 2:
        raise ShardingError("statistics of one value a channel", op=func.__name__, operands=[x])


_BUFFERS_AND_WEIGHTS = ("running_mean", "running_var", "weight", "bias")


@op(F.batch_norm, names=("input", *_BUFFERS_AND_WEIGHTS, "training", "momentum", "eps"))
def batch_norm(func, x, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    running = running_mean, running_var
    p = Channels(func, x, running, (weight, bias), (0, *range(2, x.ndim)))
    if not training:
        if None in running:
            raise ShardingError("neither training nor buffers", op="batch_norm", operands=[x])
        return Plan((x, *(along_channels(x, s) for s in running), *p.affine), x, p.plain(func))
    over = p.over()
    _several(func, x, over.count)
    inputs = (x, *(s.replicated() for s in p.running), *p.affine)
    if not p.groups and not p.join:
        return Plan(inputs, x)

    def local(t, running_mean, running_var, weight=None, bias=None, *args, **kwargs):
        y, mean, var = p.apply(t, weight, bias, over, eps)
        p.track((running_mean, running_var), mean, var, over.count, momentum)
        return y

    return Plan(inputs, x, local)


@op(F.instance_norm, names=("input", *_BUFFERS_AND_WEIGHTS, "use_input_stats", "momentum", "eps"))
def instance_norm(
    func, x, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-5
):
    """Buffers follow the mean over the batch of the samples' own statistics."""
    running = running_mean, running_var
    p = Channels(func, x, running, (weight, bias), tuple(range(2, x.ndim)))
    if not use_input_stats:
        if None in running:
            raise ShardingError("neither statistics nor buffers", op="instance_norm", operands=[x])
        return Plan((x, *(along_channels(x, s) for s in running), *p.affine), x, p.plain(func))
    over, batch = p.over(), x.axis_of(0)
    _several(func, x, over.count)
    inputs = (x, *(s.replicated() for s in p.running), *p.affine)
    if not p.groups and not (p.running and x.is_sharded()):
        return Plan(inputs, x, p.plain(func))

    def local(t, running_mean=None, running_var=None, weight=None, bias=None, *args, **kwargs):
        y, mean, var = p.apply(t, weight, bias, over, eps)
        if p.running:
            both = torch.stack([mean, var]).sum(1) / x.shape[0]
            mean, var = both if batch is None else c.send_all_reduce(both, c.axis_group(x.mesh, batch))
            p.track((running_mean, running_var), mean, var, over.count, momentum)
        return y

    return Plan(inputs, x, local)


# -- the same in another order of arguments -----------------------------------------------------------------------
@op(torch.batch_norm)
def batch_norm_by_position(func, x, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled):
    plan = batch_norm(F.batch_norm, x, running_mean, running_var, weight, bias, training, momentum, eps)
    return _reordered(plan, F.batch_norm, (weight, bias), (running_mean, running_var))


@op(torch.instance_norm)
def instance_norm_by_position(
    func, x, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled
):
    plan = instance_norm(F.instance_norm, x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    return _reordered(plan, F.instance_norm, (weight, bias), (running_mean, running_var))


def _reordered(plan, function, affine, running):
    x, *specs = plan.inputs
    n, local = sum(s is not None for s in running), plan.local or function

    def call(t, weight, bias, running_mean, running_var, use_input, momentum, eps, cudnn_enabled):
        return local(t, running_mean, running_var, weight, bias, use_input, momentum, eps)

    return plan._replace(inputs=(x, *specs[n:], *specs[:n]), local=call)


# -- over data-parallel ranks too -----------------------------------------------------------------------------------
class OverWorld(NamedTuple):
    """As :class:`Over`, and over the ranks of ``world``, where each sample's sums appear ``copies`` times."""

    within: Over
    world: c.Group
    copies: int
    count: torch.Tensor  # type: ignore[assignment]  # tuple.count is not used

    def here(self, value, dtype=None):
        return self.within.here(value, dtype)

    def everywhere(self, sums):
        return c.send_all_reduce(self.within.everywhere(sums) / self.copies, self.world)

    def spread(self, statistic):
        return statistic


def synchronised_batch_norm(x, running_mean, running_var, weight, bias, momentum, eps, group):
    """Batch norm of a ShardTensor in training, with the statistics of all samples that the ranks of the process group
    named ``group`` hold parts of."""
    tensors = x, running_mean, running_var, weight, bias
    if torch.compiler.is_dynamo_compiling():
        return _operator(*tensors, momentum, eps, group)
    return handle_torch_function(synchronised_batch_norm, tensors, *tensors, momentum, eps, group)


_operator = operator(
    "synchronised_batch_norm(Tensor x, Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor? weight, "
    "Tensor? bias, float momentum, float eps, str group) -> Tensor",
    synchronised_batch_norm,
)


@op(synchronised_batch_norm)
def synchronised(func, x, running_mean, running_var, weight, bias, momentum, eps, group):
    final, x = x, x.aside(1)  # ranks of the process group must hold the same channels
    p = Channels(func, x, (running_mean, running_var), (weight, bias), (0, *range(2, x.ndim)))
    within = p.over()
    process_group = group_named(group)
    world = c.Group(group, process_group.size(), process_group.rank())
    with no_modes():  # the mesh's tensor is a real one, also while torch.compile looks on
        here = set(x.mesh.mesh.flatten().tolist())
    copies = len(here.intersection(dist.get_process_group_ranks(process_group)))

    def local(t, running_mean, running_var, weight, bias, *args):
        count = c.send_all_reduce(torch.tensor([within.count / copies], dtype=torch.float64, device=t.device), world)
        count = count.to(torch.promote_types(t.dtype, torch.float32))
        y, mean, var = p.apply(t, weight, bias, OverWorld(within, world, copies, count), eps)
        p.track((running_mean, running_var), mean, var, count, momentum)
        return y

    return Plan((x, *(s.replicated() for s in p.running), *p.affine), x, local, final)


def _forward_for_shards(plain):
    @wraps(plain)
    def forward(self, x):
        if not isinstance(x, ShardTensor):
            return plain(self, x)
        if not self.training:
            return nn.BatchNorm1d.forward(self, x)
        running_mean = running_var = None
        momentum = self.momentum or 0.0
        if self.track_running_stats:
            running_mean, running_var = self.running_mean, self.running_var
            self.num_batches_tracked.add_(1)
            momentum = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        group = group_name(self.process_group or dist.group.WORLD)
        return synchronised_batch_norm(x, running_mean, running_var, self.weight, self.bias, momentum, self.eps, group)

    return forward


setattr(nn.SyncBatchNorm, "forward", _forward_for_shards(nn.SyncBatchNorm.forward))  # noqa: B010
