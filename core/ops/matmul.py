"""Products. A cut row or batch dim stays cut; a cut contraction leaves a pending sum; nothing else is sent."""

from string import ascii_letters

import torch
import torch.nn.functional as F
from torch.distributed.tensor.placement_types import Shard

from core.dispatch import Plan, op
from core.errors import ShardingError
from core.formulas import LINEAR
from core.ops.pointwise import meet, operand
from core.ops.reduction import finish_local
from core.spec import PARTIAL, REPLICATE

aten = torch.ops.aten


@op(F.linear)
def linear(func, x, weight, bias=None):
    """Rows stay where they are. Where the features are cut, so is the sum over them, and the bias is added once."""
    rows = _letters(x.ndim - 1)
    features = "o" if weight.ndim == 2 else ""
    inputs, out = contract(func, [(x, rows + "m"), (weight, features + "m")], rows + features)
    formula = LINEAR if features and x.ndim else None
    return Plan(inputs if bias is None else (*inputs, operand(bias, out)), out, formula=formula)


def _letters(n):
    return "abcdefgh"[:n]


@op(torch.matmul, torch.Tensor.matmul, names=("input", "other"))
@op(torch.mm, torch.Tensor.mm, torch.bmm, torch.Tensor.bmm, names=("input", "mat2"))
def matmul(func, a, b):
    """``a @ b`` as the einsum that it is."""
    if a.ndim == 1 and b.ndim == 1:
        left, right, result = "m", "m", ""
    else:
        lead = _letters(max(a.ndim, b.ndim) - 2)
        left = lead[len(lead) - max(a.ndim - 2, 0) :] + ("nm" if a.ndim > 1 else "m")
        right = lead[len(lead) - max(b.ndim - 2, 0) :] + ("mp" if b.ndim > 1 else "m")
        result = lead + ("n" if a.ndim > 1 else "") + ("p" if b.ndim > 1 else "")
    stretches = _letters(8) if "matmul" in func.__name__ else ""
    return Plan(*contract(func, [(a, left), (b, right)], result, stretches))


@op(torch.mv, torch.Tensor.mv, names=("input", "vec"))
def mv(func, a, b):
    return Plan(*contract(func, [(a, "nm"), (b, "m")], "n"))


@op(torch.dot, torch.Tensor.dot, torch.vdot, torch.Tensor.vdot, names=("input", "tensor"))
def dot(func, a, b):
    return Plan(*contract(func, [(a, "m"), (b, "m")], ""))


@op(torch.inner, torch.Tensor.inner, names=("input", "other"))
def inner(func, a, b):
    """A sum over the last dim of both; a number multiplies."""
    if not (a.ndim and b.ndim):
        left, right = _letters(a.ndim), _letters(b.ndim)
        return Plan(*contract(func, [(a, left), (b, right)], left + right))
    left, right = _letters(a.ndim - 1), "ijklmnop"[: b.ndim - 1]
    return Plan(*contract(func, [(a, left + "z"), (b, right + "z")], left + right))


@op(torch.tensordot, names=("a", "b"))
def tensordot(func, a, b, dims=2, out=None):
    """Over the last dims of one and the first of the other, or over dims given by two lists."""
    if out is not None:
        raise ShardingError("writes into out", op="tensordot", operands=[a, b], remedy="Use the form that returns it.")
    if isinstance(dims, int):
        dims = range(a.ndim - dims, a.ndim), range(dims)
    left, right = list(ascii_letters[: a.ndim]), list(ascii_letters[a.ndim : a.ndim + b.ndim])
    for i, j in zip(*([d] if isinstance(d, int) else d for d in dims)):
        right[j] = left[i]
    result = "".join(c for c in left + right if (c in left) != (c in right))
    return Plan(*contract(func, [(a, "".join(left)), (b, "".join(right))], result))


@op(F.bilinear, torch.bilinear, names=("input1", "input2", "weight"))
def bilinear(func, a, b, weight, bias=None):
    rows = _letters(a.ndim - 1)
    inputs, out = contract(func, [(a, rows + "x"), (b, rows + "y"), (weight, "oxy")], rows + "o")
    inputs = inputs if bias is None else (*inputs, operand(bias, out))
    return Plan(inputs, out, _bilinear)


def _bilinear(a, b, weight, bias=None):
    if weight.numel():
        return F.bilinear(a, b, weight, bias)
    none = torch.einsum("...x,oxy,...y->...o", a, weight, b)  # a part without features, which torch refuses
    return none if bias is None else none + bias


@op(torch.einsum)
def einsum(func, equation, *operands):
    if not isinstance(equation, str):
        equation, operands = _written_out((equation, *operands))
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
    return Plan(*contract(func, list(zip(operands, terms)), result, ascii_letters))


