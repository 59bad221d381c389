"""The commands of the aero application: the files they write, what they import, and how they refuse bad input."""

import json
import os
import shutil
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from aero_runs import AHMED, SMALL, python
from launch import launch
from torch.distributed.run import get_args_parser

from apps.aero import evaluate, figures, infer, train
from apps.aero.dataset import Points, Scaling
from apps.outputs import temporary, written
from core import InputError, checkpoint
from data.aero.archive import AeroReader
from data.aero.geometry import area_vectors
from data.aero.splits import hold_out
from data.aero.synthetic import synthetic_archive, synthetic_run
from data.aero.vtk_files import OPENFOAM, read_surface
from data.aero.writing import write_archive


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return synthetic_archive(tmp_path_factory.mktemp("aero") / "a.zarr", runs=3, cells=400)


@pytest.fixture(scope="module")
def trained(ahmed, tmp_path_factory):
    """A barely trained model of the real body: (checkpoint, archive)."""
    out = tmp_path_factory.mktemp("trained")
    result = train.main(["--archive", str(ahmed), "--out", str(out), "--steps", "2", *SMALL])
    assert (out / "figure.png").stat().st_size > 10_000
    return str(result.checkpoint), str(ahmed)


# Files


@pytest.mark.parametrize("source", [None, AHMED / "ahmed00" / "body.vtp"])
def test_inference_writes_a_surface_whose_forces_are_the_printed_ones(trained, tmp_path, source, capsys):
    import pyvista

    path, archive = trained
    flags = ["--vtp", str(source)] if source else []
    command = ["--checkpoint", path, "--archive", archive, "--run", "ahmed00", "--out", str(tmp_path), *flags]
    scores = infer.main(command)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ahmed00.json", "ahmed00.png", "ahmed00.vtp"]
    file = pyvista.read(tmp_path / "ahmed00.vtp")
    data = file.cell_data
    for kind, end in (("predicted", ""), ("true", "_true")):  # from the file alone, of points and of polygons
        force = data[f"Cp_{kind}"][:, None] * data["normal"] + data[f"Cf_{kind}"]
        found = -(force * data["area"][:, None]).sum(axis=0, dtype=float) / file.field_data["Aref"]
        assert found == pytest.approx([scores[f"{name}{end}"] for name in ("Cd", "Cs", "Cl")], abs=1e-5)
    assert data["valid"].all() and "part" not in data
    mesh, true = read_surface(AHMED / "ahmed00" / "body.vtp", OPENFOAM)
    assert np.array_equal(data["cell_id"], np.arange(len(mesh)))
    assert np.array_equal(data["pressure_true"], true["pressure"])
    assert np.array_equal(data["shear_true"], true["shear"])
    np.testing.assert_allclose(data["shear_error"], data["shear_predicted"] - data["shear_true"], atol=1e-3)
    if source:
        mesh = read_surface(tmp_path / "ahmed00.vtp", {"pressure": "pressure_predicted", "shear": "shear_predicted"})[0]
    vectors = area_vectors(mesh)[0]  # the file winds inward, so these point into the body
    area = np.linalg.norm(vectors, axis=1)[:, None]
    attrs = AeroReader(archive).run_attrs("ahmed00")
    for kind, name in (("predicted", "Cd"), ("true", "Cd_true")):
        force = (data[f"pressure_{kind}"][:, None] * vectors - data[f"shear_{kind}"] * area).sum(axis=0)
        assert force[0] / (0.5 * attrs["U"] ** 2 * attrs["Aref"]) == pytest.approx(scores[name], abs=1e-5)
    assert scores["Cd_true"] == pytest.approx(0.31069, abs=1e-5) and scores["Cd_stated"] == pytest.approx(0.31069)
    assert scores["Cl_true"] == pytest.approx(-0.190738, abs=1e-5)
    told, lines = json.loads((tmp_path / "ahmed00.json").read_text()), capsys.readouterr().out.splitlines()
    assert told["scores"] == scores and told["validation"]["runs"] == "training runs"  # there are no others
    start = next(i for i, line in enumerate(lines) if line.split() == ["predicted", "+-", "true", "fields", "stated"])
    rows = {line.split()[0]: line.split()[1:] for line in lines[start + 1 : start + 13]}
    assert list(rows)[6:] == ["Clf", "Clr", "Cs", "CmRoll", "CmPitch", "CmYaw"]
    for name, row in rows.items():
        mean = [told["validation"][f"{name}_mae"]] if name in ("Cd", "Cl") else []
        known = [scores[f"{name}_stated"]] if f"{name}_stated" in scores else []
        assert row == [f"{value:.5f}" for value in (scores[name], *mean, scores[f"{name}_true"], *known)], name
    text = " ".join(lines[start + 13 :])
    assert "lift + up" in text and "on its training runs" in text and "by the solver" in text


