"""The forecaster: the same on one process and on many, blind under masks, exact on resume, plain about bad input."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray
import zarr
from launch import launch
from torch.distributed.tensor.placement_types import Shard
from weather_worker import START, evaluate_arguments, every_verb, forecast_arguments, gradients, options, training

from apps.weather import diffusion, evaluate, forecast, train
from apps.weather.baselines import Observed, persistence
from apps.weather.dataset import Frames, row_sizes
from apps.weather.diffusion import Diffusion
from apps.weather.facts import Facts
from apps.weather.model import Denoiser, ModelConfig
from core import DistributedManager, InputError, scatter_tensor
from core.testing import check_sharded
from data.weather import build
from data.weather.archive import WeatherReader
from data.weather.grid import hrrr_crop
from data.weather.synthetic import Storms, build_synthetic

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small archive, and a copy of it of which the last rows of every frame are cut short."""
    folder = tmp_path_factory.mktemp("weather")
    grid = hrrr_crop(2, slice(216, 242), slice(420, 441))
    build_synthetic(folder / "archive.zarr", Storms(("refc", "bt13"), days=3, frames=8), grid)
    shutil.copytree(folder / "archive.zarr", folder / "broken.zarr")
    for chunk in (folder / "broken.zarr" / "fields" / "c").rglob("0"):
        if chunk.is_file():
            _spoil_last_rows(chunk)
    return folder


@pytest.fixture(scope="module")
def single(folder):
    """The reference: gradients, training and forecast of this process."""
    found, nbytes = gradients(options(folder, "unused", precision="fp64"))
    result = training(options(folder, folder / "single"))
    DistributedManager.cleanup()
    forecast.main(forecast_arguments(folder, result.checkpoint, folder / "single.zarr"))
    evaluate.main(evaluate_arguments(folder, result.checkpoint, folder / "single", "--figures"))
    return {"gradients": found, "bytes": nbytes, "result": result}


def _spoil_last_rows(chunk):
    """Overwrites the end of the last band of rows in a shard; the index behind it (16 bytes a band) stays."""
    raw = bytearray(chunk.read_bytes())
    index = 7 * 16 + 4
    raw[-index - 40 : -index] = b"\xff" * 40
    chunk.write_bytes(raw)


@pytest.fixture(scope="module", params=[(2, 2), (4, 2)], ids=["domain of 2", "2 x 2"])
def sharded(request, folder):
    ranks, domain = request.param
    ends, out = launch(ranks, every_verb, str(folder), domain, timeout=240), folder / f"ranks{ranks}"
    assert (out / "evaluation/results.json").exists(), "\n".join(said[-4000:] for _, said in ends)
    return {"ranks": ranks, "out": out, "ends": ends}


# -- sharded equals single ------------------------------------------------------------------------------------------
def test_losses_of_many_ranks_are_those_of_one_and_fall(single, sharded):
    got, want = json.loads((sharded["out"] / "result.json").read_text()), single["result"]
    assert got["losses"] == pytest.approx(want.losses, rel=1e-5)
    assert want.losses[-1] < 0.8 * want.losses[0]
    assert got["scores"] == pytest.approx(want.scores, rel=1e-5)


def test_gradients_of_many_ranks_are_those_of_one(single, sharded):
    for found in torch.load(sharded["out"] / "gradients.pt"):  # rows cut, and columns too: 1 x 2 and 2 x 2 parts
        assert found.keys() == single["gradients"].keys()
        for name, want in single["gradients"].items():
            assert want.abs().max() > 1e-6, name
            torch.testing.assert_close(found[name], want, rtol=1e-10, atol=1e-10, msg=name)


def test_each_rank_reads_its_own_rows(single, sharded):
    """Rows 0 to 12 and 12 to 26 of bands of 4: 3 and 4 of the 7 bands, for the samples of the own group."""
    groups = sharded["ranks"] // 2
    nbytes = [int((sharded["out"] / f"bytes{rank}").read_text()) for rank in range(sharded["ranks"])]
    for first in range(0, len(nbytes), 2):
        north, south = nbytes[first + 1], nbytes[first]
        assert south < north < 0.75 * single["bytes"]
    assert groups == 2 or sum(nbytes) < 1.25 * single["bytes"]  # the index of a frame is read by both


