"""Drag, lift, side force and moments from fields, in double precision, additive over chunks of cells and over ranks.

    sums = force_sums(...)                     of any part of the cells, numpy or torch (differentiable)
    coefficients(sums_a + sums_b, reference)   sums of disjoint parts simply add, so a rank reduces 12 numbers

Signs (derived in data.aero.loads.force_sums): with outward normals n and OpenFOAM's wall shear stress tau,
F = rho sum (-p n - tau) A; with the winding of a DrivAerML file, whose area vectors S point into the car, the same is
F = rho sum (p S - tau |S|). Sources: OpenFOAM's forceCoeffs on two Ahmed bodies, which these functions reproduce to
1e-6, and the force tables of DrivAerML (arXiv 2408.11969v2).
"""

from dataclasses import dataclass

import numpy as np

from core.errors import InputError
from data.aero.loads import force_sums, load_coefficients

__all__ = ["Reference", "coefficients", "force_sums", "moved", "reference_of"]


@dataclass(frozen=True)
class Reference:
    """What coefficients are made with: U m/s, rho kg/m3, Aref m2, Lref m, center of moments (3,) m."""

    U: float
    rho: float
    Aref: float
    Lref: float
    center: tuple


def reference_of(attrs, convention="run"):
    """Reference of a run's attributes (AeroReader.run_attrs).

    convention: "run" for the run's own Aref, Lref and center, "constant" for one set for all runs (DrivAerML's constref
    files: 2.17 m2); mixing the two shifts coefficients by up to 20 %. Raises InputError where the run has no such set.
    """
    if convention not in ("run", "constant"):
        raise InputError(f"unknown convention {convention!r}", variable="convention", remedy='Use "run" or "constant"')
    values = attrs if convention == "run" else attrs.get("constant")
    if values is None:
        raise InputError("this run has no constant reference", variable="convention", remedy='Use "run"')
    return Reference(attrs["U"], attrs["rho"], values["Aref"], values["Lref"], tuple(values["center"]))


def coefficients(sums, reference):
    """Coefficients of force sums (4, 3) as a dict of floats.

    Cd, Cs, Cl along +x, +y, +z; each also as its part of pressure and of friction (Cd_pressure, Cd_friction, ...);
    CmRoll, CmPitch, CmYaw about +x, +y, +z through the centre that the sums were made with, over Lref (nose up is
    positive pitch); Clf and Clr, the lift of the front and the rear axle, Cl / 2 +- CmPitch. sums: numpy or torch.
    """
    sums = np.asarray(sums.detach().cpu() if hasattr(sums, "detach") else sums, dtype=np.float64)
    return load_coefficients(sums, U=reference.U, rho=reference.rho, Aref=reference.Aref, Lref=reference.Lref)


def moved(sums, old, new):
    """Force sums (4, 3) with moments about ``new`` (3,) instead of ``old`` (3,): M' = M + (old - new) x F."""
    sums = np.asarray(sums.detach().cpu() if hasattr(sums, "detach") else sums, dtype=np.float64)
    arm = np.asarray(old, dtype=np.float64) - np.asarray(new, dtype=np.float64)
    return np.concatenate([sums[:2], sums[2:] + np.cross(arm, sums[:2])])
