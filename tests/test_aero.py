"""The aero application: its equations, what ranks read and send, its scores, and one result on every layout."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from aero_worker import settings, train_and_infer
from launch import succeed
from torch.distributed.tensor import Shard

from apps.aero import metrics, train
from apps.aero.dataset import Points, Scaling, sample_start
from apps.aero.model import ModelConfig, SliceAttention, Transolver
from core import debug, scatter_tensor, set_fallback
from data.aero.archive import AeroReader
from data.aero.synthetic import synthetic_archive


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return synthetic_archive(tmp_path_factory.mktemp("aero") / "a.zarr", runs=6, cells=1000)


# The model


def test_attention_is_what_the_equations_say():
    torch.manual_seed(0)
    layer, x = SliceAttention(12, heads=3, slices=5).double(), torch.randn(2, 40, 12, dtype=torch.float64)
    expected = torch.zeros(2, 40, 12, dtype=torch.float64)
    for b in range(2):
        for h in range(3):
            part = slice(4 * h, 4 * h + 4)
            w = torch.softmax(layer.slice(layer.place(x[b])[:, part]) / 0.25, dim=-1)
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
    scores = metrics.case_scores(total, attrs | {"Cd": 7.0})
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
    """{name: (folder, ranks)} of the same training and inference on one process, two groups, a domain of two, 2 x 2."""
    found = {}
    for name, ranks, domain in (("one", 1, 1), ("2 x 1", 2, 1), ("domain", 2, 2), ("2 x 2", 4, 2)):
        folder = tmp_path_factory.mktemp("layout")
        succeed(ranks, train_and_infer, folder, str(archive), domain, timeout=120)
        found[name] = folder, [json.loads((folder / f"rank_{r}.json").read_text()) for r in range(ranks)]
    return found


def test_one_process_learns(layouts):
    losses = layouts["one"][1][0]["losses"]
    assert len(losses) == 10 and losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", ["2 x 1", "domain", "2 x 2"])
def test_sharded_equals_single(layouts, name):
    (one, (first,)), (many, ranks) = layouts["one"], layouts[name]
    expected, got = (torch.load(folder / "gradients.pt") for folder in (one, many))
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-10, atol=1e-10, msg=key)
    assert max(value.abs().max() for value in expected.values()) > 1e-3
    for rank in ranks:
        np.testing.assert_allclose(rank["losses"], first["losses"], rtol=1e-5)
        assert rank["scores"] == pytest.approx(first["scores"], rel=1e-4)


def test_inference_on_two_ranks_equals_one(layouts):
    one, two = (json.loads((layouts[name][0] / "run_1.json").read_text())["scores"] for name in ("one", "domain"))
    assert two == pytest.approx(one, rel=1e-4, abs=1e-6) and one["Cd"] != one["Cd_true"]


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
    same = "steps", "lr", "optimizer", "warmup", "points", "width", "layers", "heads", "slices", "out", "archive"
    flags = [part for key in same for part in (f"--{key}", str(getattr(config, key)))]
    result = train.main([*flags, "--resume", "--checkpoint-every", "5", "--validate-every", "10"])
    expected = layouts["one"][1][0]
    np.testing.assert_allclose(result.losses, expected["losses"], rtol=1e-5)
    assert result.scores == pytest.approx(expected["scores"], rel=1e-4)
