"""From the surface file of a new car to cells as the model knows them, with every doubt said in words.

The model learned one frame: flow along +x, z up, metres, and the ground where the training's was. What a file has in
another frame is brought there before the prediction, and its fields are brought back after it.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from apps.aero.shapes import describe, nearest
from core import InputError
from data.aero.bodies import read_body
from data.aero.geometry import Polygons, area_vectors
from data.aero.resample import resample
from data.aero.silhouette import LINES, projected_area
from data.aero.topology import winding

UNITS = {"millimetres": 1e-3, "centimetres": 1e-2, "inches": 0.0254, "feet": 0.3048}
DRIVAERML = {"rho": 1.0, "Lref": 2.78618, "center": (1.40009, 0.0, -0.3176)}
SEAMS = 1e-5  # area vectors that close so far leave seams, not holes
MATCH = 2.5  # a body's spread may differ from the training's by this factor before its unit is doubted


@dataclass
class Case:
    """A body ready to be predicted.

    arrays: position m, normal, area m2, part, cell_id of the cells that have an area, and pressure, shear where the
    file has them, in the training's frame; mesh: Polygons in the frame and unit of the file, of which ``cell_id``
    numbers the cells; frame (3, 3): vectors of the file to the training's; attrs: U, rho, Aref, Lref, center; notes:
    what a person should know; facts: the same for programs.
    """

    name: str
    arrays: dict
    mesh: Polygons
    frame: np.ndarray
    parts: list
    attrs: dict
    notes: list
    facts: dict
    scale: float = 1.0
    shift: tuple = (0.0, 0.0, 0.0)

    def placed(self, points):
        """Points (n, 3) of the file's frame and unit in the training's."""
        return points.astype(np.float64) * self.scale @ self.frame.T + np.asarray(self.shift)


def prepare(config, scaling, task):
    """Case of the surface file ``config.surface`` (apps.aero.infer.InferConfig).

    scaling: apps.aero.dataset.Scaling; task: the checkpoint's facts on its training. Raises InputError as of
    ``read_body`` and ``winding``, and for a body whose size fits the training's in another unit only.
    """
    body, notes = read_body(config.surface, config.pressure, config.shear), []
    frame, known = axes(config.flow_axis, config.up_axis), DRIVAERML | task.get("reference", {})
    scale, shift = 1.0 if config.scale is None else config.scale, np.zeros(3)
    if not 0 < scale < math.inf:
        raise InputError(f"is {scale}", variable="scale", remedy="Give metres in a unit of the file, above 0")
    if config.ground is not None:
        shift[2] = known["center"][2] - config.ground * scale
        notes.append(f"ground moved by {shift[2]:+.4g} m to that of the training, the height of its moment centre")
    mesh = _placed(body.mesh, scale, frame, shift)
    found = winding(mesh, config.surface)
    if not found.vectors.any():
        raise InputError("no cell has an area", file=config.surface, remedy="Export the geometry again")
    notes += _winding_notes(found, len(mesh))
    _check_unit(config, scaling, found, notes)
    attrs = _reference(config, scaling, known, mesh, notes)
    if body.fields and config.speed is None:
        notes.append(f"true fields are taken to be of {attrs['U']:g} m/s: give the speed of theirs with --speed")
    fine, owner, sides, centers = _cells(config, mesh, found, known, notes)
    area = np.linalg.norm(sides, axis=1)
    kept = area > 1e-12 * area.mean()
    if not kept.all():
        notes.append(f"{(~kept).sum()} cells without area are left out: NaN in the file, 0 in `valid`")
    arrays = {"position": centers, "normal": sides / np.where(kept, area, 1)[:, None], "area": area}
    arrays |= {name: values[owner] for name, values in body.fields.items()} | {"part": body.part[owner]}
    if "shear" in arrays:
        arrays["shear"] = arrays["shear"] @ frame.T
    arrays = {name: values[kept] for name, values in arrays.items()} | {"cell_id": np.flatnonzero(kept)}
    facts = dict(winding=found.name, open_edges=found.open_edges, open_share=found.open_share, scale=scale)
    facts["nearest"] = _compare(mesh, arrays, task, notes)
    back = body.mesh if fine is mesh else _restored(fine, scale, frame, shift)
    return Case(Path(config.surface).stem, arrays, back, frame, body.names, attrs, notes, facts, scale, tuple(shift))


def axes(flow, up):
    """Rotation (3, 3) that takes vectors of a file, whose flow and up are "x", "-y", ..., to flow +x and up +z."""
    along, above = (_axis(name) for name in (flow, up))
    if along @ above:
        raise InputError(f"flow along {flow} and up {up}", variable="flow-axis", remedy="Name two different axes")
    return np.stack([along, np.cross(above, along), above])


def _axis(name):
    return np.eye(3)["xyz".index(name[-1])] * (-1 if name[0] == "-" else 1)


def _placed(mesh, scale, frame, shift):
    return Polygons(mesh.points.astype(np.float64) * scale @ frame.T + shift, mesh.connectivity, mesh.offsets)


def _restored(mesh, scale, frame, shift):
    return Polygons(((mesh.points - shift) @ frame / scale).astype(np.float32), mesh.connectivity, mesh.offsets)


def _winding_notes(found, cells):
    notes = []
    if found.name != "outward":
        turned = int((found.turn < 0).sum())
        notes.append(f"winding {found.name}: {turned:,} of {cells:,} cells pointed inward and were turned outward")
    if found.open_edges and found.open_share > SEAMS:
        notes.append(
            f"open surface: {found.open_edges:,} edges belong to one cell only, and the area vectors miss closure by "
            f"{found.open_share:.2%} of the area. Forces on an open surface are not those of a body: they change with "
            "the level of pressure"
        )
    elif found.open_edges:
        notes.append(
            f"{found.open_edges:,} edges belong to one cell only, but the area vectors close to {found.open_share:.1e} "
            "of the area: seams that do not match rather than holes, without weight in the forces"
        )
    if found.crowded_edges:
        notes.append(
            f"{found.crowded_edges:,} edges belong to more than two cells: parts touch, or lie inside; "
            "cells that no flow reaches are predicted and counted like the others"
        )
    return notes


def _check_unit(config, scaling, found, notes):
    """Refuses a body of a size that fits the training's in another unit; --scale, given, is taken at its word."""
    area = np.linalg.norm(found.vectors, axis=1)
    center = area @ found.centers / area.sum()
    spread = np.sqrt(area @ ((found.centers - center) ** 2).sum(axis=1) / area.sum())
    ratio = spread / np.linalg.norm(scaling.position_std)
    if 1 / MATCH <= ratio <= MATCH:
        return
    fits = {name: factor for name, factor in UNITS.items() if 1 / MATCH <= ratio * factor <= MATCH}
    told = f"the body spreads over {ratio:.3g} times the length of the training's"
    if fits and config.scale is None:
        name = min(fits, key=lambda unit: abs(np.log(ratio * fits[unit])))
        raise InputError(
            f"{told}: its unit seems to be {name}",
            file=config.surface,
            variable="scale",
            remedy=f"Give --scale {fits[name]:g}, or --scale 1 if it is in metres",
        )
    notes.append(f"{told}, which no usual unit explains: check --scale")


