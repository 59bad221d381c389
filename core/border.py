"""Nodes of torch's graph where tensors come in, go out and are cut otherwise, and the promotion of plain tensors.

The backward of each is the node in the opposite direction, so all of them have derivatives of any order.
"""

import warnings

from torch.autograd import Function
from torch.distributed.tensor import DTensor

from core._torch import dtensor_from_local, wait
from core.errors import ShardingError
from core.redistribute import move
from core.shard_tensor import ShardTensor, TensorPromotionMode
from core.spec import make_spec, replicated_spec


class FromLocal(Function):
    @staticmethod
    def forward(ctx, local, spec, cotangent):
        ctx.specs = spec, cotangent
        return ShardTensor(wait(local.detach()), spec)

    @staticmethod
    def backward(ctx, grad):
        spec, cotangent = ctx.specs
        return ToLocal.apply(as_shards(grad, spec.mesh).redistribute_to(cotangent), spec), None, None


class ToLocal(Function):
    @staticmethod
    def forward(ctx, x, cotangent):
        ctx.specs = x._spec, cotangent
        local = wait(x._local_tensor)
        return local.view_as(local)

    @staticmethod
    def backward(ctx, grad):
        spec, cotangent = ctx.specs
        return FromLocal.apply(grad, cotangent, spec), None


class Redistribute(Function):
    @staticmethod
    def forward(ctx, x, spec):
        ctx.spec = x._spec
        local = move(x._local_tensor, x._spec, spec)
        return ShardTensor(local.view_as(local) if local is x._local_tensor else local, spec)

    @staticmethod
    def backward(ctx, grad):
        """A cut value wants a cut gradient; to whole and pending ones any gradient is as good."""
        if ctx.spec.is_sharded() and isinstance(grad, ShardTensor):
            grad = grad.redistribute_to(ctx.spec.finished())
        return grad, None


class FromDTensor(Function):
    @staticmethod
    def forward(ctx, dtensor):
        ctx.spec = make_spec(dtensor.device_mesh, dtensor.placements, dtensor.shape)
        return ShardTensor(wait(dtensor._local_tensor).detach(), ctx.spec)

    @staticmethod
    def backward(ctx, grad):
        spec = ctx.spec.finished()
        return ToDTensor.apply(as_shards(grad, spec.mesh).redistribute_to(spec))


class ToDTensor(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.spec = spec = x._spec
        return dtensor_from_local(x._local_tensor, spec.mesh, spec.placements, spec.shape, spec.stride)

    @staticmethod
    def backward(ctx, grad):
        return ShardTensor.from_dtensor(grad) if isinstance(grad, DTensor) else grad


class Promote(Function):
    """A plain tensor as a replicated ShardTensor. Its gradient is finished before the plain tensor sees it."""

    @staticmethod
    def forward(ctx, tensor, spec):
        ctx.spec = spec
        return ShardTensor(tensor.detach(), spec)

    @staticmethod
    def backward(ctx, grad):
        if isinstance(grad, ShardTensor):
            grad = Plain.apply(grad.redistribute_to(ctx.spec))
        return grad, None


class Plain(Function):
    """The reverse of :class:`Promote`: a whole ShardTensor as the plain tensor that it is on every rank."""

    @staticmethod
    def forward(ctx, x):
        ctx.spec = x._spec
        return x._local_tensor.view_as(x._local_tensor)

    @staticmethod
    def backward(ctx, grad):
        return as_shards(grad, ctx.spec.mesh)


def promote(tensor, mesh):
    """``tensor``, equal on all ranks of ``mesh``, as a replicated ShardTensor. Differentiable."""
    if isinstance(tensor, DTensor):
        return ShardTensor.from_dtensor(tensor)
    return Promote.apply(tensor, replicated_spec(mesh, tensor.shape))


def as_shards(tensor, mesh):
    """A gradient, which is plain where it is whole on every rank, as a ShardTensor. Differentiable."""
    return tensor if isinstance(tensor, ShardTensor) else promote(tensor, mesh)


def check_promotion(tensor):
    """Applies the promotion mode to a plain tensor of more than one element that meets a ShardTensor."""
    mode = ShardTensor._promotion_mode
    if mode is TensorPromotionMode.SILENT or tensor.ndim == 0:
        return
    text = f"a plain tensor of shape {tuple(tensor.shape)} meets a ShardTensor"
    if mode is TensorPromotionMode.DISABLED:
        raise ShardingError(text, remedy="Scatter it, or allow promotion with ShardTensor.set_promotion_mode.")
    warnings.warn(f"{text}; taken as replicated", stacklevel=4)


def local_cotangent(grad, spec):
    """The local gradient that each rank's graph must start from, given a gradient of the global value of ``spec``.

    Cut dims: the own rows. Replicated: terms of a pending sum. Partial: the whole gradient on every rank.
    """
    if not isinstance(grad, ShardTensor):
        grad = ShardTensor(grad, spec.replicated())
    return move(grad._local_tensor, grad._spec, spec.cotangent())