def test_a_forecast_of_many_ranks_is_that_of_one(folder, single, sharded):
    got, want = (xarray.open_zarr(path) for path in (sharded["out"] / "forecast.zarr", folder / "single.zarr"))
    assert got.valid_time.equals(want.valid_time) and got.attrs["seed"] == want.attrs["seed"]
    for name in ("refc", "bt13", "latitude", "longitude"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=2e-3)


def test_scores_of_many_ranks_are_those_of_one(folder, single, sharded):
    found = (json.loads((path / "evaluation/results.json").read_text()) for path in (sharded["out"], folder / "single"))
    got, want = (results["sums"] for results in found)
    assert got.keys() == want.keys()
    assert set(want["refc"]) == {"model", "persistence", "extrapolation", "steps", "observed"}
    for channel, source, name in ((c, s, n) for c in want for s in want[c] for n in want[c][s]):
        assert np.shape(want[channel][source][name])[:2] == (3, 2)  # cases and leads
        tolerance = dict(rtol=1e-4, atol=1e-3, err_msg=f"{channel}/{source}/{name}")
        np.testing.assert_allclose(got[channel][source][name], want[channel][source][name], **tolerance)


def test_a_chunk_that_one_rank_cannot_read_ends_all(sharded):
    for status, said in sharded["ends"]:
        assert status == 2 and "broken.zarr, variable fields" in said
    assert not (sharded["out"] / "broken" / "checkpoints").exists()


# -- what a forecast file says --------------------------------------------------------------------------------------
def test_the_forecast_opens_with_times_map_and_units(folder, single):
    path = folder / "out" / "single.nc"
    forecast.main(forecast_arguments(folder, single["result"].checkpoint, path))
    reader = WeatherReader(folder / "archive.zarr")
    for data in (xarray.open_zarr(folder / "single.zarr"), xarray.open_dataset(path, engine="h5netcdf")):
        assert data.refc.dims == ("time", "lead_time", "member", "y", "x")
        assert data.refc.shape == (1, 2, 3, 26, 21)
        start = np.datetime64(START)
        assert data.time.values[0] == start
        assert (data.valid_time.values[0] == start + np.array([10, 20], "timedelta64[m]")).all()
        assert data.lead_time.attrs["units"] == "minutes" and data.lead_time.values.tolist() == [10, 20]
        assert data.refc.attrs["units"] == "dBZ" and data.bt13.attrs["units"] == "K"
        mapping = data.refc.attrs.get("grid_mapping") or data.refc.encoding["grid_mapping"]
        assert data[mapping].attrs["grid_mapping_name"] == "lambert_conformal_conic"
        assert data[mapping].attrs["standard_parallel"] == 38.5
        np.testing.assert_array_equal(data.x, reader.axes[0])
        np.testing.assert_array_equal(data.latitude, reader.grid.latitude)
        assert data.attrs["seed"] == 0 and len(data.attrs["checkpoint_sha256"]) == 64
        assert data.attrs["archive_statistics_hash"] == reader.attrs["statistics_hash"]
        seen = np.any([reader.read(str(i), "valid", (slice(None),) * 3)[0] for i in (20, 21)], axis=0)
        assert (np.isfinite(data.refc.values[0]) == seen).all() and not seen.all()
        assert np.nanmin(data.refc) >= -10 and np.isfinite(data.bt13).all()
        assert float(abs(data.refc[:, :, 0] - data.refc[:, :, 1]).max()) > 0
        data.close()
    assert sorted(p.name for p in path.parent.iterdir()) == ["single.nc"]


