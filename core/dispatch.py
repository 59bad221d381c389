"""The one registry and the one decorator: from an operation on ShardTensors to the same operation on their parts.

A *rule* is pure metadata: it gets the arguments of the operation with every tensor replaced by its spec and returns a
:class:`Plan`, which says how each tensor must be cut, how the results are cut, and which computation of plain tensors
makes them. Plans are cached by the specs, so a rule runs once for each kind of call.

Where an operation is caught is a detail of its key: a function (``F.conv2d``) is caught above autograd
(``core.above``) and its computation, collectives included, is differentiated on plain local tensors; an aten overload
is caught below (``core.below``), where values are global and torch's own derivative applies.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from core.arguments import call, described, name_of, shards
from core.errors import ShardingError
from core.shard_tensor import ShardTensor
from core.spec import replicated_spec
from core.writes import writes


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
COMPOSED: dict[Any, Callable] = {}
_plans: dict[Any, Plan] = {}
KINDS: dict[int, Any] = {}  # of overloads, which live as long as their library
_MOST_PLANS = 20_000
ATEN = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))


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
        COMPOSED.update(dict.fromkeys(functions, compute))
        KINDS.clear()
        return compute

    return register


def mesh_of(tensors):
    """The mesh that the ShardTensors among them share."""
    mesh = None
    for t in tensors:
        if isinstance(t, ShardTensor):
            if mesh is not None and t._spec.mesh is not mesh and t._spec.mesh != mesh:
                raise ShardingError("operands live on different meshes", operands=[x._spec for x in shards(tensors)])
            mesh = t._spec.mesh
    return mesh


def spec_of(tensor, mesh):
    if isinstance(tensor, ShardTensor):
        return tensor._spec
    return replicated_spec(mesh, tensor.shape)


def cached_plan(key):
    """The plan of a kind of call that came before, or None."""
    try:
        return _plans.get(key)
    except TypeError:  # symbolic sizes and the like
        return None


def forget_plans():
    """Rules are asked again. Process groups that end give their names to others."""
    _plans.clear()


def plan_of(rule, func, args, kwargs, tensors, key):
    """What the rule says of this kind of call, kept under ``key``."""
    mesh = mesh_of(tensors)
    specs = [spec_of(t, mesh) for t in tensors]
    plan = call(lambda *a, **k: rule(func, *a, **k), args, kwargs, specs)
    if not isinstance(plan, Plan) or len(plan.inputs) != len(tensors):
        got = f"specs of {len(plan.inputs)} inputs" if isinstance(plan, Plan) else repr(plan)
        raise ShardingError(
            f"its rule returned {got} for {len(tensors)} tensors",
            op=name_of(func),
            operands=described(tensors),
            remedy="A rule returns core.Plan(one spec for each tensor among the arguments, outputs).",
        )
    if isinstance(func, ATEN[1]) and kind_of(func).view and isinstance(tensors[0], ShardTensor):
        plan = plan._replace(orders={})
    try:
        if len(_plans) >= _MOST_PLANS:  # scalars that change every step would fill it
            forget_plans()
        _plans[key] = plan
    except TypeError:
        pass
    return plan


def raise_again(error, func, tensors):
    """In place of a TypeError or NotImplementedError, which Python's operators would swallow, an error that names the
    operation and its operands."""
    if not isinstance(error, (TypeError, NotImplementedError)):
        raise
    raise ShardingError(f"{type(error).__name__}: {error}", op=name_of(func), operands=described(tensors)) from error


def check_parts(func, out):
    """A rule that promises other parts than there are is found at its first call."""
    for t in out if isinstance(out, tuple) else (out,):
        if isinstance(t, ShardTensor) and t._local_tensor.shape != t._spec.local_shape():
            raise ShardingError(
                f"its rule promised a part of {tuple(t._spec.local_shape())}, it is {tuple(t._local_tensor.shape)}",
                op=name_of(func),
                operands=[t._spec],
                remedy="Plan(outputs=...) holds the specs of what the local computation returns.",
            )


class Kind(NamedTuple):
    """What is always asked of an aten overload: what composes it, if it writes, if it is a view."""

    composed: Callable | None
    writes: bool
    view: bool


def kind_of(func):
    """The :class:`Kind` of an aten overload, kept."""
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return KINDS.setdefault(id(func), Kind(COMPOSED.get(func), bool(writes(func)), view))