def _written_out(args):
    """The equation of a call with lists of numbers between the operands, and the operands."""
    terms = ["".join("..." if n is Ellipsis else ascii_letters[n] for n in numbers) for numbers in args[1::2]]
    last = ["..." if n is Ellipsis else ascii_letters[n] for n in args[-1]] if len(args) % 2 else None
    return ",".join(terms) + ("" if last is None else "->" + "".join(last)), args[: len(terms) * 2 : 2]


def _without_ellipsis(operands, terms, result):
    """The same with a letter for every dim; those of an ellipsis are aligned at the right."""
    widths = [max(s.ndim - len(t.replace("...", "")), 0) if "." in t else 0 for s, t in zip(operands, terms)]
    free = "".join(c for c in ascii_letters if c not in "".join(terms) + result)[: max(widths)]
    terms = [t.replace("...", free[len(free) - n :]) for t, n in zip(terms, widths)]
    return terms, result.replace("...", free)


def contract(func, operands, result, stretches="", whole=""):
    """Cuts of the operands and of the result of an Einstein sum; dims of the labels ``stretches`` may be one, those of
    the labels ``whole`` are not cut.

    On each axis the largest cut operand names the label that stays cut; operands without the label are whole, and if
    the result lacks it the sum stays pending on that axis.
    """
    extent = {}
    for spec, labels in operands:
        fits = len(labels) == spec.ndim
        for label, n in zip(labels, spec.shape):
            known = extent.setdefault(label, n)
            extent[label] = n if known == 1 else known
            fits = fits and (n == known or label in stretches and 1 in (n, known))
        if not fits:
            specs = [s for s, _ in operands]
            raise ShardingError("shapes that do not fit", op=getattr(func, "__name__", str(func)), operands=specs)
    mesh = operands[0][0].mesh
    inputs = [spec.replicated() for spec, _ in operands]
    twice = [c for _, labels in operands for c in labels if labels.count(c) > 1]
    placements, sizes, taken = [], [], {*twice, *whole}
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
    out = inputs[0].recut(placements, sizes, [extent[label] for label in result])
    return tuple(inputs), out


def _cut_label(operands, axis, extent, taken):
    for spec, labels in sorted(operands, key=lambda o: -o[0].shape.numel()):
        p = spec.placements[axis]
        if isinstance(p, Shard):
            label = labels[p.dim]
            if spec.shape[p.dim] == extent[label] and label not in taken:
                return label, spec.sizes[axis]
    return None, None


@op(aten.mm, aten.bmm)
def mm_below(func, a, b):
    return _below(func, *contract(func, [(a, "znm"[-a.ndim :]), (b, "zmp"[-b.ndim :])], "znp"[-a.ndim :]))


@op(aten.mv, aten.dot, aten.vdot)
def mv_below(func, a, b):
    return _below(func, *contract(func, [(a, "nm"[-a.ndim :]), (b, "m")], "n"[: a.ndim - 1]))


@op(aten.addmm, aten.baddbmm)
def addmm(func, bias, a, b, *, beta=1, alpha=1):
    return _added(func, bias, a, "znm"[-a.ndim :], b, "zmp"[-b.ndim :], "znp"[-a.ndim :])


@op(aten.addbmm)
def addbmm(func, bias, a, b, *, beta=1, alpha=1):
    return _added(func, bias, a, "znm", b, "zmp", "np")


@op(aten.addmv)
def addmv(func, bias, a, b, *, beta=1, alpha=1):
    def local(bias, a, b, **kwargs):  # of no rows torch would give the shape of the bias
        return func(bias.expand(a.shape[0]), a, b, **kwargs)

    return _added(func, bias, a, "nm", b, "m", "n", local)


@op(aten.addr)
def addr(func, bias, a, b, *, beta=1, alpha=1):
    return _added(func, bias, a, "n", b, "p", "np")


def _added(func, bias, a, left, b, right, result, local=None):
    """``beta * bias + alpha * product``: of a pending product the bias is pending too, so that it counts once."""
    inputs, out = contract(func, [(a, left), (b, right)], result)
    return _below(local or func, (operand(bias, out), *inputs), out)


def _below(func, inputs, out):
    """Below autograd a pending product is summed at once, and what is whole then is a plain tensor."""
    if not out.is_partial():
        return Plan(inputs, out, func)
    done = out.finished()
    return Plan(inputs, None if done.is_replicated() else done, lambda *a, **k: finish_local(func(*a, **k), out))


@op(aten.linalg_cross)
def cross(func, a, b, *, dim=-1):
    """Along dims of three elements, whole in each part: a cut one is turned aside and back."""
    target = meet((a, b))
    turned = target.aside(dim)
    return Plan((operand(a, turned), operand(b, turned)), turned, final=target)
