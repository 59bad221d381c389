"""Bodies from files: STL and its solids, winding, openness, silhouettes, finer triangles, and how unlike shapes are."""

import numpy as np
import pytest
from aero_runs import AHMED, cube

from apps.aero.shapes import describe, nearest
from apps.aero.statistics import interval, mean, pair_differences, spearman
from core import InputError
from data.aero.bodies import read_body
from data.aero.geometry import Polygons, area_vectors, signed_volume, triangles
from data.aero.resample import resample
from data.aero.silhouette import projected_area
from data.aero.stl import read_solids
from data.aero.topology import winding
from data.aero.vtk_files import OPENFOAM, read_stl, read_surface, write_stl, write_surface


def soup(corners):
    return Polygons(corners.reshape(-1, 3), np.arange(3 * len(corners)), np.arange(len(corners) + 1) * 3)


def write_binary(path, corners):
    record = np.zeros(len(corners), [("n", "<f4", 3), ("c", "<f4", (3, 3)), ("a", "<u2")])
    record["c"] = corners
    path.write_bytes(b"\0" * 80 + np.uint32(len(corners)).tobytes() + record.tobytes())


# Files


def test_text_and_binary_stl_are_read_alike_and_as_vtk_does(tmp_path):
    corners, solid, names = read_solids(AHMED / "ahmed25" / "body.stl")
    np.testing.assert_array_equal(corners, read_stl(AHMED / "ahmed25" / "body.stl"))
    assert names == ["body"] and not solid.any()
    write_binary(tmp_path / "b.stl", corners)
    np.testing.assert_array_equal(read_solids(tmp_path / "b.stl")[0], corners)


def test_solids_keep_their_names(tmp_path):
    corners = triangles(cube()).astype(np.float32)
    write_stl(tmp_path / "a", corners[:4], "body side")
    write_stl(tmp_path / "b", corners[4:], "wheel")
    (tmp_path / "c.stl").write_text((tmp_path / "a").read_text() + (tmp_path / "b").read_text())
    body = read_body(tmp_path / "c.stl")
    assert body.names == ["body side", "wheel"] and np.bincount(body.part).tolist() == [4, len(corners) - 4]


def test_damaged_files_are_refused(tmp_path):
    def refused(data, name="a.stl"):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError) as error:
            read_body(tmp_path / name)
        assert str(tmp_path / name) in str(error.value)
        return str(error.value)

    text = (AHMED / "ahmed25" / "body.stl").read_bytes()
    write_binary(tmp_path / "b.stl", triangles(cube()))
    binary = (tmp_path / "b.stl").read_bytes()
    assert "cut short" in refused(b"") and "cut short" in refused(text[:-5000]) and "cut short" in refused(binary[:-7])
    assert "no triangles" in refused(b"solid a\nendsolid a\n")
    lines = text.splitlines(keepends=True)
    assert "damaged" in refused(b"".join(lines[:3] + lines[4:]))
    assert "damaged" in refused(text.replace(b"vertex -1.0431445", b"vertex oops", 1))
    assert "not finite, the first is cell 0" in refused(text.replace(b"vertex -1.0431445", b"vertex nan", 1))
    assert "cut short" in refused((AHMED / "ahmed25" / "body.vtp").read_bytes()[:-1000], "a.vtp")
    with pytest.raises(InputError, match="no such file"):
        read_body(tmp_path / "none.stl")