def test_prediction_does_not_see_held_back_values(tmp_path):
    """Held-out cells are judged alone, forces still come from all cells, and their targets never reach the loss."""
    run = synthetic_run(0, 1, cells=600)
    make = {"splits": {"train": ["run_1"], "valid": [], "test": []}, "holdout": hold_out(0.3, "blocks", 0)}
    write_archive(tmp_path / "a.zarr", [run], **make)
    out = tmp_path / "out"
    result = train.main(["--archive", str(tmp_path / "a.zarr"), "--out", str(out), "--steps", "2", *SMALL])
    state = checkpoint.read_state(result.checkpoint)["task"]
    assert state["validated_on"] == "heldout"
    spoilt = replace(run, surface={name: values.copy() for name, values in run.surface.items()})
    held = make["holdout"]("run_1", "surface", run.surface["position"])
    spoilt.surface["pressure"][held] = 1e6
    write_archive(tmp_path / "b.zarr", [spoilt], **make)
    again = train.main(["--archive", str(tmp_path / "b.zarr"), "--out", str(tmp_path / "b"), "--steps", "2", *SMALL])
    assert again.losses == result.losses
    results = evaluate.main(["--checkpoint", str(result.checkpoint), "--archive", str(tmp_path / "a.zarr"),
                             "--split", "heldout", "--out", str(tmp_path / "e")])  # fmt: skip
    assert results["label"].startswith("interpolation") and results["runs"]["run_1"]["pressure_l2"] > 0
    reader = AeroReader(tmp_path / "a.zarr")
    weight = Points(reader, Scaling.of(reader)).read("run_1", "weight", (slice(None),))
    assert (weight == 0).sum() == held.sum() > 0


def test_evaluation_reports_a_run_that_was_not_trained_on(trained):
    path, archive = trained
    results = evaluate.main(["--checkpoint", path, "--archive", archive, "--split", "test"])
    out = Path(path).parents[1] / "evaluation"  # in the folder of the run
    assert sorted(p.name for p in out.iterdir()) == [
        "ahmed00.png",
        "ahmed00_profiles.png",
        "parity.png",
        "report.html",
        "results.json",
        "trend.png",
    ]
    assert json.loads((out / "results.json").read_text()) == results
    assert results["label"] == "test runs, not trained on" and results["runs_that_were_trained_on"] == []
    assert evaluate.label_of("test", ["ahmed25"]) == "test runs, 1 of them trained on"  # of an archive dealt anew
    assert results["summary"]["cases"] == 1 and results["summary"]["Cd_r2"] is None
    assert results["runs"]["ahmed00"]["Cd_true"] == pytest.approx(0.31069, abs=1e-5)


def test_names_in_a_figure_stay_inside_and_cover_nothing(tmp_path, monkeypatch):
    """Runs at the edges, and two beside each other."""
    kept = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: kept.append(figure))
    pairs = {
        "run_21": (0.037, -0.070),
        "run_22": (-0.037, -0.110),
        "run_23": (0.092, -0.076),
        "run_24": (-0.272, -0.193),
    }
    cases = {run: {f"{c}{e}": v for c in ("Cd", "Cl", "CmPitch") for e, v in zip(("_true", ""), pair)}
             for run, pair in pairs.items()}  # fmt: skip
    figures.draw_parity(tmp_path / "a.png", cases, "runs")
    kept[0].draw_without_rendering()
    for ax in kept[0].axes:
        assert {text.get_text() for text in ax.texts} == {"run_21", "run_23", "run_24"}
        boxes = [text.get_window_extent() for text in ax.texts]
        assert all(ax.bbox.contains(*corner) for box in boxes for corner in (box.min, box.max))
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
        dots = ax.transData.transform(list(pairs.values()))
        assert not any(box.contains(*dot) for box in boxes for dot in dots)


@pytest.mark.parametrize("config", [train.TrainConfig, infer.InferConfig, evaluate.EvaluateConfig])
def test_torchrun_passes_every_option_on(config):
    """Under Python 3.11 it refuses what may be short for several options of its own, behind the command's name too."""
    for field in fields(config):
        flag = "--" + field.name.replace("_", "-")
        assert get_args_parser().parse_args(["-m", "command", flag, "1"]).training_script_args == [flag, "1"]


def test_outputs_are_whole_or_absent(tmp_path):
    with pytest.raises(RuntimeError), written(tmp_path / "a", tmp_path / "b") as (a, b):
        a.write_text("1")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    temporary(tmp_path / "a").write_text("of a run that was killed")
    with written(tmp_path / "a") as (a,):
        a.write_text("1")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "1")]
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"), written(tmp_path / "file" / "a"):
        pass


# Manners

BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"vtk", "vtkmodules", "pyvista", "cfgrib", "eccodes", "netCDF4", "h5netcdf", "h5py",
                                  "scipy", "pyproj", "matplotlib", "dask"}:
            raise ModuleNotFoundError(f"blocked: {name}", name=name.split(".")[0])
