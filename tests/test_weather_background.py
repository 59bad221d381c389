"""Fields of a weather model: conditions, by what was known at the start, that no model of ours forecasts."""

import json
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import xarray

from apps.weather import evaluate, forecast, train
from apps.weather.config import TrainConfig
from apps.weather.dataset import Frames
from apps.weather.facts import Facts
from core import DistributedManager, InputError
from data.weather.archive import WeatherReader
from data.weather.channels import CHANNELS
from data.weather.grid import hrrr_crop
from data.weather.splits import date_splits
from data.weather.writer import write_archive

SHAPE, FRAMES, STEP, HOUR = (16, 20), 14, np.timedelta64(10, "m"), np.timedelta64(60, "m")
DAYS = ("2020-01-01", "2020-01-04", "2020-01-07")
NAMES = "refc", "bt13", "z500"


def run_before(time):
    """Runs start hourly and are known an hour later: for when the nearest field is, and since when it was known."""
    known = time.astype("datetime64[h]").astype("datetime64[s]")
    return (time + HOUR / 2).astype("datetime64[h]").astype("datetime64[s]"), known


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """Noise; z500 is everywhere the number of its frame. Frame 3 has none; frames 4 to 9, an hour, nothing else."""
    path, rng = tmp_path_factory.mktemp("background") / "a.zarr", np.random.default_rng(5)
    times = np.concatenate([np.datetime64(f"{day}T12:00:00") + STEP * np.arange(FRAMES) for day in DAYS])

    def frame(i):
        fields = rng.normal(size=(3, *SHAPE)).astype(np.float32)
        fields[2] = np.nan if i == 3 else i
        fields[:2, :, :] = np.nan if 4 <= i <= 9 else fields[:2]
        return fields, {"times": {} if i == 3 else {"z500": run_before(times[i])}}

    splits = date_splits(*((day, np.datetime64(day) + 1) for day in DAYS))
    grid = hrrr_crop(2, slice(216, 232), slice(420, 440))
    write_archive(path, grid, [CHANNELS[name] for name in NAMES], times, frame, splits, attrs={"step_minutes": 10})
    return path


@pytest.fixture
def frames(archive):
    DistributedManager.initialize()
    reader = WeatherReader(archive)
    facts = Facts.of(reader, 2, ("refc", "bt13"), ("z500",))
    yield Frames(reader, facts, DistributedManager().initialize_mesh((1,), ("domain",)), 4)
    DistributedManager.cleanup()


def test_the_field_of_a_step_is_the_latest_that_was_known_at_the_start(frames):
    """At 12:40 the run of 11 UTC was known; frames from 13:00 on hold that of 12 UTC. Hours lead to the valid time."""
    found = [frames.model.find("z500", 4, lead) for lead in range(5)]
    assert [at for at, _ in found] == [5, 5, 5, 5, 5]
    assert [hours for _, hours in found] == pytest.approx([1 / 6, 0, -1 / 6, -2 / 6, -3 / 6])
    assert frames.model.find("z500", 6, 2) == (9, 0.5)  # at 13:00 the run of 12 UTC was known
    assert frames.model.find("z500", FRAMES - 1, 3)[0] == FRAMES - 1  # of the next day nothing
    assert frames.model.find("z500", 2, 0)[0] == 2  # frame 3 has none
    assert [frames.model.age(index, 3) for index in (0, 2, 5, FRAMES)] == [0, 2, 3, 0]


def test_conditions_hold_value_validity_and_age(frames):
    mean, std = (getattr(frames.reader, name)[2] for name in ("mean", "std"))
    count = frames.facts.conditions
    assert count == 2 * 2 * 2 + 3 + 4 and frames.observed(4).values.shape[1] == 2
    conditions = frames.batch([6, 6, 2], [0, 1, 0]).conditions
    assert conditions.shape[1] == count
    told = conditions[:, 8:11].full_tensor().mean((2, 3))  # for 13:10 of what was known at 13:00 and 12:50; for 12:30
    expected = [[(at - mean) / std, 1, hours] for at, hours in ((7, -1 / 6), (5, -1 / 6), (2, -1 / 2))]
    torch.testing.assert_close(told, torch.tensor(expected, dtype=told.dtype))
    missing = frames.batch([3]).conditions[:, 8:11].full_tensor()
    assert missing[:, 0].unique().item() == pytest.approx((4 - mean) / std)


