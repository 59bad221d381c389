"""Volumes of cells of every type, in both ways that VTK has written polyhedra, and numbers as text."""

import numpy as np
import pytest
import pyvista

from core.errors import InputError
from data.aero.cell_volumes import cell_volumes
from data.aero.geometry import Polygons
from data.aero.vtu import VtuFile
from data.aero.vtu_cells import VtuCells
from data.aero.vtu_writer import CellFile, Vertices, VtuWriter

STEP = [[0, 0], [2, 0], [2, 1], [1, 1], [1, 2], [0, 2]]  # an L of area 3
CELLS = {  # VTK's type: points of one cell; the last is an L-shaped prism, given by its faces
    10: [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]],
    11: [[x, y, z] for z in (0, 3) for y in (0, 2) for x in (0, 1)],
    12: [[0, 0, 0], [1, 0, 0], [1, 2, 0], [0, 2, 0], [0, 0, 1], [1, 0, 1], [1, 2, 3], [0, 2, 3]],
    13: [[0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 1, 1], [1, 0, 1]],
    14: [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [0.3, 0.3, 1]],
    42: [[*p, z] for z in (0, 1) for p in STEP],
}
VOLUMES = [1 / 6, 6, 4, 1 / 2, 1 / 3, 3]
L_FACES = [[5, 4, 3, 2, 1, 0], [6, 7, 8, 9, 10, 11], *([i, (i + 1) % 6, (i + 1) % 6 + 6, i + 6] for i in range(6))]


def write_text(path, points, cells, types, faces, values):
    """A VTU file as text with VTK's older streams of faces; cells: points of each; faces {cell: faces}."""
    streams = [[len(faces[k]), *(n for face in faces[k] for n in (len(face), *face))] if k in faces else []
               for k in range(len(cells))]  # fmt: skip
    ends = np.cumsum([len(stream) for stream in streams])
    arrays = {
        "Points": {"Points": ("Float64", 3, points)},
        "Cells": {
            "connectivity": ("Int64", 1, np.concatenate(cells)),
            "offsets": ("Int64", 1, np.cumsum([len(cell) for cell in cells])),
            "types": ("UInt8", 1, types),
            "faces": ("Int64", 1, np.concatenate(streams).astype(int)),
            "faceoffsets": ("Int64", 1, [end if stream else -1 for end, stream in zip(ends, streams)]),
        },
        "CellData": {"p": ("Float32", 1, values)},
    }
    text = f'<VTKFile type="UnstructuredGrid"><UnstructuredGrid><Piece NumberOfPoints="{len(points)}" '
    text += f'NumberOfCells="{len(cells)}">'
    for section, found in arrays.items():
        text += f"<{section}>"
        for name, (kind, components, numbers) in found.items():
            text += f'<DataArray type="{kind}" Name="{name}" NumberOfComponents="{components}" format="ascii">\n'
            text += " ".join(f"{n:.9g}" for n in np.ravel(numbers)) + "\n</DataArray>"
        text += f"</{section}>"
    path.write_text(text + "</Piece></UnstructuredGrid></VTKFile>\n")


@pytest.fixture
def zoo(tmp_path):
    """Two cells of every type apart from each other, polyhedra not last, as VTK writes them now and as text."""
    points, cells, types, faces = [], [], [], {}
    for k, kind in enumerate([42, *CELLS, *(kind for kind in CELLS if kind != 42)]):
        first = len(points)
        cells.append(np.arange(first, first + len(CELLS[kind])))
        points += [[x + 5 * k, y, z] for x, y, z in CELLS[kind]]
        types.append(kind)
        if kind == 42:
            faces[k] = [[first + n for n in face] for face in L_FACES]
    flat = [[len(c), *c] if k not in faces else
            [1 + sum(len(f) + 1 for f in faces[k]), len(L_FACES), *(n for f in faces[k] for n in (len(f), *f))]
            for k, c in enumerate(cells)]  # fmt: skip
    values = np.linspace(-1, 1, len(cells)).astype(np.float32)
    grid = pyvista.UnstructuredGrid(np.concatenate(flat), types, np.array(points, float))
    grid.cell_data["p"] = values
    grid.save(tmp_path / "now.vtu")
    write_text(tmp_path / "text.vtu", points, cells, types, faces, values)
    return tmp_path, grid, [3, *VOLUMES, *VOLUMES[:-1]]