def test_true_fields_are_found_and_wrong_names_refused(tmp_path):
    path = AHMED / "ahmed00" / "body.vtp"
    body, (mesh, fields) = read_body(path), read_surface(path, OPENFOAM)
    np.testing.assert_array_equal(body.mesh.connectivity, mesh.connectivity)
    np.testing.assert_array_equal(body.fields["shear"].astype(np.float32), fields["shear"])
    with pytest.raises(InputError, match="not in the file; cell arrays are"):
        read_body(path, "pressure", "wallShearStress")
    with pytest.raises(InputError, match="--shear"):
        read_body(path, "p")
    values = np.zeros((6, 3))
    values[2] = np.nan
    write_surface(tmp_path / "a.vtp", cube(), {"p": np.zeros(6), "wallShearStress": values})
    with pytest.raises(InputError, match="1 cells are not finite, the first is cell 2"):
        read_body(tmp_path / "a.vtp")
    points = tmp_path / "points.vtp"
    import pyvista

    sphere = pyvista.Sphere()
    sphere["p"] = np.zeros(sphere.n_points)
    sphere.save(points)
    with pytest.raises(InputError, match="only on points"):
        read_body(points, "p", "tau")
    assert read_body(points).fields == {}
    sphere.save(tmp_path / "s.ply")
    assert len(read_body(tmp_path / "s.ply").mesh) == sphere.n_cells
    sphere.cast_to_unstructured_grid().save(tmp_path / "s.vtu")
    assert len(read_body(tmp_path / "s.vtu").mesh) == sphere.n_cells
    pyvista.ImageData(dimensions=(2, 2, 2)).cast_to_unstructured_grid().save(tmp_path / "v.vtu")
    with pytest.raises(InputError, match="no polygons"):
        read_body(tmp_path / "v.vtu")


# Winding


def outward(found, mesh):
    return signed_volume(found.vectors * found.turn[:, None], found.centers)


def test_winding_is_named_and_turned():
    for reverse, name in ((False, "outward"), (True, "inward")):
        mesh = cube(reverse)
        found = winding(mesh, "cube")
        assert (found.name, found.open_edges, found.mixed) == (name, 0, 0) and found.open_share < 1e-15
        assert outward(found, mesh) == pytest.approx(1)
    corners = triangles(cube())
    turned = corners.copy()
    turned[[1, 4, 5]] = turned[[1, 4, 5], ::-1]
    found = winding(soup(turned), "cube")
    assert found.name == "mixed" and set(np.flatnonzero(found.turn < 0)) == {1, 4, 5} and found.mixed > 0
    assert outward(found, None) == pytest.approx(1) and found.open_share < 1e-15


