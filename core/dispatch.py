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
from functools import cache, partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from core._torch import NoTorchFunction, make_dual, transformed, transforming
from core.errors import MissingShardPatch, ShardingError
from core.fallback import fallback
from core.gradients import running
from core.redistribute import move
from core.region import pairs, run
from core.shard_tensor import ShardTensor, as_shards, check_promotion, promote
from core.spec import REPLICATE, ShardTensorSpec, replicated_spec
from core.views import copied_as_torch_would, is_copy, remember


class Plan(NamedTuple):
    """What to do for one kind of call.

    Attributes:
        inputs: wanted spec of every tensor argument, in the order of the arguments.
        outputs: spec of the result, or a tuple of them; None for a plain result, TARGET for an operation in place.
        local: computation on the local tensors, called as the operation is; None: the operation itself.
        final: how the results are handed out, if not as ``outputs`` (say, cut again as the operand was); above autograd
            by default with pending sums carried out. TARGET: the result is copied into the first tensor.
    """

    inputs: tuple
    outputs: Any
    local: Callable | None = None
    final: Any = None


TARGET = object()  # as ``outputs`` below autograd and ``final`` above: the operation writes into its first argument

RULES: dict[Any, Callable] = {}
HANDLERS: dict[Any, Callable] = {}
_COMPOSED: dict[Any, Callable] = {}
_plans: dict[Any, Plan] = {}
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
        return compute

    return register


def tensors_in(args, kwargs=None):
    """All specs among (nested) arguments, in order."""
    found = []
    for a in (*args, *(kwargs or {}).values()):
        if isinstance(a, ShardTensorSpec):
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found.extend(tensors_in(a))
    return tuple(found)


# -- arguments ------------------------------------------------------------------------------------------------------
_NUMBERS = {int, float, bool, type(None), str, torch.dtype}  # looked at first: most arguments are one, tensors are few


def _scan(args, tensors):
    """Hashable description of the arguments; collects their tensors in order."""
    key = []
    for a in args:
        kind = type(a)
        if kind in _NUMBERS:
            key.append((kind, a))
        elif kind is ShardTensor:
            tensors.append(a)
            key.append(a._spec)
        elif kind is list or kind is tuple:
            key.append(_scan(a, tensors))
        elif isinstance(a, torch.Tensor):
            tensors.append(a)
            key.append(a._spec if isinstance(a, ShardTensor) else a.shape)
        else:
            key.append((kind, a))
    return tuple(key)


_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "x": "input"}


def _positional(rule, args, kwargs):
    """The first arguments without their names, the others in the order of the rule's parameters, which is that of
    ``Plan.inputs``; names that torch takes from numpy become its own."""
    if not kwargs.keys().isdisjoint(_NUMPY_NAMES):
        kwargs = {k if k in rule.order else _NUMPY_NAMES.get(k, k): v for k, v in kwargs.items()}
    first = rule.names[len(args)] if len(args) < len(rule.names) else None
    if first in kwargs:
        args, kwargs = list(args), dict(kwargs)
        while first in kwargs:
            args.append(kwargs.pop(first))
            first = rule.names[len(args)] if len(args) < len(rule.names) else None
    if len(kwargs) > 1:
        kwargs = {name: kwargs[name] for name in (*rule.order, *kwargs) if name in kwargs}
    return args, kwargs


def _collect(args, tensors):
    """The tensors among (nested) arguments, in order."""
    for a in args:
        if isinstance(a, torch.Tensor):
            tensors.append(a)
        elif type(a) is list or type(a) is tuple:
            _collect(a, tensors)


def _fill(args, values):
    """The arguments with their tensors replaced by the next ones of an iterator."""
    return [
        a
        if type(a) in _NUMBERS
        else next(values)
        if isinstance(a, torch.Tensor)
        else type(a)(_fill(a, values))
        if type(a) is tuple or type(a) is list
        else a
        for a in args
    ]


