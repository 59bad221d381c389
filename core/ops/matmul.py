"""Products. A cut row or batch dim stays cut; a cut contraction leaves a pending sum; nothing else is sent."""

from string import ascii_letters

import torch
import torch.nn.functional as F
from torch.distributed.tensor.placement_types import Shard

from core.dispatch import Plan, op
from core.errors import ShardingError
from core.ops.pointwise import operand
from core.ops.reduction import finish_local
from core.spec import PARTIAL, REPLICATE

aten = torch.ops.aten


@op(F.linear)
def linear(func, x, weight, bias=None):
    """Rows stay where they are; the features must be whole."""
    x = x.whole(-1)
    out = x.reshaped((*x.shape[:-1], *weight.shape[:-1]), {d: d for d in range(x.ndim - 1)})
    inputs = (x, weight.replicated()) + ((bias.replicated(),) if bias is not None else ())
    return Plan(inputs, out)


@op(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, names=("input", "other"))
@op(torch.mm, torch.Tensor.mm, torch.bmm, torch.Tensor.bmm, names=("input", "mat2"))
def matmul(func, a, b):
    """``a @ b`` as the einsum that it is."""
    letters = "abcdefgh"
    if a.ndim == 1 and b.ndim == 1:
        left, right, result = "m", "m", ""
    else:
        batch = max(a.ndim, b.ndim) - 2
        lead = letters[: max(batch, 0)]
        left = lead[len(lead) - max(a.ndim - 2, 0) :] + ("nm" if a.ndim > 1 else "m")
        right = lead[len(lead) - max(b.ndim - 2, 0) :] + ("mp" if b.ndim > 1 else "m")
        result = lead + ("n" if a.ndim > 1 else "") + ("p" if b.ndim > 1 else "")
    inputs, out = _contract(func, [(a, left), (b, right)], result, letters if "matmul" in func.__name__ else "")
    return Plan(inputs, out)


@op(torch.einsum)
def einsum(func, equation, *operands):
    operands = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    equation = equation.replace(" ", "")
    terms, _, result = equation.partition("->")
    terms = terms.split(",")
    if "->" not in equation:
        text = "".join(terms)
        once = sorted(c for c in set(text) - {"."} if text.count(c) == 1)
        result = "".join(["..." if "." in text else "", *once])
    if "." in equation:
        terms, result = _without_ellipsis(operands, terms, result)
    inputs, out = _contract(func, list(zip(operands, terms)), result, ascii_letters)
    return Plan(inputs, out)


def _without_ellipsis(operands, terms, result):
    """The same with a letter for every dim; those of an ellipsis are aligned at the right."""
    widths = [max(s.ndim - len(t.replace("...", "")), 0) if "." in t else 0 for s, t in zip(operands, terms)]
    free = "".join(c for c in ascii_letters if c not in "".join(terms) + result)[: max(widths)]
    terms = [t.replace("...", free[len(free) - n :]) for t, n in zip(terms, widths)]
    return terms, result.replace("...", free)


def _contract(func, operands, result, stretches=""):
    """Cuts of the operands and of the result of an Einstein sum; dims of the labels ``stretches`` may be one.

    On each axis the largest cut operand names the label that stays cut; operands without the label are whole, and if
    the result lacks it the sum stays pending on that axis.
    """
    extent = {}
    for spec, labels in operands:
        for label, n in zip(labels, spec.shape):
            known = extent.setdefault(label, n)
            extent[label] = n if known == 1 else known
            if n != known and not (label in stretches and 1 in (n, known)) or len(labels) != spec.ndim:
                specs = [s for s, _ in operands]
                raise ShardingError("shapes that do not fit", op=getattr(func, "__name__", str(func)), operands=specs)
    mesh = operands[0][0].mesh
    inputs = [spec.replicated() for spec, _ in operands]
    placements, sizes, taken = [], [], {c for _, labels in operands for c in labels if labels.count(c) > 1}
    for axis in range(mesh.ndim):
        label, extents = _cut_label(operands, axis, extent, taken)
        taken.add(label)
        for i, (spec, labels) in enumerate(operands):
            if label and label in labels and spec.shape[labels.index(label)] == extent[label]:
                inputs[i] = inputs[i].with_axis(axis, Shard(labels.index(label)), extents)
        if label is None:
            placements.append(REPLICATE)
            sizes.append(None)
        elif label in result:
            placements.append(Shard(result.index(label)))
            sizes.append(extents)
        else:
            placements.append(PARTIAL)
            sizes.append(None)
    out = inputs[0]._new(placements, sizes, [extent[label] for label in result])
    return tuple(inputs), out


def _cut_label(operands, axis, extent, taken):
    for spec, labels in sorted(operands, key=lambda o: -o[0].shape.numel()):
        p = spec.placements[axis]
        if isinstance(p, Shard):
            label = labels[p.dim]
            if spec.shape[p.dim] == extent[label] and label not in taken:
                return label, spec.sizes[axis]
    return None, None


def _summed(out, func):
    """Below autograd a pending product is summed at once, and what is whole then is a plain tensor."""
    return lambda *args, **kwargs: finish_local(func(*args, **kwargs), out)


@op(aten.mm, aten.bmm)
def mm_below(func, a, b):
    inputs, out = _contract(func, [(a, "znm"[-a.ndim :]), (b, "zmp"[-b.ndim :])], "znp"[-a.ndim :])
    return _below(func, inputs, out)


@op(aten.addmm, aten.baddbmm)
def addmm_below(func, bias, a, b, *, beta=1, alpha=1):
    inputs, out = _contract(func, [(a, "znm"[-a.ndim :]), (b, "zmp"[-b.ndim :])], "znp"[-a.ndim :])
    if out.is_partial():  # the bias would be counted on every rank
        inputs = tuple(s.replicated() for s in inputs)
        out = out.replicated()
    return _below(func, (operand(bias, out), *inputs), out)


def _below(func, inputs, out):
    if not out.is_partial():
        return Plan(inputs, out)
    done = out.finished()
    return Plan(inputs, None if done.is_replicated() else done, _summed(out, func))
