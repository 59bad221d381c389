"""Forces of real and made bodies against the solver and the closed form, and the geometry that they rest on."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from aero_runs import cube

from apps.aero.forces import coefficients, force_sums, reference_of
from core.errors import InputError
from data.aero import plain
from data.aero.archive import AeroReader
from data.aero.cells import surface_arrays
from data.aero.distance import NearestSurface
from data.aero.geometry import Polygons, area_vectors, signed_volume, triangles
from data.aero.synthetic import (
    exact_forces,
    make_body,
    outward,
    radius,
    sample_shape,
    surface_flow,
    synthetic_run,
    to_space,
    to_unit,
    truth,
    volume_flow,
)
from data.aero.vtk_files import read_stl

AHMED = Path(__file__).parent / "data" / "aero"
FIELDS = ("position", "normal", "area", "pressure", "shear")
ALL = (slice(None),)


# Forces


@pytest.mark.parametrize("name, cd, cl", [("ahmed25", 0.300982, 0.310323), ("ahmed00", 0.31069, -0.190738)])
def test_forces_equal_the_solver(name, cd, cl):
    run = plain.read_run(AHMED / name)
    reference = reference_of(run.attrs)
    fields = [run.surface[field] for field in FIELDS]
    found = coefficients(force_sums(*fields, rho=reference.rho, center=reference.center), reference)
    assert found["Cd"] == pytest.approx(cd, abs=1e-6) and found["Cl"] == pytest.approx(cl, abs=1e-6)
    for key in ("Cd", "Cl", "Cs", "CmPitch"):
        assert found[key] == pytest.approx(run.attrs[key], abs=2e-7), key
    assert found["Cd_pressure"] + found["Cd_friction"] == pytest.approx(found["Cd"], abs=1e-12)
    assert 0.03 < found["Cd_friction"] < 0.05 and found["Clf"] + found["Clr"] == pytest.approx(found["Cl"])


def test_forces_from_the_archive_add_up_over_parts(ahmed):
    reader = AeroReader(ahmed)
    for run in reader.runs:
        attrs = reader.run_attrs(run)
        reference = reference_of(attrs)
        rows = reader.shape(f"{run}/surface", "area")[0]
        cuts, sums = [0, 1, 1, rows // 3, rows], np.zeros((4, 3))
        for start, stop in zip(cuts, cuts[1:]):
            part = [torch.from_numpy(reader.read(f"{run}/surface", name, (slice(start, stop),))) for name in FIELDS]
            sums += force_sums(*part, rho=reference.rho, center=reference.center).numpy()
        found = coefficients(sums, reference)
        assert found["Cd"] == pytest.approx(attrs["Cd"], abs=1e-6) and found["Cl"] == pytest.approx(
            attrs["Cl"], abs=1e-6
        )
        assert attrs["Cd_cells"] == pytest.approx(attrs["Cd"], abs=1e-6)


def test_forces_differentiate_in_torch():
    fields = [torch.from_numpy(np.asarray(v)) for v in (np.eye(3), np.eye(3), np.ones(3), np.ones(3), np.zeros((3, 3)))]
    pressure = fields[3].clone().requires_grad_()
    force_sums(*fields[:3], pressure, fields[4], rho=2.0, center=(0, 0, 0))[0, 0].backward()
    assert pressure.grad.tolist() == [-2.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["ahmed25", "ahmed00", "synthetic"])
def test_constant_pressure_on_a_closed_body_has_no_force(name):
    run = synthetic_run(0, 1, 1000) if name == "synthetic" else plain.read_run(AHMED / name)
    s, still = run.surface, np.zeros((len(run.surface["area"]), 3))
    sums = force_sums(s["position"], s["normal"], s["area"], np.ones(len(still)), still, rho=1.0, center=(0, 0, 0))
    assert np.abs(sums).max() < 2e-6 * s["area"].sum()
    assert run.attrs["open_share"] < 1e-6


def test_conventions_of_reference_are_named():
    attrs = truth(sample_shape(0, 1))
    own, constant = reference_of(attrs), reference_of(attrs, "constant")
    assert constant.Aref == 2.17 and own.Aref == attrs["Aref"] != 2.17
    assert attrs["constant"]["Cd"] * 2.17 == pytest.approx(attrs["Cd"] * own.Aref)
    with pytest.raises(InputError, match="convention"):
        reference_of({key: attrs[key] for key in attrs if key != "constant"}, "constant")


# Geometry


def test_area_vectors_centres_and_volume_of_polygons():
    vectors, centers = area_vectors(cube())
    np.testing.assert_allclose(
        vectors, [[0, 0, -1], [0, 0, 1], [0, -1, 0], [1, 0, 0], [0, 1, 0], [-1, 0, 0]], atol=1e-15
    )
    np.testing.assert_allclose(centers[1], [0.5, 0.5, 1], atol=1e-15)
    np.testing.assert_allclose(centers[2], [0.5, 0, 0.5], atol=1e-15)
    assert signed_volume(vectors, centers) == pytest.approx(1)


@pytest.mark.parametrize("reverse, winding", [(False, "outward"), (True, "inward")])
def test_winding_is_found_and_normals_point_outward(reverse, winding):
    mesh = cube(reverse)
    arrays, facts = surface_arrays(mesh, np.ones(6), np.zeros((6, 3)), file="cube")
    assert facts["winding"] == winding
    assert (np.einsum("ij,ij->i", arrays["normal"], arrays["position"] - 0.5) > 0).all()


def test_area_of_a_sphere_is_kept():
    """Weights are cell areas: averaged to points they would halve (pyvista#5746)."""
    import pyvista

    sphere = pyvista.Sphere(radius=0.5, theta_resolution=60, phi_resolution=60)
    faces = np.asarray(sphere.regular_faces)
    mesh = Polygons(np.asarray(sphere.points), faces.ravel(), np.arange(len(faces) + 1) * 3)
    assert np.linalg.norm(area_vectors(mesh)[0], axis=1).sum() == pytest.approx(np.pi, rel=5e-3)


def test_signed_distance_equals_vtk_and_leads_to_the_surface():
    from pyvista import PolyData
    from vtkmodules.vtkFiltersCore import vtkImplicitPolyDataDistance

    corners = read_stl(AHMED / "ahmed25" / "body.stl")
    points = np.random.default_rng(0).uniform([-2, -0.8, -0.2], [1, 0.8, 1], (3000, 3))
    reference = vtkImplicitPolyDataDistance()
    reference.SetInput(PolyData.from_regular_faces(corners.reshape(-1, 3), np.arange(corners.size // 3).reshape(-1, 3)))
    expected = np.array([reference.EvaluateFunction(point) for point in points])
    distance, direction = NearestSurface(corners).query(points)
    np.testing.assert_allclose(distance, expected, atol=2e-6)
    assert (distance < 0).sum() > 50  # some lie inside
    foot = points - distance[:, None] * direction
    np.testing.assert_allclose(NearestSurface(corners).query(foot)[0], 0, atol=2e-6)
    turned, _ = NearestSurface(corners[:, ::-1]).query(points)
    np.testing.assert_allclose(turned, distance, atol=1e-9)
    fine = triangles(make_body(0, 1, 4000).mesh)  # of more pieces than are asked first, from near and from far
    points = np.concatenate([points[:300], 40 * points[:100], fine[::50].mean(axis=1) * 1.01])
    reference.SetInput(
        PolyData.from_regular_faces(fine.reshape(-1, 3), np.arange(len(fine) * 3).reshape(-1, 3)).clean()
    )
    expected = np.array([reference.EvaluateFunction(point) for point in points])  # the mesh winds inward
    np.testing.assert_allclose(NearestSurface(fine).query(points)[0], -expected, atol=1e-9)
    out = np.array([[2.0, 0, 0], [0, 0, 2], [1.5, 1.5, 1.5]])  # of faces, and of a corner of the unit cube
    flat = triangles(cube())
    distance, direction = NearestSurface(flat).query(out + 0.5)
    np.testing.assert_allclose(distance, [1.5, 1.5, 3**0.5], atol=1e-12)
    np.testing.assert_allclose(direction, [[1, 0, 0], [0, 0, 1], [3**-0.5] * 3], atol=1e-12)


# Synthetic bodies


def off(run):
    """Errors of the coefficients that are summed over the cells of a made body."""
    fields = [run.surface[name] for name in FIELDS]
    found = coefficients(force_sums(*fields, rho=1.0, center=(0, 0, 0)), reference_of(run.attrs))
    return np.abs([found[name] - run.attrs[name] for name in ("Cd", "Cl", "Cs")])


def test_synthetic_forces_are_exact_and_the_mesh_tends_to_them():
    """For every body of the embedded default."""
    for number in range(1, 25):
        assert off(synthetic_run(0, number)).max() < 1e-3, number
    for number in (1, 6):
        shape = sample_shape(0, number)
        sums = exact_forces(shape)
        np.testing.assert_allclose(sums, exact_forces(shape, order=130), atol=1e-6)
        assert sums[0, 0] > 0.6 * sums[:2, 0].sum()
        assert off(synthetic_run(0, number))[0] < off(synthetic_run(0, number, 500))[0] / 4


def test_separation_and_base_pressure_move_with_the_slant():
    drag = {}
    for angle in (5, 25, 40):
        shape = replace(sample_shape(0, 1), slant_angle=float(angle), slant_length=1.0)
        drag[angle] = truth(shape)["Cd"]
        point = np.array([[shape.slant_start + 0.6, 0.0, 1.2]])
        up = np.array([[0.4, 0.0, 0.9]]) / np.hypot(0.4, 0.9)
        assert (surface_flow(shape, point, up)[1][0, 0] > 0) == (angle == 40), "reversed shear where separated"
    assert drag[25] > drag[40] > drag[5]


def test_volume_flow_meets_the_surface_and_the_free_stream():
    shape, position = sample_shape(0, 2), synthetic_run(0, 2, 1000).surface["position"]
    foot = to_space(shape, to_unit(shape, position) / radius(shape, position)[:, None])
    velocity, pressure = volume_flow(shape, foot)
    np.testing.assert_allclose(pressure, surface_flow(shape, foot, outward(shape, foot))[0], rtol=1e-10)
    assert np.abs(velocity).max() < 1e-10
    velocity, pressure = volume_flow(shape, np.array([[-60.0, 0, 1], [0, 60, 1]]))
    np.testing.assert_allclose(velocity, [[38.889, 0, 0]] * 2, atol=0.3)
    assert np.abs(pressure).max() < 1


def test_shapes_depend_on_seed_and_number_only():
    assert sample_shape(3, 7) == sample_shape(3, 7) != sample_shape(3, 8) != sample_shape(4, 8)
