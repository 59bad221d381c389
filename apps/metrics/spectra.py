"""Whether a field has the detail of the truth: power by wavelength, of fields that may be cut and have holes."""

import math

import torch

from apps.metrics.sums import alike, mine, part, total


def bands(shape):
    """Edges of wavenumber bands, a third of an octave each where they hold whole wavenumbers, ints.

    Wavenumbers count waves along the longer side of ``shape`` (y, x); the last edge is the Nyquist one.
    """
    top = max(shape) // 2
    return sorted({round(2 ** (i / 3)) for i in range(3 * max(top, 1).bit_length()) if 2 ** (i / 3) < top} | {top})


def spectrum_sums(fields, valid, edges, zero=0.0, taper=True):
    """{"power": (bands,), "waves": (bands,)} of (member, y, x): the power of a member, in units squared, by band.

    Departures from ``zero`` are transformed; what is not valid (y, x) departs by nothing, and a Hann window takes the
    edges out. The truth under the same mask has the same treatment, so their ratio is fair. Radial wavenumbers are
    rounded; band i holds edges[i] <= wavenumber < edges[i + 1]. power / waves is the mean power of a coefficient.
    """
    ny, nx = fields.shape[-2:]
    window = _hann(ny)[:, None] * _hann(nx) if taper else torch.ones(ny, nx, dtype=torch.float64)
    norm = (window**2).sum()
    x = torch.where(part(valid), part(fields).double() - zero, 0) * mine(window, fields)
    waves = torch.fft.fft2(alike(x, fields))
    power = part(waves).abs().square().mean(0) / norm
    at = torch.bucketize(mine(_wavenumbers(ny, nx), waves), torch.tensor(edges, device=power.device), right=True)
    masks = [at == i for i in range(1, len(edges))]
    return {
        "power": torch.stack([total(torch.where(mask, power, 0)) for mask in masks]),
        "waves": torch.stack([total(mask) for mask in masks]),
    }


def _hann(n):
    """Without the zeros at its ends, which would waste a row on each side."""
    return torch.sin(math.pi * (torch.arange(n, dtype=torch.float64) + 0.5) / n) ** 2


def _wavenumbers(ny, nx):
    ky, kx = (torch.fft.fftfreq(n, dtype=torch.float64) * max(ny, nx) for n in (ny, nx))
    return torch.hypot(ky[:, None], kx).round().long()


def spectrum_scores(s):
    """Mean power of a coefficient by band."""
    return {"power": s["power"] / s["waves"]}
