"""Rows of the table in bf16 on shards against fp64 on one process: values and every gradient, relative in norm.

Operands and cotangents are rounded to bf16 first, so that only the computing differs. A sum that lacks a rank or a row
that lacks a halo is off by tenths; the bounds are a few units of bf16's last place.
"""

import torch
from cases import _here, cut, load, operands, seed_torch, tensors_of

from core import neighborhood_attention

EPS = 2**-8  # of bf16
BOUNDS = {"result": 2 * EPS, "gradient": 4 * EPS}
WHOLE_FAMILIES = "cases_attention", "cases_norm", "cases_conv"
BESIDE = {  # of families whose other rows ask for fp64 themselves, or are built anew by Triton for every window
    "cases_neighborhood": ["7x5", "3d", "1d", "dilated", "causal_first_dim"],
    "cases_slots": ["sums_of_points", "sums_shared", "read_by_points", "read_shared"],
    "cases_products": ["whole", "", "cut_features", "no_bias", "of_cut_features", "pending", "of_vectors"],
}
NAMES = {"cases_neighborhood": "neighborhood_", "cases_slots": "slot_", "cases_products": "linear_"}
WIDER = {
    "instance_norm_1d": 6 * EPS,
    "batch_norm_checkpointed": 3 * EPS,
}  # statistics that run on are rounded on the way
NOT_IN_BF16 = {
    *("layer_norm_offset", "group_norm_offset", "batch_norm_offset", "norms_far_in_bfloat16"),  # a spread below the eps
    *("conv_others", "local_response_norm"),  # complex numbers, and an operation that a CPU lacks
}


def rows(family):
    table = load()
    if family in WHOLE_FAMILIES:
        return [n for n, row in table.items() if row.family == family and row.cuts and n not in NOT_IN_BF16]
    return [(NAMES[family] + n).rstrip("_") for n in BESIDE[family]]


def _converted(x, kind):
    """Rounded to bf16, and of a type."""
    kept = x.detach().to(torch.bfloat16).to(kind) if x.is_floating_point() else x.clone()
    return kept.requires_grad_(x.requires_grad)


def _gradients(outs, cotangents, leaves):
    pairs = [(t, w.to(t.dtype)) for t, w in zip(outs, cotangents) if t.requires_grad]
    if pairs:
        sum((t * w).sum() for t, w in pairs).backward()
    return [x.grad for x in leaves]


def off_by(got, wanted):
    """Root mean square of the error on this rank over that of all that is wanted, 0 if that is nothing."""
    here, part = _here(got.detach(), wanted.detach())
    scale = wanted.double().square().mean().sqrt()
    return ((here.double() - part).square().mean().sqrt() / scale).item() if scale > 1e-6 and here.numel() else 0.0


def errors(mesh, name, split):
    """(what, which, cut, error) of every result and gradient of a row for every cut."""
    row, device, found = load()[name], mesh.device_type, []
    drawn = operands(row, 1000, device)
    plain = [_converted(x, torch.float64) for x in drawn]
    seed_torch(1000, device)
    outs = tensors_of(row.fn(*plain))
    g = torch.Generator().manual_seed(1001)
    cotangents = [torch.randn(t.shape, dtype=torch.float64, generator=g).bfloat16().to(device) for t in outs]
    wanted = {"result": outs, "gradient": _gradients(outs, cotangents, plain)}
    for dims in row.cuts:
        parts = [cut(_converted(x, torch.bfloat16), mesh, d, split) for x, d in zip(drawn, dims)]
        seed_torch(1000, device)
        outs = tensors_of(row.fn(*parts))
        got = {"result": outs, "gradient": _gradients(outs, cotangents, parts)}
        for what in wanted:
            for i, (a, b) in enumerate(zip(got[what], wanted[what], strict=True)):
                if b is not None and b.is_floating_point():
                    found.append((what, i, dims, off_by(a, b)))
    return found


def run_half(meshes, mesh_name, split, names):
    """Asserts the bounds for some rows; gives the largest errors in units of the eps."""
    mesh, wrong, most = meshes[mesh_name], [], dict.fromkeys(BOUNDS, 0.0)
    if mesh.get_coordinate() is None:
        return most
    for name in names:
        for what, i, dims, error in errors(mesh, name, split):
            most[what] = max(most[what], error / EPS)
            if not error <= max(BOUNDS[what], WIDER.get(name, 0.0)):
                wrong.append(f"{name} cut {dims} {split}: {what} {i} is off by {error / EPS:.1f} eps")
    assert not wrong, "\n".join(wrong)
    return most


def last_rows(device, shape, size, rows=8):
    """Errors of neighbourhood attention in bf16 on the last rows of a grid, results and gradients of q, k and v,
    against an fp64 run of the last ``rows`` alone: those that see no edge but the true one.

    Args:
        shape: (1, height, width, heads, channels).
        size: of the window, odd.
    """
    torch.manual_seed(0)
    leaves = [torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    cotangent = torch.randn(shape, device=device, dtype=torch.bfloat16)
    ends = [t[:, -rows:].detach().double().requires_grad_() for t in leaves]
    found = []
    for tensors, grad in ((leaves, cotangent), (ends, cotangent[:, -rows:].double())):
        out = neighborhood_attention(*tensors, size)
        found.append([out.detach(), *torch.autograd.grad(out, tensors, grad)])
        del out
    kept = rows - 2 * (size // 2) - 1  # keys further up are seen by queries that are not there, or by pushed windows
    return [off_by(a[:, -kept:], b[:, -kept:]) for a, b in zip(*found, strict=True)]
