"""Rows of products of vectors and matrices."""

import torch
import torch.nn.functional as F
from cases import case, refuse

X, V, M, N = (2, 7, 6), (7,), (7, 5), (5, 6)
la = torch.linalg

# -- linear and matmul in their other forms ---------------------------------------------------------------------------
case(
    "linear_of_cut_features",
    F.linear,
    (X, (4, 6), (4,)),
    ((2, None, None), (2, 1, None), ("P", 1, 0)),
    cuts2=(((1, 2), None, None), ((2, 1), None, None), ((1, 2), (0, 1), None)),
)
case("linear_pending", F.linear, (X, (4, 6), (4,)), ((2, None, None),), wire=("all_reduce",))
case("linear_cut_weight", F.linear, (X, (4, 6), (4,)), (("R", 0, 0), (None, 0, None), ("P", 0, "P"), (1, 0, None)))
case(
    "linear_of_vectors",
    lambda x, w, b: (F.linear(x, w, b), F.linear(x[0, 0], w), F.linear(x[0, 0], w[0]), F.linear(x, w[0])),
    (X, (4, 6), (4,)),
    ((0, None, None), (1, None, None), (2, None, None)),
    cuts2=(((1, 2), None, None),),
)
case(
    "matmul_of_vectors",
    lambda a, v, w: (a @ w, v @ a, w @ a.mT, torch.matmul(v, v), a[0] @ w, v @ a[0]),
    (X, V, (6,)),
    ((0, None, None), (1, 0, None), (2, None, 0), ("P", 0, "P")),
    cuts2=(((1, 2), None, None), ((0, 2), None, None)),
)
case(
    "matmul_of_batches",
    lambda a, b, c: (a @ b, b.mT @ a.mT, a[:, :1] @ b[0], c @ b),
    ((3, 2, 7, 6), (2, 6, 7), (7, 6)),
    ((0, None, None), (1, 0, 0), (3, 1, None), (2, "R", "P")),
    cuts2=(((0, 1), None, None), ((2, 3), None, None)),
)
case(
    "einsum_forms",
    lambda a, b: (
        *(torch.einsum(a, [0, 1, 2], b, [2, 3], [0, 1, 3]), torch.einsum("...i,ij", a, b), torch.einsum("nij->ji", a)),
        *(torch.einsum("nij,nij,jk->ik", a, a, b), torch.einsum(a, [..., 0], b, [0, 1])),
        torch.einsum("ij,jk", [a[0], b]),
    ),
    (X, (6, 3)),
    ((1, None), (2, 0), ("P", 0)),
    cuts2=(((1, 2), None),),
)

