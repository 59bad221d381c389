"""The weather archive: written whole or not at all, read by the part, split fairly; and synthetic storms in it."""

import multiprocessing
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyproj
import pytest
import xarray as xr
import zarr
from weather_files import (
    ALL,
    SMALL,
    truncate,
)

from core.errors import InputError
from data.weather.archive import WeatherReader
from data.weather.channels import CHANNELS
from data.weather.grid import hrrr_crop
from data.weather.layout import chunk_rows
from data.weather.scheduler import by_lots, spread
from data.weather.splits import cells_in, choose_splits, date_splits, longitude_splits, times_in
from data.weather.sun import cos_zenith
from data.weather.synthetic import WINDOW, Storms, build_synthetic, day_frames, radar_hole
from data.weather.writer import write_archive


@pytest.fixture(scope="module")
def storms(tmp_path_factory):
    path = tmp_path_factory.mktemp("storms") / "storms.zarr"
    build_synthetic(path)
    return WeatherReader(path)


# splits


def test_dates_must_be_48_hours_apart():
    splits = date_splits(("2020-01-01", "2020-01-10"), ("2020-01-12", "2020-01-13"), ("2020-01-15", "2020-01-16"))
    assert splits["valid"] == ["2020-01-12T00:00:00", "2020-01-13T00:00:00"]
    inside = times_in(splits["valid"], np.array(["2020-01-11T23:50", "2020-01-12", "2020-01-13"], "datetime64[s]"))
    assert inside.tolist() == [False, True, True]
    with pytest.raises(InputError, match="valid split starts 24.0 h after the train split ends"):
        date_splits(("2020-01-01", "2020-01-10"), ("2020-01-11", "2020-01-13"), ("2020-01-15", "2020-01-16"))
    with pytest.raises(InputError, match="before it starts"):
        date_splits(("2020-01-10", "2020-01-01"), ("2020-01-13", "2020-01-13"), ("2020-01-15", "2020-01-16"))


def test_longitude_split_leaves_200_km_on_every_row():
    grid = hrrr_crop(2)
    splits = longitude_splits(grid, -100)
    train, valid = (cells_in(splits[k], grid.longitude) for k in ("train", "valid"))
    assert train.any() and valid.any() and not (train & valid).any()
    gaps = []
    for i in range(0, grid.shape[0], 50):
        west, east = np.flatnonzero(train[i])[-1], np.flatnonzero(valid[i])[0]
        ends = grid.longitude[i, west], grid.latitude[i, west], grid.longitude[i, east], grid.latitude[i, east]
        gaps.append(pyproj.Geod(a=6371229, b=6371229).inv(*ends)[2])
    assert min(gaps) > 200e3
    with pytest.raises(InputError, match="leaves one side of the grid"):
        longitude_splits(grid, -50)


def test_choice_of_splits():
    grid, day = hrrr_crop(2), np.timedelta64(1, "D")
    long = choose_splits(np.datetime64("2020-01-01") + np.arange(40) * day, grid)
    assert list(long) == ["train", "valid", "test"] and long["train"][0].startswith("2020-01-01")
    short = choose_splits(np.datetime64("2020-01-01") + np.arange(3) * day, grid)
    assert short["train"] == {"lon_max": -100.0}
    east = choose_splits(np.datetime64("2020-01-01") + np.arange(3) * day, hrrr_crop(2, cols=slice(700, 896)))
    assert east["train"]["lon_max"] > -90


# the archive


def tiny(path, n=5, mode="w-", first=0, **overrides):
    """An archive of n incompressible frames with a gap; returns what was written."""
    rng = np.random.default_rng(7)
    fields = rng.normal(size=(10, 2, 40, 50)).astype(np.float32)[first : first + n]
    fields[:, 0, :3, :7] = np.nan
    times = np.datetime64("2020-01-01T00:00") + np.arange(first, first + n) * np.timedelta64(10, "m")
    splits = date_splits(("2020-01-01", "2020-01-01T00:20"), ("2020-02-01",) * 2, ("2020-03-01",) * 2)
    options = dict(channels=[CHANNELS["refc"], CHANNELS["bt13"]], times=times, frames=iter(fields), splits=splits)
    write_archive(path, hrrr_crop(**SMALL), **(options | overrides), mode=mode, attrs={"provenance": {"files": {}}})
    return fields, times


