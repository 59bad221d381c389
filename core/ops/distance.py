"""Distances between rows, and the cosine of the angle between them."""

import torch
import torch.nn.functional as F

from core import collectives as c
from core.dispatch import Plan, op
from core.ops.matmul import contract
from core.ops.pointwise import meet, operand
from core.ops.reduction import groups_of, reduced, reduced_dims, squeezed
from core.ops.statistics import root


@op(torch.cdist, names=("x1", "x2"))
def cdist(func, x1, x2, p=2.0, compute_mode="use_mm_for_euclid_dist_if_necessary"):
    """Cut as the rows of the larger operand; the rows of the other and all features are whole. How torch computes does
    not depend on the cut."""
    batch = "abcdefgh"[: max(x1.ndim, x2.ndim) - 2]
    left, right = (batch[len(batch) - (x.ndim - 2) :] for x in (x1, x2))
    terms = [(x1.aside(-1), left + "pm"), (x2.aside(-1), right + "rm")]
    inputs, out = contract(func, terms, batch + "pr", stretches=batch, whole="m")
    if compute_mode == "use_mm_for_euclid_dist_if_necessary":
        many = max(x1.shape[-2], x2.shape[-2]) > 25
        compute_mode = "use_mm_for_euclid_dist" if many else "donot_use_mm_for_euclid_dist"
    through_mm = p == 2 and compute_mode == "use_mm_for_euclid_dist"

    def local(a, b, *args, **kwargs):
        if through_mm and not (a.numel() and b.numel()):  # torch would turn to a form without a second derivative
            return a @ b.mT
        return func(a, b, p, compute_mode)

    return Plan(inputs, out, local)


@op(F.cosine_similarity, names=("x1", "x2"))
def cosine_similarity(func, x1, x2, dim=1, eps=1e-8):
    """Over a cut dim one all-reduce of three sums: the product and the two squares."""
    target = meet((x1, x2))
    inputs = operand(x1, target), operand(x2, target)
    dims = reduced_dims(target, dim)
    out, axes = reduced(target, dims, False)
    if not axes:
        return Plan(inputs, out)
    groups = groups_of(target, axes)

    def local(a, b, *args, **kwargs):
        a, b = torch.broadcast_tensors(a, b)
        sums = torch.stack([(a * b).sum(dims, True), (a * a).sum(dims, True), (b * b).sum(dims, True)])
        for group in groups:
            sums = c.all_reduce(sums, group)
        product, *norms = sums[0], root(sums[1]), root(sums[2])
        for n in norms:
            product = product / (n + (n.clamp_min(eps) - n).detach())  # torch has no derivative of the bound either
        return squeezed(product, dims, False)

    return Plan(inputs, out.finished(), local)