def _call(function, args, kwargs, values):
    values = iter(values)
    args = _fill(args, values)
    if kwargs:
        kwargs = dict(zip(kwargs, _fill(kwargs.values(), values)))
    return function(*args, **kwargs)


def _mesh_of(tensors):
    mesh = None
    for t in tensors:
        if isinstance(t, ShardTensor):
            if mesh is not None and t._spec.mesh is not mesh and t._spec.mesh != mesh:
                raise ShardingError("operands live on different meshes", operands=[x._spec for x in _shards(tensors)])
            mesh = t._spec.mesh
    return mesh


def _shards(tensors):
    return [t for t in tensors if isinstance(t, ShardTensor)]


def _spec_of(tensor, mesh):
    if isinstance(tensor, ShardTensor):
        return tensor._spec
    return replicated_spec(mesh, tensor.shape)


def _cached(key):
    try:
        return _plans.get(key)
    except TypeError:  # symbolic sizes and the like
        return None


def _plan(rule, func, args, kwargs, tensors, key):
    mesh = _mesh_of(tensors)
    specs = [_spec_of(t, mesh) for t in tensors]
    plan = _call(lambda *a, **k: rule(func, *a, **k), args, kwargs, specs)
    if not isinstance(plan, Plan) or len(plan.inputs) != len(tensors):
        got = f"specs of {len(plan.inputs)} inputs" if isinstance(plan, Plan) else repr(plan)
        raise ShardingError(
            f"its rule returned {got} for {len(tensors)} tensors",
            op=_name(func),
            operands=_described(tensors),
            remedy="A rule returns core.Plan(one spec for each tensor among the arguments, outputs).",
        )
    try:
        if len(_plans) >= _MOST_PLANS:  # scalars that change every step would fill it
            _plans.clear()
        _plans[key] = plan
    except TypeError:
        pass
    return plan


def _raise_again(error, func, tensors):
    """In place of a TypeError or NotImplementedError, which Python's operators would swallow, an error that names the
    operation and its operands."""
    if not isinstance(error, (TypeError, NotImplementedError)):
        raise
    raise ShardingError(f"{type(error).__name__}: {error}", op=_name(func), operands=_described(tensors)) from error


def _described(tensors):
    return [t._spec if isinstance(t, ShardTensor) else tuple(t.shape) for t in tensors]


def _refuse_transformed(func, tensors):
    """Nodes of ours have reverse-mode derivatives only: a tangent would get lost on the way."""
    if func is make_dual or any(transformed(t) for t in tensors if not isinstance(t, ShardTensor)):
        raise MissingShardPatch(
            "a transform of torch.func or a forward-mode derivative of shards",
            op=_name(func),
            operands=_described(tensors),
            remedy="Use torch.autograd.grad or backward.",
        )


def _name(func):
    return getattr(func, "__name__", str(func))


# -- above autograd -------------------------------------------------------------------------------------------------
# Functions that look at the identity of tensors: their plain arguments must not be replaced by promoted ones.
_IDENTITY = {
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad,
    torch.Tensor.requires_grad_,
    torch.Tensor.grad.__get__,
    torch.Tensor.grad.__set__,
    torch.Tensor.grad_fn.__get__,
    torch.Tensor.requires_grad.__get__,
    torch.Tensor.requires_grad.__set__,
    torch.Tensor.shape.__get__,
    torch.Tensor.dtype.__get__,
    torch.Tensor.device.__get__,
    torch.Tensor.ndim.__get__,
    torch.Tensor.is_leaf.__get__,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.stride,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
}


_REQUIRES_GRAD = {torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__}


def _keep_cut(leaf):
    """The gradient of a leaf arrives finished and cut as the leaf, however the operations on the way left it."""
    spec = leaf._spec.finished()
    with NoTorchFunction():
        if leaf.requires_grad and leaf.is_leaf and not getattr(leaf, "_keeps_cut", False):
            leaf._keeps_cut = True
            leaf.register_hook(lambda g: as_shards(g, spec.mesh).redistribute_to(spec) if g is not None else None)


