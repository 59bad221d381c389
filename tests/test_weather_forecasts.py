"""Forecasts of two models and of experts, broken off and resumed, as products, scored from files and beside HRRR."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xarray
from launch import succeed
from weather_files import hrrr_keys, write_subhourly

from apps.cli import parse
from apps.weather import ensemble, evaluate, forecast, look, maps, products, train
from apps.weather.baselines import Observed
from apps.weather.dataset import Frames
from apps.weather.ensemble import policy_of
from apps.weather.facts import Facts
from apps.weather.hrrr import Hrrr
from apps.weather.policy import Policy
from apps.weather.product import Product
from apps.weather.rollout import rollout, spread
from apps.weather.stages import load, merged
from apps.weather.stored import Stored
from apps.weather.verify import score_case
from core import DistributedManager, InputError, checkpoint
from data.weather.archive import WeatherReader
from data.weather.grid import SPACING, hrrr_crop
from data.weather.synthetic import Storms, build_synthetic

START = "2021-05-28T18:50"
SIZES = ["--history", "2", "--width", "16", "--depth", "1", "--heads", "2", "--kernel", "3", "--cases", "1"]
FEW = ["--steps", "1", "--batch", "2", "--members", "1", "--sampler-steps", "2", "--sigma-max", "20"]
REJECT = ["--missing", "reject", "--least", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forecasts")
    grid = hrrr_crop(2, slice(216, 242), slice(420, 441))
    build_synthetic(folder / "archive.zarr", Storms(("refc", "c02", "bt13"), days=3, frames=8), grid)
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    """Checkpoints of the satellite and the radar model; of the latter an expert of each half of the noise too."""

    def run(part, *more):
        base = ["--archive", folder / "archive.zarr", "--out", folder / f"{part}{''.join(more)}", "--part", part]
        return str(train.main([*map(str, base), *SIZES, *FEW, *REJECT, *more]).checkpoint)

    halves = [run("radar", "--boundaries", "0.5", "--expert", str(i)) for i in range(2)]
    return {"satellite": run("satellite", "--history", "3"), "radar": run("radar"), "halves": halves}


def _arguments(folder, trained, out, *more):
    base = ["--checkpoint", trained["radar"], "--satellite", trained["satellite"], "--out", str(folder / out)]
    size = ["--steps", "5", "--members", "3", "--init", START]
    return [*base, "--archive", str(folder / "archive.zarr"), *size, *more]


@pytest.fixture(scope="module")
def coupled(folder, trained):
    """A forecast of the radar model on that of the satellite model."""
    forecast.main(_arguments(folder, trained, "coupled.zarr"))
    return folder / "coupled.zarr"


@pytest.fixture(scope="module")
def short(folder, trained):
    """The first two steps of it."""
    arguments = _arguments(folder, trained, "short.zarr", "--no-products")
    arguments[arguments.index("--steps") + 1] = "2"
    forecast.main(arguments)
    return folder / "short.zarr"


def test_the_radar_model_hears_the_forecast_of_the_bands(folder, trained, coupled):
    """Bands are those of the satellite model alone; other bands make other rain from the second step on."""
    data = xarray.open_zarr(coupled)
    assert data.attrs["channels"] == "c02 bt13 refc" and json.loads(data.attrs["sampler"])[1]["steps"] == 2
    assert len(data.attrs["checkpoint_sha256"].split()) == 2
    alone = _arguments(folder, trained, "bands.zarr")
    alone = [trained["satellite"] if value == trained["radar"] else value for value in alone]
    at = alone.index("--satellite")
    forecast.main(alone[:at] + alone[at + 2 :])
    bands = xarray.open_zarr(folder / "bands.zarr")
    assert "refc" not in bands and bands.attrs["history_frames"] == 3
    np.testing.assert_allclose(data.bt13, bands.bt13, rtol=1e-5)
    first, second = _steps(folder, trained, heard=True), _steps(folder, trained, heard=False)
    torch.testing.assert_close(first[0][:, 2], second[0][:, 2])
    assert (first[0][:, 1] - second[0][:, 1]).abs().max() > 0.01
    assert (first[1][:, 2] - second[1][:, 2]).abs().max() > 1e-6


def _steps(folder, trained, heard):
    """Two steps (member, channel, y, x) of shaken models; unless ``heard``, the bands' model is another one."""
    DistributedManager.initialize()
    mesh = DistributedManager().initialize_mesh((1, 1), ("ddp", "domain"))
    arguments = _arguments(folder, trained, "none.zarr")
    stages = forecast.load_stages(parse(forecast.ForecastConfig, arguments))
    for number, stage in enumerate(stages):
        generator = torch.Generator().manual_seed(10 * number + (number == 0) * heard)
        for layer in (stage.network.head, stage.network.finer):
            torch.nn.init.normal_(layer.weight, std=0.1, generator=generator)
    reader = WeatherReader(folder / "archive.zarr")
    frames = Frames(reader, merged(stages), mesh["domain"], 4)
    index = forecast.find_start(reader, frames.facts, START)
    with torch.no_grad():
        made = [f.values.full_tensor() for f in rollout(stages, frames, index, range(2), [0], 0)]
    DistributedManager.cleanup()
    return made


