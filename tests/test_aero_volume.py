"""Surface and volume by shared slices: the model's options, cut over ranks, and the air around a body in a file."""

import json

import numpy as np
import pytest
import pyvista
import torch
from launch import exit_status
from torch.distributed.tensor import Shard

from apps.aero import evaluate, infer, submission, train
from apps.aero.air import write_air
from apps.aero.cloud import RunCloud
from apps.aero.dataset import KINDS, Points, Scaling, rows_of
from apps.aero.model import ModelConfig, SliceAttention, Transolver
from apps.aero.predict import Cells, load_model
from apps.aero.profiles import box_of, centreline, wake
from apps.aero.states import States, streamed
from core import InputError, scatter_tensor
from data.aero.archive import AeroReader
from data.aero.geometry import triangles
from data.aero.synthetic import make_body, synthetic_archive
from data.aero.vtk_files import write_hexahedra, write_stl
from data.files import sha256

JOINT = ModelConfig(width=16, layers=2, heads=2, slices=4, volume=(7, 4))
SIZES = ["--points", "256", "--width", "16", "--layers", "1", "--heads", "2", "--slices", "4"]


def test_clouds_meet_in_the_tokens_alone():
    """Two clouds are one cloud of all points where stems are alike: the attention of a joined cloud, cut in two."""
    torch.manual_seed(0)
    layer, x = SliceAttention(16, 2, 4).double(), torch.randn(1, 50, 16).double()
    joined = layer(x)
    parts = layer(x[:, :20], x[:, 20:])
    torch.testing.assert_close(torch.cat(parts, dim=1), joined)
    with pytest.raises(ValueError, match="1 clouds of points for a model of 2"):
        Transolver(JOINT)(torch.randn(1, 5, 6))


def test_options_of_the_slices_do_what_they_say():
    torch.manual_seed(0)
    x = torch.randn(1, 40, 16)
    sharp, soft = (SliceAttention(16, 2, 8, ModelConfig(temperature=t)) for t in (0.02, 5.0))
    soft.load_state_dict(sharp.state_dict() | {"log_temperature": soft.log_temperature})
    most = [(q @ k.mT).softmax(-1).max(-1)[0].mean() for q, k in (sharp.places(x), soft.places(x))]
    assert most[0] > 2 * most[1]
    bounded = SliceAttention(16, 2, 8, ModelConfig(temperature=0.02, low=0.5))
    bounded.load_state_dict(soft.state_dict() | {"log_temperature": bounded.log_temperature})
    by_one, by_half = (q @ k.mT for q, k in (soft.places(x), bounded.places(x)))
    torch.testing.assert_close(by_half * 0.5, by_one * 5.0)
    tied = SliceAttention(16, 2, 8, ModelConfig(tied=True))
    assert not hasattr(tied, "value") and tied(x).shape == x.shape
    plus = SliceAttention(16, 2, 8, ModelConfig(plus=True))
    noisy = plus(x), plus(x)
    assert (noisy[0] - noisy[1]).abs().max() > 1e-3  # noise while training
    plus.eval()
    assert torch.equal(plus(x), plus(x))
    assert plus.places(x).q[..., -1].unique().numel() > 40  # a temperature of every point


def test_weighed_slices_do_not_see_how_a_surface_is_cut():
    """Cells cut in two, each half with half the area, change nothing; without weights they do."""
    torch.manual_seed(0)
    whole = torch.cat([torch.randn(1, 30, 6), torch.rand(1, 30, 1) + 0.5], dim=-1).double()
    halves = whole[:, :10] * torch.tensor([1.0] * 6 + [0.5])
    cut = torch.cat([halves, halves, whole[:, 10:]], dim=1)
    weighed = Transolver(ModelConfig(features=7, width=16, layers=2, heads=2, slices=4, weighed=True)).double()
    torch.testing.assert_close(weighed(cut)[:, 20:], weighed(whole)[:, 10:], rtol=1e-6, atol=1e-8)
    plain = Transolver(ModelConfig(features=7, width=16, layers=2, heads=2, slices=4)).double()
    assert (plain(cut)[:, 20:] - plain(whole)[:, 10:]).abs().max() > 1e-5