def test_every_closed_piece_is_turned_by_its_own_volume():
    both = np.concatenate([triangles(cube()), 3 + triangles(cube(reverse=True))])
    found = winding(soup(both), "two cubes")
    assert (found.turn[: len(both) // 2] == 1).all() and (found.turn[len(both) // 2 :] == -1).all()


def test_open_surfaces_crowded_edges_and_cells_without_area():
    corners = triangles(cube())
    found = winding(soup(corners[1:]), "open")
    assert found.open_edges == 3 and found.name == "outward" and 0.04 < found.open_share < 0.05
    flat = np.concatenate([corners, [[[0, 0, 0], [1, 0, 0], [0, 0, 0]]]])
    found = winding(soup(flat), "flat")
    assert found.open_edges == 0 and found.crowded_edges == 0 and np.linalg.norm(found.vectors[-1]) == 0
    touching = np.concatenate([corners, corners + [1, 0, 0]])
    found = winding(soup(touching), "touching")
    assert found.crowded_edges > 0 and found.open_edges == 0 and (found.turn == 1).all()


def test_a_surface_with_one_side_is_refused():
    t = np.linspace(0, 2 * np.pi, 25)
    edge = np.stack([(1 + s * 0.3 * np.cos(t / 2)) * np.cos(t) for s in (-1, 1)])
    along = np.stack([(1 + s * 0.3 * np.cos(t / 2)) * np.sin(t) for s in (-1, 1)])
    up = np.stack([s * 0.3 * np.sin(t / 2) for s in (-1, 1)])
    strip = np.stack([edge, along, up], axis=-1)
    strip[:, -1] = strip[::-1, 0]
    quads = np.stack([strip[0, :-1], strip[0, 1:], strip[1, 1:], strip[1, :-1]], axis=1)
    mesh = Polygons(quads.reshape(-1, 3), np.arange(4 * len(quads)), np.arange(len(quads) + 1) * 4)
    with pytest.raises(InputError, match="one side only"):
        winding(mesh, "strip")


# Silhouettes and finer triangles


def test_frontal_area_of_sphere_box_and_what_hides_behind():
    import pyvista

    sphere = pyvista.Sphere(radius=0.5, theta_resolution=80, phi_resolution=80)
    faces = np.asarray(sphere.regular_faces)
    mesh = Polygons(np.asarray(sphere.points), faces.ravel(), np.arange(len(faces) + 1) * 3)
    for axis in range(3):
        assert projected_area(mesh, axis) == pytest.approx(np.pi / 4, rel=5e-3)
    box = triangles(cube()) * [4.0, 1.8, 1.4]
    for axis, area in ((0, 1.8 * 1.4), (1, 4 * 1.4), (2, 4 * 1.8)):
        assert projected_area(soup(box), axis) == pytest.approx(area, rel=1e-9)
    small = triangles(cube()) * 0.5
    row = np.concatenate([box, small + [6, 0.3, 0.3], small + [8, 5, 0.2]])  # one in the shadow, one beside
    vectors = area_vectors(soup(row))[0]
    assert np.abs(vectors[:, 0]).sum() / 2 == pytest.approx(1.8 * 1.4 + 0.5)
    assert projected_area(soup(row), 0) == pytest.approx(1.8 * 1.4 + 0.25, rel=1e-3)


def test_resampling_keeps_the_surface():
    mesh = soup(read_stl(AHMED / "ahmed25" / "body.stl").astype(np.float64))
    fine, owner = resample(mesh, 5000)
    assert 4000 < len(fine) < 7500
    before, after = area_vectors(mesh)[0], area_vectors(fine)[0]
    assert np.linalg.norm(after, axis=1).sum() == pytest.approx(np.linalg.norm(before, axis=1).sum(), rel=1e-12)
    for k in range(3):
        np.testing.assert_allclose(np.bincount(owner, after[:, k]), before[:, k], atol=1e-12)
    assert len(resample(mesh, 10)[0]) == len(mesh)


# Shapes


def test_shapes_are_compared_whatever_their_mesh():
    mesh = soup(triangles(cube()))
    described = []
    for part in (mesh, resample(mesh, 3000)[0]):
        vectors, _ = area_vectors(part)
        area = np.linalg.norm(vectors, axis=1)
        described.append(describe(np.zeros(3), np.ones(3), vectors / area[:, None], area))
    np.testing.assert_allclose(described[0], described[1], atol=1e-12)
    longer = describe(np.zeros(3), np.array([1.5, 1, 1]), vectors / area[:, None], area)
    lengths = np.arange(36) < 10
    table = {"a": described[0] + 0.01 * lengths, "b": described[0] + 0.02 * lengths, "c": longer}
    run, distance, reach = nearest(described[0], table)
    assert run == "a" and 0 < distance < reach
    turned = described[0] - described[0] * ~lengths
    turned[10] = 1.0  # faces one corner of the sky only
    assert nearest(turned, table)[1] == pytest.approx(1, abs=0.1)
    assert nearest(described[0], {"a": longer})[2] is None


def test_statistics_over_cases():
    assert spearman([1, 2, 3, 10], [0.1, 0.2, 0.3, 0.4]) == pytest.approx(1)
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(np.sqrt(3) / 2)
    assert spearman([1, 1], [1, 2]) is None and spearman([1], [2]) is None
    found = pair_differences([1.0, 2.0, 4.0], [1.0, 3.0, 2.0])
    assert found["pairs"] == 3 and found["right_sign"] == pytest.approx(2 / 3)
    assert found["mae"] == pytest.approx((1 + 2 + 3) / 3) and found["max"] == 3
    assert found["r2"] == pytest.approx(1 - (1 + 4 + 9) / (4 + 1 + 1))
    assert pair_differences([1.0], [1.0]) is None and pair_differences([1.0, 2.0], [1.0, 1.0]) is None
    low, high = interval(mean, np.random.default_rng(1).normal(size=400))
    assert -0.2 < low < 0 < high < 0.2 and high - low == pytest.approx(2 * 1.96 / 20, rel=0.15)
    assert interval(mean, [1.0, 2.0]) is None