def test_a_model_that_is_told_of_what_none_forecasts_is_refused(folder, trained, capsys):
    args = _arguments(folder, trained, "none.zarr")
    at = args.index("--satellite")
    for bad, word in ((args[:at] + args[at + 2 :], "is told of c02, bt13"), (_half(args, trained), "learned no noise")):
        with pytest.raises(SystemExit):
            forecast.main(bad)
        assert word in capsys.readouterr().err


@pytest.mark.parametrize("n, count", [(117, 12), (13, 12), (12, 12), (5, 12), (117, 1), (24, 12)])
def test_cases_are_spread_over_all_of_a_split(n, count):
    """Equal parts, one of each: no part is left out, the last days no more than the first."""
    chosen = spread(range(n), count)
    assert len(chosen) == min(n, count) and np.diff([*chosen, n]).min() > 0 and chosen[0] >= 0
    gaps = np.diff(chosen)
    assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1
    assert abs(chosen[0] - (n - 1 - chosen[-1])) <= 1


def test_products_in_bf16_stay_near(folder, trained, short, capsys):
    """Both networks': no value is the same, and all are near; recording needs a GPU."""
    args = _arguments(folder, trained, "half.zarr", "--no-products", "--precision", "bf16")
    args[args.index("--steps") + 1] = "1"
    forecast.main(args)
    half, full = (xarray.open_zarr(path).isel(lead_time=0).compute() for path in (folder / "half.zarr", short))
    for name in ("refc", "bt13"):
        a, b = half[name].values, full[name].values
        there = np.isfinite(b) & (b > np.nanmin(b))
        assert (a[there] != b[there]).mean() > 0.5 and np.abs(a - b)[there].mean() < 0.02 * b[there].std()
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            forecast.main([*args, "--overwrite", "--capture"])
        assert "--capture records on GPUs" in capsys.readouterr().err


def test_what_was_trained_in_fp64_is_not_said_to_be_in_bf16(folder, trained, monkeypatch, capsys):
    monkeypatch.setattr(ensemble, "load", lambda paths, **sampler: replace(load(paths), dtype=torch.float64))
    with pytest.raises(SystemExit):
        forecast.main(_arguments(folder, trained, "none.zarr", "--precision", "bf16"))
    assert "step_00000001: was trained in fp64" in capsys.readouterr().err


