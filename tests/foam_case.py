"""A tiny OpenFOAM case as the solver writes it, in ASCII."""

import numpy as np

HEAD = "FoamFile\n{{\n    version 2.0;\n    format ascii;\n    class {};\n    object {};\n}}\n"
CONTROL = "startFrom startTime;\nstartTime 0;\nstopAt endTime;\nendTime 600;\ndeltaT 1;\nwriteInterval 600;\n"


def write_case(folder, fields, time="600"):
    """A box of 3 x 3 x 3 cells without the middle one, which is the body; patches body, of six faces, and far.

    fields: {"p": values (6,) on the body, ...}; inside of the box they are zero.
    """
    inner, body, far = _faces([c for c in np.ndindex(3, 3, 3) if c != (1, 1, 1)])
    mesh = folder / "constant" / "polyMesh"
    for path in (mesh, folder / "system", folder / time):
        path.mkdir(parents=True)
    _write(folder / "system" / "controlDict", "dictionary", CONTROL)
    _write(mesh / "points", "vectorField", _list(f"({i} {j} {k})" for k, j, i in np.ndindex(4, 4, 4)))
    _write(mesh / "faces", "faceList", _list(f"4({' '.join(map(str, ids))})" for *_, ids in inner + body + far))
    _write(mesh / "owner", "labelList", _list(str(owner) for owner, *_ in inner + body + far))
    _write(mesh / "neighbour", "labelList", _list(str(other) for _, other, _ in inner))
    first = len(inner)
    patches = ("body", "wall", len(body), first), ("far", "patch", len(far), first + len(body))
    told = (f"{name}\n{{\ntype {kind};\nnFaces {n};\nstartFace {start};\n}}" for name, kind, n, start in patches)
    _write(mesh / "boundary", "polyBoundaryMesh", _list(told))
    for name, values in fields.items():
        _write_field(folder / time / name, np.asarray(values))


def _faces(cells):
    """Faces (owner, neighbour, points) between cells, on the body and far off, winding out of their owner."""
    number, inner, body, far = {cell: k for k, cell in enumerate(cells)}, [], [], []
    for cell in cells:
        for axis, side in np.ndindex(3, 2):
            corners = np.tile(cell, (4, 1))
            corners[:, axis] += side
            corners[:, (axis + 1) % 3] += [0, 1, 1, 0]
            corners[:, (axis + 2) % 3] += [0, 0, 1, 1]
            ids = (corners @ [1, 4, 16]).tolist()
            other = tuple(int(c) + (2 * side - 1) * (k == axis) for k, c in enumerate(cell))
            face = number[cell], number.get(other), ids if side else ids[::-1]
            if other not in number:
                (body if other == (1, 1, 1) else far).append(face)
            elif face[1] > face[0]:
                inner.append(face)
    return sorted(inner), body, far


def _write_field(path, values):
    kind, zero = ("scalar", "0") if values.ndim == 1 else ("vector", "(0 0 0)")
    rows = (str(row) if kind == "scalar" else f"({' '.join(map(str, row))})" for row in values.tolist())
    text = f"dimensions [0 2 -2 0 0 0 0];\ninternalField uniform {zero};\nboundaryField\n{{\n"
    text += f"body\n{{\ntype calculated;\nvalue nonuniform List<{kind}>\n{_list(rows)};\n}}\n"
    _write(path, f"vol{kind.capitalize()}Field", text + "far\n{\ntype zeroGradient;\n}\n}\n")


def _write(path, kind, text):
    path.write_text(HEAD.format(kind, path.name) + text)


def _list(rows):
    rows = list(rows)
    return f"{len(rows)}\n(\n" + "\n".join(rows) + "\n)\n"
