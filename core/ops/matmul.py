"""Products. A cut row or batch dim stays cut; a cut contraction leaves a pending sum; nothing else is sent."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor.placement_types import Shard

from core.dispatch import Plan, op
from core.errors import MissingShardPatch
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


@op(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm, torch.bmm, torch.Tensor.bmm)
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
    inputs, out = _contract([(a, left), (b, right)], result)
    return Plan(inputs, out)


@op(torch.einsum)
def einsum(func, equation, *operands):
    operands = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    equation = equation.replace(" ", "")
    if "." in equation:
        raise MissingShardPatch("an ellipsis in the equation", op="einsum", remedy="Name every dim.")
    terms, _, result = equation.partition("->")
    terms = terms.split(",")
    if "->" not in equation:
        text = "".join(terms)
        result = "".join(sorted(c for c in set(text) if text.count(c) == 1))
    inputs, out = _contract(list(zip(operands, terms)), result)
    return Plan(inputs, out)


def _contract(operands, result):
    """Cuts of the operands and of the result of an Einstein sum.

    On each axis the largest cut operand names the label that stays cut; operands without the label are whole, and if
    the result lacks it the sum stays pending on that axis.
    """
    extent = {}
    for spec, labels in operands:
        for label, n in zip(labels, spec.shape):
            extent[label] = max(n, extent.get(label, 1))
    mesh = operands[0][0].mesh
    inputs = [spec.replicated() for spec, _ in operands]
    placements, sizes, taken = [], [], set()
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
    inputs, out = _contract([(a, "znm"[-a.ndim :]), (b, "zmp"[-b.ndim :])], "znp"[-a.ndim :])
    return _below(func, inputs, out)


@op(aten.addmm, aten.baddbmm)
def addmm_below(func, bias, a, b, *, beta=1, alpha=1):
    inputs, out = _contract([(a, "znm"[-a.ndim :]), (b, "zmp"[-b.ndim :])], "znp"[-a.ndim :])
    if out.is_partial():  # the bias would be counted on every rank
        inputs = tuple(s.replicated() for s in inputs)
        out = out.replicated()
    return _below(func, (operand(bias, out), *inputs), out)


def _below(func, inputs, out):
    if not out.is_partial():
        return Plan(inputs, out)
    done = out.finished()
    return Plan(inputs, None if done.is_replicated() else done, _summed(out, func))