def test_the_policy_for_gaps_is_that_of_the_training_unless_told(folder, trained, short, tmp_path, capsys):
    """Stated with the checkpoint, the forecast and the scores; no radar sees all, so all of a frame is too much."""
    states = [checkpoint.read_state(trained[part])["task"]["policy"] for part in ("satellite", "radar")]
    kept = xarray.open_zarr(short).attrs["missing_pixels"]
    assert [Policy(**state) for state in (*states, json.loads(kept))] == [Policy("reject", 0.0)] * 3
    stages = [SimpleNamespace(policy=Policy(kind), paths=[f"{kind}.pt"]) for kind in ("mask", "reject")]
    with pytest.raises(InputError, match="mask.pt: was trained with --missing mask --least 0.5, reject.pt with --mis"):
        policy_of(SimpleNamespace(missing=None, least=0.1), stages)
    assert policy_of(SimpleNamespace(missing="refuse", least=0.1), stages) == Policy("refuse", 0.1)
    everything, archive = ["--least", "1"], ["--archive", str(folder / "archive.zarr"), "--no-figures"]
    models = ["--checkpoint", trained["radar"], "--satellite", trained["satellite"]]
    score, named = (
        ["--out", str(tmp_path), "--steps", "2"],
        "archive.zarr, variable c02: only 0% was observed at 2021-05-28T18:30",
    )
    for main, arguments, words in (
        (forecast.main, _arguments(folder, trained, "none.zarr", *everything), named),
        (forecast.main, _arguments(folder, trained, "none.zarr", *everything, "--missing", "refuse"), named),
        (evaluate.main, [*models, *archive, *score, *everything], "successive frames that can be used"),
        (evaluate.main, [*models, *archive, *score, "--least", "0.5", "--missing", "refuse"], "c02: only 0% was"),
        (evaluate.main, ["--forecast", str(short), *archive, *score, *everything], "no forecast is"),
        (evaluate.main, ["--forecast", str(short), *archive, *score, *everything, "--missing",
                         "refuse"], named),
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            main(arguments)
        assert words in capsys.readouterr().err
    forecast.main(_arguments(folder, trained, "none.zarr", *everything, "--missing", "mask", "--no-products"))


def _half(args, trained):
    return [trained["halves"][0] if value == trained["radar"] else value for value in args]


def test_experts_forecast_together(folder, trained, coupled):
    args = _arguments(folder, trained, "experts.nc", "--solver", "dpm", "--no-products")
    at = args.index(trained["radar"])
    forecast.main(args[:at] + trained["halves"][::-1] + args[at + 1 :])
    data = xarray.open_dataset(folder / "experts.nc", engine="h5netcdf")
    assert data.refc.shape == (1, 5, 3, 26, 21) and bool(np.isfinite(data.bt13).all()) and "refc_mean" not in data
    assert [len(part.split("/")) > 1 for part in data.attrs["checkpoint"].split()] == [True] * 3


def break_off(arguments, after, monkeypatch):
    """A forecast that ends in the middle of writing a step."""
    write = Product.write

    def broken(self, lead, *rest):
        if lead == after:
            self.group["refc"][0, lead, 0] = 99.0
            raise KeyboardInterrupt
        write(self, lead, *rest)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Product, "write", broken)
        forecast.main(arguments)


@pytest.mark.parametrize("after", [1, 4])
def test_a_forecast_that_was_broken_off_goes_on(folder, trained, coupled, monkeypatch, after, capsys):
    """Before and after the history is all forecast."""
    out = f"broken{after}.zarr"
    break_off(_arguments(folder, trained, out), after, monkeypatch)
    assert not (folder / out).exists()
    with pytest.raises(SystemExit):
        forecast.main(_arguments(folder, trained, out, "--resume", "--seed", "1"))
    assert "variable seed" in capsys.readouterr().err
    forecast.main(_arguments(folder, trained, out, "--resume", "--at-once", "2"))
    assert f"going on after step {after}\nstep {after + 1}/5" in capsys.readouterr().err
    got, want = (xarray.open_zarr(path) for path in (folder / out, coupled))
    assert set(got.variables) == set(want.variables) and not list(folder.glob(".broken*"))
    for name in want.data_vars:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-4, err_msg=name)


def resumed(rank, arguments):
    forecast.main.__wrapped__([*arguments, "--resume", "--domain", "2"])


def test_a_forecast_goes_on_under_another_cut(folder, trained, coupled, monkeypatch):
    """Begun by one process, whose chunks two ranks would share; killed while they were changed, between two names."""
    arguments = [str(x) for x in _arguments(folder, trained, "recut.zarr")]
    break_off(arguments, 2, monkeypatch)
    part = folder / ".recut.partial.zarr"
    part.rename(part.with_suffix(".old"))
    part.with_suffix(".recut").mkdir()
    assert "going on after step 2\n" in succeed(2, resumed, arguments)[0]
    got, want = (xarray.open_zarr(path) for path in (folder / "recut.zarr", coupled))
    assert got.refc.encoding["chunks"][-2] < want.refc.encoding["chunks"][-2] and not list(folder.glob(".recut*"))
    for name in want.data_vars:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("last", [1, 4])
