"""The diffusion: preconditioning, weighted loss, noise law and Heun sampler of Karras et al. 2022 (EDM).

Equations (Eq.), algorithms and tables are those of "Elucidating the Design Space of Diffusion-Based Generative Models",
arXiv:2206.00364. Noise is drawn by global sample position, so it does not depend on how many ranks share the sample.
"""

import math
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Replicate

from core import make_spec, rng

SOLVERS, LAWS = ("heun", "dpm"), ("lognormal", "loguniform")


@dataclass(frozen=True)
class Diffusion:
    """Constants of the process; sigmas in units of the state that is diffused.

    sigma_data: standard deviation of that state. law, p_mean, p_std: of training noise; "lognormal" over all levels or
    "loguniform" from sigma_min to sigma_max. low, high: the levels that one expert learns, where others have the rest;
    the law is cut off there; None: no end. sigma_min, sigma_max, rho, steps: the schedule of the sampler. solver:
    "heun", second order, two calls a step, or "dpm", DPM-Solver++(2M), one call a step. churn: share by which Heun
    raises the noise at each step (0: the deterministic sampler).
    """

    sigma_data: float = 0.5
    p_mean: float = -1.2
    p_std: float = 1.2
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0
    steps: int = 18
    churn: float = 0.0
    law: str = "lognormal"
    low: float = 0.0
    high: float | None = None
    solver: str = "heun"

    def sigma(self, normal):
        """Training noise levels from standard normal numbers: ln(sigma) ~ N(p_mean, p_std^2), Table 1, or uniform."""
        share = torch.special.ndtr(normal.double())
        if self.law == "loguniform":
            low, high = map(math.log, self.ends)
            return (low + share * (high - low)).exp().to(normal.dtype)
        low, high = (self._below(level) for level in (self.low, self.high))
        return (self.p_mean + self.p_std * torch.special.ndtri(low + share * (high - low))).exp().to(normal.dtype)

    def _below(self, level):
        """The share of the log-normal law below a level."""
        if not level:
            return 0.0 if level == 0 else 1.0
        return 0.5 * math.erfc((self.p_mean - math.log(level)) / self.p_std / math.sqrt(2))

    def weight(self, sigma):
        """Loss weight lambda(sigma) that gives every level the same loss at the start, Table 1."""
        return (sigma**2 + self.sigma_data**2) / (sigma * self.sigma_data) ** 2

    def schedule(self):
        """Sampler levels sigma_0 > ... > sigma_steps = 0, fp64 (steps + 1,), Eq. 5."""
        at = torch.linspace(0, 1, self.steps, dtype=torch.float64) if self.steps > 1 else torch.zeros(1).double()
        high, low = self.sigma_max ** (1 / self.rho), self.sigma_min ** (1 / self.rho)
        return torch.cat([(high + at * (low - high)) ** self.rho, torch.zeros(1, dtype=torch.float64)])

    @property
    def ends(self):
        """Least and most noise that is learned and sampled."""
        return max(self.low, self.sigma_min), min(self.high or math.inf, self.sigma_max)

    def ranges(self, count):
        """Ends of ``count`` ranges between `ends`, evenly wide in ln(sigma)."""
        low, high = map(math.log, self.ends)
        return [math.exp(low + (high - low) * i / count) for i in range(count + 1)]


def denoise(network, noisy, conditions, sigma, diffusion):
    """Expected clean state of a noisy one, D(x; sigma), Eq. 7: skip, input and output scaled to unit variance.

    noisy (batch, channels, y, x); sigma (batch,).
    """
    data = diffusion.sigma_data
    total = (sigma**2 + data**2).sqrt()
    skip, out, into = data**2 / total**2, sigma * data / total, 1 / total
    answer = network(_wide(into) * noisy, conditions, sigma.log() / 4)
    return _wide(skip) * noisy + _wide(out) * answer


