"""The one formula for forces and their coefficients; apps.aero.forces is its public face."""

import numpy as np


def force_sums(position, normal, area, pressure, shear, *, rho, center):
    """Force and moment that the flow exerts on the cells, as sums that add up over chunks and ranks.

    Arguments are all numpy or all torch, of n cells: position (n, 3) m, unit *outward* normal (n, 3), area (n,) m2,
    kinematic pressure p (n,) and OpenFOAM wall shear stress tau (n, 3), both m2/s2; rho kg/m3; center (3,) m.
    Returns (4, 3) fp64: pressure force, friction force (N), pressure moment, friction moment about center (N m).

    Sign: the pressure pushes against the outward normal, f_p = -rho p n A. OpenFOAM writes tau with the sign of the
    stress that the wall exerts on the fluid (attached flow along +x has tau_x < 0), so the fluid pulls the wall by
    f_tau = -rho tau A. With area vectors that point into the body, S = -n A, this is the familiar rho (p S - tau A).
    Checked against the solver's coefficients of two Ahmed bodies to 1e-5 (tests/test_data_aero.py).
    """
    fields = position, normal, area, pressure, shear
    if isinstance(pressure, np.ndarray):
        xp, fields = np, [values.astype(np.float64) for values in fields]
    else:
        import torch as xp

        fields = [values.double() for values in fields]
    position, normal, area, pressure, shear = fields
    arm = position - xp.asarray(center, dtype=xp.float64, device=position.device)
    push = -rho * (pressure * area)[:, None] * normal
    drag = -rho * area[:, None] * shear
    return xp.stack([push.sum(0), drag.sum(0), xp.linalg.cross(arm, push).sum(0), xp.linalg.cross(arm, drag).sum(0)])


def load_coefficients(sums, *, U, rho, Aref, Lref):
    """Coefficients of force sums (4, 3), numpy fp64, as a dict of floats.

    U m/s, rho kg/m3, Aref m2, Lref m. Cd, Cs, Cl along +x, +y, +z, each also by its part of pressure and of friction;
    CmRoll, CmPitch, CmYaw about +x, +y, +z (nose up is positive pitch) as in OpenFOAM's forceCoeffs; Clf and Clr,
    the lift of the front and of the rear axle, Cl / 2 +- CmPitch.
    """
    scale = 0.5 * rho * U**2 * Aref
    found = {}
    for name, parts in zip(("Cd", "Cs", "Cl"), sums[:2].T / scale):
        found[name], found[f"{name}_pressure"], found[f"{name}_friction"] = parts.sum(), *parts
    moments = sums[2:].sum(axis=0) / (scale * Lref)
    found |= dict(zip(("CmRoll", "CmPitch", "CmYaw"), moments))
    found |= dict(Clf=found["Cl"] / 2 + moments[1], Clr=found["Cl"] / 2 - moments[1])
    return {name: float(value) for name, value in found.items()}