def test_round_trip(tmp_path):
    fields, times = tiny(tmp_path / "a.zarr")
    reader = WeatherReader(tmp_path / "a.zarr")
    assert np.array_equal(reader.times, times) and reader.channels == ["refc", "bt13"]
    for step in range(5):
        assert np.array_equal(reader.read(str(step), "fields", ALL), fields[step], equal_nan=True)
        assert np.array_equal(reader.read(str(step), "valid", ALL), np.isfinite(fields[step]))
    part = (slice(1, 2), slice(13, 31), slice(5, 9))
    assert np.array_equal(reader.read("2", "fields", part), fields[2][part])
    assert reader.shape("0", "fields") == (2, 40, 50) and reader.shape("0", "latitude") == (40, 50)
    grid = hrrr_crop(**SMALL)
    assert np.array_equal(reader.read("0", "longitude", (slice(3, 9), slice(None))), grid.longitude[3:9])
    assert np.array_equal(reader.grid.y, grid.y) and reader.grid.crs == grid.crs


def test_statistics_come_from_training_dates_only(tmp_path):
    fields, _ = tiny(tmp_path / "a.zarr")
    reader = WeatherReader(tmp_path / "a.zarr")
    train = fields[:3].astype(np.float64)
    assert reader.mean == pytest.approx(np.nanmean(train, (0, 2, 3)), abs=1e-12)
    assert reader.std == pytest.approx(np.nanstd(train, (0, 2, 3)), abs=1e-12)
    assert reader.attrs["floor"] == {"refc": -10.0} and reader.attrs["units"] == {"refc": "dBZ", "bt13": "K"}


def test_statistics_of_a_longitude_split(tmp_path):
    grid = hrrr_crop(**SMALL)
    splits = {"train": {"lon_max": float(grid.longitude.mean())}, "valid": {"lon_min": -96.0}}
    fields, _ = tiny(tmp_path / "a.zarr", splits=splits)
    train = fields[:, :, grid.longitude <= grid.longitude.mean()].astype(np.float64)
    assert WeatherReader(tmp_path / "a.zarr").mean == pytest.approx(np.nanmean(train, (0, 2)), abs=1e-12)


def test_nothing_to_train_on_is_an_error(tmp_path):
    empty = np.full((5, 2, 40, 50), np.nan, np.float32)
    with pytest.raises(InputError, match="variable refc: no valid value in the training part"):
        tiny(tmp_path / "a.zarr", frames=iter(empty))
    assert list(tmp_path.iterdir()) == []


def test_append_equals_one_write(tmp_path):
    whole, _ = tiny(tmp_path / "whole.zarr", 5)
    tiny(tmp_path / "a.zarr", 2)
    before = WeatherReader(tmp_path / "a.zarr").attrs["statistics_hash"]
    tiny(tmp_path / "a.zarr", 3, mode="a", first=2)
    one, two = WeatherReader(tmp_path / "whole.zarr"), WeatherReader(tmp_path / "a.zarr")
    assert np.array_equal(one.times, two.times) and two.attrs["statistics_hash"] != before
    assert two.mean == pytest.approx(one.mean, abs=1e-12) and two.std == pytest.approx(one.std, abs=1e-12)
    for step in range(5):
        assert np.array_equal(two.read(str(step), "fields", ALL), whole[step], equal_nan=True)
    assert xr.open_zarr(tmp_path / "a.zarr").sizes["time"] == 5


def test_failed_write_leaves_what_was_there(tmp_path):
    def broken(fields):
        yield fields[0]
        raise InputError("broken", file="x")

    path, frame = tmp_path / "a.zarr", np.zeros((5, 2, 40, 50))
    with pytest.raises(InputError, match="broken"):
        tiny(path, frames=broken(frame))
    assert list(tmp_path.iterdir()) == []
    fields, _ = tiny(path, 2)
    for mode in ("w", "a"):
        with pytest.raises(InputError, match="broken"):
            tiny(path, 5, mode=mode, first=2, frames=broken(frame))
        assert list(tmp_path.iterdir()) == [path]
        reader = WeatherReader(path)
        assert len(reader.times) == 2 and np.array_equal(reader.read("1", "fields", ALL), fields[1], equal_nan=True)


def test_only_archives_are_overwritten(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="is no archive, and is not touched"):
        tiny(tmp_path / "home", mode="w")
    assert (tmp_path / "home" / "letter.txt").read_text() == "dear"


