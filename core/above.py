"""Operations caught above autograd: by their rule, differentiated on the parts; all others go on to ``core.below``."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from core._torch import NoTorchFunction, make_dual, transformed, transforming
from core.arguments import call, collect, described, emptied, name_of, positional, scan
from core.border import as_shards, check_promotion, promote
from core.dispatch import (
    ATEN,
    COMPOSED,
    HANDLERS,
    RULES,
    TARGET,
    cached_plan,
    check_parts,
    mesh_of,
    plan_of,
    raise_again,
)
from core.errors import MissingShardPatch
from core.region import run
from core.shard_tensor import ShardTensor
from core.spec import REPLICATE
from core.views import lay
from core.writes import is_plain, writes_by_name

# Functions that look at the identity of tensors: their plain arguments must not be replaced by promoted ones.
_METHODS: Any = torch.Tensor  # whose attributes are described by its class
_IDENTITY = {
    _METHODS.register_hook,
    _METHODS.register_post_accumulate_grad_hook,
    _METHODS.retain_grad,
    _METHODS.requires_grad_,
    _METHODS.grad.__get__,
    _METHODS.grad.__set__,
    _METHODS.grad_fn.__get__,
    _METHODS.requires_grad.__get__,
    _METHODS.requires_grad.__set__,
    _METHODS.shape.__get__,
    _METHODS.dtype.__get__,
    _METHODS.device.__get__,
    _METHODS.ndim.__get__,
    _METHODS.is_leaf.__get__,
    _METHODS.size,
    _METHODS.dim,
    _METHODS.numel,
    _METHODS.stride,
    _METHODS.is_contiguous,
    _METHODS.is_floating_point,
}


_REQUIRES_GRAD = {_METHODS.requires_grad_, _METHODS.requires_grad.__set__}


def _keep_cut(leaf):
    """The gradient of a leaf arrives finished and cut as the leaf, however the operations on the way left it."""
    spec = leaf._spec.finished()
    with NoTorchFunction():
        if leaf.requires_grad and leaf.is_leaf and not getattr(leaf, "_keeps_cut", False):
            leaf._keeps_cut = True
            leaf.register_hook(lambda g: as_shards(g, spec.mesh).redistribute_to(spec) if g is not None else None)


def above(func, types, args, kwargs):
    """``__torch_function__``: operations with a rule above autograd; all others go on, with plain operands promoted."""
    if torch.compiler.is_dynamo_compiling():  # it notes the call, and makes it on ShardTensors later
        with NoTorchFunction():
            return func(*args, **kwargs)
    if func in _IDENTITY:
        with NoTorchFunction():
            out = func(*args, **kwargs)
        if func in _REQUIRES_GRAD:
            _keep_cut(args[0])
        return out
    if HANDLERS and (handler := HANDLERS.get(func) or HANDLERS.get(str(func))):
        return handler(func, types, args, kwargs)
    if args and not isinstance(args[0], ShardTensor) and writes_by_name(func) and is_plain(args[0]):
        return _into_plain(func, args, kwargs)
    return _operated(func, args, kwargs)


def _operated(func, args, kwargs):
    if func in COMPOSED:
        return COMPOSED[func](*args, **kwargs)
    tensors = []
    rule = RULES.get(func)
    if rule is not None and (isinstance(func, ATEN) or kwargs.get("out") is not None):
        rule = None  # torch.ops.aten.X and out= are matters of the values below autograd
    elif rule is not None and kwargs:
        args, kwargs = positional(rule, args, {k: v for k, v in kwargs.items() if k != "out"})
    if rule is None:
        collect(args, tensors)
        collect(kwargs.values(), tensors)
    else:
        key = (func, scan(args, tensors), tuple(kwargs), scan(kwargs.values(), tensors) if kwargs else ())
    for t in tensors:
        if isinstance(t, DTensor):
            return _with_dtensors(func, args, kwargs, tensors)
    if transforming():
        _refuse_transformed(func, tensors)
    if rule is not None:
        try:
            return _run_above(rule, func, args, kwargs, tensors, key)
        except Exception as error:
            raise_again(error, func, tensors)
    promoted = [type(t) is not ShardTensor and _needs_promotion(t) for t in tensors]
    with NoTorchFunction():
        if True in promoted:
            mesh = mesh_of(tensors)
            values = [promote(t, mesh) if p else t for t, p in zip(tensors, promoted)]
            return _all_shards(call(func, args, kwargs, values), tensors)
        return _all_shards(func(*args, **kwargs), tensors)


def _into_plain(func, args, kwargs):
    """A plain tensor, written into, stays the plain tensor that it is: it gets whole operands, and with them whatever
    gradient is recorded of them."""
    tensors = []
    collect((*args, *kwargs.values()), tensors)
    whole = [t.full_tensor() if isinstance(t, ShardTensor) else t for t in tensors]
    return call(func, args, kwargs, whole)


def _needs_promotion(tensor):
    """Plain operands get their gradient finished by a node of their own; those without gradient go as they are."""
    check_promotion(tensor)
    return tensor.requires_grad and torch.is_grad_enabled()


def _all_shards(out, tensors):
    """Below autograd a sum over all axes is a plain tensor; for the user it is a ShardTensor again."""
    if type(out) is ShardTensor:
        return out
    if isinstance(out, torch.Tensor):
        return out if isinstance(out, (ShardTensor, DTensor)) or out.is_sparse else promote(out, mesh_of(tensors))
    if type(out) in (tuple, list):
        return type(out)([_all_shards(o, tensors) for o in out])
    return out


def _with_dtensors(func, args, kwargs, tensors):
    """DTensors of the same mesh become ShardTensors; those of another mesh (weights cut over ``tp``) take the
    ShardTensors inside replicated DTensors, so that each mesh sees its own kind."""
    mesh = mesh_of(tensors)
    others = [t.device_mesh for t in tensors if isinstance(t, DTensor) and t.device_mesh != mesh]
    if not others:
        values = [promote(t, mesh) if isinstance(t, DTensor) else t for t in tensors]
    else:
        whole = [REPLICATE] * others[0].ndim
        values = [t if isinstance(t, DTensor) else DTensor.from_local(t, others[0], whole) for t in tensors]
    return call(func, args, kwargs, values)


def _run_above(rule, func, args, kwargs, tensors, key):
    for t in tensors:
        if not isinstance(t, ShardTensor):
            check_promotion(t)
        elif t._spec._pending and not rule.pending or t._spec._nested:
            return call(func, args, kwargs, [_settled(t, rule.pending) for t in tensors])
    cached = cached_plan(key)
    plan = cached or plan_of(rule, func, args, kwargs, tensors, key)
    compute = plan.local or func
    args, kwargs = emptied(args, kwargs)
    with NoTorchFunction():
        values = [_placed(t, spec) for t, spec in zip(tensors, plan.inputs)]
        if plan.final is not TARGET:
            out = run(plan, compute, values, args, kwargs)
            if cached is None:
                check_parts(func, out)
            if plan.order_of is not None:
                lay(out, tensors[plan.order_of])
            return _with_names(func, out) if type(out) is tuple else out
        result = run(plan._replace(final=None), compute, values, args, kwargs)
    return tensors[0].copy_(result)


def _with_names(func, out):
    """Results that torch names (``x.sort().indices``): those of a node are a plain tuple."""
    kind = getattr(torch.return_types, name_of(func), None)
    return out if kind is None or kind.n_sequence_fields != len(out) else kind(out)


def _settled(t, pending):
    """What a rule understands: no dim cut twice, and no pending sum where it does not say so."""
    if not isinstance(t, ShardTensor):
        return t
    spec = t._spec.cut_once()
    return t.redistribute_to(spec if pending else spec.finished())


def _placed(tensor, spec):
    if isinstance(tensor, ShardTensor):
        return tensor if tensor._spec is spec else tensor.redistribute_to(spec)
    if spec.is_replicated():
        return tensor
    return promote(tensor, spec.mesh).redistribute_to(spec)


def _refuse_transformed(func, tensors):
    """Nodes of ours have reverse-mode derivatives only: a tangent would get lost on the way."""
    if func is make_dual or any(transformed(t) for t in tensors if not isinstance(t, ShardTensor)):
        raise MissingShardPatch(
            "a transform of torch.func or a forward-mode derivative of shards",
            op=name_of(func),
            operands=described(tensors),
            remedy="Use torch.autograd.grad or backward.",
        )
