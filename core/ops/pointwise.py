"""Pointwise operations: no communication, except to bring operands that are cut differently to one cut.

Those that torch tags as pointwise come here by themselves; ``UNTAGGED`` names the others.

The rule of alignment: axis by axis the result is cut as the largest operand that this axis cuts along a dim of full
extent (the first of equals); the others follow. In-place operations keep the cut of their target.
"""

import torch
from torch.distributed.tensor.placement_types import Partial, Shard

from core import formulas
from core.arguments import tensors_in
from core.dispatch import TARGET, Plan, op
from core.errors import ShardingError
from core.spec import PARTIAL, REPLICATE
from core.writes import mutates

aten = torch.ops.aten

# Linear in all tensor operands together: pending sums may stay pending.
_SUMS = {aten.add.Tensor, aten.sub.Tensor}
# Linear in the first operand alone (and, for products, in the second alone).
_SCALES = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default}

# What torch does not tag: some in-place forms, activations and their derivatives.
UNTAGGED = (
    *(aten.eq_, aten.ne_, aten.lt_, aten.le_, aten.gt_, aten.ge_, aten.__irshift__, aten.gcd_, aten.lcm_),
    *(aten.abs_, aten.copysign_, aten.heaviside_, aten.xlogy_, aten.floor_divide, aten.floor_divide_, aten.rsub),
    *(aten.fill, aten.fill_, aten.zero, aten.zero_, aten.masked_fill, aten.masked_fill_, aten.complex, aten.polar),
    *(aten.gelu_, aten.mish_, aten.threshold_, aten.hardswish, aten.hardswish_, aten._prelu_kernel),
    *(aten.celu_, aten.elu_, aten.hardsigmoid_, aten.hardtanh_, aten.leaky_relu, aten.leaky_relu_),  # 2.11
    *(aten.elu_backward, aten.hardshrink_backward, aten.hardsigmoid_backward, aten.hardswish_backward),
    *(aten.hardtanh_backward, aten.leaky_relu_backward, aten.log_sigmoid_backward, aten.mish_backward),
    *(aten.softplus_backward, aten.softshrink_backward, aten.rrelu_with_noise_backward, aten._prelu_kernel_backward),
    torch.ops.prims.add,  # in derivatives of derivatives
)


@op("pointwise", *UNTAGGED, pending=True, elementwise=True)
def pointwise(func, *args, **kwargs):
    specs = tensors_in(args, kwargs)
    if mutates(func):  # its target holds no pending sum: dispatch finishes it first
        fits(func, specs)
        return Plan(tuple(operand(s, specs[0]) for s in specs), TARGET)
    target = _settle_pending(func, specs, meet(specs, func))
    return Plan(tuple(operand(s, target, func) for s in specs), target)


@op(torch.addcmul, torch.Tensor.addcmul, names=("input", "tensor1", "tensor2"))
def addcmul(func, x, *others, value=1):
    """Caught above autograd, so that the gradient of a row for all rows, as a gate is, is a sum that stays pending."""
    specs = tensors_in((x, *others), {"value": value})
    target = meet(specs, func)
    inputs = tuple(operand(s, target) for s in specs)
    usual = len(others) == 2 and len(specs) == 3  # and neither the old order of arguments nor a factor in a tensor
    return Plan(inputs, target, formula=formulas.addcmul(*(s.local_shape() for s in inputs)) if usual else None)


def fits(func, specs):
    """In place, the operands must broadcast to the shape of the target."""
    if _broadcast(specs, func) != specs[0].shape:
        raise ShardingError("the target would change its shape", op=str(func), operands=specs)


def _broadcast(specs, func):
    try:
        return torch.broadcast_shapes(*[s.shape for s in specs])
    except RuntimeError as error:
        name = str(func) if func is not None else None
        raise ShardingError("shapes that do not broadcast", op=name, operands=specs) from error


def meet(specs, func=None):
    """The cut of a broadcast result of several operands, and its order in memory, which is the first's of its shape."""
    shape = _broadcast(specs, func)
    stride = next((s.stride for s in specs if s.shape == shape and 0 not in s.stride), None)
    n, mesh = len(shape), specs[0].mesh
    placements, sizes, taken = [], [], set()
    by_size = sorted(specs, key=lambda s: -s.shape.numel())
    for axis in range(mesh.ndim):
        choice = (REPLICATE, None)
        for s in by_size:
            p = s.placements[axis]
            if not isinstance(p, Shard):
                continue
            dim = p.dim + n - s.ndim
            if s.shape[p.dim] == shape[dim] and dim not in taken:
                choice = (Shard(dim), s.sizes[axis])
                taken.add(dim)
                break
        placements.append(choice[0])
        sizes.append(choice[1])
    return specs[0].recut(placements, sizes, shape, stride)


def operand(spec, target, func=None):
    """How an operand must be cut to meet a result cut as ``target``."""
    placements, sizes = [], []
    for axis, (p, extents) in enumerate(zip(target.placements, target.sizes)):
        if isinstance(p, Shard):
            dim = p.dim - target.ndim + spec.ndim
            if dim < 0 or spec.shape[dim] != target.shape[p.dim]:
                p, extents = REPLICATE, None
            else:
                p = Shard(dim)
        elif isinstance(p, Partial) and func in _SCALES and not isinstance(spec.placements[axis], Partial):
            p = REPLICATE
        placements.append(p)
        sizes.append(extents)
    return spec.recut(placements, sizes)


def _settle_pending(func, specs, target):
    """On axes where a pending sum meets no cut, it stays pending if the operation is linear in it."""
    for axis, p in enumerate(target.placements):
        pending = [isinstance(s.placements[axis], Partial) for s in specs]
        if not any(pending) or isinstance(p, Shard):
            continue
        if func in _SUMS:
            stays = len(specs) == 2
        else:
            divisor = pending[-1] and len(specs) > 1 and func is aten.div.Tensor
            stays = func in _SCALES and sum(pending) == 1 and not divisor
        target = target.with_axis(axis, PARTIAL if stays else REPLICATE)
    return target
