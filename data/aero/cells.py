"""From a mesh and its fields to the checked arrays of the archive; every way into the archive passes here."""

import numpy as np

from core.errors import InputError
from data.aero.cell_volumes import cell_volumes
from data.aero.distance import NearestSurface
from data.aero.geometry import area_vectors, signed_volume, vertex_mean
from data.aero.topology import disagreement

OPEN_LIMIT, MIXED_LIMIT = 0.1, 1e-3


def surface_arrays(mesh, pressure, shear, *, file):
    """Arrays of the surface group (data.aero.archive), and what the mesh is like: {"winding", "open_share",
    "open_edges", "mixed_edges"}.

    mesh: Polygons; pressure (n,), shear (n, 3) m2/s2 on its cells; file names the source in errors. winding is
    "inward" or "outward", that of the file, found by the sign of the enclosed volume; stored normals always point
    outward. open_share is |sum S| / sum |S|, 0 for a closed surface of one winding: a constant pressure then has no
    force. Raises InputError for wrong row counts, values that are not finite, cells without area, open surfaces, and
    cells that wind unlike their neighbours where they are more than a thousandth of the area.
    """
    check_values(pressure, (len(mesh),), file, "pressure")
    check_values(shear, (len(mesh), 3), file, "wall shear stress")
    vectors, position = area_vectors(mesh)
    refuse_not_finite(position, file, "Points")
    area = np.linalg.norm(vectors, axis=1)
    empty = np.flatnonzero(~(area > 0))
    if len(empty):
        raise InputError(
            f"{len(empty)} cells have no area, the first is cell {empty[0]}",
            file=file,
            variable="Points",
            remedy="Remove degenerate cells and export again",
        )
    open_edges, mixed_edges, minority = disagreement(mesh, file)
    if minority > MIXED_LIMIT:
        raise InputError(
            f"{minority:.2%} of the area winds against its neighbours, at {mixed_edges} edges: its forces would "
            "have the wrong sign",
            file=file,
            variable="Polys",
            remedy="Orient the faces alike and export again",
        )
    open_share = float(np.linalg.norm(vectors.sum(axis=0)) / area.sum())
    if open_share > OPEN_LIMIT:
        raise InputError(
            f"the surface is open: area vectors add up to {open_share:.0%} of the area",
            file=file,
            variable="Polys",
            remedy="Export the whole closed body with the winding of the solver",
        )
    volume = signed_volume(vectors, position)
    arrays = dict(
        position=position,
        normal=vectors / area[:, None] * np.sign(volume),
        area=area,
        pressure=pressure,
        shear=shear,
        cell_id=np.arange(len(mesh), dtype=np.int64),
    )
    facts = dict(open_share=open_share, open_edges=open_edges, mixed_edges=mixed_edges)
    return arrays, facts | dict(winding="outward" if volume > 0 else "inward")


def volume_arrays(mesh, velocity, pressure, corners, *, file, types):
    """Arrays of the volume group: cell centres (mean of the vertices), their volumes, flow, and the nearest of
    triangles ``corners``; types (n,): VTK's, of the cells of ``mesh``.

    data.aero.volume does the same block by block for files."""
    check_values(velocity, (len(mesh), 3), file, "velocity")
    check_values(pressure, (len(mesh),), file, "pressure")
    position = vertex_mean(mesh)
    sdf, direction = NearestSurface(corners).query(position)
    return dict(
        position=position,
        velocity=velocity,
        pressure=pressure,
        sdf=sdf,
        direction=direction,
        volume=cell_volumes(mesh, types),
        cell_id=np.arange(len(mesh), dtype=np.int64),
    )


def check_values(values, shape, file, variable, first=0):
    """InputError unless ``values`` have the shape and are finite; ``first``: of the first cell, for the words."""
    if values.shape != shape:
        raise InputError(
            f"shape {values.shape}, but the mesh needs {shape}",
            file=file,
            variable=variable,
            remedy="Export one value a cell of this mesh",
        )
    refuse_not_finite(values, file, variable, first)


def refuse_not_finite(values, file, variable, first=0, rows="cells"):
    """InputError naming the first cell, counted from ``first``, whose values are not finite; rows: what they are."""
    bad = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
    if len(bad):
        raise InputError(
            f"{len(bad)} {rows} are not finite, the first is {rows[:-1]} {bad[0] + first}",
            file=file,
            variable=variable,
            remedy="Export a converged field, or leave this run out",
        )