def test_constant_channel(tmp_path):
    flat = np.ones((5, 2, 40, 50), np.float32)
    tiny(tmp_path / "a.zarr", 2, frames=iter(flat[:2]))
    tiny(tmp_path / "a.zarr", 3, mode="a", first=2, frames=iter(flat[2:]))
    reader = WeatherReader(tmp_path / "a.zarr")
    assert reader.mean.tolist() == [1, 1] and reader.std.tolist() == [1, 1] and reader.attrs["std"]["refc"] == 0


def test_damaged_chunk_is_named(tmp_path):
    tiny(tmp_path / "a.zarr")
    truncate(tmp_path / "a.zarr" / "fields" / "c" / "2" / "0" / "0" / "0")
    with pytest.raises(InputError, match="a.zarr, variable fields: sample 2 cannot be decoded"):
        WeatherReader(tmp_path / "a.zarr").read("2", "fields", ALL)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (dict(channels=[CHANNELS["refc"], CHANNELS["c02"]]), "other channels"),
        (dict(first=0), "ascending order, after those stored"),
        (dict(mode="w-"), "exists already"),
    ],
)
def test_append_is_checked(tmp_path, overrides, message):
    tiny(tmp_path / "a.zarr", 2)
    with pytest.raises(InputError, match=message):
        tiny(tmp_path / "a.zarr", **({"n": 2, "mode": "a", "first": 2} | overrides))


def test_half_the_rows_are_half_the_bytes(tmp_path):
    tiny(tmp_path / "a.zarr")

    def cost(*rows, name="fields"):
        reader = WeatherReader(tmp_path / "a.zarr")
        reader.read("1", name, (slice(None), slice(*rows), slice(None)))
        return reader.bytes_read

    index = 8 * 16 + 4  # where the 8 chunks of a frame lie, and a checksum
    whole, half, eighth = cost(0, 40) - index, cost(20, 40) - index, cost(5, 10) - index
    assert 0.9 * 2 * 40 * 50 * 4 < whole < 1.1 * 2 * 40 * 50 * 4  # incompressible noise
    assert half == pytest.approx(whole / 2, rel=0.01) and eighth == pytest.approx(whole / 8, rel=0.02)
    assert cost(0, 20) + cost(20, 40) == cost(0, 40) + index
    reader = WeatherReader(tmp_path / "a.zarr")
    assert reader.shape("0", "fields") == (2, 40, 50) and reader.bytes_read == 0


@pytest.mark.parametrize("ny, rows", [(64, 8), (512, 64), (1024, 128), (2048, 128), (118, 15), (3, 1)])
def test_chunks_meet_the_cuts_of_ranks(ny, rows):
    assert chunk_rows(ny) == rows


def test_xarray_opens_it(storms):
    dataset = xr.open_zarr(storms.path)
    assert dataset.time.dtype.kind == "M" and dataset.time.values[1] == np.datetime64("2021-05-20T18:10")
    assert dataset.fields.dims == ("time", "channel", "y", "x") and set(dataset.coords) >= {"latitude", "longitude"}
    assert dataset.fields.attrs["grid_mapping"] == "crs"
    assert pyproj.CRS.from_cf(dataset.crs.attrs).coordinate_operation.method_name.startswith("Lambert Conic Conformal")
    assert dataset.x.attrs["units"] == "m" and dataset.latitude.attrs["units"] == "degrees_north"
    assert dataset.channel_units.values.tolist() == ["dBZ", "K", "1", "count"]
    one = xr.open_dataset(storms.path, engine="zarr").fields.sel(channel="refc").isel(time=3, y=slice(0, 8))
    assert np.array_equal(one, storms.read("3", "fields", ALL)[0, :8], equal_nan=True)


def test_every_array_and_attribute_is_documented(storms):
    text = (Path(__file__).parents[1] / "docs" / "data_weather.md").read_text()
    group = zarr.open_group(storms.path, mode="r")
    words = set(re.findall(r"`([^`\n]+)`", re.sub("```.*?```", "", text, flags=re.DOTALL)))
    assert {*group.array_keys(), *group.attrs, *storms.channels, "topography", "radar_proximity"} <= words