def joint(meshes, mesh, plus):
    """Loss and gradients of a joint model on clouds cut over a mesh; called on every worker."""
    if meshes[mesh].get_coordinate() is None:
        return None
    torch.manual_seed(0)
    more = dict(plus=True, tied=True, features=7, weighed=True) if plus else {}
    config = ModelConfig(width=16, layers=2, heads=2, slices=4, volume=(7, 4), **more)
    model, sizes = Transolver(config).double(), ((31, config.features), (45, 7))
    clouds = [torch.rand(1, n, f).double() for n, f in sizes]
    with torch.random.fork_rng():
        torch.manual_seed(7)
        cut = [scatter_tensor(x, None, meshes[mesh], [Shard(1)]) for x in clouds]
        outputs = model(*cut)
        loss = sum(out.square().mean() for out in outputs)
        loss.backward()
    model.eval()
    with torch.no_grad():
        whole = [out.to_local()[0] for out in model(*cut)]
        chunked = streamed(model, [x.to_local()[0] for x in cut], 7, meshes[mesh])
    apart = max((a - b).abs().max().item() for a, b in zip(chunked, whole) if len(a))
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    return float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss), grads, apart


@pytest.mark.parametrize("plus", [False, True])
def test_a_joint_model_is_the_same_on_any_number_of_ranks_and_in_chunks(pool, plus):
    one = pool.run(joint, "1", plus)[0]
    assert one[2] < 1e-9
    for found in pool.run(joint, "3", plus)[:3]:
        assert found[0] == pytest.approx(one[0], rel=1e-10) and found[2] < 1e-9
        for name, value in one[1].items():
            torch.testing.assert_close(found[1][name], value, rtol=1e-8, atol=1e-10, msg=name)


class Truncated(torch.Tensor):
    """Rows of which the last cannot be read."""

    def __getitem__(self, rows):
        raise InputError("is cut short", file="cloud")


def unread(meshes, mesh):
    if meshes[mesh].get_coordinate() is None:
        return
    model, rows = Transolver(ModelConfig(width=16, layers=2, heads=2, slices=4)), torch.rand(9, 6)
    rows = rows.as_subclass(Truncated) if meshes[mesh].get_local_rank() == 1 else rows
    with pytest.raises(InputError, match="cloud: is cut short"):
        States(model, [rows], 4, meshes[mesh])