def _reference(config, scaling, known, mesh, notes):
    """Reference values, each from its option, else from the training; Aref from the silhouette."""
    aref = config.aref
    if aref is None:
        aref = projected_area(mesh, 0)
        notes.append(f"Aref is the area of the silhouette along the flow, by {LINES} lines over its height")
    U, rho, Lref = (
        given if given is not None else default
        for given, default in ((config.speed, scaling.U), (config.density, known["rho"]), (config.lref, known["Lref"]))
    )
    if abs(U / scaling.U - 1) > 0.01:
        notes.append(f"trained at {scaling.U:g} m/s: at {U:g} m/s fields are scaled by U^2, as if Re did not matter")
    center = config.center or known["center"]
    if min(aref, U, rho, Lref) <= 0 or len(center) != 3:
        raise InputError(
            f"Aref {aref:g}, U {U:g}, rho {rho:g}, Lref {Lref:g}, centre {center}",
            variable="reference",
            remedy="All but the centre must be positive, and the centre takes three numbers",
        )
    notes.append(
        f"U {U:g} m/s, rho {rho:g} kg/m3, Aref {aref:.6g} m2, Lref {Lref:g} m, moments about "
        f"({center[0]:g} {center[1]:g} {center[2]:g}) m in the frame of the training"
    )
    return dict(U=U, rho=rho, Aref=aref, Lref=Lref, center=list(center))


def _cells(config, mesh, found, known, notes):
    """(mesh to predict on, cell of ``mesh`` of each of its cells, outward area vectors, centres)."""
    trained = known.get("cells")
    if config.cells is None:
        if trained and len(mesh) < trained / 4:
            notes.append(f"{len(mesh):,} cells where training runs have about {trained:,}: consider --cells {trained}")
        return mesh, np.arange(len(mesh)), found.vectors * found.turn[:, None], found.centers
    fine, owner = resample(mesh, config.cells)
    vectors, centers = area_vectors(fine)
    notes.append(f"{len(mesh):,} cells cut into {len(fine):,} triangles, on which fields and forces are predicted")
    return fine, owner, vectors * found.turn[owner][:, None], centers


def _compare(mesh, arrays, task, notes):
    """Distance to the nearest training shape, for programs; the same in words to ``notes``."""
    if not task.get("shapes"):
        notes.append("the checkpoint does not describe its training shapes: how unlike this one is to them is unknown")
        return None
    low, high = mesh.points.min(axis=0), mesh.points.max(axis=0)
    run, distance, reach = nearest(describe(low, high, arrays["normal"], arrays["area"]), task["shapes"])
    text = f"nearest training shape {run} at distance {distance:.3f}"
    if reach is None:
        notes.append(f"{text}; it is the only one, so there is no scale for that")
    elif distance > reach:
        notes.append(f"OUTSIDE OF THE TRAINING: {text}; no training shape is farther than {reach:.3f} from its next")
    else:
        notes.append(f"{text}; training shapes are up to {reach:.3f} from their next")
    return dict(run=run, distance=distance, reach=reach)