def test_data_groups_that_had_come_further_do_not_go_back(folder, trained, coupled, monkeypatch, last, capsys):
    """Member 2, of another data group, had done the steps up to ``last`` when the others had done one."""
    write, out = Product.write, f"ahead{last}.zarr"

    def ahead(self, lead, members, ensemble):
        write(self, lead, *((members, ensemble) if lead < 1 else ([2], Observed(*(part[2:] for part in ensemble)))))
        if lead == last:
            raise KeyboardInterrupt

    monkeypatch.setattr(Product, "write", ahead)
    with pytest.raises(KeyboardInterrupt):
        forecast.main(_arguments(folder, trained, out))
    monkeypatch.undo()
    if last == 4:  # the frames of its first steps are gone
        with pytest.raises(SystemExit):
            forecast.main(_arguments(folder, trained, out, "--resume"))
        assert "has members of different steps" in capsys.readouterr().err
        monkeypatch.setattr(forecast, "share", lambda members, mesh: [0, 1])
    forecast.main(_arguments(folder, trained, out, "--resume"))
    assert "going on after step 1\nstep 2/5" in capsys.readouterr().err
    got, want = (xarray.open_zarr(path) for path in (folder / out, coupled))
    for name in ("refc", "bt13"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-4, err_msg=name)


def test_latest_is_the_last_time_with_its_history(folder):
    reader = WeatherReader(folder / "archive.zarr")
    facts = Facts.of(reader, 3)
    assert forecast.find_start(reader, facts, "latest") == len(reader.times) - 1


def scored(meshes, path):
    """A file that one rank cannot read ends the scoring of a case on all ranks, before fields travel."""
    reader, config = WeatherReader(path), SimpleNamespace(steps=2, members=1, seed=0)

    def broken(*args):
        raise InputError("is truncated", file="one")

    for rank, name, hrrr in ((0, "none", SimpleNamespace(forecast=broken)), (3, "_read", None)):
        frames = Frames(reader, Facts.of(reader, 2, ("refc",)), meshes["4"], 4)
        if torch.distributed.get_rank() == rank:
            setattr(frames, name, broken)
        with pytest.raises(InputError, match="one: is truncated"):
            score_case(iter(()), frames, 3, config, ("persistence", "extrapolation"), hrrr)


def test_what_one_rank_cannot_read_ends_all(pool, folder):
    pool.run(scored, str(folder / "archive.zarr"))


# -- products ---------------------------------------------------------------------------------------------------------
def test_products_of_a_forecast(coupled):
    data = xarray.open_zarr(coupled)
    members = data.refc.values[0, 2]
    known = np.isfinite(members).all(0)
    assert (known == (data.refc_seen.values[0] == 1)).all() and not known.all()
    np.testing.assert_allclose(data.refc_mean[0, 2], members.mean(0), rtol=1e-5)
    share = (members >= data.threshold_refc.values[0]).mean(0)
    np.testing.assert_allclose(data.refc_probability[0, 2, 0].values[known], share[known], rtol=1e-5)
    assert data.refc_rain_rate.dims == data.refc.dims and data.refc_rain_rate.attrs["units"] == "mm h-1"
    assert np.isnan(data.refc_probability_matched_mean[0, 2].values[~known]).all()
    assert data.refc.attrs["ancillary_variables"] == "refc_seen"
    assert data.bt13.attrs["standard_name"] == "toa_brightness_temperature"


def test_pictures_show_members_and_chances(coupled, monkeypatch, capsys):
    drawn, data = {}, xarray.open_zarr(coupled)
    monkeypatch.setattr(maps, "draw_maps", lambda path, rows, *rest: drawn.update({path.name: (rows, *rest)}))
    look.main(["--forecast", str(coupled)])
    names = [f"coupled_{name}.png" for name in ("c02", "bt13", "bt13_chance", "refc", "refc_chance")]
    assert sorted(drawn) == sorted(names) and capsys.readouterr().out.count("figure") == 5
    rows, titles, x, y, lines, channel, label = drawn["coupled_refc.png"]
    assert titles[1] == "2021-05-28 19:20 UTC, +30 min" and label == "composite radar reflectivity (dBZ)" and lines
    assert list(rows) == ["member 1", "member 2", "probability_matched_mean"]
    np.testing.assert_allclose(rows["member 2"][2], data.refc[0, 4, 1])
    np.testing.assert_allclose(rows["probability_matched_mean"][1], data.refc_probability_matched_mean[0, 2], rtol=1e-6)
    rows = drawn["coupled_bt13_chance.png"][0]
    assert list(rows) == ["< 235 K", "< 220 K"]
    np.testing.assert_allclose(rows["< 235 K"][0], data.bt13_neighborhood_maximum_probability[0, 0, 0])