def test_rows_that_one_rank_cannot_read_end_all(pool):
    pool.run(unread, "3")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder, archive with volumes, {fields: checkpoint})."""
    folder = tmp_path_factory.mktemp("joint")
    archive = synthetic_archive(folder / "a.zarr", runs=4, cells=300, volume=True)
    steps = ["--steps", "2", "--checkpoint-every", "2", "--validate-every", "2", "--archive", str(archive)]
    found = {
        fields: train.main([*SIZES, *steps, "--fields", fields, *more, "--out", str(folder / fields)]).checkpoint
        for fields, more in (
            ("joint", ["--force-weight", "1", "--loss", "huber", "--weighed", "--recompute"]),
            ("volume", ["--plus"]),
        )
    }
    return folder, archive, found


def test_volume_samples_are_scaled_rows(trained):
    reader = AeroReader(trained[1])
    scaling = Scaling.from_state(json.loads(json.dumps(Scaling.of(reader, "volume").state())))
    points, every = Points(reader, scaling), (slice(None),)
    features, targets = (points.read("run_1", name, every) for name in ("features", "targets"))
    assert features.shape[1] == 7 and np.abs(features[:, 6]).max() < 3
    fields = scaling.fields(torch.from_numpy(targets), 38.889).numpy()
    np.testing.assert_allclose(fields[:, 1:], reader.read("run_1/volume", "velocity", every), rtol=1e-5, atol=1e-3)
    twice = scaling.fields(torch.from_numpy(targets), 2 * 38.889).numpy()
    np.testing.assert_allclose(twice, fields * [4, 2, 2, 2], rtol=1e-9)


@pytest.mark.parametrize("fields", ["joint", "volume"])
def test_a_run_is_inferred_with_its_air(trained, fields, tmp_path):
    folder, archive, checkpoints = trained
    common = ["--checkpoint", str(checkpoints[fields]), "--archive", str(archive), "--out", str(tmp_path)]
    scores = infer.main([*common, "--run", "run_4", "--chunk", "100"])
    told = json.loads((tmp_path / "run_4.json").read_text())
    grid = pyvista.read(tmp_path / "run_4_volume.vtu")
    assert grid.n_cells == told["volume"]["points"] and ("Cd" in scores) == (fields == "joint")
    error = np.linalg.norm(grid["velocity_error"]) / np.linalg.norm(grid["velocity_true"])
    assert error == pytest.approx(told["volume"]["velocity_l2"], rel=1e-4)


def counted_air(meshes, mesh, archive, path, part):
    """Writes the air of run_4 by ``mesh``, 100 rows at a time, and counts; called on every worker."""
    if meshes[mesh].get_coordinate() is None:
        return None
    reader, (model, scalings, _) = AeroReader(archive), load_model(path)
    cloud = RunCloud(reader, "run_4", scalings["volume"], meshes[mesh], next(model.parameters()))
    rows = []
    for layer in model.modules():
        layer.register_forward_hook(lambda _layer, inputs, _found: rows.append(inputs[0].shape[-2]))
    states = States(model, [cloud], 100, meshes[mesh], memory=0)
    kept = States(model, [cloud], 100, meshes[mesh])
    for mine, other in zip(states.tokens, kept.tokens):
        torch.testing.assert_close(mine, other)
    air = write_air(part, states, 0, reader.run_attrs("run_4")["U"])
    return max(rows), states.kept, len(states.tokens), air.scores


def test_air_passes_through_in_chunks_on_any_number_of_ranks(trained, tmp_path, pool):
    """No layer ever sees more rows than a chunk, none are kept, and the file is that of one process."""
    _, archive, checkpoints = trained
    common = ["--checkpoint", str(checkpoints["volume"]), "--archive", str(archive), "--run", "run_4"]
    infer.main([*common, "--out", str(tmp_path)])
    expected = pyvista.read(tmp_path / "run_4_volume.vtu")
    told = json.loads((tmp_path / "run_4.json").read_text())["volume"]
    for most, kept, layers, scores in pool.run(
        counted_air, "4", str(archive), checkpoints["volume"], tmp_path / "4.vtu"
    ):
        assert most <= 100 < expected.n_cells / 4 and kept is None and layers == 1
        assert scores == pytest.approx(told, rel=1e-5)
    found = pyvista.read(tmp_path / "4.vtu")
    assert found.array_names == expected.array_names and sorted(found["cell_id"]) == list(range(expected.n_cells))
    np.testing.assert_array_equal(found.points, expected.points)
    for name in found.array_names:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-3, err_msg=name)


def test_a_new_body_in_millimetres_has_its_air_in_its_own_frame(trained, tmp_path, capsys):
    """Flow along -y in the file: velocity comes back along -y, on the cells of a VTU file and on drawn points."""
    _, _, checkpoints = trained
    body = make_body(0, 4, 300, volume=True)
    turn = np.array([[0, -1, 0], [1, 0, 0], [0, 0, 1.0]])  # of the training's vectors to those of the file
    back = turn @ np.diag([1, 1, 1.0])

    def moved(points):
        return (points.astype(np.float64) @ back * 1000).astype(np.float32)

    write_stl(tmp_path / "car.stl", moved(triangles(body.mesh).reshape(-1, 3)).reshape(-1, 3, 3)[:, ::-1])
    mesh = type(body.volume)(moved(body.volume.points), body.volume.connectivity, body.volume.offsets)
    flow = {"p": body.volume_pressure, "U": (body.volume_velocity @ back).astype(np.float32)}
    write_hexahedra(tmp_path / "air.vtu", mesh, flow)
    common = ["--checkpoint", str(checkpoints["joint"]), "--surface", str(tmp_path / "car.stl"), "--scale", "0.001"]
    common += ["--flow-axis=-y", "--out", str(tmp_path)]
    infer.main([*common, "--volume", str(tmp_path / "air.vtu")])
    grid = pyvista.read(tmp_path / "car_volume.vtu")
    np.testing.assert_allclose(grid.points, mesh.points)
    np.testing.assert_array_equal(grid.cell_connectivity, mesh.connectivity)
    assert grid["velocity_predicted"][:, 1].mean() < -5
    np.testing.assert_allclose(grid["velocity_true"], flow["U"], atol=1e-5)
    error, size = (np.linalg.norm(grid[f"velocity_{name}"], axis=1) for name in ("error", "true"))
    volume, told = (
        grid.compute_cell_sizes(length=False, area=False)["Volume"],
        json.loads((tmp_path / "car.json").read_text()),
    )
    assert told["volume"]["velocity_l2_volume"] == pytest.approx(
        np.sqrt((volume * error**2).sum() / (volume * size**2).sum()), rel=1e-3
    )
    infer.main([*common, "--query", "3000"])
    grid = pyvista.read(tmp_path / "car_volume.vtu")
    assert 2000 < grid.n_cells <= 3000 and grid["sdf"].min() > 0
    assert np.ptp(grid.points, axis=0).max() > 10_000 and grid["velocity_predicted"][:, 1].mean() < -5
    for place, words in ((tmp_path / "car.json", "cannot be written"), (tmp_path / "whole", "no such file")):
        more = ["--volume", str(tmp_path / "not.vtu")] if words == "no such file" else ["--query", "3000"]
        assert exit_status(infer.main, [*common[:-1], str(place), *more]) == 2 and words in capsys.readouterr().err
    assert not (tmp_path / "whole").exists()


def test_evaluation_draws_curves_and_exports_every_cell(trained, tmp_path):
    _, archive, checkpoints = trained
    common = ["--archive", str(archive), "--split", "test", "--pictures", "1"]
    joint = ["--checkpoint", str(checkpoints["joint"]), "--export", str(tmp_path / "export")]
    results = evaluate.main([*common, *joint, "--out", str(tmp_path / "joint")])
    (run,) = results["runs"]
    summary, curves = results["summary"], results["profiles"][run]
    assert {"Cd_mae", "pressure_l2", "velocity_l2", "velocity_l2_volume", "velocity_z_l2"} <= set(summary)
    assert results["baselines"]["mean_field"] and len(curves["wake"]["lines"]) == 3
    names = {path.name for path in (tmp_path / "joint").iterdir()}
    assert {f"{run}_profiles.png", f"{run}_volume.png", f"{run}.png", "parity.png", "report.html"} <= names
    manifest, reader = json.loads((tmp_path / "export/manifest.json").read_text()), AeroReader(archive)
    for kind, vector in submission.VECTOR.items():
        (file,) = (name for name in manifest[run] if name.startswith(kind))
        assert sha256(tmp_path / "export" / run / file) == manifest[run][file]["sha256"]
        with np.load(tmp_path / "export" / run / file) as arrays:
            assert sorted(arrays["raw_cell_id"]) == list(range(reader.shape(f"{run}/{kind}", "cell_id")[0]))
            assert arrays[vector].shape == (len(arrays["raw_cell_id"]), 3) and arrays["pMeanTrim"].dtype == np.float32
    with pytest.raises(SystemExit):
        evaluate.main([*common, *joint, "--out", str(tmp_path / "again")])
    alone = evaluate.main([*common, "--checkpoint", str(checkpoints["volume"]), "--out", str(tmp_path / "volume")])
    assert "Cd_mae" not in alone["summary"] and alone["pairs"] is None
    assert not (tmp_path / "volume/parity.png").exists() and (tmp_path / "volume/report.html").exists()


def curves(meshes, archive):
    """Curves of cells whose prediction is the truth plus a tenth of q in pressure; called on every worker."""
    if meshes["2"].get_coordinate() is None:
        return None
    reader, found = AeroReader(archive), {}
    for kind in ("surface", "volume"):
        rows = rows_of(reader, "run_1", kind)
        half = slice(0, rows // 3) if torch.distributed.get_rank() == 0 else slice(rows // 3, rows)
        fields = {
            n: torch.from_numpy(reader.read(f"run_1/{kind}", n, (half,)).astype(float)) for n in KINDS[kind].arrays
        }
        vector = fields["shear" if kind == "surface" else "velocity"]
        predicted = torch.cat([fields["pressure"][:, None] + 0.05 * 38.889**2, vector], dim=1)
        cells = Cells(kind, "run_1", reader.run_attrs("run_1"), predicted, fields, None, None)
        box = box_of(reader, "run_1")
        found[kind] = centreline(cells, meshes["2"]) if kind == "surface" else wake(cells, box, meshes["2"])
    return found


def test_curves_are_of_all_ranks(trained, pool):
    one, two = pool.run(curves, str(trained[1]))[:2]
    assert one == two and one["volume"]["r2"] == pytest.approx(1)
    upper = one["surface"]["upper"]
    known = [k for k, value in enumerate(upper["true"]) if value is not None]
    assert len(known) > 5
    np.testing.assert_allclose([upper["predicted"][k] - upper["true"][k] for k in known], 0.1, rtol=1e-9)
    assert max(upper["true"][k] for k in known) > 0.4  # the flow stagnates in front


def test_a_model_of_surfaces_refuses_a_volume(trained, tmp_path, capsys):
    with pytest.raises(SystemExit):
        train.main([*SIZES, "--fields", "volume", "--force-weight", "1", "--archive", str(trained[1])])
    assert "needs a surface to add up" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train.main([*SIZES, "--temperature", "9", "--archive", str(trained[1])])
    assert "9.0 is not within 0.01 ... 5.0" in capsys.readouterr().err