def above(func, types, args, kwargs):
    """``__torch_function__``: operations with a rule above autograd; all others go on, with plain operands promoted."""
    if func in _IDENTITY:
        with NoTorchFunction():
            out = func(*args, **kwargs)
        if func in _REQUIRES_GRAD:
            _keep_cut(args[0])
        return out
    if HANDLERS and (handler := HANDLERS.get(func) or HANDLERS.get(str(func))):
        return handler(func, types, args, kwargs)
    if args and not isinstance(args[0], ShardTensor) and _writes_by_name(func):
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
        args, kwargs = _positional(rule, args, kwargs)
    if rule is None:
        _collect(args, tensors)
        _collect(kwargs.values(), tensors)
    else:
        key = (func, _scan(args, tensors), tuple(kwargs), _scan(kwargs.values(), tensors) if kwargs else ())
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
    promoted = [_needs_promotion(t) for t in tensors]
    with NoTorchFunction():
        if any(promoted):
            mesh = _mesh_of(tensors)
            values = [promote(t, mesh) if p else t for t, p in zip(tensors, promoted)]
            return _all_shards(_call(func, args, kwargs, values), tensors)
        return _all_shards(func(*args, **kwargs), tensors)


def _in_order(func):
    """Functions that copy what does not lie in order: torch asks the stride, and a view here remembers its own."""

    def call(input, *args, **kwargs):
        source = input
        if isinstance(input, ShardTensor) and not torch.compiler.is_compiling():
            source = copied_as_torch_would(func, input, args, kwargs)
        with NoTorchFunction():
            out = func(source, *args, **kwargs)
        if source is not input:
            out._is_copy = False  # of nothing that anybody still sees
        return out

    return call


for _f in (torch.Tensor.contiguous, torch.reshape, torch.Tensor.reshape, torch.flatten, torch.Tensor.flatten):
    composed(_f)(_in_order(_f))