def losses(network, clean, valid, conditions, sigma, noise, diffusion, weights=None):
    """Weighted squared error over valid pixels, Eq. 8: (batch,), for each sample the mean over its valid values.

    clean, noise (batch, channels, y, x); valid the same, bool; sigma (batch,); weights (channels,) of mean one, or None
    for equal ones. What stands under an invalid pixel of ``clean`` has no influence, neither as a target nor through
    the network.
    """
    clean = torch.where(valid, clean, 0.0)
    error = denoise(network, clean + _wide(sigma) * noise, conditions, sigma, diffusion) - clean
    square = error * error if weights is None else error * error * weights[:, None, None]
    square = torch.where(valid, square, 0.0).sum((1, 2, 3))
    count = valid.to(square.dtype).sum((1, 2, 3)).clamp(min=1)
    return diffusion.weight(sigma) * square / count


class Experts:
    """Denoisers of one state, each with the noise levels that it learned: pairs (network, highest level), rising."""

    def __init__(self, parts):
        self.parts = parts

    def at(self, sigma):
        """The network that learned this level."""
        return next((network for network, high in self.parts if sigma <= high), self.parts[-1][0])


@torch.no_grad()
def sample(network, noise, conditions, diffusion, fresh=None):
    """A clean state from standard normal ``noise`` (batch, channels, y, x), by the solver of ``diffusion``.

    network: one, or `Experts`. fresh(step): more standard normal noise of the same shape, needed with churn.
    """

    def clean(x, sigma):
        levels = torch.full((x.shape[0],), sigma, dtype=x.dtype, device=x.device)
        best = network.at(sigma) if isinstance(network, Experts) else network
        return denoise(best, x, conditions, levels, diffusion)

    levels = diffusion.schedule().tolist()
    if diffusion.solver == "dpm":
        return _multistep(clean, levels[0] * noise, levels)
    return _heun(clean, levels[0] * noise, levels, diffusion.churn, fresh)


def _heun(clean, x, levels, churn, fresh):
    """Heun's second-order steps, Algorithm 2; the slope dx/dsigma of the probability flow is that of Eq. 3."""
    for step, (here, there) in enumerate(zip(levels, levels[1:])):
        if churn:
            raised = here * (1 + churn)
            x = x + (raised**2 - here**2) ** 0.5 * fresh(step)
            here = raised
        slope = (x - clean(x, here)) / here
        moved = x + (there - here) * slope
        if there:
            slope = (slope + (moved - clean(moved, there)) / there) / 2
            moved = x + (there - here) * slope
        x = moved
    return x


def _multistep(clean, x, levels):
    """DPM-Solver++(2M) (Lu et al. 2022, arXiv:2211.01095, Algorithm 2) where alpha is 1, so that lambda = -ln(sigma).

    The clean state is extrapolated from this call and the one before; the last step goes to the clean state itself.
    """
    before, last = None, None
    for here, there in zip(levels, levels[1:]):
        now = clean(x, here)
        if not there:
            return now
        h = math.log(here / there)
        best = now if before is None else now + (now - before) * (h / (2 * last))
        x = (there / here) * x - math.expm1(-h) * best
        before, last = now, h
    return x


def noise_like(x, keys):
    """Standard normal fields cut as ``x`` (len(keys), channel, y, x), one for each key.

    A key is a tuple of integers that says what the noise is for; a value depends on the key and its global position.
    """
    return _normal(x.spec, keys, x)


def numbers(x, keys):
    """One standard normal number for each key, (len(keys),), whole on every rank of the mesh of ``x``."""
    spec = make_spec(x.device_mesh, [Replicate()] * x.device_mesh.ndim, (len(keys),))
    return _normal(spec, keys, x)


def _normal(spec, keys, x):
    return rng.normal(spec=spec, key=[rng.key(*key) for key in keys], dtype=x.dtype, device=x.device)


def _wide(v):
    return v[:, None, None, None]
