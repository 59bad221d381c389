"""The diffusion: preconditioning, weighted loss, noise law and Heun sampler of Karras et al. 2022 (EDM).

Equations (Eq.), algorithms and tables are those of "Elucidating the Design Space of Diffusion-Based Generative Models",
arXiv:2206.00364. Noise is drawn by global sample position, so it does not depend on how many ranks share the sample.
"""

from dataclasses import dataclass

import torch
from torch.distributed.tensor import Replicate

from core import make_spec, rng


@dataclass(frozen=True)
class Diffusion:
    """Constants of the process; sigmas in units of the state that is diffused.

    sigma_data: standard deviation of that state. p_mean, p_std: the log-normal law of training noise. sigma_min,
    sigma_max, rho, steps: the schedule of the sampler. churn: share by which noise is raised at each step (0: the
    deterministic sampler).
    """

    sigma_data: float = 0.5
    p_mean: float = -1.2
    p_std: float = 1.2
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0
    steps: int = 18
    churn: float = 0.0

    def sigma(self, normal):
        """Training noise levels from standard normal numbers: ln(sigma) ~ N(p_mean, p_std^2), Table 1."""
        return (self.p_mean + self.p_std * normal).exp()

    def weight(self, sigma):
        """Loss weight lambda(sigma) that gives every level the same loss at the start, Table 1."""
        return (sigma**2 + self.sigma_data**2) / (sigma * self.sigma_data) ** 2

    def schedule(self):
        """Sampler levels sigma_0 > ... > sigma_steps = 0, fp64 (steps + 1,), Eq. 5."""
        at = torch.linspace(0, 1, self.steps, dtype=torch.float64) if self.steps > 1 else torch.zeros(1).double()
        high, low = self.sigma_max ** (1 / self.rho), self.sigma_min ** (1 / self.rho)
        return torch.cat([(high + at * (low - high)) ** self.rho, torch.zeros(1, dtype=torch.float64)])


def denoise(network, noisy, conditions, sigma, diffusion):
    """Expected clean state of a noisy one, D(x; sigma), Eq. 7: skip, input and output scaled to unit variance.

    noisy (batch, channels, y, x); sigma (batch,).
    """
    data = diffusion.sigma_data
    total = (sigma**2 + data**2).sqrt()
    skip, out, into = data**2 / total**2, sigma * data / total, 1 / total
    answer = network(_wide(into) * noisy, conditions, sigma.log() / 4)
    return _wide(skip) * noisy + _wide(out) * answer


def loss(network, clean, valid, conditions, sigma, noise, diffusion):
    """Weighted squared error over valid pixels, Eq. 8: per sample the mean over its valid values, then over samples.

    clean, noise (batch, channels, y, x); valid the same, bool; sigma (batch,). What stands under an invalid pixel of
    ``clean`` has no influence, neither as a target nor through the network.
    """
    clean = torch.where(valid, clean, 0.0)
    error = denoise(network, clean + _wide(sigma) * noise, conditions, sigma, diffusion) - clean
    square = torch.where(valid, error * error, 0.0).sum((1, 2, 3))
    count = valid.to(square.dtype).sum((1, 2, 3)).clamp(min=1)
    return (diffusion.weight(sigma) * square / count).mean()


@torch.no_grad()
def sample(network, noise, conditions, diffusion, fresh=None):
    """A clean state from standard normal ``noise`` (batch, channels, y, x): Heun's second-order steps, Algorithm 2.

    fresh(step): more standard normal noise of the same shape, needed with churn.
    """
    levels = diffusion.schedule().tolist()
    x = levels[0] * noise
    for step, (here, there) in enumerate(zip(levels, levels[1:])):
        if diffusion.churn:
            raised = here * (1 + diffusion.churn)
            x = x + (raised**2 - here**2) ** 0.5 * fresh(step)
            here = raised
        slope = _slope(network, x, conditions, here, diffusion)
        moved = x + (there - here) * slope
        if there:
            slope = (slope + _slope(network, moved, conditions, there, diffusion)) / 2
            moved = x + (there - here) * slope
        x = moved
    return x


def _slope(network, x, conditions, sigma, diffusion):
    """dx/dsigma of the probability flow, Eq. 3."""
    levels = torch.full((x.shape[0],), sigma, dtype=x.dtype, device=x.device)
    return (x - denoise(network, x, conditions, levels, diffusion)) / sigma


def noise_like(x, keys):
    """Standard normal fields (len(keys), channel, y, x), cut as ``x`` (batch, channel, y, x), one for each key.

    A key is a tuple of integers that says what the noise is for; a value depends on the key and its global position.
    """
    return torch.stack([_normal(x[0].spec, key, x) for key in keys])


def numbers(x, keys):
    """One standard normal number for each key, (len(keys),), whole on every rank of the mesh of ``x``."""
    spec = make_spec(x.device_mesh, [Replicate()] * x.device_mesh.ndim, ())
    return torch.stack([_normal(spec, key, x) for key in keys])


def _normal(spec, key, x):
    return rng.normal(spec=spec, key=rng.key(*key), dtype=x.dtype, device=x.device)


def _wide(v):
    return v[:, None, None, None]