def test_reader_survives_pickle_and_fork(storms):
    rows = (slice(None), slice(0, 8), slice(None))
    expected = storms.read("5", "fields", rows)
    copy = pickle.loads(pickle.dumps(storms))
    assert copy.bytes_read == 0 and np.array_equal(copy.read("5", "fields", rows), expected, equal_nan=True)
    with multiprocessing.get_context("fork").Pool(2) as pool:  # workers of a loader, after the parent has read
        jobs = [pool.apply_async(storms.read, ("5", "fields", rows)) for _ in range(4)]
        assert all(np.array_equal(job.get(timeout=60), expected, equal_nan=True) for job in jobs)


def test_reader_names_what_is_wrong(storms):
    for call in (lambda: storms.read("999", "fields", ALL), lambda: storms.shape("-1", "fields")):
        with pytest.raises(InputError, match="no sample .*144 frames"):
            call()
    with pytest.raises(InputError, match="variable rain: no such array"):
        storms.read("0", "rain", ALL)
    with pytest.raises(InputError, match=r"variable tset.*\['test', 'train', 'valid'\]"):
        storms.split("tset")


# synthetic storms


def correlation(a, b):
    both = np.isfinite(a) & np.isfinite(b)
    return np.corrcoef(a[both], b[both])[0, 1] if both.sum() > 100 else np.nan


@pytest.fixture(scope="module")
def radar(storms):
    """Reflectivity of the default archive, (day, step, y, x)."""
    return np.stack([storms.read(str(i), "fields", ALL)[0] for i in range(144)]).reshape(6, 24, 64, 96)


@pytest.mark.parametrize("lag, expected", [(1, 0.77), (5, 0.44)])
def test_storms_persist_as_radar_does(radar, lag, expected):
    pairs = [correlation(day[i], day[i + lag]) for day in radar for i in range(24 - lag)]
    assert np.nanmean(pairs) == pytest.approx(expected, abs=0.1)


def test_following_the_wind_beats_persistence(radar):
    def moved(field, dy, dx):
        out = np.full_like(field, np.nan)
        ny, nx = field.shape
        out[max(dy, 0) : ny + min(dy, 0), dx:] = field[max(-dy, 0) : ny - max(dy, 0), : nx - dx]
        return out

    persisted, followed = [], []
    for day in radar:
        for i in range(3, 21, 3):
            past, now, then = day[i - 3], day[i], day[i + 3]
            if not all(np.isfinite(f).any() for f in (past, now, then)):
                continue
            shifts = [(dy, dx) for dy in range(-3, 4) for dx in range(7)]
            forecast = moved(now, *max(shifts, key=lambda s: correlation(moved(past, *s), now)))
            both = np.isfinite(forecast) & np.isfinite(then) & np.isfinite(now)
            persisted.append(np.mean((now - then)[both] ** 2))
            followed.append(np.mean((forecast - then)[both] ** 2))
    assert np.mean(followed) < 0.9 * np.mean(persisted)


def test_storms_look_like_weather(storms, radar):
    assert np.nanmin(radar) == -10 and 45 < np.nanmax(radar) < 75
    assert 0.05 < np.nanmean(radar > 5) < 0.4
    assert ((storms.times[1:] - storms.times[:-1]) >= np.timedelta64(600, "s")).all()
    spans = [storms.split(name) for name in ("train", "valid", "test")]
    assert date_splits(*spans) == storms.attrs["splits"]
    whole = np.isnan(radar).all((2, 3))
    assert 0 < whole.mean() < 0.15  # missing scans
    hole = radar_hole(Storms(), storms.grid)
    assert 10 < hole.sum() < 100 and (np.isnan(radar[~whole]) == hole).all()


def test_channels_are_of_one_sky():
    names = ("refc", "bt13", "c02", "glm")
    grid = hrrr_crop(**WINDOW)
    times = np.datetime64("2021-05-20T12:00", "s") + np.arange(24) * np.timedelta64(40, "m")
    frames = np.stack(list(day_frames(Storms(names, missing=0, hole=False), grid, 0, times)))
    rain, cold, bright, flashes = frames.transpose(1, 0, 2, 3)
    assert cold[rain > 45].mean() < cold[rain == -10].mean() - 30
    assert cold.min() > 190 and cold.max() < 320
    sun = np.array([cos_zenith(grid.latitude, grid.longitude, t).mean() for t in times])
    assert bright[sun > 0.5].mean() > 0.1 and np.abs(bright[sun < -0.2]).max() < 0.05
    assert flashes[rain < 25].max() == 0 and flashes[rain > 45].mean() > 1


