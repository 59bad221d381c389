"""Matrix functions of torch.linalg: every rank works on whole matrices.

A cut batch stays cut, and so do the columns of a right-hand side; nothing is sent then, forward or backward. A cut of
the matrix itself is turned aside to a batch dim (one all-to-all) or, where there is none, undone.

A matrix that cannot be inverted or decomposed raises on the ranks that hold it.
"""

import torch

from core.dispatch import Plan, op
from core.errors import ShardingError
from core.ops.matmul import contract

aten = torch.ops.aten
la = torch.linalg


@op(la.inv, torch.inverse, torch.Tensor.inverse, la.det, torch.det, torch.Tensor.det, torch.logdet, torch.Tensor.logdet)
@op(la.cholesky, torch.cholesky, torch.Tensor.cholesky, torch.cholesky_inverse, torch.Tensor.cholesky_inverse)
@op(la.pinv, torch.pinverse, torch.Tensor.pinverse, la.matrix_rank, la.cond, la.svdvals, la.eigvals, la.eigvalsh)
@op(la.matrix_exp, torch.matrix_exp, torch.Tensor.matrix_exp)
@op(la.matrix_power, torch.matrix_power, torch.Tensor.matrix_power, aten._linalg_svd)
@op(torch.svd, torch.Tensor.svd, torch.qr, torch.Tensor.qr, torch.slogdet, torch.Tensor.slogdet)
@op(la.svd, la.qr, la.slogdet, la.eig, la.eigh, la.lu, la.lu_factor, la.inv_ex, la.cholesky_ex)
def of_matrix(func, A, *args, **kwargs):
    """Results have the batch dims first; torch itself says what follows them, asked without any data."""
    if A.ndim < 2:
        raise ShardingError("not a matrix", op=func.__name__, operands=[A])
    A = A.aside(-2, -1)
    like = func(torch.empty(A.shape, device="meta"), *args, **kwargs)
    batch = {d: d for d in range(A.ndim - 2)}
    local = None if A.local_shape().numel() else _connected(func)
    if isinstance(like, torch.Tensor):
        return Plan((A,), A.reshaped(like.shape, batch), local)
    return Plan((A,), tuple([A.reshaped(t.shape, batch) for t in like]), local)


def _connected(func):
    """For a part without matrices, of which torch may give results without a gradient: it takes part in the backward
    pass of all ranks."""

    def tied(out, A):
        number = out.is_floating_point() or out.is_complex()
        return out + A.abs().square().sum() if number and not out.requires_grad else out

    def local(A, *args, **kwargs):
        out = func(A, *args, **kwargs)
        return tied(out, A) if isinstance(out, torch.Tensor) else tuple([tied(o, A) for o in out])

    return local


@op(la.solve, names=("A", "B"))
def solve(func, A, B, *, left=True):
    vector = B.ndim == 1 or B.shape == A.shape[:-1]
    return _solved(func, A, B, "m" if vector else "mk" if left else "km")


@op(la.solve_triangular, names=("A", "B"))
def solve_triangular(func, A, B, *, upper, left=True, unitriangular=False):
    return _solved(func, A, B, "mk" if left else "km")


@op(torch.cholesky_solve, torch.Tensor.cholesky_solve, names=("B", "L"))
def cholesky_solve(func, B, L, upper=False):
    plan = _solved(func, L, B, "mk")
    return plan._replace(inputs=plan.inputs[::-1])


def _solved(func, A, B, right):
    """The solution is cut as the right-hand side ``B``, whose dims behind the batch are ``right``."""
    batch = "abcdefgh"[: max(A.ndim - 2, B.ndim - len(right))]
    right = batch[len(batch) - (B.ndim - len(right)) :] + right
    left = batch[len(batch) - (A.ndim - 2) :] + "nm"
    A, B = A.aside(-2, -1), B.aside(right.index("m"))
    inputs, out = contract(func, [(A, left), (B, right)], batch + right.strip(batch), stretches=batch, whole="nm")
    return Plan(inputs, out)
