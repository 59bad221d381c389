"""Inference from files of new bodies: the same answer as from the archive, in any frame and unit, and its warnings."""

import json

import numpy as np
import pytest
import torch
from aero_runs import SMALL
from launch import succeed
from test_aero_bodies import soup, write_binary

from apps.aero import evaluate, infer, train
from apps.aero.body import axes
from apps.aero.dataset import Scaling
from apps.aero.forces import moved
from apps.aero.model import ModelConfig, Transolver
from apps.aero.predict import gathered, outputs, scattered
from core import checkpoint
from data.aero.archive import AeroReader
from data.aero.cells import surface_arrays
from data.aero.geometry import Polygons, triangles
from data.aero.loads import force_sums
from data.aero.synthetic import make_body, outward, surface_flow, synthetic_run, truth
from data.aero.topology import winding
from data.aero.vtk_files import read_polygons, write_stl, write_surface
from data.aero.writing import write_archive

RUNS, CELLS = 3, 600
COEFFICIENTS = ("Cd", "Cl", "Cs", "CmPitch", "Clf", "Clr", "Cd_friction")


def triangular_run(number):
    """A synthetic body all of triangles, and its corners, which wind inward."""
    body = make_body(0, number, CELLS)
    corners = triangles(body.mesh).astype(np.float32)
    mesh = soup(corners)
    position = corners.astype(np.float64).mean(axis=1)
    flow = surface_flow(body.shape, position, outward(body.shape, position))
    arrays, facts = surface_arrays(mesh, *(f.astype(np.float32) for f in flow), file="body")
    run = synthetic_run(0, number, 100)
    run.surface, run.attrs = arrays, truth(body.shape) | facts | {"sources": {}}
    return run, corners


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(checkpoint, archive, corners of run_3, attributes of run_3, folder); run_1 and run_2 were trained on."""
    folder = tmp_path_factory.mktemp("infer")
    runs = [triangular_run(number) for number in range(1, RUNS + 1)]
    splits = {"train": ["run_1", "run_2"], "valid": [], "test": ["run_3"]}
    write_archive(folder / "a.zarr", [run for run, _ in runs], splits)
    result = train.main(["--archive", str(folder / "a.zarr"), "--out", str(folder / "out"), "--steps", "4", *SMALL])
    run, corners = runs[-1]
    write_stl(folder / "car.stl", corners[:, ::-1])
    return str(result.checkpoint), str(folder / "a.zarr"), corners, run.attrs, folder


def flags(made, out, **changes):
    path, _, _, attrs, folder = made
    known = {
        "checkpoint": path,
        "surface": folder / "car.stl",
        "aref": attrs["Aref"],
        "lref": attrs["Lref"],
        "out": out,
    }
    return [f"--{name.replace('_', '-')}={value}" for name, value in (known | changes).items() if value is not None]


def inferred(made, out, **changes):
    """(scores, JSON, VTP) of an inference from a surface file."""
    import pyvista

    options = flags(made, out, **changes)
    scores = infer.main(options)
    (table,) = out.glob("*.json")
    return scores, json.loads(table.read_text()), pyvista.read(table.with_suffix(".vtp"))


@pytest.fixture(scope="module")
def from_archive(made):
    import pyvista

    path, archive, _, _, folder = made
    scores = infer.main(["--checkpoint", path, "--archive", archive, "--run", "run_3", "--out", str(folder / "i")])
    return scores, pyvista.read(folder / "i" / "run_3.vtp")


@pytest.fixture(scope="module")
def from_stl(made):
    return inferred(made, made[-1] / "s")


def same(found, expected, scale=1e-4):
    for name in COEFFICIENTS:
        assert found[name] == pytest.approx(expected[name], abs=scale), name


def test_an_stl_gives_the_fields_and_forces_of_the_archive(from_archive, from_stl):
    scores, table, data = from_stl
    same(scores, from_archive[0], 2e-5)
    for name in ("pressure_predicted", "shear_predicted", "Cp_predicted", "Cf_predicted"):
        expected = from_archive[1].cell_data[name]
        np.testing.assert_allclose(data.cell_data[name], expected, atol=2e-5 * np.abs(expected).max())
    assert "Cd_true" in from_archive[0] and "Cd_true" not in scores and "pressure_true" not in data.cell_data
    assert table["winding"] == "outward" and table["open_edges"] == 0 and "by_part" in table
    assert table["nearest"]["run"] in ("run_1", "run_2")
    assert data.n_cells == len(from_archive[1].cell_data["cell_id"])


def test_the_written_surface_holds_the_printed_forces(made, from_stl):
    scores, table, _ = from_stl
    mesh = read_polygons(made[-1] / "s" / "car.vtp")
    fields = from_stl[2].cell_data
    arrays, _ = surface_arrays(mesh, fields["pressure_predicted"], fields["shear_predicted"], file="car")
    rows = [arrays[name] for name in ("position", "normal", "area", "pressure", "shear")]
    force = force_sums(*rows, rho=1.0, center=(0, 0, 0))[:2].sum(axis=0)
    q = 0.5 * table["reference"]["U"] ** 2 * table["reference"]["Aref"]
    np.testing.assert_allclose(force / q, [scores["Cd"], scores["Cs"], scores["Cl"]], atol=1e-5)
    np.testing.assert_allclose(force, [scores["force_x"], scores["force_y"], scores["force_z"]], rtol=1e-3, atol=1e-2)


def test_unit_frame_and_ground_are_undone(made, from_stl, tmp_path):
    """A file in millimetres, flow along -y, up along x, standing half a metre higher."""
    frame = axes("-y", "x")
    corners = (made[2][:, ::-1].astype(np.float64) + [0, 0, 0.5]) @ frame * 1000
    write_binary(tmp_path / "mm.stl", corners)
    options = {"surface": tmp_path / "mm.stl", "flow_axis": "-y", "up_axis": "x", "ground": 500}
    with pytest.raises(SystemExit):
        infer.main(flags(made, tmp_path / "no", **options))
    scores, _, data = inferred(made, tmp_path / "o", scale=0.001, chunk=100, **options)
    same(scores, from_stl[0])
    np.testing.assert_allclose(data.points.min(0), corners.reshape(-1, 3).min(0), rtol=1e-6)
    shear = from_stl[2].cell_data["shear_predicted"]
    np.testing.assert_allclose(data.cell_data["shear_predicted"], shear @ frame, atol=1e-3 * np.abs(shear).max())
    fields = data.cell_data
    force = (fields["Cp_predicted"][:, None] * fields["normal"] + fields["Cf_predicted"]) * fields["area"][:, None]
    assert force.sum(axis=0)[1] / data.field_data["Aref"] == pytest.approx(scores["Cd"], abs=1e-5)  # flow along -y


@pytest.mark.parametrize("scale", ["0", "-1", "nan"])
def test_a_scale_is_above_nothing(made, tmp_path, capsys, scale):
    with pytest.raises(SystemExit) as stop:
        infer.main(flags(made, tmp_path / "o", scale=scale))
    assert stop.value.code == 2 and "variable scale" in capsys.readouterr().err


@pytest.mark.parametrize("factor, unit, scale", [(1e3, "millimetres", "0.001"), (1 / 0.0254, "inches", "0.0254")])
def test_a_wrong_unit_is_named_with_its_factor(made, tmp_path, capsys, factor, unit, scale):
    write_binary(tmp_path / "u.stl", made[2] * factor)
    with pytest.raises(SystemExit) as stop:
        infer.main(flags(made, tmp_path / "o", surface=tmp_path / "u.stl"))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and unit in error and f"--scale {scale}" in error and not (tmp_path / "o").exists()


def test_winding_flat_triangles_and_holes_are_told(made, from_stl, tmp_path):
    corners = made[2][:, ::-1].copy()
    corners[::7] = corners[::7, ::-1]
    flat = corners[:1].copy()
    flat[0, 2] = flat[0, 0]
    write_binary(tmp_path / "mixed.stl", np.concatenate([flat, corners]))
    scores, table, data = inferred(made, tmp_path / "m", surface=tmp_path / "mixed.stl")
    same(scores, from_stl[0])
    notes = " ".join(table["notes"])
    assert table["winding"] == "mixed" and "1 cells without area" in notes and "turned outward" in notes
    assert data.cell_data["valid"][0] == data.cell_data["area"][0] == 0
    assert np.isnan(data.cell_data["pressure_predicted"][0]) and data.cell_data["valid"][1:].all()
    np.testing.assert_allclose(data.cell_data["Cp_predicted"][1:], from_stl[2].cell_data["Cp_predicted"], atol=1e-4)
    write_binary(tmp_path / "open.stl", made[2][40:, ::-1])
    table = inferred(made, tmp_path / "p", surface=tmp_path / "open.stl")[1]
    assert table["open_edges"] > 0 and "Forces on an open surface are not those of a body" in " ".join(table["notes"])


def test_a_body_without_area_is_refused(made, tmp_path, capsys):
    write_binary(tmp_path / "line.stl", np.zeros((5, 3, 3)) + np.arange(3)[:, None])
    with pytest.raises(SystemExit):
        infer.main(flags(made, tmp_path / "o", surface=tmp_path / "line.stl"))
    assert "no cell has an area" in capsys.readouterr().err


def test_parts_add_up_and_true_fields_are_judged(made, from_archive, from_stl, tmp_path, capsys):
    corners = made[2][:, ::-1]
    write_stl(tmp_path / "a", corners[:300], "front left")
    write_stl(tmp_path / "b", corners[300:], "rest")
    (tmp_path / "parts.stl").write_text((tmp_path / "a").read_text() + (tmp_path / "b").read_text())
    scores, table, data = inferred(made, tmp_path / "o", surface=tmp_path / "parts.stl")
    printed = capsys.readouterr().out
    assert f"{'front left':>24}{table['by_part']['front left']['Cd']:>13.5f}" in printed
    assert list(table["by_part"]) == ["front left", "rest"] and np.bincount(data.cell_data["part"])[0] == 300
    for name in ("Cd", "Cl", "CmPitch", "force_x", "area"):
        assert sum(part[name] for part in table["by_part"].values()) == pytest.approx(scores[name], rel=1e-9, abs=1e-9)
    true = from_archive[1].cell_data
    names = {"p": true["pressure_true"], "wallShearStress": true["shear_true"]}
    write_surface(tmp_path / "t.vtp", soup(made[2]), names)
    scores, table, data = inferred(made, tmp_path / "t", surface=tmp_path / "t.vtp")
    assert "true fields are taken to be of 38.889 m/s" in " ".join(table["notes"])
    for name in ("pressure_l2", "shear_l2_area", "Cd_true", "pressure_largest"):
        assert scores[name] == pytest.approx(from_archive[0][name], rel=1e-4), name
    assert np.abs(data.cell_data["pressure_error"]).max() == pytest.approx(scores["pressure_largest"], rel=1e-5)


def test_a_coarse_body_is_cut_finer_and_a_strange_one_told(made, from_stl, tmp_path):
    box = np.array([[-2.2, -0.9, 0.2], [2.2, 0.9, 2.8]])
    corner = np.array([[box[(i >> k) & 1, k] for k in range(3)] for i in range(8)])
    quads = [[0, 4, 6, 2], [1, 3, 7, 5], [0, 1, 5, 4], [2, 6, 7, 3], [0, 2, 3, 1], [4, 5, 7, 6]]
    write_surface(tmp_path / "box.vtp", Polygons(corner, np.ravel(quads), np.arange(7) * 4), {"k": np.zeros(6)})
    options = {"surface": tmp_path / "box.vtp", "aref": None}
    _, table, data = inferred(made, tmp_path / "o", **options)
    assert table["reference"]["Aref"] == pytest.approx(1.8 * 2.6, rel=1e-6) and data.n_cells == 6
    assert "consider --cells" in " ".join(table["notes"]) and "OUTSIDE OF THE TRAINING" in " ".join(table["notes"])
    _, table, data = inferred(made, tmp_path / "c", cells=900, speed=20, **options)
    notes = " ".join(table["notes"])
    assert 700 < data.n_cells < 1500 and "6 cells cut into" in notes and "as if Re did not matter" in notes
    assert data.area == pytest.approx(2 * (4.4 * 1.8 + 4.4 * 2.6 + 1.8 * 2.6), rel=1e-6)


def test_old_checkpoints_and_bad_commands(made, tmp_path, capsys):
    import shutil

    shutil.copytree(made[0], tmp_path / "step_00000001")
    state = checkpoint.read_state(made[0])
    assert set(state["task"]["shapes"]) == {"run_1", "run_2"} and state["task"]["reference"]["cells"] > CELLS
    state["task"] = {name: v for name, v in state["task"].items() if name not in ("shapes", "reference")}
    (tmp_path / "step_00000001" / "state.json").write_text(json.dumps(state))
    _, table, _ = inferred(made, tmp_path / "o", checkpoint=tmp_path / "step_00000001")
    assert table["nearest"] is None and "does not describe its training shapes" in " ".join(table["notes"])
    assert table["reference"]["center"] == [1.40009, 0.0, -0.3176]
    run = {"surface": None, "run": "run_3", "archive": made[1], "lref": None}
    for changes in (
        run,
        {"archive": made[1]},
        {"run": "run_3"},
        {"surface": None},
        {"flow_axis": "z"},
        {"aref": -1},
        {"surface": "none.stl"},
    ):
        with pytest.raises(SystemExit):
            infer.main(flags(made, tmp_path / "no", **changes))
        assert capsys.readouterr().err.startswith("error: ") and not (tmp_path / "no").exists()


def on_a_rank(rank, options):
    infer.main(options)


def test_two_ranks_equal_one(made, from_stl, tmp_path):
    succeed(2, on_a_rank, flags(made, tmp_path / "o"), timeout=120)
    found = json.loads((tmp_path / "o" / "car.json").read_text())
    same(found["scores"], from_stl[0], 1e-6)


def test_moments_move_with_their_centre():
    rng = np.random.default_rng(0)
    fields = [
        rng.normal(size=(9, 3)),
        rng.normal(size=(9, 3)),
        rng.random(9),
        rng.normal(size=9),
        rng.normal(size=(9, 3)),
    ]
    at = [force_sums(*fields, rho=1.2, center=center) for center in ((0, 0, 0), (1, 2, 3))]
    np.testing.assert_allclose(moved(at[0], (0, 0, 0), (1, 2, 3)), at[1], atol=1e-12)


def chunks(meshes, mesh, chunk):
    """Fields of cells that rank 0 holds, on the ranks of a mesh; called on every worker."""
    if meshes[mesh].get_coordinate() is None:
        return None
    torch.manual_seed(0)
    model = Transolver(ModelConfig(width=16, layers=3, heads=2, slices=4)).double().eval()
    rng = np.random.default_rng(0)
    scaling = Scaling((0.0,) * 3, (1.0,) * 3, (0.0,) * 4, (1.0,) * 4, 30.0)
    cells = rng.normal(size=(301, 3)), rng.normal(size=(301, 3))
    mine = cells if torch.distributed.get_rank() == 0 else (None, None)
    cloud = scattered(model, scaling, mine, meshes[mesh])
    return gathered(scaling.fields(outputs(model, [cloud], meshes[mesh], chunk)[0], 30.0), cloud)


def test_chunks_and_ranks_do_not_change_the_answer(pool):
    whole = pool.run(chunks, "4", None)
    for mesh, chunk in (("4", 7), ("4", 1000), ("3", 1), ("3", None)):
        for found in pool.run(chunks, mesh, chunk)[:3]:
            np.testing.assert_allclose(found, whole[0], rtol=1e-9, atol=1e-11)
    assert np.abs(whole[0]).max() > 0.01


def test_evaluation_stands_beside_the_nearest_shape(made, tmp_path):
    """A test run that is a training run under another name is the field of its nearest shape exactly."""
    twins = [triangular_run(1)[0], triangular_run(2)[0], triangular_run(1)[0]]
    twins[2].id = "run_4"
    write_archive(tmp_path / "b.zarr", twins, {"train": ["run_1", "run_2"], "valid": [], "test": ["run_4"]})
    out = tmp_path / "e"
    options = ["--checkpoint", made[0], "--archive", str(tmp_path / "b.zarr"), "--out", str(out), "--chunk", "500"]
    results = evaluate.main(options)
    near, mean = (results["baselines"][name]["runs"]["run_4"] for name in ("nearest_shape", "mean_field"))
    assert near["from"] == "run_1" and near["distance"] < 1e-6 and near["pressure_l2"] < 1e-3 < mean["pressure_l2"]
    attrs = AeroReader(tmp_path / "b.zarr").run_attrs("run_1")
    assert near["Cd"] == attrs["Cd"] != mean["Cd"]
    scores = results["runs"]["run_4"]
    assert scores["Cd_constant_true"] * 2.17 == pytest.approx(scores["Cd_true"] * attrs["Aref"])
    assert scores["CmPitch_constant_true"] != pytest.approx(scores["CmPitch_true"], rel=1e-3)
    assert scores["Clf_constant_true"] + scores["Clr_constant_true"] == pytest.approx(scores["Cl_constant_true"])
    assert scores["pressure_largest"] > scores["pressure_mae"] and scores["shear_y_l2"] > 0
    assert (
        results["summary"]["Cs_r2"] is None
        and results["pairs"] is None
        and results["summary"]["Cd_mae_counts"] == pytest.approx(1000 * abs(scores["Cd_error"]))
    )
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4 and "http" not in page and "run_4" in page
    assert "not the one that the model was trained on" not in page


def test_constant_pressure_on_a_closed_file_has_no_force(made):
    found = winding(soup(made[2].astype(np.float64)), "car")
    area = np.linalg.norm(found.vectors, axis=1)
    normal = found.vectors * found.turn[:, None] / area[:, None]
    still = np.zeros((len(area), 3))
    sums = force_sums(found.centers, normal, area, np.full(len(area), 1e3), still, rho=1.0, center=(0, 0, 0))
    assert np.abs(sums).max() < 1e-9 * 1e3 * area.sum() and found.open_share < 1e-12