def test_members_depend_on_seed_and_number_only(folder, single):
    """More members, or fewer at once, leave the first ones as they are; another seed or other noise does not."""
    base = xarray.open_zarr(folder / "single.zarr").refc
    args = forecast_arguments(folder, single["result"].checkpoint, folder / "more.zarr")
    forecast.main([*args, "--members", "4", "--at-once", "1"])
    np.testing.assert_allclose(xarray.open_zarr(folder / "more.zarr").refc[:, :, :3], base, rtol=1e-4, atol=1e-3)
    for other in (["--seed", "1"], ["--sigma-max", "5"]):
        forecast.main([*args, *other, "--overwrite"])
        made = xarray.open_zarr(folder / "more.zarr")
        assert float(abs(made.refc - base).max()) > 0.1
        assert json.loads(made.attrs["sampler"])[0]["sigma_max"] == (5 if "5" in other else 20)


# -- masks ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def mesh():
    DistributedManager.initialize()
    yield DistributedManager().initialize_mesh((1, 1), ("ddp", "domain"))
    DistributedManager.cleanup()


def _loss(path, mesh, split=None):
    reader = WeatherReader(path)
    facts = Facts.of(reader, history=2)
    frames = Frames(reader, facts, mesh["domain"], 4, split, torch.float64)
    torch.manual_seed(0)
    model = Denoiser(ModelConfig(2, facts.conditions, 16, 1, 2, 3)).double()
    torch.nn.init.normal_(model.head.weight, std=0.1)
    torch.nn.init.normal_(model.finer.weight, std=0.1)
    batch = frames.batch(range(1, 7))
    keys = [(0, i) for i in range(6)]
    noise, sigma = diffusion.noise_like(batch.clean, keys), diffusion.numbers(batch.clean, keys).exp()
    parts = batch.clean, batch.valid, batch.conditions
    loss = diffusion.losses(model, *parts, sigma, noise, Diffusion()).mean()
    return loss.item(), batch


def _rewritten(folder, path, change):
    """A copy of the archive with ``change(fields, valid)`` made to its arrays."""
    shutil.copytree(folder / "archive.zarr", path)
    group = zarr.open_group(path, mode="r+", use_consolidated=False)
    fields, valid = group["fields"][...], group["valid"][...]
    change(fields, valid, group["longitude"][...])
    group["fields"][...], group["valid"][...] = fields, valid
    return path


def test_values_under_the_mask_do_not_matter(folder, tmp_path, mesh):
    def wild(fields, valid, longitude):
        assert not valid.all()
        fields[~valid] = 1e6

    want, batch = _loss(folder / "archive.zarr", mesh)
    assert np.isfinite(want) and not batch.valid.all()
    assert _loss(_rewritten(folder, tmp_path / "wild.zarr", wild), mesh)[0] == want

    def other(fields, valid, longitude):
        fields[4, 0, 13, 10] += 5.0

    assert _loss(_rewritten(folder, tmp_path / "other.zarr", other), mesh)[0] != want


def test_a_training_region_sees_nothing_beyond_it(folder, tmp_path, mesh):
    longitude = WeatherReader(folder / "archive.zarr").grid.longitude
    split = {"lon_max": float(np.median(longitude))}

    def east(fields, valid, longitude):
        fields[:, :, longitude > split["lon_max"]] += 7.0

    want, batch = _loss(folder / "archive.zarr", mesh, split)
    assert _loss(_rewritten(folder, tmp_path / "east.zarr", east), mesh, split)[0] == want
    assert not batch.valid.to_local()[..., torch.from_numpy(longitude > split["lon_max"])].any()


def test_persistence_is_the_last_value_seen():
    frames = [([1.0, 2.0, 0.0], [True, True, False]), ([5.0, 0.0, 0.0], [True, False, False])]
    history = [Observed(torch.tensor(v), torch.tensor(m)) for v, m in frames]
    now = persistence(history)
    assert now.values.tolist() == [5.0, 2.0, 0.0] and now.valid.tolist() == [True, True, False]


