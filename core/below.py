"""Operations caught below autograd, where values are global and torch's own derivatives apply."""

import torch

from core.arguments import call, scan, shards
from core.dispatch import (
    HANDLERS,
    KINDS,
    RULES,
    TARGET,
    Plan,
    cached_plan,
    check_parts,
    kind_of,
    mesh_of,
    plan_of,
    raise_again,
    spec_of,
)
from core.fallback import fallback
from core.redistribute import move
from core.region import pairs
from core.shard_tensor import ShardTensor
from core.views import remember
from core.writes import make_writable, mutates, note_written, write_out, written_in


def below(func, types, args, kwargs):
    """``__torch_dispatch__``: values are global; plain tensors are replicated values."""
    if HANDLERS and (handler := HANDLERS.get(func)):
        return handler(func, types, args, kwargs)
    kind = KINDS.get(id(func)) or kind_of(func)
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
        plan = cached = cached_plan(key)
        if plan is None:
            rule = _rule(func)
            if rule is None:  # in inference mode operations made of others arrive whole
                out = func.decompose(*args, **kwargs)
                if out is not NotImplemented:
                    return out
                return fallback(func, lambda whole: call(func, args, kwargs, whole), tensors, written, mutates(func))
            plan = _element_by_element(rule, func, tensors)
            for t in shards(tensors) if plan is None else ():
                if t._spec._pending and not rule.pending or t._spec._nested:
                    return call(func, args, kwargs, [_settled(t, rule.pending) for t in tensors])
            plan = plan or plan_of(rule, func, args, kwargs, tensors, key)
        locals_ = [_moved(t, spec) for t, spec in zip(tensors, plan.inputs)]
        out = call(plan.local or func, args, kwargs, locals_)
    except Exception as error:
        raise_again(error, func, tensors)
    if written:
        note_written(written)
    if plan.outputs is TARGET:
        return args[0]
    if kind.view and torch.is_inference_mode_enabled() and not tensors[0].is_inference():
        with torch.inference_mode(False):  # torch wants a view of a tensor made outside to be as that tensor
            out = _wrapped(out, plan.outputs, plan.final)
    else:
        out = _wrapped(out, plan.outputs, plan.final)
    if cached is None:
        check_parts(func, out)
    if plan.orders is not None:
        remember(plan.orders, lambda whole: call(func, args, kwargs, [whole]), tensors[0], out)
    return out


def _rule(func):
    rule = RULES.get(func) or RULES.get(func.overloadpacket)
    return rule or (RULES["pointwise"] if torch.Tag.pointwise in func.tags else None)


def _settled(t, pending):
    if not isinstance(t, ShardTensor):
        return t
    spec = t._spec.cut_once()
    spec = spec if pending else spec.finished()
    return t if spec is t._spec else ShardTensor(move(t._local_tensor, t._spec, spec), spec)


def _element_by_element(rule, func, tensors):
    """The plan of an operation of single elements whose operands are all cut alike, a dim of theirs twice."""
    specs = [spec_of(t, mesh_of(tensors)) for t in tensors]
    cut = {s for s in specs if s.ndim}
    if rule.elementwise and len(cut) == 1 and (spec := cut.pop())._nested:
        return Plan(tuple(specs), TARGET if mutates(func) else spec, orders={} if kind_of(func).view else None)
    return None


def _moved(t, spec):
    if isinstance(t, ShardTensor):
        if t._spec is spec:
            return t._local_tensor
        return move(t._local_tensor, t._spec, spec)
    if spec is None or spec.is_replicated():
        return t
    return move(t, spec.replicated(), spec)


def _wrapped(out, spec, final=None):
    """As :func:`core.region.handed_out`, but what is pending stays so."""
    if isinstance(out, torch.Tensor):
        if final is not None:
            out, spec = move(out, spec, final), final
        return ShardTensor(out, spec) if spec is not None else out
    if isinstance(out, (tuple, list)):
        return type(out)([_wrapped(o, *s) for o, s in zip(out, pairs(spec, final, len(out)))])
    return out
