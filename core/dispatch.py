"""The one registry and the one decorator: from an operation on ShardTensors to the same operation on their parts.

A *rule* is pure metadata: it gets the arguments of the operation with every tensor replaced by its spec and returns a
:class:`Plan`, which says how each tensor must be cut, how the results are cut, and which computation of plain tensors
makes them. Plans are cached by the specs, so a rule runs once for each kind of call.

Where an operation is caught is a detail of its key: a function (``F.conv2d``) is caught above autograd and its
computation, collectives included, is differentiated on plain local tensors; an aten overload is caught below
autograd, where values are global and torch's own derivative applies.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from core._torch import NoTorchFunction, make_dual, transformed, transforming
from core.arguments import call, collect, described, emptied, name_of, positional, scan, shards
from core.border import as_shards, check_promotion, promote
from core.errors import MissingShardPatch, ShardingError
from core.fallback import fallback
from core.redistribute import move
from core.region import pairs, run
from core.shard_tensor import ShardTensor
from core.spec import REPLICATE, replicated_spec
from core.views import lay, remember
from core.writes import (
    is_plain,
    make_writable,
    mutates,
    note_written,
    write_out,
    writes,
    writes_by_name,
    written_in,
)


class Plan(NamedTuple):
    """What to do for one kind of call.

    Attributes:
        inputs: wanted spec of every tensor argument, in the order of the arguments.
        outputs: spec of the result, or a tuple of them; None for a plain result, TARGET for an operation in place.
        local: computation on the local tensors, called as the operation is; None: the operation itself.
        final: how the results are handed out, if not as ``outputs`` (say, cut again as the operand was); above autograd
            by default with pending sums carried out. TARGET: the result is copied into the first tensor.
        formula: above autograd, the derivative of a ``local`` with one result, written out (:mod:`core.formulas`).
        order_of: above autograd, the number of the tensor in whose order the dims of the one result lie in memory, as
            those of torch's kernels do (:func:`core.views.lay`); None: they lie in order.
        orders: not for rules; what is known of a view (:mod:`core.views`).
    """

    inputs: tuple
    outputs: Any
    local: Callable | None = None
    final: Any = None
    formula: Any = None
    order_of: int | None = None
    orders: dict | None = None


TARGET = object()  # as ``outputs`` below autograd and ``final`` above: the operation writes into its first argument

RULES: dict[Any, Callable] = {}
HANDLERS: dict[Any, Callable] = {}
_COMPOSED: dict[Any, Callable] = {}
_plans: dict[Any, Plan] = {}
_kinds: dict[int, Any] = {}  # of overloads, which live as long as their library
_MOST_PLANS = 20_000
_ATEN = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))


def op(*functions, pending=False, elementwise=False, names=("input",)):
    """Registers a rule ``rule(func, *args, **kwargs) -> Plan`` for functions or aten overloads (or whole packets).

    Args:
        pending: the rule also accepts Partial specs; otherwise pending sums are finished first.
        elementwise: the rule also accepts specs of which a dim is cut by two axes, if all operands are cut alike.
        names: torch's names of the first arguments, which may come as keywords.
    """

    def register(rule):
        rule.pending, rule.elementwise, rule.names = pending, elementwise, names
        rule.order = tuple(inspect.signature(rule).parameters)
        for f in functions:
            RULES[f] = rule
        return rule

    return register


def composed(*functions):
    """Registers what computes functions from other operations; it is called as they are, with the tensors."""

    def register(compute):
        _COMPOSED.update(dict.fromkeys(functions, compute))
        _kinds.clear()
        return compute

    return register


def _mesh_of(tensors):
    mesh = None
    for t in tensors:
        if isinstance(t, ShardTensor):
            if mesh is not None and t._spec.mesh is not mesh and t._spec.mesh != mesh:
                raise ShardingError("operands live on different meshes", operands=[x._spec for x in shards(tensors)])
            mesh = t._spec.mesh
    return mesh


def _spec_of(tensor, mesh):
    if isinstance(tensor, ShardTensor):
        return tensor._spec
    return replicated_spec(mesh, tensor.shape)


def _cached(key):
    try:
        return _plans.get(key)
    except TypeError:  # symbolic sizes and the like
        return None


def forget_plans():
    """Rules are asked again. Process groups that end give their names to others."""
    _plans.clear()


def _plan(rule, func, args, kwargs, tensors, key):
    mesh = _mesh_of(tensors)
    specs = [_spec_of(t, mesh) for t in tensors]
    plan = call(lambda *a, **k: rule(func, *a, **k), args, kwargs, specs)
    if not isinstance(plan, Plan) or len(plan.inputs) != len(tensors):
        got = f"specs of {len(plan.inputs)} inputs" if isinstance(plan, Plan) else repr(plan)
        raise ShardingError(
            f"its rule returned {got} for {len(tensors)} tensors",
            op=name_of(func),
            operands=described(tensors),
            remedy="A rule returns core.Plan(one spec for each tensor among the arguments, outputs).",
        )
    if isinstance(func, _ATEN[1]) and _kind(func).view and isinstance(tensors[0], ShardTensor):
        plan = plan._replace(orders={})
    try:
        if len(_plans) >= _MOST_PLANS:  # scalars that change every step would fill it
            forget_plans()
        _plans[key] = plan
    except TypeError:
        pass
    return plan


def _raise_again(error, func, tensors):
    """In place of a TypeError or NotImplementedError, which Python's operators would swallow, an error that names the
    operation and its operands."""
    if not isinstance(error, (TypeError, NotImplementedError)):
        raise
    raise ShardingError(f"{type(error).__name__}: {error}", op=name_of(func), operands=described(tensors)) from error


def _refuse_transformed(func, tensors):
    """Nodes of ours have reverse-mode derivatives only: a tangent would get lost on the way."""
    if func is make_dual or any(transformed(t) for t in tensors if not isinstance(t, ShardTensor)):
        raise MissingShardPatch(
            "a transform of torch.func or a forward-mode derivative of shards",
            op=name_of(func),
            operands=described(tensors),
            remedy="Use torch.autograd.grad or backward.",
        )


# -- above autograd -------------------------------------------------------------------------------------------------
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
    if func in _COMPOSED:
        return _COMPOSED[func](*args, **kwargs)
    tensors = []
    rule = RULES.get(func)
    if rule is not None and (isinstance(func, _ATEN) or kwargs.get("out") is not None):
        rule = None  # torch.ops.aten.X and out= are matters of the values below autograd
    elif rule is not None and kwargs:
        args, kwargs = positional(rule, args, kwargs)
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
            _raise_again(error, func, tensors)
    promoted = [type(t) is not ShardTensor and _needs_promotion(t) for t in tensors]
    with NoTorchFunction():
        if True in promoted:
            mesh = _mesh_of(tensors)
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
        return out if isinstance(out, (ShardTensor, DTensor)) or out.is_sparse else promote(out, _mesh_of(tensors))
    if type(out) in (tuple, list):
        return type(out)([_all_shards(o, tensors) for o in out])
    return out


def _with_dtensors(func, args, kwargs, tensors):
    """DTensors of the same mesh become ShardTensors; those of another mesh (weights cut over ``tp``) take the
    ShardTensors inside replicated DTensors, so that each mesh sees its own kind."""
    mesh = _mesh_of(tensors)
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
    cached = _cached(key)
    plan = cached or _plan(rule, func, args, kwargs, tensors, key)
    compute = plan.local or func
    args, kwargs = emptied(args, kwargs)
    with NoTorchFunction():
        values = [_placed(t, spec) for t, spec in zip(tensors, plan.inputs)]
        if plan.final is not TARGET:
            out = run(plan, compute, values, args, kwargs)
            if cached is None:
                _check_parts(func, out)
            if plan.order_of is not None:
                lay(out, tensors[plan.order_of])
            return _with_names(func, out) if type(out) is tuple else out
        result = run(plan._replace(final=None), compute, values, args, kwargs)
    return tensors[0].copy_(result)


def _check_parts(func, out):
    """A rule that promises other parts than there are is found at its first call."""
    for t in out if isinstance(out, tuple) else (out,):
        if isinstance(t, ShardTensor) and t._local_tensor.shape != t._spec.local_shape():
            raise ShardingError(
                f"its rule promised a part of {tuple(t._spec.local_shape())}, it is {tuple(t._local_tensor.shape)}",
                op=name_of(func),
                operands=[t._spec],
                remedy="Plan(outputs=...) holds the specs of what the local computation returns.",
            )


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


# -- below autograd -------------------------------------------------------------------------------------------------
def below(func, types, args, kwargs):
    """``__torch_dispatch__``: values are global; plain tensors are replicated values."""
    if HANDLERS and (handler := HANDLERS.get(func)):
        return handler(func, types, args, kwargs)
    kind = _kinds.get(id(func)) or _kind(func)
    if kind.composed:
        return kind.composed(*args, **kwargs)
    written = written_in(func, args, kwargs) if kind.writes else ()
    if written:
        make_writable(func, written)
        if kwargs and any(a.is_out for a in func._schema.arguments):
            return write_out(func, args, kwargs, written)
    tensors = []
    key = (id(func), scan(args, tensors), tuple(kwargs), scan(kwargs.values(), tensors) if kwargs else ())
    try:
        plan = cached = _cached(key)
        if plan is None:
            rule = _rule_below(func)
            if rule is None:  # in inference mode operations made of others arrive whole
                out = func.decompose(*args, **kwargs)
                if out is not NotImplemented:
                    return out
                return fallback(func, lambda whole: call(func, args, kwargs, whole), tensors, written, mutates(func))
            plan = _element_by_element(rule, func, tensors)
            for t in shards(tensors) if plan is None else ():
                if t._spec._pending and not rule.pending or t._spec._nested:
                    return call(func, args, kwargs, [_settled_below(t, rule.pending) for t in tensors])
            plan = plan or _plan(rule, func, args, kwargs, tensors, key)
        locals_ = [_move_below(t, spec) for t, spec in zip(tensors, plan.inputs)]
        out = call(plan.local or func, args, kwargs, locals_)
    except Exception as error:
        _raise_again(error, func, tensors)
    if written:
        note_written(written)
    if plan.outputs is TARGET:
        return args[0]
    if kind.view and torch.is_inference_mode_enabled() and not tensors[0].is_inference():
        with torch.inference_mode(False):  # torch wants a view of a tensor made outside to be as that tensor
            out = _wrap_below(out, plan.outputs, plan.final)
    else:
        out = _wrap_below(out, plan.outputs, plan.final)
    if cached is None:
        _check_parts(func, out)
    if plan.orders is not None:
        remember(plan.orders, lambda whole: call(func, args, kwargs, [whole]), tensors[0], out)
    return out


class _Kind(NamedTuple):
    """What is always asked of an aten overload: what composes it, if it writes, if it is a view."""

    composed: Callable | None
    writes: bool
    view: bool


def _kind(func):
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return _kinds.setdefault(id(func), _Kind(_COMPOSED.get(func), bool(writes(func)), view))


def _rule_below(func):
    rule = RULES.get(func) or RULES.get(func.overloadpacket)
    return rule or (RULES["pointwise"] if torch.Tag.pointwise in func.tags else None)


def _settled_below(t, pending=False):
    if not isinstance(t, ShardTensor):
        return t
    spec = t._spec.cut_once()
    spec = spec if pending else spec.finished()
    return t if spec is t._spec else ShardTensor(move(t._local_tensor, t._spec, spec), spec)


def _element_by_element(rule, func, tensors):
    """The plan of an operation of single elements whose operands are all cut alike, a dim of theirs twice."""
    specs = [_spec_of(t, _mesh_of(tensors)) for t in tensors]
    cut = {s for s in specs if s.ndim}
    if rule.elementwise and len(cut) == 1 and (spec := cut.pop())._nested:
        return Plan(tuple(specs), TARGET if mutates(func) else spec, orders={} if _kind(func).view else None)
    return None


def _move_below(t, spec):
    if isinstance(t, ShardTensor):
        if t._spec is spec:
            return t._local_tensor
        return move(t._local_tensor, t._spec, spec)
    if spec is None or spec.is_replicated():
        return t
    return move(t, spec.replicated(), spec)


def _wrap_below(out, spec, final=None):
    """As :func:`core.region.handed_out`, but what is pending stays so."""
    if isinstance(out, torch.Tensor):
        if final is not None:
            out, spec = move(out, spec, final), final
        return ShardTensor(out, spec) if spec is not None else out
    if isinstance(out, (tuple, list)):
        return type(out)([_wrap_below(o, *s) for o, s in zip(out, pairs(spec, final, len(out)))])
    return out