def on_ranks(meshes, path):
    reader = WeatherReader(path)
    frames = Frames(reader, Facts.of(reader, 2, ("refc", "bt13"), ("z500",)), meshes["2x2"], 4)
    return frames.batch([6, 6], [0, 1]).conditions.full_tensor().numpy()


def test_ranks_are_told_the_same(pool, archive, frames):
    whole = frames.batch([6, 6], [0, 1]).conditions.full_tensor().numpy()
    assert all(np.array_equal(found, whole) for found in pool.run(on_ranks, str(archive)))


SIZES = ["--history", "8", "--width", "16", "--depth", "1", "--heads", "2", "--kernel", "3", "--cases", "1"]
FEW = ["--steps", "1", "--batch", "2", "--members", "1", "--sampler-steps", "2"]


@pytest.fixture
def read_alone(monkeypatch):
    """Frames that a forecast reads where a rank that cannot would leave the others waiting."""
    inside, alone, read, agreed = [], [], Frames._read, forecast.together

    @contextmanager
    def together():
        inside.append(True)
        with agreed():
            yield
        inside.pop()

    def noted(frames, sample):
        alone.extend([] if inside else [sample])
        return read(frames, sample)

    monkeypatch.setattr(forecast, "together", together)
    monkeypatch.setattr(Frames, "_read", noted)
    return alone


def test_no_model_forecasts_what_a_weather_model_says(archive, tmp_path, capsys, read_alone):
    """Neither part takes it for a band of the satellite; forecasts of both hear it. These have an hour without
    observations in their history."""
    base, paths = ["--archive", str(archive), *SIZES, *FEW], {}
    for part, more in (("satellite", []), ("radar", ["--background", "none"])):
        result = train.main([*base, "--out", str(tmp_path / part), "--part", part, *more])
        paths[part] = str(result.checkpoint)
    made = tmp_path / "f.zarr"
    arguments = ["--checkpoint", paths["radar"], "--satellite", paths["satellite"], "--archive", str(archive)]
    arguments += ["--init", "2020-01-01T13:40", "--steps", "2", "--members", "1", "--out"]
    read_alone.clear()
    forecast.main([*arguments, str(made)])
    assert not read_alone
    data = xarray.open_zarr(made)
    assert data.attrs["channels"] == "bt13 refc" and np.isfinite(data.refc).all()
    assert data.attrs["background"] == "z500"
    evaluate.main(["--forecast", str(made), "--baselines", "persistence", "--no-figures", "--out", str(tmp_path)])
    scores = json.loads((tmp_path / "results.json").read_text())["scores"]
    assert set(scores) == {"bt13", "refc"} and all(np.isfinite(scores[name]["model"]["rmse"]).all() for name in scores)
    none = str(tmp_path / "none.zarr")
    for main, wrong, word in (
        (train.main, [*base, "--out", none, "--channels", "z500"], "forecasts z500"),
        (train.main, [*base, "--out", none, "--background", "refc"], "names no fields of a weather model"),
        (forecast.main, [*arguments, none, "--missing", "refuse"], "only 0% was observed at 2020-01-01T12:40"),
    ):
        with pytest.raises(SystemExit):
            main(wrong)
        assert word in capsys.readouterr().err
    assert TrainConfig(part="radar").names(NAMES) == (("bt13",), ("refc",))
    assert (
        TrainConfig().model_fields(NAMES) == ("z500",) and TrainConfig(background=("none",)).model_fields(NAMES) == ()
    )


def test_an_archive_that_does_not_say_when_is_refused(archive, frames, monkeypatch):
    monkeypatch.setattr("data.weather.archive.TIMES", {"model_other_time": ""})
    reader = WeatherReader(archive)
    with pytest.raises(InputError, match="a.zarr, variable model_other_time: does not say for when"):
        Frames(reader, frames.facts, frames.mesh, 4)
