"""What a training makes small: errors of standardised fields, and of the forces that they add up to.

Every loss is a mean over samples of sums over points, so cutting the points over ranks changes nothing.
"""

import torch
import torch.nn.functional as F

LOSSES = ("mse", "huber", "relative")


def field_loss(kind, outputs, targets, weight):
    """Loss of outputs (B, N, 4) against targets, standardised fields; weight (B, N): 1 for points that count.

    "mse": mean square; "huber": quadratic up to one standard deviation, linear beyond, for the few cells of extreme
    suction; "relative": sqrt(sum of squared errors / sum of squared targets), pressure and vector apart, as the
    accuracy of the literature is stated (of standardised fields here, so that a sample's mean is not what counts).
    """
    if kind == "relative":
        square = weight[..., None] * (outputs - targets).square()
        truth = weight[..., None] * targets.square()
        parts = [(square[..., c].sum((1, 2)), truth[..., c].sum((1, 2))) for c in (slice(0, 1), slice(1, 4))]
        return sum((s / t.clamp(min=1e-12)).clamp(min=1e-12).sqrt().mean() for s, t in parts) / 2
    if kind == "huber":
        error = F.huber_loss(outputs, targets, reduction="none").mean(-1)
    else:
        error = (outputs - targets).square().mean(-1)
    return ((weight * error).sum(1) / weight.sum(1).clamp(min=1)).mean()


def force_loss(outputs, targets, normal, area, std):
    """Squared error of the force on the sampled cells, x, y and z, over half the squared inflow speed and the area.

    outputs, targets (B, N, 4) standardised; normal (B, N, 3) outward; area (B, N) m2; std (4,): of
    the fields over q = U^2 / 2, so that the error is of coefficients. Means over cells, so a sample estimates the body.
    """
    error = (outputs - targets) * std
    force = (error[..., :1] * normal + error[..., 1:]) * (area / area.mean(1, keepdim=True))[..., None]
    return force.mean(1).square().sum(-1).mean()


def std_over_q(scaling, device, dtype):
    """Standard deviations (4,) of pressure and shear over q, as a tensor."""
    return torch.tensor(scaling.field_std, device=device, dtype=dtype) / (0.5 * scaling.U**2)
