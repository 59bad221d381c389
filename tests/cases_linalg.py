"""Rows of matrix functions and of distances."""

import torch
import torch.nn.functional as F
from cases import case, refuse

X, la = (2, 7, 6), torch.linalg


def regular(g, shape):
    """Matrices that can be inverted, far from singular."""
    return torch.randn(shape, dtype=torch.float64, generator=g) + 6 * torch.eye(shape[-1], dtype=torch.float64)


def positive(g, shape):
    x = torch.randn(shape, dtype=torch.float64, generator=g)
    return x @ x.mT + torch.eye(shape[-1], dtype=torch.float64)


EACH = ((0,), (1,), ("P",))
case(
    "of_regular_matrices",
    lambda x: (
        *(la.inv(x), x.inverse(), la.det(x), torch.logdet(x), x.slogdet()[1], la.slogdet(x).logabsdet),
        *(x.matrix_power(3), la.matrix_power(x, -2), la.pinv(x), la.cond(x), la.matrix_rank(x), la.inv_ex(x).inverse),
        *((x / 9).matrix_exp(), x.det()),
        *(la.lu_factor(x).LU, la.lu(x)[1], x.pinverse(), la.matrix_exp(x / 9), la.eigvals(x).abs(), la.eig(x)[0].real),
    ),
    ((5, 4, 4),),
    EACH,
    cuts2=(((0, 1),), ((1, 2),)),
    make={0: regular},
    atol=1e-8,
)
case(
    "of_symmetric_matrices",
    lambda x: (
        *(la.cholesky(x), x.cholesky(), torch.cholesky_inverse(x), la.cholesky_ex(x)[0]),
        *(la.eigh(x).eigenvalues, la.eigvalsh(x)),
    ),
    ((2, 5, 4, 4),),
    ((0,), (1,), (3,)),
    cuts2=(((0, 1),), ((1, 2),)),
    make={0: positive},
    atol=1e-8,
)
case(
    "of_any_matrices",
    lambda x: (
        *(la.svd(x).S, la.svdvals(x), x.svd()[1], torch.svd(x).S, la.svd(x, full_matrices=False).U.abs()),
        *(la.qr(x).R, torch.qr(x)[1], la.qr(x)[0].abs(), la.pinv(x)),
    ),
    ((5, 4, 3),),
    EACH,
    cuts2=(((0, 1),), ((1, 2),)),
    atol=1e-8,
)
case(
    "solve",
    lambda a, b: (
        *(la.solve(a, b), la.solve(a, b[..., 0]), la.solve(a[0], b), la.solve(a, b.mT, left=False)),
        *(la.solve_triangular(a, b, upper=True), torch.cholesky_solve(b, a.tril()), la.solve(a[0], b[0])),
    ),
    ((3, 4, 4), (3, 4, 5)),
    ((0, 0), (None, 2), (1, 1), (0, 2), ("R", 2), ("P", 0)),
    cuts2=(((0, 1), None), (None, (0, 2)), ((0, 1), (0, 2))),
    make={0: regular},
    atol=1e-8,
)
case(
    "of_matrices_sent_nothing",
    lambda x: (la.inv(x), la.svd(x)[1], la.eigh(x)[0], la.qr(x)[0], x.det()),
    ((5, 4, 4),),
    ((0,),),
    make={0: positive},
    wire=(),
    atol=1e-8,
)
case("solve_sent_nothing", la.solve, ((4, 4), (4, 7)), ((None, 1),), make={0: regular}, wire=())

# -- distances -------------------------------------------------------------------------------------------------------
case(
    "cdist",
    lambda a, b: (
        torch.cdist(a, b),
        torch.cdist(a, b, 1),
        torch.cdist(a, b[:1], p=float("inf")),
        torch.cdist(a[0], b[1], 3.0),
    ),
    ((2, 7, 4), (2, 5, 4)),
    ((0, 0), (1, None), (1, 1), (2, 2), (0, "P")),
    cuts2=(((1, 2), None), ((0, 1), (0, 1)), (None, (1, 2))),
)
case("cdist_sent_nothing", torch.cdist, ((2, 7, 4), (2, 5, 4)), ((1, None), (None, 1), (0, 0)), wire=())
case("cdist_of_many", torch.cdist, ((30, 3), (9, 3)), ((0, None), (0, 0), (1, None)), atol=1e-7)
case(
    "cosine_similarity",
    lambda a, b: (
        F.cosine_similarity(a, b),
        F.cosine_similarity(a, b[0], dim=-1),
        torch.cosine_similarity(a * 0, b, 1),
        F.cosine_similarity(a, b[:1, :1], 1, eps=5.0),
    ),
    (X, X),
    ((0, 0), (1, 1), (2, 2), (None, 2), (1, 2)),
    cuts2=(((1, 2), (1, 2)), ((1, 2), None)),
)
case("cosine_similarity_sent", F.cosine_similarity, (X, X), ((1, 1),), wire=("all_reduce",))
case(
    "pairwise_distance",
    lambda a, b: (
        F.pairwise_distance(a, b),
        F.pairwise_distance(a, b, 1.0, keepdim=True),
        F.pairwise_distance(a[0], b[0], 3),
    ),
    (X, X),
    ((1, 1), (2, 2), (1, 2)),
    cuts2=(((1, 2), (1, 2)),),
)
case(
    "norm_of_zeros",
    lambda x: (x.norm(dim=1), x.norm(1, 1), x.norm(3, 1), F.normalize(x, dim=1)),
    (X,),
    ((0,), (1,), (2,)),
    make={0: lambda g, s: torch.zeros(s, dtype=torch.float64)},
)

refuse("cdist of other features", lambda x: torch.cdist(x, torch.ones(3, 5, dtype=x.dtype)), (7, 6), 1)
refuse("inverse of a vector", lambda x: torch.linalg.inv(x), (7,), 0)
refuse("solve of other rows", lambda x: torch.linalg.solve(x, torch.ones(5, 2, dtype=x.dtype)), (7, 7), 1)