@pytest.mark.parametrize("name", ["now.vtu", "text.vtu"])
def test_volumes_of_every_type_by_any_range_of_cells(zoo, name):
    folder, grid, expected = zoo
    file = VtuFile([folder / name])
    cells, n = VtuCells(file), grid.n_cells
    np.testing.assert_allclose(cells.volumes(0, n), expected, rtol=1e-12)
    for size in (1, 5):
        parts = [cells.volumes(k, min(k + size, n)) for k in range(0, n, size)]
        np.testing.assert_allclose(np.concatenate(parts), expected, rtol=1e-12)
    np.testing.assert_array_equal(file.read("CellData", "p", 2, n), grid["p"][2:])
    vertices = [np.mean(grid.get_cell(k).points, axis=0) for k in range(n)]
    np.testing.assert_allclose(cells.centers(0, n), vertices, rtol=1e-12)


def test_warped_neighbours_share_a_face_without_gap_or_overlap():
    grid = pyvista.ImageData(dimensions=(4, 4, 4)).cast_to_structured_grid().cast_to_unstructured_grid()
    grid = pyvista.UnstructuredGrid(grid)
    points = np.array(grid.points, float)
    inner = ((points > 0) & (points < 3)).all(axis=1)
    points[inner] += np.random.default_rng(0).uniform(-0.3, 0.3, (inner.sum(), 3))
    mesh = Polygons(points, grid.cell_connectivity, np.arange(grid.n_cells + 1) * 8)
    assert set(grid.celltypes) == {12}
    assert cell_volumes(mesh, grid.celltypes).sum() == pytest.approx(27, rel=1e-12)


def test_a_mesh_in_another_unit_than_the_body_is_refused(zoo):
    folder, grid, _ = zoo
    cells, body = VtuCells(VtuFile([folder / "now.vtu"])), np.array([[[0, 0, 0], [9, 0, 0], [0, 3, 3]]])
    cells.check_around(body)
    cells.check_around(body / 1000, scale=0.001)
    for corners, scale in ((body / 1000, 1), (body, 0.001)):
        with pytest.raises(InputError, match="now.vtu, variable Points: spans .* m: their units are not the same"):
            cells.check_around(corners, scale)


def test_what_has_no_volume_is_named(zoo, tmp_path):
    folder = zoo[0]
    pyvista.Plane().cast_to_unstructured_grid().save(tmp_path / "skin.vtu")
    with pytest.raises(InputError, match="skin.vtu, variable types: has cells of VTK's types .9., which are no linear"):
        VtuCells(VtuFile([tmp_path / "skin.vtu"])).volumes(0, 3)
    text = (folder / "text.vtu").read_text()
    (tmp_path / "bad.vtu").write_text(text.replace("\n0 0 0 ", "\n0 nan 0 ", 1))
    with pytest.raises(InputError, match="bad.vtu, variable Points: 1 points are not finite, the first is point 0"):
        VtuCells(VtuFile([tmp_path / "bad.vtu"]))
    (tmp_path / "bad.vtu").write_text(text.replace("\n0 0 0 ", "\n0 x 0 ", 1))
    with pytest.raises(InputError, match="bad.vtu, variable Points: is no text of numbers"):
        VtuCells(VtuFile([tmp_path / "bad.vtu"]))
    VtuWriter(tmp_path / "none.vtu", Vertices(0), {}).create()
    with pytest.raises(InputError, match="none.vtu: has no cells"):
        VtuCells(VtuFile([tmp_path / "none.vtu"]))


@pytest.mark.parametrize("name", ["now.vtu", "text.vtu"])
def test_a_mesh_is_written_again_by_many_with_fields_of_their_own_rows(zoo, name, tmp_path):
    folder, grid, expected = zoo
    rows, cuts = np.arange(grid.n_cells, dtype=np.float32), [0, 5, 5, grid.n_cells]
    fields = {"id": (np.dtype("i8"), ()), "twice": (np.dtype("f4"), (2,))}
    for rank, (first, last) in enumerate(zip(cuts, cuts[1:])):  # the second has no rows
        writer = VtuWriter(tmp_path / "out.vtu", CellFile([folder / name]), fields)
        if rank == 0:
            writer.create()
        writer.write("CellData", "id", first, rows[first:last])
        writer.write("CellData", "twice", first, np.stack([rows, 2 * rows], axis=1)[first:last])
        writer.copy(rank, 3)
    found = pyvista.read(tmp_path / "out.vtu")
    np.testing.assert_array_equal(found.celltypes, grid.celltypes)
    np.testing.assert_array_equal(found["id"], rows)
    np.testing.assert_array_equal(found["twice"][:, 1], 2 * rows)
    np.testing.assert_array_equal(found.get_cell(1).points, grid.get_cell(1).points)
    assert found.get_cell(0).n_faces == 8
    cells = VtuCells(VtuFile([tmp_path / "out.vtu"]))
    np.testing.assert_allclose(cells.volumes(0, grid.n_cells), expected, rtol=1e-12)