def test_the_test_holds_weather_that_training_never_shows(storms):
    (first, _), (_, last) = storms.attrs["provenance"]["unseen_regime"][0], storms.split("test")
    days = times_in([first, last], storms.times), times_in(storms.split("test"), storms.times)
    assert [day.sum() for day in days] == [24, 48]
    drift = []
    for at in range(0, 144, 24):  # of the cold tops in two hours, which the infrared always shows in this archive
        cold = [storms.read(str(i), "fields", ALL)[1] for i in range(at, at + 24)]
        drift.append(max(((dy, dx) for dy in range(-9, 6) for dx in range(0, 9)), key=lambda s: _match(cold, *s))[0])
    assert drift[-1] < min(drift[:-1]) - 2, drift


def _match(frames, dy, dx):
    """Correlation of frames half an hour apart once the earlier one is moved by cells."""
    now, then = np.stack(frames[:-3]), np.stack(frames[3:])
    ny, nx = now.shape[1:]
    now = now[:, max(-dy, 0) : ny - max(dy, 0), : nx - dx]
    return correlation(now, then[:, max(dy, 0) : ny + min(dy, 0), dx:])


def test_counts_are_seen_by_their_logarithm(storms):
    assert storms.log.tolist() == [False, False, False, True]
    train = [storms.read(str(i), "fields", ALL)[3].astype(np.float64) for i in range(72)]
    assert storms.mean[3] == pytest.approx(np.nanmean(np.log1p(train)), abs=1e-9)
    assert storms.std[3] == pytest.approx(np.nanstd(np.log1p(train)), abs=1e-9)


def test_storms_follow_their_seed():
    grid, times = hrrr_crop(**WINDOW), np.array(["2021-05-20T18:00"], "datetime64[s]")
    one, again, other, next_day = (
        next(day_frames(Storms(seed=seed, missing=0, hole=False), grid, day, times))
        for seed, day in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert np.array_equal(one, again) and not np.array_equal(one, other) and not np.array_equal(one, next_day)


def test_storms_are_the_same_however_many_make_them(tmp_path):
    grid, storms = hrrr_crop(2, slice(216, 232), slice(420, 436)), Storms(("refc",), days=9, frames=3)
    for name, workers in (("one", 1), ("two", 2)):
        build_synthetic(tmp_path / name, storms, grid, each=spread(workers=workers))
    one, two = (
        {
            path.relative_to(tmp_path / name): path.read_bytes()
            for path in (tmp_path / name).rglob("*")
            if path.is_file()
        }
        for name in ("one", "two")
    )
    assert one == two and len(one) > 27


def test_a_build_that_goes_on_keeps_its_lots():
    """A lot is a day, wherever a killed build begins again."""
    lots = []
    each = by_lots(lambda function, items: map(function, lots.extend(items) or items), 3)
    assert list(each(str, range(4, 11))) == [*"456789", "10"] and lots == [[4, 5], [6, 7, 8], [9, 10]]


def test_impossible_storms(tmp_path):
    with pytest.raises(InputError, match="variable days: .*at least 3"):
        build_synthetic(tmp_path / "a.zarr", Storms(days=2))
    with pytest.raises(InputError, match="variable rain: is not made. Choose among refc"):
        build_synthetic(tmp_path / "a.zarr", Storms(channels=("refc", "rain")))


def test_sun_stands_where_it_should():
    noon = np.datetime64("2021-06-21T18:30")  # local noon of 97.5 W at the solstice
    assert cos_zenith(38.5, -97.5, noon) == pytest.approx(np.cos(np.radians(38.5 - 23.44)), abs=0.01)
    assert cos_zenith(0.0, 0.0, np.datetime64("2021-03-20T12:07")) == pytest.approx(1, abs=0.01)
    assert cos_zenith(0.0, 0.0, np.datetime64("2021-03-20T06:07")) == pytest.approx(0, abs=0.02)


def test_training_machine_needs_only_numpy_and_zarr(tmp_path):
    code = f"""
import sys
for name in ("netCDF4", "cfgrib", "eccodes", "h5netcdf", "h5py", "pyproj", "scipy", "matplotlib", "xarray", "vtk"):
    sys.modules[name] = None
from data.weather.synthetic import Storms, build_synthetic
from data.weather.archive import WeatherReader
build_synthetic({str(tmp_path / "s.zarr")!r}, Storms(days=3, frames=2))
assert WeatherReader({str(tmp_path / "s.zarr")!r}).mean.shape == (4,)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1], timeout=60)
