"""ShardTensor: a torch.Tensor that knows how it is cut over a mesh and computes as if it were whole.

The wrapper itself stands in torch's autograd graph, with the global shape; the part of this rank is in
``_local_tensor`` and the cut in ``_spec``. Operations are caught twice, both times by ``core.dispatch``: above
autograd (``__torch_function__``) where an operation brings its own communication, below it
(``__torch_dispatch__``) where the operation of the parts is the operation itself.
"""

import copy
import enum
import uuid
import warnings
import zlib
from itertools import product

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from core import collectives as c
from core._torch import NoTorchFunction, dtensor_from_local, make_wrapper_subclass, never_symbolic, wait
from core.errors import ShardingError, UndeterminedShardingError
from core.redistribute import move
from core.spec import ShardTensorSpec, make_spec, memory_format_of, replicated_spec

_MOST_DIMS = 16  # that from_local compares


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
        return dispatch.above(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch.below(func, types, args, kwargs or {})

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
        spec = _spec_of_local(local_tensor, device_mesh, placements, sharding_shapes, global_shape, check)
        return _FromLocal.apply(
            local_tensor, spec, _cotangent(spec, grad_placements) if grad_placements else spec.finished()
        )

    @staticmethod
    def from_dtensor(dtensor):
        """The same tensor as a ShardTensor on the DTensor's mesh. Differentiable, no communication."""
        return _FromDTensor.apply(dtensor)

    def to_dtensor(self):
        """The same tensor as a DTensor; re-cut to torch.chunk's extents where they differ. Differentiable."""
        spec = self._spec
        spec = make_spec(spec.mesh, spec.placements, spec.shape, stride=spec.stride)
        return _ToDTensor.apply(self.redistribute_to(spec))

    def to_local(self, grad_placements=None):
        """The plain tensor of this rank. Differentiable.

        Args:
            grad_placements: what the gradients that come back are, one per axis. By default those of the own part, and
                of a replicated tensor terms of a sum, as each rank makes something of its own of it; ``Replicate()``
                where all go on with the same computation, as :meth:`full_tensor` has it.
        """
        spec = self._spec
        return _ToLocal.apply(self, _cotangent(spec, grad_placements) if grad_placements else spec.cotangent())

    def full_tensor(self):
        """The whole as a plain tensor on every rank. Differentiable; every rank goes on with the same computation."""
        whole = self.redistribute_to(self._spec.replicated())
        return _ToLocal.apply(whole, whole._spec)

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
        return _Redistribute.apply(self, spec)

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


def local_cotangent(grad, spec):
    """The local gradient that each rank's graph must start from, given a gradient of the global value of ``spec``.

    Cut dims: the own rows. Replicated: terms of a pending sum. Partial: the whole gradient on every rank.
    """
    if not isinstance(grad, ShardTensor):
        grad = ShardTensor(grad, spec.replicated())
    return move(grad._local_tensor, grad._spec, spec.cotangent())


def _cotangent(spec, placements):
    """The spec of a gradient that lies as ``placements`` say and is cut as its value."""
    return make_spec(spec.mesh, placements, spec.shape, {a: s for a, s in enumerate(spec.sizes) if s is not None})


class _FromLocal(Function):
    @staticmethod
    def forward(ctx, local, spec, cotangent):
        ctx.specs = spec, cotangent
        return ShardTensor(wait(local.detach()), spec)

    @staticmethod
    def backward(ctx, grad):
        spec, cotangent = ctx.specs
        return _ToLocal.apply(as_shards(grad, spec.mesh).redistribute_to(cotangent), spec), None, None


class _ToLocal(Function):
    @staticmethod
    def forward(ctx, x, cotangent):
        ctx.specs = x._spec, cotangent
        local = wait(x._local_tensor)
        return local.view_as(local)

    @staticmethod
    def backward(ctx, grad):
        spec, cotangent = ctx.specs
        return _FromLocal.apply(grad, cotangent, spec), None


class _Redistribute(Function):
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


class _FromDTensor(Function):
    @staticmethod
    def forward(ctx, dtensor):
        ctx.spec = make_spec(dtensor.device_mesh, dtensor.placements, dtensor.shape)
        return ShardTensor(wait(dtensor._local_tensor).detach(), ctx.spec)

    @staticmethod
    def backward(ctx, grad):
        spec = ctx.spec.finished()
        return _ToDTensor.apply(as_shards(grad, spec.mesh).redistribute_to(spec))


class _ToDTensor(Function):
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


# -- construction -------------------------------------------------------------------------------------------------
def _spec_of_local(local, mesh, placements, sharding_shapes, global_shape, check):
    try:
        spec = _claimed_spec(local, mesh, placements, sharding_shapes, global_shape)
    except (UndeterminedShardingError, IndexError) as error:
        if check:  # the other ranks may have found nothing wrong: they must hear of it
            all_agree(local, None, mesh)
        raise UndeterminedShardingError(str(error), op="from_local") from error
    wrong = spec.local_shape() != local.shape or (global_shape is not None and tuple(global_shape) != tuple(spec.shape))
    if wrong if not check else not all_agree(local, spec, mesh):
        raise UndeterminedShardingError(
            f"local shape {tuple(local.shape)} where placements and sizes say {tuple(spec.local_shape())}"
            + (", here or on another rank" if check else ""),
            op="from_local",
            operands=[spec],
        )
    return spec.restrided(local)


def _claimed_spec(local, mesh, placements, sharding_shapes, global_shape):
    """What this rank's arguments say of the whole."""
    placements = [placements] if isinstance(placements, (Shard, Replicate, Partial)) else list(placements)
    if sharding_shapes == "chunk":
        if global_shape is None:
            raise UndeterminedShardingError("sharding_shapes='chunk' needs global_shape")
        return make_spec(mesh, placements, global_shape)
    cuts = [(a, p.dim % local.ndim) for a, p in enumerate(placements) if isinstance(p, Shard)]
    if sharding_shapes == "infer":
        sizes = _asked_sizes(local, mesh, cuts)
    else:
        sizes = {a: [s if isinstance(s, int) else s[d] for s in sharding_shapes[a]] for a, d in cuts}
    shape = list(local.shape)
    for axis, dim in reversed(cuts):  # of two cuts of a dim the first says how long it is
        if isinstance(sizes[axis][0], int):
            shape[dim] = sum(sizes[axis])
    return make_spec(mesh, placements, shape, sizes)


def _asked_sizes(local, mesh, cuts):
    """Extents of all ranks by one small all-gather an axis; where a dim is cut twice, first of the inner cut."""
    sizes = {}
    for axis, dim in reversed(cuts):
        inner = next((a for a, d in cuts if d == dim and a > axis), None)
        mine = sizes[inner] if inner is not None else [local.shape[dim]]
        group = c.axis_group(mesh, axis)
        rows = torch.tensor([mine], dtype=torch.int64, device=local.device)
        rows = c.send_gather(rows, 0, (1,) * group.size, group).tolist()
        if inner is not None:
            sizes[inner] = [tuple(row) for row in rows]
        sizes[axis] = [sum(row) for row in rows]
    return sizes


def all_agree(local, spec, mesh):
    """Whether all ranks say the same of the whole and hold what it says of them: one small all-gather an axis."""
    facts = spec and (spec.placements, tuple(spec.shape), spec.sizes, local.dtype)
    mine = [zlib.crc32(repr(facts).encode()), local.ndim, *local.shape, *[0] * _MOST_DIMS][: _MOST_DIMS + 2]
    table = torch.tensor([mine], dtype=torch.int64, device=local.device)
    for axis in reversed(range(mesh.ndim)):
        group = c.axis_group(mesh, axis)
        table = c.send_gather(table, 0, (len(table),) * group.size, group)
    table = table.tolist()
    for row, place in zip(table, product(*(range(n) for n in mesh.shape))):
        if spec is None or row[0] != table[0][0] or tuple(row[2 : 2 + row[1]]) != tuple(spec.local_shape(place)):
            return False
    return True


def scatter_tensor(
    tensor, src=None, mesh=None, placements=None, global_shape=None, dtype=None, requires_grad=False, sizes=None
):
    """Sends every rank of ``mesh`` its own part of a tensor that rank ``src`` holds.

    Args:
        tensor: the whole on ``src`` (ignored, may be None, elsewhere); with ``src=None`` the whole on every rank, and
            nothing is sent.
        src: global rank of the source, which must belong to the mesh.
        placements: ``Shard(dim)`` or ``Replicate()`` per axis.
        global_shape, dtype: taken from the source when left out (one small broadcast).
        sizes: a dict axis -> extents for cuts other than torch.chunk's.

    Returns:
        ShardTensor that owns its storage, with the source's memory format.
    """
    if src is None:
        spec = make_spec(mesh, placements, tensor.shape, sizes)
        local = move(tensor.detach(), spec.replicated(), spec)
        local = local.to(dtype or local.dtype, copy=True)
    else:
        local, spec = _send_parts(tensor, src, mesh, placements, global_shape, dtype, sizes)
    return ShardTensor(local, spec).requires_grad_(requires_grad)


def _send_parts(tensor, src, mesh, placements, global_shape, dtype, sizes):
    ranks = mesh.mesh.flatten().tolist()
    if src not in ranks:
        raise ShardingError(f"source rank {src} is not in the mesh {ranks}", op="scatter_tensor")
    facts = [None]
    if dist.get_rank() == src:
        source = tensor.detach() if dtype is None else tensor.detach().to(dtype)
        facts = [(tuple(source.shape), source.dtype, memory_format_of(source))]
    facts = _tell(facts, src, mesh)
    shape, dtype, memory_format = facts
    if global_shape is not None and tuple(global_shape) != shape:
        raise UndeterminedShardingError(f"the source has shape {shape}, not {tuple(global_shape)}", op="scatter_tensor")
    spec = make_spec(mesh, placements, shape, sizes)
    parts = [spec.local_shape(_coordinate(mesh, r)) for r in ranks]
    device = torch.device(mesh.device_type, torch.cuda.current_device()) if mesh.device_type == "cuda" else "cpu"
    local = torch.empty(spec.local_shape(), dtype=dtype, device=device)
    if dist.get_rank() == src:
        requests = []
        for r, part in zip(ranks, parts):
            index = tuple(slice(*spec.local_range(d, _coordinate(mesh, r))) for d in range(spec.ndim))
            if r == src:
                local.copy_(source[index])
            elif part.numel():
                requests.append(dist.isend(c.as_bytes(source[index].to(device).reshape(-1)), r))
        for q in requests:
            q.wait()
    elif local.numel():
        buffer = c.as_bytes(local.reshape(-1))
        dist.recv(buffer, src)
    return local.contiguous(memory_format=memory_format), spec


def _tell(facts, src, mesh):
    """The source's facts on every rank of the mesh: along each axis in turn, from those who know."""
    home = _coordinate(mesh, src)
    at = tuple(mesh.get_coordinate())
    for axis in range(mesh.ndim):
        if all(at[a] == home[a] for a in range(axis + 1, mesh.ndim)):
            group = mesh.get_group(axis)
            dist.broadcast_object_list(facts, src=dist.get_global_rank(group, home[axis]), group=group)
    return facts[0]


def _coordinate(mesh, rank):
    return tuple((mesh.mesh == rank).nonzero()[0].tolist())


from core import dispatch  # noqa: E402  (dispatch needs the class, the class needs dispatch only when called)