def test_tops_of_storms_have_colours_and_all_that_is_warmer_is_grey():
    """Colours differ on the two sides of the warmest event, whatever was observed, and darken as tops get colder."""
    style = maps._style("bt13", {"observed": [np.full((2, 2), 290.0)]})
    share = (np.array([200.0, 215.0, 234.0, 236.0, 290.0]) - style["vmin"]) / (style["vmax"] - style["vmin"])
    look = style["cmap"](share)
    assert (np.ptp(look[:, :3], axis=1) > 0.2).tolist() == [True] * 3 + [False] * 2
    light = look[:, :3] @ [0.21, 0.72, 0.07]
    assert light[0] < light[1] < light[2] and light[4] < light[3]


def test_the_matched_mean_has_the_places_of_the_mean_and_the_values_of_the_members():
    members = np.random.default_rng(0).gamma(0.5, 10, (5, 8, 9))
    members[:, 0, 0] = np.nan
    got, mean = products.matched_mean(members), members.mean(0)
    order = np.argsort(mean[np.isfinite(mean)])
    assert (np.diff(got[np.isfinite(mean)][order]) >= 0).all() and np.isnan(got[0, 0])
    assert np.nanmax(got) > np.nanmax(mean) and np.nanmean(got) == pytest.approx(np.nanmean(mean), rel=0.05)


def test_neighborhoods_count_what_is_known():
    event, known = np.zeros((2, 15, 15), bool), np.ones((15, 15), bool)
    event[0, 7, 7], known[7, 8] = True, False
    share, anywhere = products.near_share(event.mean(0), known, 6.0), products.near_any(event, known, 6.0)
    inside = np.hypot(*np.mgrid[-7:8, -7:8]) * 6 <= products.RADIUS_KM
    assert share[7, 7] == pytest.approx(0.5 / (inside.sum() - 1)) and np.isnan(share[7, 8])
    assert anywhere[7, 4] == 0.5 and anywhere[7, 3] == 0.0 and share[7, 3] == pytest.approx(0, abs=1e-12)


def test_rain_of_reflectivity():
    rain = products.rain_rate(np.array([-10.0, 23.0, 40.0, 53.0, 70.0]))
    assert rain[0] == 0 and rain[3] == rain[4] == pytest.approx(103.8, abs=0.5)
    np.testing.assert_allclose(300 * rain[1:3] ** 1.4, 10 ** np.array([2.3, 4.0]))


# -- scores -----------------------------------------------------------------------------------------------------------
def test_a_stored_forecast_has_the_scores_of_a_new_one(folder, trained, tmp_path):
    common = ["--archive", str(folder / "archive.zarr"), "--no-figures", "--baselines", "persistence"]
    models = ["--checkpoint", trained["radar"], "--satellite", trained["satellite"]]
    size = ["--steps", "2", "--members", "3", "--cases", "1"]
    evaluate.main([*models, *common, *size, "--out", str(tmp_path / "new")])
    new = json.loads((tmp_path / "new/results.json").read_text())
    forecast.main([*models, "--archive", common[1], *size[:4], "--init", new["cases"][0], "--no-products",
                   "--out", str(tmp_path / "one.zarr")])  # fmt: skip
    evaluate.main(["--forecast", str(tmp_path / "one.zarr"), *common])
    old = json.loads((tmp_path / "evaluation/results.json").read_text())  # beside the file
    assert old["cases"] == new["cases"] and old["members"] == new["members"]
    for channel in ("c02", "bt13", "refc"):
        for name, want in new["sums"][channel]["model"].items():
            np.testing.assert_allclose(old["sums"][channel]["model"][name], want, rtol=2e-4, atol=1e-3, err_msg=name)


def test_reflected_sunlight_is_scored_by_the_height_of_the_sun(folder, trained, tmp_path):
    common = ["--archive", str(folder / "archive.zarr"), "--no-figures", "--baselines", "persistence"]
    size = ["--steps", "2", "--members", "2", "--cases", "2", "--out", str(tmp_path)]
    evaluate.main(["--checkpoint", trained["satellite"], *common, *size])
    found = json.loads((tmp_path / "results.json").read_text())
    assert set(found["sun"]) == {"c02"} and [p["cos_zenith"] for p in found["sun"]["c02"]][0] == [0.1, 0.4]
    sums = found["sums"]
    parts = [sums[name] for name in sums if name.startswith("c02 at sun")]
    for name in ("n", "square", "crps"):
        total = np.sum([part["model"][name] for part in parts], axis=0)
        np.testing.assert_allclose(total, sums["c02"]["model"][name], rtol=1e-9)