@cache
def _writes_by_name(func):
    name = _name(func)
    return (
        name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
        or name.startswith("__i")
        and (name[3:-2] in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"))
    )


def _into_plain(func, args, kwargs):
    """A plain tensor, written into, stays the plain tensor that it is. It would not learn of a gradient: where it has
    one to record that is refused, and where ``total += loss`` gives a new meaning to a name, that is what it gives."""
    target, tensors = args[0], []
    if not isinstance(target, torch.Tensor) or isinstance(target, DTensor):
        return _operated(func, args, kwargs)
    _collect((*args[1:], *kwargs.values()), tensors)
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if torch.is_grad_enabled() and target.requires_grad or recorded and _name(func) == "__setitem__":
        raise ShardingError(
            "writes ShardTensors into a plain tensor, and a gradient is recorded",
            op=_name(func),
            operands=[tuple(target.shape), *(t._spec for t in _shards(tensors))],
            remedy="Compute out of place, or make the target a ShardTensor first (scatter_tensor, or x.new_zeros).",
        )
    out = _operated(func, args, kwargs)
    return target if isinstance(out, ShardTensor) and not recorded else out


# -- the autograd engine, and what it holds ---------------------------------------------------------------------------
# Gradient edges instead of tensors: a backward pass may recompute a checkpointed forward, so it must run with
# ``__torch_function__`` switched on, and edges have none of their own.
def _edges(tensors):
    with NoTorchFunction():
        return [get_gradient_edge(t) if isinstance(t, ShardTensor) else t for t in tensors]


def _seeds(outputs, grads):
    grads = [None] * len(outputs) if grads is None else grads
    grads = [grads] if isinstance(grads, torch.Tensor) else grads
    return [torch.ones_like(o) if g is None and o.numel() == 1 else g for o, g in zip(outputs, grads)]


@composed(torch.autograd.grad)
def _grad(outputs, inputs, grad_outputs=None, *, materialize_grads=False, allow_unused=None, **kwargs):
    allow_unused = bool(allow_unused or materialize_grads)
    seeds = _seeds(outputs, grad_outputs)
    with running(stores=False):  # what is asked for goes to the caller
        found = torch.autograd.grad(_edges(outputs), _edges(inputs), seeds, allow_unused=allow_unused, **kwargs)
    if materialize_grads:
        found = tuple(torch.zeros_like(t) if g is None else g for t, g in zip(inputs, found))
    return found


@composed(torch.autograd.backward)
def _backward(tensors, grad_tensors=None, retain_graph=None, create_graph=False, inputs=None):
    inputs = _edges(inputs) if inputs is not None else None
    seeds = _seeds(tensors, grad_tensors)
    with running(stores=inputs is None and not create_graph):
        torch.autograd.backward(_edges(tensors), seeds, retain_graph, create_graph, inputs=inputs)


@composed(torch.Tensor.data.__set__)
def _set_data(tensor, data):
    """``x.data = y``: torch changes the wrapper, and the part must change with it."""
    if not isinstance(tensor, ShardTensor) or not isinstance(data, ShardTensor):
        raise ShardingError("one is a ShardTensor and the other is not", op="data", remedy="Scatter the new values.")
    with NoTorchFunction():
        torch.Tensor.data.__set__(tensor, data)
    tensor._local_tensor, tensor._spec = data._local_tensor, data._spec


def _needs_promotion(tensor):
    """Plain operands get their gradient finished by a node of their own; those without gradient go as they are."""
    if isinstance(tensor, ShardTensor):
        return False
    check_promotion(tensor)
    return tensor.requires_grad and torch.is_grad_enabled()


def _all_shards(out, tensors):
    """Below autograd a sum over all axes is a plain tensor; for the user it is a ShardTensor again."""
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
    return _call(func, args, kwargs, values)


_HOLE = torch.empty(0)


def _emptied(args, kwargs):
    """The arguments without their tensors, which a node of the graph must not keep alive."""
    holes = repeat(_HOLE)
    return _fill(args, holes), dict(zip(kwargs, _fill(kwargs.values(), holes))) if kwargs else kwargs


def _run_above(rule, func, args, kwargs, tensors, key):
    for t in tensors:
        if not isinstance(t, ShardTensor):
            check_promotion(t)
        elif t._spec._pending and not rule.pending or t._spec._nested:
            return _call(func, args, kwargs, [_settled(t, rule.pending) for t in tensors])
    cached = _cached(key)
    plan = cached or _plan(rule, func, args, kwargs, tensors, key)
    compute = plan.local or func
    args, kwargs = _emptied(args, kwargs)
    with NoTorchFunction():
        values = [_placed(t, spec) for t, spec in zip(tensors, plan.inputs)]
        if plan.final is not TARGET:
            out = run(plan, partial(_call, compute, args, kwargs), values)
            if cached is None:
                _check_parts(func, out)
            return _with_names(func, out) if type(out) is tuple else out
        result = run(plan._replace(final=None), partial(_call, compute, args, kwargs), values)
    return tensors[0].copy_(result)


def _check_parts(func, out):
    """A rule that promises other parts than there are is found at its first call."""
    for t in out if isinstance(out, tuple) else (out,):
        if isinstance(t, ShardTensor) and t._local_tensor.shape != t._spec.local_shape():
            raise ShardingError(
                f"its rule promised a part of {tuple(t._spec.local_shape())}, it is {tuple(t._local_tensor.shape)}",
                op=_name(func),
                operands=[t._spec],
                remedy="Plan(outputs=...) holds the specs of what the local computation returns.",
            )


def _with_names(func, out):
    """Results that torch names (``x.sort().indices``): those of a node are a plain tuple."""
    kind = getattr(torch.return_types, _name(func), None)
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
    if func in _COMPOSED:
        return _COMPOSED[func](*args, **kwargs)
    written = _written(func, args, kwargs) if _writes(func) else ()
    if written:
        _make_writable(func, written)
        if kwargs and any(a.is_out for a in func._schema.arguments):
            return _write_out(func, args, kwargs, written)
    tensors = []
    key = (id(func), _scan(args, tensors), tuple(kwargs), _scan(kwargs.values(), tensors) if kwargs else ())
    try:
        plan = cached = _cached(key)
        if plan is None:
            rule = _rule_below(func)
            if rule is None:  # in inference mode operations made of others arrive whole
                out = func.decompose(*args, **kwargs)
                if out is not NotImplemented:
                    return out
                return fallback(func, lambda whole: _call(func, args, kwargs, whole), tensors, written, mutates(func))
            plan = _element_by_element(rule, func, tensors)
            for t in _shards(tensors) if plan is None else ():
                if t._spec._pending and not rule.pending or t._spec._nested:
                    return _call(func, args, kwargs, [_settled_below(t, rule.pending) for t in tensors])
            plan = plan or _plan(rule, func, args, kwargs, tensors, key)
        locals_ = [_move_below(t, spec) for t, spec in zip(tensors, plan.inputs)]
        out = _call(plan.local or func, args, kwargs, locals_)
    except Exception as error:
        _raise_again(error, func, tensors)
    if plan.outputs is TARGET:
        return args[0]
    if torch.is_inference_mode_enabled() and _is_view(func) and not tensors[0].is_inference():
        with torch.inference_mode(False):  # torch wants a view of a tensor made outside to be as that tensor
            out = _wrap_below(out, plan.outputs, plan.final)
    else:
        out = _wrap_below(out, plan.outputs, plan.final)
    if cached is None:
        _check_parts(func, out)
    if _is_view(func) and isinstance(tensors[0], ShardTensor):
        remember(key, lambda whole: _call(func, args, kwargs, [whole]), tensors[0], out)
    return out


@cache
def _is_view(func):
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


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
        return Plan(tuple(specs), TARGET if mutates(func) else spec)
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


@cache
def _writes(func):
    """Position and name of the arguments that an aten overload writes into; reading a schema is slow."""
    schema = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in schema if a.alias_info is not None and a.alias_info.is_write)


