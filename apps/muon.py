"""Muon for matrices, those of one shape at a time: torch's own goes from matrix to matrix, and a small model then waits
for Python.

Sources: Jordan et al. 2024 (the iteration), Liu et al. 2025, arXiv 2502.16982, eq. 4 (the scale at which AdamW's
learning rate and weight decay suit it).
"""

import torch

A, B, C, STEPS, EPS = 3.4445, -4.7750, 2.0315, 5, 1e-7  # of the iteration, as published


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, for parameters of two dims; its state is that of ``torch.optim.Muon``."""

    def __init__(self, params, lr=1e-3, weight_decay=0.1, momentum=0.95):
        params = list(params)
        if any(p.ndim != 2 for p in params):
            raise ValueError("Muon is for parameters of two dims")
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))

    @torch.no_grad()
    def step(self, closure=None):
        """``closure``, as torch's optimizers take it: computes gradients and returns the loss."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for matrices in self._by_shape(group["params"]):
                self._move(matrices, group["lr"], group["weight_decay"], group["momentum"])
        return loss

    def _by_shape(self, params):
        alike = {}
        for p in params:
            if p.grad is not None:
                alike.setdefault((p.shape, p.dtype, p.device), []).append(p)
        return alike.values()

    def _move(self, matrices, lr, decay, momentum):
        ahead = []
        for p in matrices:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            mean = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - momentum)
            ahead.append(p.grad.lerp(mean, momentum))
        length = 0.2 * max(matrices[0].shape) ** 0.5  # that of a step of AdamW
        for p, move in zip(matrices, orthogonal(torch.stack(ahead)).to(matrices[0].dtype)):
            p.mul_(1 - lr * decay).add_(move, alpha=-lr * length)


def orthogonal(matrices):
    """Matrices (n, rows, columns) with nearly all singular values near one, in the place of their own, by Newton and
    Schulz; on GPUs in bf16, which is enough and several times faster."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.mT if tall else x