sys.meta_path.insert(0, Blocked())
from apps.aero.train import main
main(sys.argv[1:])
"""


def test_training_needs_torch_numpy_xarray_and_zarr_alone(archive, tmp_path):
    done = python("-c", BLOCKED, "--archive", archive, "--out", tmp_path, "--steps", "2", *SMALL)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "step_00000002" in done.stdout and "no figure: matplotlib is not installed" in done.stderr


def refused(command, argv, capsys):
    with pytest.raises(SystemExit) as stop:
        command([str(part) for part in argv])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_training_refuses_bad_input(archive, tmp_path, capsys):
    out = tmp_path / "out"
    common = ["--out", out, "--steps", "1", *SMALL]
    damaged = tmp_path / "damaged.zarr"
    shutil.copytree(archive, damaged)
    shard = damaged / "runs" / "run_2" / "surface" / "shear" / "c" / "0" / "0"
    os.truncate(shard, shard.stat().st_size - 100)
    error = refused(train.main, ["--archive", damaged, *common], capsys)
    assert str(shard) in error and "run_2/surface/shear" in error and "Build the archive again" in error
    shard.unlink()
    assert f"{shard}, variable run_2/surface/shear: missing" in refused(
        train.main, ["--archive", damaged, *common], capsys
    )
    shutil.rmtree(damaged / "runs" / "run_2" / "surface" / "shear")
    assert "no such field" in refused(train.main, ["--archive", damaged, *common], capsys)
    (damaged / "zarr.json").write_text("{")
    assert "cannot be opened as Zarr" in refused(train.main, ["--archive", damaged, *common], capsys)
    missing = tmp_path / "nothing.zarr"
    error = refused(train.main, ["--archive", missing, *common], capsys)
    assert str(missing) in error and "python -m data.aero.build" in error
    error = refused(train.main, ["--archive", archive, *common, "--domain", "2"], capsys)
    assert "--domain 2 does not divide 1 process. Start a multiple of 2" in error
    assert "--heads" in refused(train.main, ["--archive", archive, *common, "--heads", "3"], capsys)
    assert "--points" in refused(train.main, ["--archive", archive, *common, "--points", "0"], capsys)
    assert not out.exists()


def test_resume_refuses_another_model_and_another_archive(trained, archive, tmp_path, capsys):
    path, ahmed = trained
    shutil.copytree(Path(path).parent, tmp_path / "checkpoints")
    common = ["--out", tmp_path, "--steps", "4", "--resume", *SMALL]
    error = refused(train.main, ["--archive", archive, *common], capsys)
    assert "statistics_hash" in error and "another archive" in error
    error = refused(train.main, ["--archive", ahmed, *common, "--width", "32"], capsys)
    assert "step_00000002" in error and "this model has shape" in error


def test_inference_and_evaluation_refuse_bad_input(trained, archive, tmp_path, capsys):
    path, ahmed = trained
    out = tmp_path / "out"
    good = {"--checkpoint": path, "--archive": ahmed, "--run": "ahmed00", "--out": out}

    def infer_with(**changes):
        flags = good | {f"--{name}": value for name, value in changes.items()}
        return refused(infer.main, [part for pair in flags.items() for part in pair], capsys)

    assert "no such run; the archive has train: ahmed25; test: ahmed00" in infer_with(run="ahmed99")
    error = infer_with(checkpoint=tmp_path / "nowhere")
    assert "nowhere" in error and "Give a run's folder" in error
    assert "no checkpoint in it" in infer_with(checkpoint=archive)
    assert "another sha256" in infer_with(vtp=AHMED / "ahmed25" / "body.vtp")
    assert "no such file" in infer_with(vtp=tmp_path / "body.vtp")
    other = tmp_path / "step_00000001"
    shutil.copytree(path, other)
    state = json.loads((other / "state.json").read_text())
    (other / "state.json").write_text(json.dumps(state | {"kind": "weather"}))
    error = infer_with(checkpoint=other)
    assert str(other) in error and "a checkpoint of 'weather'" in error
    state["task"]["model"]["width"] = 32
    (other / "state.json").write_text(json.dumps(state))
    assert "this model has shape" in infer_with(checkpoint=other)
    common = ["--checkpoint", path, "--archive", ahmed, "--out", out]
    error = refused(evaluate.main, [*common, "--split", "valid"], capsys)
    assert "no runs in this split" in error and "train test" in error
    assert "--holdout-cells" in refused(evaluate.main, [*common, "--split", "heldout"], capsys)
    assert not out.exists()


def train_on_a_rank(rank, flags):
    train.main(flags)


def test_more_ranks_than_rows_end_every_rank_with_status_2(archive, tmp_path):
    flags = ["--archive", archive, "--out", tmp_path / "out", *SMALL, "--points", "1", "--domain", "2", "--steps", "1"]
    for status, error in launch(2, train_on_a_rank, [*map(str, flags)]):
        assert status == 2 and "2 ranks cannot share the 1 rows" in error and "--domain" in error, error
    assert not list(tmp_path.glob("out/checkpoints/*"))
