"""Runs of any solver or data set by a small JSON file that says which file, which array and which unit is what.

    {"surface": "cases/{id}/body.vtp",          {id} stands for the run id; paths are relative to the JSON file
     "arrays": {"pressure": "p", "shear": "wallShearStress", "velocity": "U"},
     "pressure": "m2/s2", "shear": "m2/s2", "shear_sign": "on_fluid",
     "U": 40.0, "rho": 1.2, "nu": 1.5e-5, "Aref": 0.11, "Lref": 1.0}

Optional: "volume" and "stl" (paths as of "surface"; needed for --volume), "scale" (metres in a unit of the files),
"center" (of moments, m), "table" (a CSV with a row a run) with "columns" ({"run": "case", "Cd": "drag", "Aref": "A"}:
any of the numbers above, and Cd, Cl, Cs, CmPitch, may come from it). pressure: "m2/s2", "Pa" or "Cp"; shear: "m2/s2",
"Pa" or "Cf"; shear_sign: "on_fluid", as OpenFOAM writes it (attached flow along +x has a negative x), or "on_wall".
Surfaces are VTP, VTU of surface cells, OBJ, PLY or legacy VTK (foamToVTK, postProcessing), with values by cell; with
"patches": ["car", "wheel*"] they are those patches of an OpenFOAM case at its last time, and "surface": "cases/{id}" is
the folder that holds constant/polyMesh.
"""

import csv
import json
import re
from pathlib import Path

import numpy as np

from core.errors import InputError
from data.aero.bodies import read_body
from data.aero.cells import surface_arrays
from data.aero.drivaerml import whole_or_parts
from data.aero.files import number, require
from data.aero.foam import sources_of
from data.aero.geometry import Polygons
from data.aero.volume import VolumeCells, body_of
from data.aero.writing import Run
from data.files import sha256

NUMBERS = ("U", "rho", "nu", "Aref", "Lref")
STATED = ("Cd", "Cl", "Cs", "CmPitch")
UNITS = {"pressure": ("m2/s2", "Pa", "Cp"), "shear": ("m2/s2", "Pa", "Cf")}
FILES = ("surface", "patches", "volume", "stl", "arrays", "scale", "center", "table", "columns")
KNOWN = {*FILES, *UNITS, "shear_sign", *NUMBERS}


def read_mapping(path):
    """The mapping of a JSON file as a dict with its defaults; InputError naming what is missing, unknown or wrong."""
    try:
        given = json.loads(require(path, "Name the JSON file of the mapping").read_text())
    except json.JSONDecodeError as error:
        raise InputError(f"no JSON: {error}", file=path, remedy="Write one JSON object") from None

    def refuse(problem, variable, remedy):
        raise InputError(problem, file=path, variable=variable, remedy=remedy)

    strange = sorted(set(given) - KNOWN)
    if strange:
        refuse(f"not known; known are {' '.join(sorted(KNOWN))}", strange[0], "Correct the name")
    if "{id}" not in given.get("surface", ""):
        refuse("no path with {id} in it", "surface", 'Write "surface": "run_{id}/boundary_{id}.vtp"')
    missing = [name for name in ("pressure", "shear") if name not in given.get("arrays", {})]
    if missing:
        refuse(f"names no {missing[0]}", "arrays", 'Write "arrays": {"pressure": "p", "shear": "wallShearStress"}')
    patches = given.get("patches", ["x"])
    if not patches or not isinstance(patches, list) or not all(isinstance(name, str) for name in patches):
        refuse("is no list of names", "patches", 'Write "patches": ["car", "wheel*"]')
    told = {"pressure": "m2/s2", "shear": "m2/s2", "shear_sign": "on_fluid", "scale": 1.0, "center": [0, 0, 0]} | given
    for name, choices in {**UNITS, "shear_sign": ("on_fluid", "on_wall")}.items():
        if told[name] not in choices:
            refuse(f"{told[name]!r} is none of {' '.join(choices)}", name, "Use one of them")
    told["table"] = _table(Path(path).parent / given["table"], told) if "table" in given else {}
    return told | {"root": str(Path(path).parent)}


