"""The aero application: its equations, what ranks read and send, one result on every layout, its files, its manners."""

import json
import math
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from aero_worker import settings
from torch.distributed.tensor import Shard

from apps.aero import evaluate, infer, metrics, train
from apps.aero.dataset import Points, Scaling, sample_start
from apps.aero.forces import reference_of
from apps.aero.model import ModelConfig, SliceAttention, Transolver
from apps.aero.outputs import written
from core import InputError, checkpoint, debug, scatter_tensor
from core.dispatch import set_fallback
from data.aero import build
from data.aero.archive import AeroReader, write_archive
from data.aero.geometry import area_vectors
from data.aero.splits import hold_out
from data.aero.synthetic import synthetic_archive, synthetic_run
from data.aero.vtk_files import OPENFOAM, read_surface

ROOT = Path(__file__).parent.parent
AHMED = Path(__file__).parent / "data" / "aero"
SMALL = ["--points", "256", "--width", "16", "--layers", "1", "--heads", "2", "--slices", "4", "--log-every", "1"]


def python(*args, ranks=1, cwd=ROOT, **environment):
    """Runs python (under torchrun with ``ranks``) and returns the finished process."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, *launch, *map(str, args)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return synthetic_archive(tmp_path_factory.mktemp("aero") / "a.zarr", runs=6, cells=1000)


@pytest.fixture(scope="module")
def ahmed(tmp_path_factory):
    path = tmp_path_factory.mktemp("ahmed") / "a.zarr"
    folders = [str(AHMED / name) for name in ("ahmed25", "ahmed00")]
    command = ["--run", folders[0], "--run", folders[1], "--train", "ahmed25", "--test", "ahmed00", "--out", str(path)]
    assert build.main(command) == 0
    return path


@pytest.fixture(scope="module")
def trained(ahmed, tmp_path_factory):
    """A barely trained model of the real body: (checkpoint, archive)."""
    out = tmp_path_factory.mktemp("trained")
    result = train.main(["--archive", str(ahmed), "--out", str(out), "--steps", "2", *SMALL])
    assert (out / "figure.png").stat().st_size > 10_000
    return str(result.checkpoint), str(ahmed)


# The model


def test_attention_is_what_the_equations_say():
    torch.manual_seed(0)
    layer, x = SliceAttention(12, heads=3, slices=5).double(), torch.randn(2, 40, 12, dtype=torch.float64)
    expected = torch.zeros(2, 40, 12, dtype=torch.float64)
    for b in range(2):
        for h in range(3):
            part = slice(4 * h, 4 * h + 4)
            w = torch.softmax(layer.slice(layer.place(x[b])[:, part]) / 0.5, dim=-1)
            s = (w.T @ layer.value(x[b])[:, part]) / (w.sum(0)[:, None] + 1e-5)
            scores = layer.query(s) @ layer.key(s).T / math.sqrt(4)
            expected[b, :, part] = w @ torch.softmax(scores, dim=-1) @ layer.token(s)
    torch.testing.assert_close(layer(x), layer.out(expected))


def test_model_is_equivariant_under_permutation_of_points():
    torch.manual_seed(0)
    model, x = Transolver(ModelConfig(width=16, layers=2, heads=2, slices=4)).double(), torch.randn(1, 50, 6).double()
    order = torch.randperm(50)
    torch.testing.assert_close(model(x[:, order]), model(x)[:, order])


def one_reduction(meshes, points, mixed):
    """What one layer sends forward; called on every worker."""
    set_fallback("error")
    layer = SliceAttention(16, heads=2, slices=4)
    x = scatter_tensor(torch.randn(1, points, 16), None, meshes["2"], [Shard(1)], sizes={0: (points - 3, 3)})
    with debug.trace() as trace, torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        layer(x)
    set_fallback("warn")
    return trace.kinds(), trace.bytes()


def test_a_layer_sends_one_small_sum_whatever_the_number_of_points(pool):
    """And always in fp32: a slice may hold millions of points, whose sum bf16 would lose."""
    for points, mixed in ((20, False), (5000, False), (5000, True)):
        for kinds, sent in pool.run(one_reduction, points, mixed):
            assert kinds == ["all_reduce"]
            assert sent == 1 * 2 * 4 * (8 + 1) * 4  # B H G (D + 1) fp32; a ring of two sends the buffer once


# What is read


def test_samples_are_rings_of_stored_rows(archive):
    reader = AeroReader(archive)
    scaling, key = Scaling.of(reader), "run_1/surface"
    rows = reader.shape(key, "area")[0]
    points, whole = Points(reader, scaling, rows - 10, 100), Points(reader, scaling)
    order = (np.arange(100) + rows - 10) % rows
    for name in ("features", "targets", "weight"):
        full = whole.read("run_1", name, (slice(None),))
        assert points.shape("run_1", name) == (100, *full.shape[1:])
        for part in (slice(0, 100), slice(3, 7), slice(8, 12), slice(50, 60), slice(5, 5)):
            assert np.array_equal(points.read("run_1", name, (part,)), full[order[part]])
    starts = [sample_start(rows, 0, position) for position in range(200)]
    assert len(set(starts)) > 150 and min(starts) >= 0 and max(starts) < rows


def test_scaling_makes_training_fields_standard_and_is_undone(archive):
    reader = AeroReader(archive)
    scaling = Scaling.from_state(json.loads(json.dumps(Scaling.of(reader).state())))
    points = Points(reader, scaling)
    targets = np.concatenate([points.read(run, "targets", (slice(None),)) for run in reader.splits["train"]])
    assert np.abs(targets.mean(0)).max() < 1e-3 and np.abs(targets.std(0) - 1).max() < 1e-3
    pressure, shear = (reader.read("run_1/surface", name) for name in ("pressure", "shear"))
    for U in (reader.run_attrs("run_1")["U"], 20.0):
        back = scaling.fields(torch.from_numpy(scaling.targets(pressure, shear, U)), U)
        torch.testing.assert_close(back, torch.from_numpy(np.c_[pressure, shear]).double(), rtol=1e-6, atol=1e-4)
    twice = scaling.fields(torch.ones(1, 4), 2 * scaling.U)
    torch.testing.assert_close(twice, 4 * scaling.fields(torch.ones(1, 4), scaling.U))


# Scores


def test_scores_are_those_of_the_definition_and_add_up_over_parts():
    rng = np.random.default_rng(0)
    rows, std = 50, (1.0, 2.0, 3.0, 4.0)
    fields = {name: torch.from_numpy(rng.normal(size=(rows, 3))) for name in ("position", "normal", "shear")}
    fields |= {"area": torch.from_numpy(rng.uniform(1, 2, rows)), "pressure": torch.from_numpy(rng.normal(size=rows))}
    predicted, weight = (
        torch.from_numpy(rng.normal(size=(rows, 4))),
        torch.from_numpy(rng.integers(0, 2, rows)).double(),
    )
    attrs = {"rho": 1.2, "center": [0, 0, 0], "U": 3.0, "Aref": 2.0, "Lref": 1.0}

    def sums(part):
        return metrics.case_sums(predicted[part], {k: v[part] for k, v in fields.items()}, weight[part], attrs, std)

    parts = [sums(slice(0, 13)), sums(slice(13, 13)), sums(slice(13, rows))]
    total = {key: sum(part[key] for part in parts) for key in parts[0]}
    assert {key: tuple(value.shape) for key, value in total.items()} == metrics.SHAPES
    scores = metrics.case_scores(total, reference_of(attrs), {"Cd": 7.0})
    seen, area = weight.bool(), fields["area"]
    error, true = predicted[:, 1:] - fields["shear"], fields["shear"]
    a = area[seen, None]
    assert scores["shear_l2"] == pytest.approx((error[seen].norm() / true[seen].norm()).item())
    assert scores["shear_l2_area"] == pytest.approx(
        ((a * error[seen] ** 2).sum() / (a * true[seen] ** 2).sum()).sqrt().item()
    )
    assert scores["shear_mae"] == pytest.approx(error[seen].norm(dim=1).mean().item())
    assert scores["pressure_mae"] == pytest.approx((predicted[:, 0] - fields["pressure"])[seen].abs().mean().item())
    drag = (-(predicted[:, 0] * fields["normal"][:, 0]) - predicted[:, 1]) * area  # of all cells, masked or not
    assert scores["Cd"] == pytest.approx((drag.sum() / (0.5 * 9 * 2.0)).item())
    assert scores["Cd_stated"] == 7.0 and "Cl_stated" not in scores


def test_r2_of_coefficients():
    assert metrics.r2([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == 1
    assert metrics.r2([2.0, 2.0, 2.0], [1.0, 2.0, 3.0]) == 0
    assert metrics.r2([3.0, 2.0, 1.0], [1.0, 2.0, 3.0]) == -3
    assert metrics.r2([1.0], [2.0]) is None and metrics.r2([1.0, 2.0], [2.0, 2.0]) is None


# One result on every layout


@pytest.fixture(scope="module")
def layouts(archive, tmp_path_factory):
    """{name: (folder, ranks)} of the same training and inference on one process, on a domain of two, and on 2 x 2."""
    found = {}
    for name, ranks, domain in (("one", 1, 1), ("domain", 2, 2), ("2 x 2", 4, 2)):
        folder = tmp_path_factory.mktemp("layout")
        done = python(ROOT / "tests/aero_worker.py", folder, archive, domain, ranks=ranks)
        assert done.returncode == 0, done.stderr[-3000:]
        found[name] = folder, [json.loads((folder / f"rank_{r}.json").read_text()) for r in range(ranks)]
    return found


def test_one_process_learns(layouts):
    losses = layouts["one"][1][0]["losses"]
    assert len(losses) == 10 and losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", ["domain", "2 x 2"])
def test_sharded_equals_single(layouts, name):
    (one, (first,)), (many, ranks) = layouts["one"], layouts[name]
    expected, got = (torch.load(folder / "gradients.pt") for folder in (one, many))
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-10, atol=1e-10, msg=key)
    assert max(value.abs().max() for value in expected.values()) > 1e-3
    for rank in ranks:
        np.testing.assert_allclose(rank["losses"], first["losses"], rtol=1e-5)
        assert rank["scores"] == pytest.approx(first["scores"], rel=1e-4)
    scores = [json.loads((folder / "run_1.json").read_text())["scores"] for folder in (one, many)]
    assert scores[1] == pytest.approx(scores[0], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name, share", [("domain", 1 / 2), ("2 x 2", 1 / 4)])
def test_each_rank_reads_its_own_rows(layouts, name, share):
    """Bytes fetched from storage; a range of rows may touch a chunk more at either end, and each array has an index."""
    whole = layouts["one"][1][0]["bytes_read"]
    for rank in layouts[name][1]:
        assert share * 0.8 < rank["bytes_read"] / whole < share * 1.3


def test_resume_equals_uninterrupted(layouts, archive, tmp_path):
    """From the checkpoint after five steps of two ranks, on one process."""
    shutil.copytree(layouts["domain"][0] / "checkpoints" / "step_00000005", tmp_path / "checkpoints" / "step_00000005")
    config = replace(settings(tmp_path, archive), resume=True)
    flags = [part for key in ("steps", "lr", "warmup", "points", "width", "layers", "heads", "slices", "out", "archive")
             for part in (f"--{key}", str(getattr(config, key)))]  # fmt: skip
    result = train.main([*flags, "--resume", "--checkpoint-every", "5", "--validate-every", "10"])
    expected = layouts["one"][1][0]
    np.testing.assert_allclose(result.losses, expected["losses"], rtol=1e-5)
    assert result.scores == pytest.approx(expected["scores"], rel=1e-4)


# Files


@pytest.mark.parametrize("source", [None, AHMED / "ahmed00" / "body.vtp"])
def test_inference_writes_a_surface_whose_forces_are_the_printed_ones(trained, tmp_path, source, capsys):
    import pyvista

    path, archive = trained
    flags = ["--vtp", str(source)] if source else []
    command = ["--checkpoint", path, "--archive", archive, "--run", "ahmed00", "--out", str(tmp_path), *flags]
    scores = infer.main(command)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ahmed00.json", "ahmed00.png", "ahmed00.vtp"]
    data = pyvista.read(tmp_path / "ahmed00.vtp").cell_data
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
    assert f"{scores['Cd']:.5f}" in capsys.readouterr().out
    assert json.loads((tmp_path / "ahmed00.json").read_text())["scores"] == scores


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


def test_evaluation_reports_a_run_that_was_not_trained_on(trained, tmp_path):
    path, archive = trained
    results = evaluate.main(["--checkpoint", path, "--archive", archive, "--split", "test", "--out", str(tmp_path)])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ahmed00.png", "parity.png", "results.json"]
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert results["label"] == "test runs, not trained on" and results["runs_that_were_trained_on"] == []
    assert results["summary"]["cases"] == 1 and results["summary"]["Cd_r2"] is None
    assert results["runs"]["ahmed00"]["Cd_true"] == pytest.approx(0.31069, abs=1e-5)


def test_outputs_are_whole_or_absent(tmp_path):
    with pytest.raises(RuntimeError), written(tmp_path / "a", tmp_path / "b") as (a, b):
        a.write_text("1")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
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
    assert "does not fit 1 processes" in refused(train.main, ["--archive", archive, *common, "--domain", "2"], capsys)
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

    assert "no such run; the archive has ahmed25 ahmed00" in infer_with(run="ahmed99")
    assert "nowhere" in infer_with(checkpoint=tmp_path / "nowhere")
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


def test_more_ranks_than_rows_end_every_rank_with_status_2(archive, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--archive", archive, "--out", tmp_path / "out", *SMALL, "--points", "1", "--domain", "2", "--steps", "1"]
    command = [sys.executable, "-m", "apps.aero.train", *map(str, flags)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [subprocess.Popen(command, cwd=ROOT, env=env | {"RANK": str(r), "LOCAL_RANK": str(r)},
                              stderr=subprocess.PIPE, text=True) for r in range(2)]  # fmt: skip
    for rank in ranks:
        error = rank.communicate(timeout=60)[1]
        assert rank.returncode == 2, error
        assert "2 ranks cannot share the 1 rows" in error and "--domain" in error
    assert not list(tmp_path.glob("out/checkpoints/*"))