@pytest.fixture
def hrrr(folder, tmp_path):
    """Runs of 17, 18 and 19 UTC, each for the two hours after it; values tell run and hour."""
    grid = WeatherReader(folder / "archive.zarr").grid
    near = hrrr_crop(1, slice(430, 486), slice(838, 884))
    assert near.x[0] < grid.x[0] and near.x[-1] > grid.x[-1] and near.y[0] < grid.y[0] and near.y[-1] > grid.y[-1]
    assert near.x[1] - near.x[0] == SPACING
    for run in (17, 18, 19):
        for ahead in (1, 2):
            start = np.datetime64(f"2021-05-28T{run}:00", "ns")
            values = np.full(near.shape, 10.0 * ahead + run, np.float32)
            place = {n: (("y", "x"), getattr(near, n)) for n in ("latitude", "longitude")}
            step = np.timedelta64(ahead, "h").astype("timedelta64[ns]")
            times = {"time": start, "step": step, "valid_time": start + step}
            field = xarray.Dataset({"refc": (("y", "x"), values, {"units": "dB"})}, place | times)
            field.to_netcdf(tmp_path / f"run{run}f{ahead:02d}.nc", engine="h5netcdf")
    return tmp_path


def test_hrrr_is_the_run_that_was_there_at_equal_times(folder, hrrr):
    grid, start = WeatherReader(folder / "archive.zarr").grid, np.datetime64("2021-05-28T18:50")
    times = start + np.array([10, 20, 70], "timedelta64[m]")
    fields = Hrrr(hrrr, delay=60).forecast(start, times, grid, -10.0)
    assert fields.shape == (3, *grid.shape) and (fields[0] == 20 + 17).all() and np.isnan(fields[1:]).all()
    fields = Hrrr(hrrr, delay=45).forecast(start, times, grid, -10.0)
    assert (fields[0] == 10 + 18).all() and (fields[2] == 20 + 18).all()
    with pytest.raises(InputError, match="holds no file like"):
        Hrrr(folder / "archive.zarr" / "fields", 60)


def test_quarters_of_an_hour_of_hrrr_are_read(folder, tmp_path):
    grid, start = WeatherReader(folder / "archive.zarr").grid, np.datetime64("2021-05-28T18:50")
    rows, cols = slice(447, 503), slice(841, 887)
    shape, keys = (56, 46), hrrr_keys(rows, cols)
    for hour in (2, 3):
        values = {60 * hour + minutes: np.full(shape, 10 * hour + minutes / 15) for minutes in (-45, -30, -15, 0)}
        write_subhourly(tmp_path / f"hrrr.t17z.wrfsubhf{hour:02d}.grib2", values, keys, (20210528, 1700))
    fields = Hrrr(tmp_path, delay=60).forecast(
        start, start + np.arange(10, 70, 10) * np.timedelta64(1, "m"), grid, -10.0
    )
    assert [np.nanmean(field) if np.isfinite(field).all() else None for field in fields] == [
        20,
        None,
        None,
        28,
        None,
        None,
    ]


def test_hrrr_is_scored_where_it_is_valid(folder, trained, short, hrrr, tmp_path):
    common = ["--archive", str(folder / "archive.zarr"), "--no-figures", "--baselines", "persistence"]
    forecast.main(_arguments(folder, trained, "scored.zarr", "--no-products", "--overwrite"))
    scored = ["--forecast", str(folder / "scored.zarr"), "--hrrr", str(hrrr), "--out", str(tmp_path / "scores")]
    with pytest.raises(SystemExit):  # the frames of the day end before the last lead
        evaluate.main([*scored, *common])
    scored[1] = str(short)
    evaluate.main([*scored, *common])
    found = json.loads((tmp_path / "scores/results.json").read_text())["scores"]["refc"]["hrrr"]
    assert found["rmse"][0] > 0 and found["rmse"][1] is None


@pytest.mark.parametrize("kind", ["folder", "text", "cut"])
def test_a_file_that_is_no_forecast_is_named(tmp_path, kind):
    path = tmp_path / "f.nc"
    if kind == "folder":
        path.mkdir()
    else:
        xarray.Dataset({"refc": ("x", np.arange(4000.0))}).to_netcdf(path, engine="h5netcdf")
        path.write_bytes(b"no NetCDF" if kind == "text" else path.read_bytes()[:20_000])
    with pytest.raises(InputError, match="f.nc: cannot be read as a forecast.*Give an output of"):
        Stored(path)
