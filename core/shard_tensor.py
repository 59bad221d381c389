"""ShardTensor: a torch.Tensor that knows how it is cut over a mesh and computes as if it were whole.

The wrapper itself stands in torch's autograd graph, with the global shape; the part of this rank is in
``_local_tensor`` and the cut in ``_spec``. Operations are caught twice: above autograd (``core.above``) where an
operation brings its own communication, below it (``core.below``) where the operation of the parts is the operation
itself. How tensors come in and go out is in ``core.border``.
"""

import copy
import enum
import uuid

import torch
import torch.distributed as dist
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from core._torch import NoTorchFunction, make_wrapper_subclass, never_symbolic
from core.claims import spec_of_local
from core.errors import ShardingError
from core.spec import ShardTensorSpec, make_spec


class TensorPromotionMode(enum.Enum):
    """When a plain tensor meets a ShardTensor: take it as replicated, silently or with a warning, or refuse."""

    DISABLED = "disabled"
    WARN = "warn"
    SILENT = "silent"


class ShardTensor(torch.Tensor):
    """A tensor of global shape ``shape`` of which this rank holds ``to_local()``. Make one with :func:`scatter_tensor`
    or :meth:`from_local`."""

    __slots__ = ["_local_tensor", "_spec", "_keeps_cut", "_is_copy", "_order"]
    _local_tensor: torch.Tensor
    _spec: ShardTensorSpec
    _promotion_mode = TensorPromotionMode.SILENT

    @staticmethod
    def __new__(cls, local, spec, *, requires_grad=False):
        if local.is_conj() or local.is_neg():  # a lazy bit of the part would be unknown to the wrapper
            local = local.resolve_conj().resolve_neg()
        if not local.is_contiguous():
            spec = spec.restrided(local)
        self = make_wrapper_subclass(
            cls, spec.shape, spec.stride, dtype=local.dtype, device=local.device, requires_grad=requires_grad
        )
        self._local_tensor = local
        self._spec = spec
        self._is_copy, self._order = False, None  # of a view: see core.views
        return self

    def __init__(self, *args, **kwargs):
        pass

    # -- what torch.compile needs ---------------------------------------------------------------------------------
    def _stable_hash_for_caching(self):
        """No graph of another process is taken for one of this: it hangs on the rules, which may have changed. (What
        the compiler makes of a graph is kept by its content, and found again.)"""
        return uuid.uuid4().hex

    def __tensor_flatten__(self):
        if type(self._local_tensor) is torch.Tensor:  # a spec holds numbers, also where sizes change from call to call
            never_symbolic(self._local_tensor)
        return ["_local_tensor"], (self._spec, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(inner, meta, outer_size, outer_stride):
        spec, requires_grad = meta
        return ShardTensor(inner["_local_tensor"], spec, requires_grad=requires_grad)

    def __coerce_tangent_metadata__(self):
        """Compiled backwards expect a gradient that is cut as the value and pending nowhere."""
        return self.redistribute_to(self._spec.finished())

    def __coerce_same_metadata_as_tangent__(self, expected, expected_type=None):
        return self.redistribute_to(expected[0]) if isinstance(expected[0], ShardTensorSpec) else None

    # -- dispatch -------------------------------------------------------------------------------------------------
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return above(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return below(func, types, args, kwargs or {})

    @classmethod
    def set_promotion_mode(cls, mode: TensorPromotionMode):
        cls._promotion_mode = TensorPromotionMode(mode)

    @classmethod
    def register_function_handler(cls, func, handler):
        """``handler(func, types, args, kwargs)`` computes ``func`` above autograd for ShardTensors."""
        dispatch.HANDLERS[func] = handler

    @classmethod
    def register_dispatch_handler(cls, func, handler):
        """``handler(func, types, args, kwargs)`` computes the aten overload ``func`` below autograd."""
        dispatch.HANDLERS[func] = handler

    @classmethod
    def register_named_function_handler(cls, name, handler):
        """As :meth:`register_function_handler`, for a custom operator by name, such as ``"lib.op.default"``."""
        dispatch.HANDLERS[name] = handler

    # -- metadata: never communicates -----------------------------------------------------------------------------
    @property
    def spec(self) -> ShardTensorSpec:
        return self._spec

    @property
    def device_mesh(self):
        return self._spec.mesh

    @property
    def placements(self):
        return self._spec.placements

    def __repr__(self, *, tensor_contents=None):
        with NoTorchFunction():
            grad = f", grad_fn={type(self.grad_fn).__name__}" if self.grad_fn else ""
        return f"ShardTensor(local={self._local_tensor}, spec={self._spec}{grad})"

    __str__ = __repr__

    def __format__(self, spec):
        return format(self.item(), spec) if self.numel() == 1 else repr(self)

    def __reduce_ex__(self, protocol):
        return _restored, (dist.get_rank(), self._local_tensor.detach(), self._spec, self.requires_grad, self.__dict__)

    def __deepcopy__(self, memo):
        local = self._local_tensor.detach().clone()
        memo[id(self)] = _rebuild(local, self._spec, self.requires_grad, copy.deepcopy(self.__dict__, memo))
        return memo[id(self)]

    # -- in and out -----------------------------------------------------------------------------------------------
    @staticmethod
    def from_local(
        local_tensor,
        device_mesh,
        placements,
        sharding_shapes="infer",
        global_shape=None,
        check=False,
        grad_placements=None,
    ):
        """A ShardTensor of which this rank holds ``local_tensor``. Differentiable.

        Args:
            sharding_shapes: ``"infer"`` asks all ranks for their extents (one small all-gather an axis), ``"chunk"``
                takes torch.chunk's from ``global_shape`` without communication, or a dict axis -> local shapes of all
                ranks of that axis (or their extents along the sharded dim).
            global_shape: needed for ``"chunk"``; checked otherwise.
            check: compare shapes, sizes and dtypes of all ranks (one small all-gather an axis); raises on all alike.
            grad_placements: of the gradient that ``local_tensor`` gets; by default it is finished, and the same on all
                ranks that hold the same.

        Raises:
            UndeterminedShardingError: shapes that contradict the placements.
        """
        spec = spec_of_local(local_tensor, device_mesh, placements, sharding_shapes, global_shape, check)
        cotangent = _cotangent(spec, grad_placements) if grad_placements else spec.finished()
        return border.FromLocal.apply(local_tensor, spec, cotangent)

    @staticmethod
    def from_dtensor(dtensor):
        """The same tensor as a ShardTensor on the DTensor's mesh. Differentiable, no communication."""
        return border.FromDTensor.apply(dtensor)

    def to_dtensor(self):
        """The same tensor as a DTensor; re-cut to torch.chunk's extents where they differ. Differentiable."""
        spec = self._spec
        spec = make_spec(spec.mesh, spec.placements, spec.shape, stride=spec.stride)
        return border.ToDTensor.apply(self.redistribute_to(spec))

    def to_local(self, grad_placements=None):
        """The plain tensor of this rank. Differentiable.

        Args:
            grad_placements: what the gradients that come back are, one per axis. By default those of the own part, and
                of a replicated tensor terms of a sum, as each rank makes something of its own of it; ``Replicate()``
                where all go on with the same computation, as :meth:`full_tensor` has it.
        """
        spec = self._spec
        return border.ToLocal.apply(self, _cotangent(spec, grad_placements) if grad_placements else spec.cotangent())

    def full_tensor(self):
        """The whole as a plain tensor on every rank. Differentiable; every rank goes on with the same computation."""
        whole = self.redistribute_to(self._spec.replicated())
        return border.ToLocal.apply(whole, whole._spec)

    def redistribute(self, device_mesh=None, placements=None, sizes=None):
        """The same tensor cut otherwise. Differentiable.

        Args:
            placements: one per axis. ``Shard`` takes torch.chunk's extents, the present ones if the dim stays, or
            sizes: a dict axis -> extents.
        """
        spec = self._spec
        if device_mesh is not None and device_mesh != spec.mesh:
            raise ShardingError("cannot redistribute to another mesh", op="redistribute", operands=[spec])
        placements = [placements] if isinstance(placements, (Shard, Replicate, Partial)) else list(placements)
        given, wanted = dict(sizes or {}), make_spec(spec.mesh, placements, spec.shape)
        kept = {}
        for dim in {d for _, d in spec.cuts()}:
            axes = [a for a, d in spec.cuts() if d == dim]
            if axes == [a for a, d in wanted.cuts() if d == dim] and not given.keys() & set(axes):
                kept.update({a: spec.sizes[a] for a in axes})
        return self.redistribute_to(make_spec(spec.mesh, placements, spec.shape, {**kept, **given}))

    def redistribute_to(self, spec):
        """The same tensor under ``spec`` (of the same mesh and shape). Differentiable."""
        if spec.placements == self._spec.placements and spec.sizes == self._spec.sizes:
            return self
        return border.Redistribute.apply(self, spec)

    def backward(self, gradient=None, retain_graph=None, create_graph=False, inputs=None):
        """``torch.Tensor.backward``, run with ``__torch_function__`` on: a checkpoint recomputes in here."""
        torch.autograd.backward(self, gradient, retain_graph, create_graph, inputs=inputs)

    # -- one value ------------------------------------------------------------------------------------------------
    def _one_value(self):
        if self.numel() != 1:
            raise ShardingError(f"only a tensor of one element has one value, not one of shape {tuple(self.shape)}")
        with torch.no_grad():
            return self.full_tensor()

    def item(self):
        return self._one_value().item()

    def __bool__(self):
        return bool(self._one_value())

    def __float__(self):
        return float(self._one_value())

    def __int__(self):
        return int(self._one_value())

    def __index__(self):
        return self._one_value().__index__()

    def tolist(self):
        return self.full_tensor().tolist()

    def numpy(self, *, force=False):
        raise ShardingError(
            "a ShardTensor has no single array", op="numpy", remedy="Use .to_local().numpy() or .full_tensor().numpy()."
        )

    def __array__(self, dtype=None, copy=None):
        self.numpy()


never_symbolic(ShardTensor)


def _restored(rank, local, spec, *rest):
    """Unpickled: the part of one rank is of no use to another."""
    if rank != dist.get_rank():
        raise ShardingError(
            f"holds the part of rank {rank}, and this is rank {dist.get_rank()}",
            op="torch.load",
            operands=[spec],
            remedy="Save full_tensor(), or a file for each rank, or use core.checkpoint.",
        )
    return _rebuild(local, spec, *rest)


def _rebuild(local, spec, requires_grad, attributes):
    """``attributes`` hold, among others, that a tensor is a parameter."""
    made = ShardTensor(local, spec).requires_grad_(requires_grad)
    made.__dict__.update(attributes)
    return made


def _cotangent(spec, placements):
    """The spec of a gradient that lies as ``placements`` say and is cut as its value."""
    return make_spec(spec.mesh, placements, spec.shape, {a: s for a, s in enumerate(spec.sizes) if s is not None})


from core import border, dispatch  # noqa: E402  (they need the class, which needs them when it is called)
from core.above import above  # noqa: E402
from core.below import below  # noqa: E402