# -- model and diffusion --------------------------------------------------------------------------------------------
def _model(seed=0):
    """A denoiser whose zero layers are shaken, so that every part of it matters."""
    torch.manual_seed(seed)
    model = Denoiser(ModelConfig(2, 3, width=16, depth=2, heads=2, kernel=5, patch=4, fine=8)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


def odd_grid(meshes, name, whole_patches, batch):
    """50 x 37 points: 13 x 10 patches with edges to fill, cut in whole patches or wherever torch.chunk cuts."""
    mesh = meshes[name]
    if mesh.get_coordinate() is None:
        return
    shapes, dims = ((batch, 2, 50, 37), (batch, 3, 50, 37)), range(2, 2 + mesh.ndim)
    sizes = {i: row_sizes((50, 37)[i], 4, mesh.size(i)) for i in range(mesh.ndim)} if whole_patches else None
    generator = torch.Generator().manual_seed(1)
    fields = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    cut = [scatter_tensor(x, None, mesh, [Shard(d) for d in dims], sizes=sizes, requires_grad=True) for x in fields]
    check_sharded(_model(), [*cut, torch.tensor([0.3, -0.2], dtype=torch.float64)[:batch]])


@pytest.mark.parametrize("name", ["2", "3", "2x2"])
@pytest.mark.parametrize("whole_patches, batch", [(True, 2), (False, 2), (True, 1)])
def test_model_on_an_odd_grid(pool, name, whole_patches, batch):
    pool.run(odd_grid, name, whole_patches, batch)


def test_rows_are_cut_in_whole_patches():
    assert row_sizes(50, 4, 3) == (16, 16, 18)
    assert row_sizes(64, 4, 4) == (16, 16, 16, 16)
    assert row_sizes(50, 4, 13) == (4,) * 12 + (2,)
    with pytest.raises(InputError, match="14 ranks cannot share 50 rows.*--domain 13"):
        row_sizes(50, 4, 14)


class _Constant(torch.nn.Module):
    def forward(self, noisy, conditions, level):
        self.seen = noisy
        return torch.ones_like(noisy)


def test_preconditioning():
    """Without noise the state passes; under much noise only the network speaks; its input has unit variance."""
    process, network = Diffusion(sigma_data=0.5), _Constant()
    x = torch.full((1, 1, 2, 2), 3.0, dtype=torch.float64)
    for sigma, want in ((1e-6, 3.0), (1e6, 0.5)):
        got = diffusion.denoise(network, x, x, torch.tensor([sigma], dtype=torch.float64), process)
        assert got.mean().item() == pytest.approx(want, abs=1e-5)
    torch.manual_seed(0)
    clean, noise = 0.5 * torch.randn(1, 1, 200, 200), torch.randn(1, 1, 200, 200)
    for sigma in (0.02, 0.5, 20.0):
        diffusion.denoise(network, clean + sigma * noise, clean, torch.tensor([sigma]), process)
        assert network.seen.std().item() == pytest.approx(1.0, abs=0.02)


class _Zero(torch.nn.Module):
    def forward(self, noisy, conditions, level):
        return torch.zeros_like(noisy)


def test_the_loss_of_a_network_that_says_nothing_is_one_at_every_level():
    process = Diffusion(sigma_data=0.5)
    torch.manual_seed(0)
    clean, noise = 0.5 * torch.randn(1, 1, 300, 300), torch.randn(1, 1, 300, 300)
    for sigma in (0.02, 0.5, 20.0):
        [got] = diffusion.losses(_Zero(), clean, clean < 99, clean, torch.tensor([sigma]), noise, process)
        assert got.item() == pytest.approx(1.0, abs=0.02)


class _Gauss(torch.nn.Module):
    """The exact denoiser of N(mean, spread^2), as the network that the preconditioning asks for."""

    def __init__(self, process, mean, spread):
        super().__init__()
        self.process, self.mean, self.spread = process, mean, spread

    def forward(self, noisy, conditions, level):
        sigma, data = (4 * level).exp()[:, None, None, None], self.process.sigma_data
        total = (sigma**2 + data**2).sqrt()
        x = noisy * total
        best = (sigma**2 * self.mean + self.spread**2 * x) / (sigma**2 + self.spread**2)
        return (best - data**2 / total**2 * x) / (sigma * data / total)


@pytest.mark.parametrize("churn", [0.0, 0.1])
def test_the_sampler_draws_from_the_law_of_its_denoiser(churn):
    process = Diffusion(sigma_min=0.01, sigma_max=20.0, steps=60, churn=churn)
    network = _Gauss(process, mean=1.5, spread=0.3)
    generator = torch.Generator().manual_seed(0)

    def fresh(step):
        return torch.randn(1, 1, 100, 100, generator=generator, dtype=torch.float64)

    noise = fresh(0)
    got = diffusion.sample(network, noise, noise, process, fresh)
    assert got.std().item() == pytest.approx(0.3, abs=0.01)
    assert got.mean().item() == pytest.approx(1.5, abs=0.05 if churn else 0.03)
    if not churn:  # the flow of a Gaussian scales the distance from its mean
        want = 1.5 + 0.3 / (20**2 + 0.3**2) ** 0.5 * (20 * noise - 1.5)
        torch.testing.assert_close(got, want, atol=5e-3, rtol=0)


def test_noise_of_a_position_depends_on_its_key_only(mesh):
    two, one = (scatter_tensor(torch.zeros(n, 2, 6, 5), None, mesh["domain"], [Shard(2)]) for n in (2, 1))
    both = diffusion.noise_like(two, [(1, 7), (1, 8)]).full_tensor()
    assert torch.equal(both[1:], diffusion.noise_like(one, [(1, 8)]).full_tensor())
    assert not torch.equal(both[0], both[1]) and not torch.equal(both[0], diffusion.noise_like(one, [(2, 7)])[0])


# -- runs -----------------------------------------------------------------------------------------------------------
def test_resumed_is_uninterrupted(folder, single):
    whole = folder / "whole"
    want = training(options(folder, whole, steps=6, checkpoint_every=3))
    shutil.copytree(whole, folder / "part")
    shutil.rmtree(folder / "part" / "checkpoints" / "step_00000006")
    got = training(options(folder, folder / "part", steps=6, checkpoint_every=3, resume=True))
    assert got.losses == want.losses and got.scores == want.scores
    DistributedManager.cleanup()


def test_evaluation(folder, single):
    out = folder / "single" / "evaluation"
    results = json.loads((out / "results.json").read_text())
    assert results["lead_minutes"] == [10, 20] and len(results["cases"]) == 3
    scores = results["scores"]["refc"]
    assert list(scores) == ["model", "persistence", "extrapolation", "steps", "observed"]
    assert list(results["scores"]["bt13"]) == ["model", "persistence", "extrapolation", "observed"]  # no STEPS
    for source in ("model", "persistence", "extrapolation", "steps"):
        assert len(scores[source]["rmse"]) == 2 and np.shape(scores[source]["fss"]) == (2, 4, 5)
        assert np.shape(scores[source]["fss_matched_mean"]) == (2, 4, 5)
        counts = [results["sums"]["refc"][source][name] for name in ("happened", "absent")]
        assert np.sum(counts, axis=(0, 3, 4)).tolist() == (4 * np.array(results["sums"]["refc"]["model"]["n"])).tolist()
    assert results["intervals"]["refc"] == {}  # of three cases nothing is sure
    for source in ("persistence", "extrapolation"):
        assert scores[source]["fss_matched_mean"] == scores[source]["fss"]
    assert scores["steps"]["fss_matched_mean"] != scores["steps"]["fss"]
    assert scores["persistence"]["crps"] == pytest.approx(scores["persistence"]["mae"])
    assert len(scores["steps"]["rank_histogram"][0]) == 3 and results["members"]["steps"] == 2
    assert results["windows"]["km"] == pytest.approx([6, 18, 42, 102, 198])
    report = (out / "report.html").read_text()
    assert report.count("data:image/png;base64,") == 14 and report.count("data:image/gif;base64,") == 2
    assert report.count("FSS of the matched mean (") == 4 + 3  # of refc, and of bt13, which STEPS does not know
    assert "http" not in re.sub("base64,[^']*", "", report)
    kinds = ("errors", "events", "neighborhoods", "probabilities", "ranks", "spectra", "maps")
    pictures = {f"{kind}_{channel}.png" for kind in kinds for channel in ("refc", "bt13")}
    pictures |= {"loop_refc.gif", "loop_bt13.gif"}
    assert {p.name for p in out.iterdir()} == {"results.json", "report.html"} | pictures
    reader, square, n = WeatherReader(folder / "archive.zarr"), 0.0, 0
    for time in results["cases"]:  # persistence over 20 minutes by hand
        i = int(np.flatnonzero(reader.times == np.datetime64(time))[0])
        older, last, truth = (reader.read(str(j), "fields", (slice(None),) * 3)[0] for j in (i - 1, i, i + 2))
        error = truth - np.where(np.isnan(last), older, last)
        square, n = square + np.nansum(error**2.0), n + np.isfinite(error).sum()
    assert scores["persistence"]["rmse"][1] == pytest.approx(np.sqrt(square / n), rel=1e-5)


def test_the_road_from_radar_files_to_scores(tmp_path):
    """Four real frames over the Plains: trained west of 100 W, scored east of it beyond a gap of 200 km."""
    archive = tmp_path / "mrms.zarr"
    window = ["--rows", "216:248", "--cols", "396:476"]
    split = ["--resolution", "6km", "--split-longitude", "-100"]
    build.main(["--mrms", str(TESTS / "data/mrms"), "--out", str(archive), *window, *split])
    small = ["--preset", "small", "--width", "32", "--depth", "1", "--heads", "2", "--kernel", "3"]
    few = ["--steps", "2", "--batch", "1", "--cases", "1", "--members", "2", "--sampler-steps", "2"]
    result = train.main(["--archive", str(archive), "--out", str(tmp_path / "run"), *small, *few])
    steps = ["--steps", "1", "--members", "1", "--cases", "1", "--out", str(tmp_path / "scores"), "--no-figures"]
    evaluate.main(["--checkpoint", str(result.checkpoint), "--archive", str(archive), *steps])
    results = json.loads((tmp_path / "scores/results.json").read_text())
    reader = WeatherReader(archive)
    east = reader.grid.longitude >= reader.split("valid")["lon_min"]
    assert reader.split("valid")["lon_min"] > -100 + 200 / 111.2
    seen = [reader.read(str(i), "valid", (slice(None),) * 3)[0] for i in range(4)]
    start = int(np.flatnonzero(reader.times == np.datetime64(results["cases"][0]))[0])
    want = (seen[start + 1] & (seen[start] | seen[start - 1]) & east).sum()
    assert 0 < want == results["sums"]["refc"]["model"]["n"][0][0]


BLOCKED = """
import sys
names = {"vtk", "pyvista", "cfgrib", "eccodes", "netCDF4", "pyproj", "scipy", "h5py", "h5netcdf", "matplotlib", "dask"}
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
from apps.weather import train
train.main(sys.argv[1:])
assert not names & set(sys.modules)
"""


def test_training_needs_torch_numpy_xarray_and_zarr_only(folder, tmp_path):
    arguments = [
        "--archive",
        f"{folder}/archive.zarr",
        "--out",
        str(tmp_path),
        "--steps",
        "2",
        "--kernel",
        "3",
        "--width",
        "16",
        "--depth",
        "1",
        "--cases",
        "1",
        "--members",
        "1",
        "--sampler-steps",
        "1",
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *arguments], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "checkpoint" in done.stdout and "no figure: matplotlib is not installed" in done.stderr


# -- bad input ------------------------------------------------------------------------------------------------------
def _refused(capsys, main, arguments, *words):
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    for word in words:
        assert str(word) in said


def test_training_refuses(folder, tmp_path, capsys):
    archive, out = folder / "archive.zarr", tmp_path / "out"
    base = ["--archive", archive, "--out", out, "--kernel", 3]
    missing = tmp_path / "none"
    _refused(capsys, train.main, ["--archive", missing, "--out", out], missing, "data.weather.build")
    _refused(capsys, train.main, [*base, "--channels", "refc", "cth"], archive, "variable cth", "refc, bt13")
    _refused(capsys, train.main, [*base, "--kernel", 9], "--kernel is 9", "up to 6")
    _refused(capsys, train.main, [*base, "--width", 30], "--width is 30", "multiple of")
    _refused(capsys, train.main, [*base, "--history", 9], archive, "train split", "--history")
    _refused(capsys, train.main, [*base, "--domain", 2], "--domain 2 does not divide 1 process. Start")
    _refused(capsys, train.main, [*base, "--batch", 0], "--batch")
    assert not out.exists()


def test_a_truncated_archive(folder, tmp_path, capsys):
    path = tmp_path / "cut.zarr"
    shutil.copytree(folder / "archive.zarr", path)
    for chunk in (path / "fields" / "c").rglob("0"):
        if chunk.is_file():
            chunk.write_bytes(chunk.read_bytes()[:-60])
    out = tmp_path / "out"
    _refused(capsys, train.main, ["--archive", path, "--out", out, "--kernel", 3], path, "variable fields", "Build")
    assert not (out / "checkpoints").exists()
    (path / "zarr.json").write_text("{")
    _refused(capsys, train.main, ["--archive", path, "--out", out, "--kernel", 3], path)


def test_inference_refuses(folder, single, tmp_path, capsys):
    checkpoint, out = single["result"].checkpoint, tmp_path / "out.zarr"
    args = forecast_arguments(folder, checkpoint, out)

    def with_(flag, value):
        return [*args[: args.index(flag)], flag, value, *args[args.index(flag) + 2 :]]

    none = tmp_path / "none"
    _refused(capsys, forecast.main, with_("--checkpoint", none), none, "no such folder", "a run's folder")
    _refused(capsys, forecast.main, with_("--init", "noon"), "'noon' is no time")
    _refused(capsys, forecast.main, with_("--init", "2021-06-01T00:00"), "archive.zarr", "time", "2021-05-28T19:10")
    _refused(capsys, forecast.main, with_("--init", "2021-05-28T18:00"), "lacks some of the 2 frames")
    _refused(capsys, forecast.main, with_("--out", tmp_path / "out.grib"), "out.grib", ".zarr or .nc")
    _refused(capsys, forecast.main, with_("--steps", 0), "--steps is 0")
    _refused(capsys, forecast.main, [*args, "--sigma-max", "0"], "--sigma-max is 0")
    other = tmp_path / "other.zarr"
    build_synthetic(other, Storms(days=3, frames=4), hrrr_crop(2, slice(216, 242), slice(421, 442)))
    _refused(capsys, forecast.main, with_("--archive", other), other, "variable x", "trained on")
    alien = tmp_path / "alien"
    shutil.copytree(checkpoint, alien)
    state = json.loads((alien / "state.json").read_text())
    (alien / "state.json").write_text(json.dumps(state | {"kind": "transolver"}))
    _refused(capsys, forecast.main, with_("--checkpoint", alien), alien, "'transolver'")
    state["task"]["model"]["width"] = 64
    (alien / "state.json").write_text(json.dumps(state))
    _refused(capsys, forecast.main, with_("--checkpoint", alien), alien, "variable", "same configuration")
    next(alien.glob("*.distcp")).write_bytes(b"")
    (alien / "state.json").write_text((checkpoint / "state.json").read_text())
    _refused(capsys, forecast.main, with_("--checkpoint", alien), alien)
    shutil.copytree(folder / "single.zarr", out)
    _refused(capsys, forecast.main, args, out, "exists already", "--overwrite")
    _refused(capsys, evaluate.main, [*args[:4], "--split", "west"], "variable west", "train")
    assert {p.name for p in tmp_path.iterdir()} == {"out.zarr", "other.zarr", "alien"}


def test_resuming_another_training_is_refused(folder, single, capsys):
    out = folder / "single"
    _refused(
        capsys,
        train.main,
        ["--archive", folder / "archive.zarr", "--out", out, "--resume", "--kernel", 3, "--channels", "refc"],
        "variable channels",
        "choose another --out",
    )