# -- products with names of their own ---------------------------------------------------------------------------------
case(
    "products_of_vectors",
    lambda v, w, a: (
        *(torch.mv(a, w), a.T.mv(v), torch.dot(v, v), v.vdot(v * 2), torch.outer(v, w), torch.ger(w, v)),
        *(torch.inner(v, v), a.inner(w), torch.inner(a, a * 2), torch.kron(v, w), la.vecdot(a, w), v.inner(v[0])),
        *(torch.ops.aten.dot(v, v), torch.ops.aten.vdot(w, w), torch.mm(a, a.T), torch.bmm(a[None], a.T[None])),
    ),
    (V, (5,), M),
    ((0, 0, 0), (None, 0, 1), ("P", None, 1), ("R", 0, "P")),
    cuts2=((None, None, (0, 1)), (None, None, (1, 0))),
)
case("dot_sent", lambda v, w: torch.dot(v, w), (V, V), ((0, 0), (0, None)), wire=("all_reduce",))
case("mv_sent_nothing", lambda a, v: a.mv(v), (M, (5,)), ((0, None),), wire=())
case(
    "added_products",
    lambda c, a, b: (
        *(torch.addmm(c, a, b), torch.addmm(c[0], a, b, beta=2, alpha=-1), c.addmm(a, b, beta=0)),
        *(torch.addmv(c[:, 0], a, b[:, 1]), torch.addr(c, a[:, 0], b[0], alpha=3), c.addr(a[:, 1], b[2])),
        torch.addmv(c[0, 0], a, b[:, 1]),
    ),
    ((7, 6), M, N),
    ((None, 0, None), (1, 1, 0), (0, 1, 0), (1, None, 1), ("P", "R", 0)),
    cuts2=((None, (0, 1), None), ((0, 1), (0, 1), None), (None, (1, 0), (0, 1))),
)
case(
    "added_batched_products",
    lambda c, a, b: (torch.baddbmm(c, a, b, alpha=2), torch.baddbmm(c[0, 0], a, b), torch.addbmm(c[0], a, b, beta=0.5)),
    ((3, 7, 6), (3, 7, 5), (3, 5, 6)),
    ((0, 0, 0), (1, 1, None), (None, 2, 1), ("P", 1, "R")),
    cuts2=((None, (0, 1), None), (None, (1, 2), None), ((0, 1), (1, 2), (0, 2))),
)
case("addmm_pending", torch.addmm, ((6,), M, N), ((None, 1, 0),), wire=("all_reduce",))
case(
    "tensor_dots",
    lambda a, b: (
        *(torch.tensordot(a, b, 1), torch.tensordot(a, b, ([2], [0])), torch.tensordot(a, a, dims=([0, -1], [0, -1]))),
        *(torch.tensordot(a, a, 0)[0, 0, 0], torch.tensordot(a, a[..., 0], ([1], [1]))),
    ),
    (X, (6, 3)),
    ((0, None), (1, None), (2, 0), ("P", 1)),
    cuts2=(((1, 2), None), ((0, 1), (0, 1))),
)
case(
    "bilinear",
    F.bilinear,
    ((2, 7, 3), (2, 7, 4), (5, 3, 4), (5,)),
    (
        (1, None, None, None),
        (1, 1, None, None),
        (2, None, None, None),
        (1, 2, None, None),
        (None, None, 0, 0),
    ),
    cuts2=(((0, 1), (0, 1), None, None), ((1, 2), None, None, None)),
)
case(
    "bilinear_sent_nothing",
    lambda a, b: torch.nn.Bilinear(3, 4, 5, device=a.device, dtype=a.dtype).requires_grad_(False)(a, b),
    ((2, 7, 3), (2, 7, 4)),
    ((1, 1), (0, None)),
    wire=(),
)
case(
    "cross",
    lambda a, b: (
        torch.cross(a, b, 2),
        la.cross(a, b),
        torch.cross(a, b[:1], dim=-1),
        a.transpose(1, 2).cross(b.mT, dim=1),
    ),
    ((2, 7, 3), (2, 7, 3)),
    ((1, 1), (1, None), (2, 2), (2, 1)),
    cuts2=(((1, 2), None), ((0, 1), (0, 1))),
)
case("cross_sent_nothing", la.cross, ((7, 3), (7, 3)), ((0, 0),), wire=())
case(
    "chains",
    lambda a, b, c: (
        la.multi_dot([a, b, c]),
        torch.chain_matmul(a, b),
        la.multi_dot([a[0], b, c, c.T[:, 0]]),
        torch.kron(b, c),
    ),
    (M, N, (6, 3)),
    ((0, None, None), (1, 0, None), ("P", 0, 1)),
    cuts2=(((0, 1), None, None),),
)

refuse("linear of other features", lambda x: F.linear(x, torch.ones(3, 5, dtype=x.dtype)), (2, 7, 6), 2)
refuse("linear of a vector of other features", lambda x: F.linear(x, torch.ones(5, dtype=x.dtype)), (2, 7, 6), 2)
refuse("mv of other length", lambda x: x.mv(torch.ones(5, dtype=x.dtype)), (7, 6), 1)
refuse("dot of other length", lambda x: x.dot(torch.ones(5, dtype=x.dtype)), (7,), 0)
refuse("matmul of a number", lambda x: x @ torch.tensor(1.0, dtype=x.dtype), (7, 6), 1)
refuse("tensordot of other extents", lambda x: torch.tensordot(x, torch.ones(5, 6, dtype=x.dtype), 2), (2, 7, 6), 1)
refuse("bilinear of other features", lambda x: F.bilinear(x, x, torch.ones(3, 6, 5, dtype=x.dtype)), (2, 7, 6), 2)
refuse("addmm of other extents", lambda x: torch.addmm(x, x, x), (7, 6), 0)
