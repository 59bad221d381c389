"""Synthetic bodies as files in DrivAerML's layout, so that the real readers run on data with known answers."""

from pathlib import Path

from data.aero.drivaerml import COEFFICIENTS
from data.aero.geometry import triangles
from data.aero.synthetic import U, make_body, truth
from data.aero.vtk_files import DRIVAERML, write_hexahedra, write_stl, write_surface


def write_drivaerml(directory, *, runs, seed=0, cells=4000, volume=True):
    """Write run_<i> for each i of ``runs`` below ``directory``: surface, STL, CSVs; with ``volume`` volume_i.vtu."""
    for i in runs:
        folder = Path(directory) / f"run_{i}"
        folder.mkdir(parents=True)
        body = make_body(seed, i, cells, volume)
        write_surface(
            folder / f"boundary_{i}.vtp",
            body.mesh,
            {
                DRIVAERML["pressure"]: body.pressure,
                DRIVAERML["shear"]: body.shear,
                "CpMeanTrim": body.pressure / (0.5 * U**2),
            },
        )
        # The mesh winds inward, as DrivAerML's boundary does; its STL winds outward.
        write_stl(folder / f"drivaer_{i}.stl", triangles(body.mesh).astype("float32")[:, ::-1])
        if volume:
            write_hexahedra(
                folder / f"volume_{i}.vtu",
                body.volume,
                {DRIVAERML["velocity"]: body.volume_velocity, DRIVAERML["pressure"]: body.volume_pressure},
            )
        _write_tables(folder, i, body.shape)


def _write_tables(folder, i, shape):
    exact = truth(shape)
    constant = exact["constant"]
    _table(
        folder / f"geo_ref_{i}.csv",
        {
            "lRef": exact["Lref"],
            "aRef": exact["Aref"],
            "forcesCoR": _vector(exact["center"]),
            "lRefRef": constant["Lref"],
            "aRefRef": constant["Aref"],
            "forcesCoRRef": _vector(constant["center"]),
        },
    )
    _table(folder / f"force_mom_{i}.csv", {name: exact[name] for name in COEFFICIENTS})
    _table(folder / f"force_mom_constref_{i}.csv", {name: constant[name] for name in COEFFICIENTS})
    _table(folder / f"geo_parameters_{i}.csv", exact["parameters"])


def _vector(values):
    return "(" + " ".join(map(repr, values)) + ")"


def _table(path, row):
    path.write_text(", ".join(row) + "\n" + ", ".join(str(value) for value in row.values()) + "\n")