def run_ids(mapping):
    """{run id: run id} of the surfaces that are there, sorted."""
    root, (head, *more) = Path(mapping["root"]), mapping["surface"].split("{id}")
    rule = re.compile(re.escape(head) + "([^/]+?)" + "\\1".join(map(re.escape, more)))
    paths = (path.relative_to(root).as_posix() for path in root.glob(mapping["surface"].replace("{id}", "*")))
    found = {match[1]: match[1] for match in map(rule.fullmatch, sorted(paths)) if match}
    if not found:
        raise InputError(f"no file fits {mapping['surface']}", file=root, variable="surface", remedy="Correct the path")
    return found


def read_run(mapping, run, *, volume=False):
    """Run of an id of ``run_ids``. Raises InputError as of read_body and surface_arrays, and for numbers not given."""
    patches, values = mapping.get("patches"), _numbers(mapping, run)
    path = _place(mapping, "surface", run)
    body = read_body(path, mapping["arrays"]["pressure"], mapping["arrays"]["shear"], patches)
    mesh = Polygons(body.mesh.points * mapping["scale"], body.mesh.connectivity, body.mesh.offsets)
    q = 0.5 * values["U"] ** 2
    factor = {"m2/s2": 1.0, "Pa": 1 / values["rho"], "Cp": q, "Cf": q}
    turned = -1 if mapping["shear_sign"] == "on_wall" else 1
    pressure = body.fields["pressure"] * factor[mapping["pressure"]]
    shear = body.fields["shear"] * (turned * factor[mapping["shear"]])
    surface, facts = surface_arrays(mesh, pressure, shear, file=path)
    attrs, arrays = values | {"center": [float(c) for c in mapping["center"]]} | facts, None
    sources = [path] if patches is None else sources_of(path, mapping["arrays"].values())
    if volume:
        air, stl = whole_or_parts(_place(mapping, "volume", run)), require(_place(mapping, "stl", run))
        if "velocity" not in mapping["arrays"]:
            raise InputError("names no velocity", file=run, variable="arrays", remedy='Add "velocity": "U" to "arrays"')
        names = {key: mapping["arrays"][key] for key in ("velocity", "pressure")}
        units = mapping["scale"], factor[mapping["pressure"]]
        arrays = VolumeCells(air, names, body_of(stl, body.mesh.points), *units)
        sources += [*air, stl]
    return Run(run, surface, arrays, attrs | {"sources": {p.name: sha256(p) for p in sources}})


def _place(mapping, key, run):
    if key not in mapping:
        raise InputError(f"the mapping names no {key}", file=run, variable=key, remedy="Add its path with {id}")
    return Path(mapping["root"]) / mapping[key].replace("{id}", run)


def _numbers(mapping, run):
    """References and stated coefficients of a run: from its row of the table, else from the mapping itself."""
    row = mapping["table"].get(run, {})
    found = {name: row.get(name, mapping.get(name)) for name in NUMBERS} | {n: row[n] for n in STATED if n in row}
    missing = [name for name, value in found.items() if not isinstance(value, int | float) or not np.isfinite(value)]
    if missing:
        raise InputError("no number is given", file=run, variable=missing[0], remedy="State it, or map a column to it")
    return {name: float(value) for name, value in found.items()}


def _table(path, told):
    """{run id: {name: number}} of a CSV by told["columns"]."""
    columns = told.get("columns", {})
    if "run" not in columns:
        raise InputError('"columns" names no "run"', file=path, variable="columns", remedy="Say which holds the run id")
    with open(require(path), newline="") as stream:
        rows = [{k.strip().lower(): v.strip() for k, v in row.items()} for row in csv.DictReader(stream)]
    found = {}
    for row in rows:
        key = columns["run"].lower()
        if key not in row:
            raise InputError(f"no such column; there are {' '.join(row)}", file=path, variable=columns["run"],
                             remedy="Correct the mapping")  # fmt: skip
        found[row[key]] = {name: number(row, column, path) for name, column in columns.items() if name != "run"}
    return found