def _written(func, args, kwargs):
    found = []
    for i, name in _writes(func):
        _collect([args[i] if i < len(args) else kwargs.get(name)], found)
    return found


def _make_writable(func, written):
    """Finishes pending sums, and refuses what would be lost: a view whose rows had to be fetched is a copy here, and a
    new shape is not ours to give."""
    for t in _shards(written):
        if torch.Tag.inplace_view in func.tags:
            raise MissingShardPatch(
                "changes the shape in place", op=str(func), operands=[t._spec], remedy="Use the form that returns it."
            )
        if is_copy(t):
            raise MissingShardPatch(
                "writes into rows that lie on other ranks, through a view that is a copy",
                op=str(func),
                operands=[t._spec],
                remedy="Write through a slice (x[i:i+1] instead of x[i]), or use torch.where.",
            )
        if t._spec.is_partial():
            with NoTorchFunction():
                view = t._is_view()
            if view:
                raise MissingShardPatch("writes into a view of a pending sum", op=str(func), operands=[t._spec])
            done = _settled_below(t)
            t._local_tensor, t._spec = done._local_tensor, done._spec


def _write_out(func, args, kwargs, written):
    """``out=``: the result is computed as usual and copied."""
    names = {a.name for a in func._schema.arguments if a.is_out}
    results = func.overloadpacket(*args, **{k: v for k, v in kwargs.items() if k not in names})
    for target, result in zip(written, results if isinstance(results, (tuple, list)) else [results]):
        target.copy_(result)
    return tuple(written) if len(written) > 1 else written[0]


def mutates(func):
    """Whether an aten overload writes into its first argument."""
    return any(i == 0 for i, _ in _writes(func))
