"""Weather data: real samples read and laid on the HRRR crop as independent computations say, archives, the command."""

import gzip
import json
import multiprocessing
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyproj
import pytest
import xarray as xr
from weather_files import (
    ABI,
    DATA,
    GLM_G16,
    GLM_G19,
    MRMS,
    STAGEIV,
    copy_to,
    truncate,
    write_mcmip,
    write_mrms,
    write_quiet_glm,
)

from core.errors import InputError
from data.weather import abi, build, glm, mrms, stageiv
from data.weather.archive import WeatherReader
from data.weather.channels import CHANNELS
from data.weather.grid import cell_area, cell_of, hrrr_crop, lambert_latlon, lambert_xy
from data.weather.netcdf import decode_time, opened, unpack
from data.weather.regrid import CellMean
from data.weather.sources import Lightning, regular
from data.weather.splits import cells_in, choose_splits, date_splits, longitude_splits, times_in
from data.weather.states import state_lines, state_lines_xy
from data.weather.synthetic import WINDOW, Storms, build_synthetic, cos_zenith, day_frames
from data.weather.writer import chunk_rows, write_archive

LCC = pyproj.Proj("+proj=lcc +lat_1=38.5 +lat_0=38.5 +lon_0=-97.5 +R=6371229")
ALL = (slice(None),) * 3
SMALL = dict(stride=2, rows=slice(200, 240), cols=slice(400, 450))


@pytest.fixture(scope="module")
def frame():
    return mrms.read_mrms(MRMS[0])


@pytest.fixture(scope="module")
def on_6km(frame):
    grid = hrrr_crop(2)
    return grid, CellMean(frame.latitude, frame.longitude, grid)(frame.linear)


@pytest.fixture(scope="module")
def storms(tmp_path_factory):
    path = tmp_path_factory.mktemp("storms") / "storms.zarr"
    build_synthetic(path)
    return WeatherReader(path)


# the grid


@pytest.mark.parametrize(
    "stride, corner, latitude, longitude",
    [
        (1, (0, 0), 21.582358, -122.767193),
        (1, (0, -1), 21.591804, -72.268903),
        (1, (-1, 0), 47.427217, -133.712150),
        (1, (-1, -1), 47.440961, -61.336836),
        (2, (0, 0), 21.582358, -122.767193),
        (2, (-1, -1), 47.426543, -61.388283),
    ],
)
def test_crop_corners(stride, corner, latitude, longitude):
    grid = hrrr_crop(stride)
    assert grid.shape == (1024 // stride, 1792 // stride) and grid.spacing == 3000 * stride
    assert grid.latitude[corner] == pytest.approx(latitude, abs=1e-6)
    assert grid.longitude[corner] == pytest.approx(longitude, abs=1e-6)


def test_lambert_agrees_with_pyproj():
    grid = hrrr_crop(8)
    x, y = LCC(grid.longitude, grid.latitude)
    assert np.abs(x - grid.x).max() < 1e-6 and np.abs(y - grid.y[:, None]).max() < 1e-6
    x, y = lambert_xy(*lambert_latlon(x, y))
    assert np.abs(x - grid.x).max() < 1e-6 and np.abs(y - grid.y[:, None]).max() < 1e-6


def test_cell_area_is_that_of_the_projection():
    grid = hrrr_crop(2, slice(0, 200), slice(100, 300))
    scale = LCC.get_factors(grid.longitude, grid.latitude).areal_scale
    assert np.abs(cell_area(grid) * scale / 36e6 - 1).max() < 1e-5


def test_window_is_a_part_of_the_crop():
    whole, part = hrrr_crop(2), hrrr_crop(**SMALL)
    assert np.array_equal(part.latitude, whole.latitude[200:240, 400:450])
    cells = cell_of(whole.latitude, whole.longitude, part)
    inside = np.zeros(whole.shape, bool)
    inside[200:240, 400:450] = True
    assert np.array_equal(cells[inside], np.arange(2000)) and (cells[~inside] == -1).all()
    with pytest.raises(ValueError, match="0 x 896"):
        hrrr_crop(2, rows=slice(600, 700))


# MRMS


def test_real_frame(frame):
    assert (frame.product.name, frame.time) == ("PrecipRate", np.datetime64("2019-06-10T00:00:00"))
    assert frame.linear.shape == (3500, 7000) and frame.linear.dtype == np.float32
    assert frame.latitude[0] == pytest.approx(20.005, abs=1e-5) and frame.latitude[-1] == pytest.approx(54.995)
    assert frame.longitude[0] == pytest.approx(-129.995) and frame.longitude[-1] == pytest.approx(-60.005, abs=1e-5)
    assert np.isnan(frame.linear).sum() == 8769493 and (frame.linear == 0).sum() == 14747625
    assert np.nanmax(frame.linear) == pytest.approx(148.8)


def test_marshall_palmer_like_conversion():
    rate = np.array([0, 1e-6, 1, 100, np.nan])
    assert mrms.to_dbz(rate, True) == pytest.approx([-10, -10, 24.771, 52.771, np.nan], abs=1e-3, nan_ok=True)
    z = mrms.to_linear(np.array([-999, -99, -15, 0, 40], np.float32), False)
    assert z == pytest.approx([np.nan, 0, 10**-1.5, 1, 1e4], nan_ok=True)
    assert mrms.to_dbz(z, False) == pytest.approx([np.nan, -10, -10, 0, 40], nan_ok=True)


@pytest.mark.parametrize("south_first", [False, True])
def test_reflectivity_by_number_in_either_order(tmp_path, south_first):
    values = np.full((30, 50), -99.0)
    values[:5] = -999
    values[10, 20] = 45.5
    path = write_mrms(tmp_path / "r.grib2", values, time=(2024, 5, 6, 7, 8, 39), south_first=south_first)
    frame = mrms.read_mrms(path)
    assert (frame.product.channel, frame.time) == ("refc", np.datetime64("2024-05-06T07:08:39"))
    assert (np.diff(frame.latitude) > 0).all()
    dbz = mrms.to_dbz(frame.linear, False)
    dbz = dbz if south_first else dbz[::-1]
    assert np.isnan(dbz[:5]).all() and dbz[10, 20] == pytest.approx(45.5) and (np.delete(dbz[5:], 5, 0) == -10).all()


def test_gzip_reads_the_same(tmp_path):
    path = write_mrms(tmp_path / "r.grib2", np.arange(600.0).reshape(20, 30) / 10, product=(209, 11, 0))
    packed = tmp_path / "r.grib2.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    plain, zipped = mrms.read_mrms(path), mrms.read_mrms(packed)
    assert zipped.product.channel == "refb" and np.array_equal(plain.linear, zipped.linear)
    with pytest.raises(InputError, match="cannot be read"):
        mrms.read_mrms(truncate(packed))


@pytest.mark.parametrize("read", [mrms.scan_mrms, mrms.read_mrms])
def test_bad_grib_is_named(tmp_path, read):
    bad = tmp_path / "bad.grib2"
    bad.write_bytes(MRMS[0].read_bytes()[:500000])
    with pytest.raises(InputError, match="bad.grib2.*truncated: 500000 of 1031273 bytes"):
        read(bad)
    bad.write_bytes(b"<html>not found</html>")
    with pytest.raises(InputError, match="not GRIB edition 2"):
        read(bad)
    if read is mrms.read_mrms:
        broken = bytearray(MRMS[0].read_bytes())
        broken[500000:500100] = bytes(100)
        bad.write_bytes(broken)
        with pytest.raises(InputError, match="variable PrecipRate: cannot be decoded"):
            read(bad)
    with pytest.raises(InputError, match=r"no MRMS radar product.*\(209, 3, 28\)"):
        read(write_mrms(bad, np.eye(20, 30), product=(209, 3, 28)))
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path / "absent.grib2")


# regridding


@pytest.mark.parametrize("spacing", ["3km, the rainy quarter", "6km"])
def test_mean_is_kept(frame, on_6km, spacing):
    if spacing == "6km":
        grid, mean = on_6km
    else:
        grid = hrrr_crop(1, slice(256, 768), slice(896, 1344))
        mean = CellMean(frame.latitude, frame.longitude, grid)(frame.linear)
    valid = np.isfinite(mean)
    area = cell_area(grid)
    kept = (mean * area)[valid].sum() / area[valid].sum()
    source = total = 0.0  # the same cells seen from the source, located by pyproj
    cols = np.flatnonzero(
        (frame.longitude > grid.longitude.min() - 0.1) & (frame.longitude < grid.longitude.max() + 0.1)
    )
    for row, latitude in enumerate(frame.latitude):
        if not grid.latitude.min() - 0.1 < latitude < grid.latitude.max() + 0.1:
            continue
        rain = frame.linear[row, cols]
        x, y = LCC(frame.longitude[cols], np.full(len(cols), latitude))
        i, j = np.rint((y - grid.y[0]) / grid.spacing), np.rint((x - grid.x[0]) / grid.spacing)
        inside = (i >= 0) & (i < grid.shape[0]) & (j >= 0) & (j < grid.shape[1]) & np.isfinite(rain)
        inside[inside] = valid[i[inside].astype(int), j[inside].astype(int)]
        source += rain[inside].sum(dtype=np.float64) * np.cos(np.radians(latitude))
        total += inside.sum() * np.cos(np.radians(latitude))
    assert valid.mean() > 0.8 and kept == pytest.approx(source / total, rel=3e-3)


def test_maxima_lie_where_the_source_has_them(frame, on_6km):
    grid, mean = on_6km
    strongest = np.argsort(np.nan_to_num(mean, nan=-1).ravel())[-20:]
    rain, (lat, lon) = frame.linear, (frame.latitude, frame.longitude)
    for cell in strongest:
        i, j = np.unravel_index(cell, grid.shape)
        rows = np.flatnonzero(np.abs(lat - grid.latitude[i, j]) < 0.1)
        cols = np.flatnonzero(np.abs(lon - grid.longitude[i, j]) < 0.1)
        x, y = LCC(*np.meshgrid(lon[cols], lat[rows]))
        inside = (np.abs(x - grid.x[j]) < 3000) & (np.abs(y - grid.y[i]) < 3000)
        assert mean[i, j] == pytest.approx(rain[np.ix_(rows, cols)][inside].mean(), rel=1e-3)
    peak = np.unravel_index(np.nanargmax(rain), rain.shape)  # the strongest pixel is in a strong cell
    i, j = np.unravel_index(cell_of(lat[peak[0]], lon[peak[1]], grid), grid.shape)
    assert np.nanmax(mean[i - 1 : i + 2, j - 1 : j + 2]) > np.nanquantile(mean, 0.999)


def test_half_of_a_cell_must_be_seen():
    grid = hrrr_crop(**SMALL)
    lat, lon = np.arange(35, 41, 0.01), np.arange(-102, -94, 0.01)
    values = np.ones((len(lat), len(lon)))
    border = grid.latitude[20, 25]
    values[lat > border + 0.01] = np.nan  # a little over half of the cells of that row remain
    mean = CellMean(lat, lon, grid)(values)
    assert mean[20, 25] == pytest.approx(1) and np.isnan(mean[21, 25]) and np.isfinite(mean[:20]).all()
    values[lat > border - 0.01] = np.nan
    assert np.isnan(CellMean(lat, lon, grid)(values)[20, 25])


def test_coarse_source_is_refused():
    with pytest.raises(InputError, match="0.100 degrees apart.*every 6 km"):
        CellMean(np.arange(30, 40, 0.1), np.arange(-100, -90, 0.1), hrrr_crop(2))


# GLM


@pytest.mark.parametrize("path, satellite", [(GLM_G16, "G16"), (GLM_G19, "G19")])
def test_lightning_counts_equal_a_histogram(path, satellite):
    import netCDF4

    grid = hrrr_crop(2)
    about, events = glm.scan_glm(path), glm.read_glm(path)
    assert about.satellite == satellite and about.end - about.start == np.timedelta64(20, "s")
    assert (events.time > about.start - np.timedelta64(5, "s")).all() and (events.time < about.end).all()
    counts = glm.count_events(events, grid, about.start - np.timedelta64(10, "m"), about.end)
    with netCDF4.Dataset(path) as file:
        bad = file["group_id"][:][file["group_quality_flag"][:] == 1]
        keep = ~np.isin(file["event_parent_group_id"][:], bad)
        x, y = LCC(np.asarray(file["event_lon"][:])[keep], np.asarray(file["event_lat"][:])[keep])
    edges = [np.append(a, a[-1] + grid.spacing) - grid.spacing / 2 for a in (grid.y, grid.x)]
    expected, _, _ = np.histogram2d(y, x, edges)
    assert counts.sum() > 100 and np.array_equal(counts, expected)
    late = glm.count_events(events, grid, about.start + np.timedelta64(10, "s"), about.end)
    assert 0 < late.sum() < counts.sum()


def test_quiet_file_counts_zero(tmp_path):
    events = glm.read_glm(write_quiet_glm(tmp_path / "quiet.nc"))
    grid = hrrr_crop(**SMALL)
    start = np.datetime64("2025-04-07T13:00")
    assert glm.count_events(events, grid, start, start + np.timedelta64(10, "m")).sum() == 0


def test_files_may_be_read_by_several_threads():
    files = [GLM_G16, GLM_G19] * 10
    with ThreadPoolExecutor(4) as pool:
        counts = [len(events.time) for events in pool.map(glm.read_glm, files)]
    assert counts == [len(glm.read_glm(file).time) for file in files[:2]] * 10


def test_mixed_satellites_are_refused_unless_one_is_chosen(tmp_path):
    folder, step = copy_to(tmp_path / "glm", GLM_G16, GLM_G19), np.timedelta64(20, "s")
    with pytest.raises(InputError, match="G19.*platform_ID.*mixes G16, G19"):
        Lightning(folder, hrrr_crop(**SMALL), step)
    with pytest.raises(InputError, match="no file of G18"):
        Lightning(folder, hrrr_crop(**SMALL), step, satellite="G18")
    source = Lightning(folder, hrrr_crop(2), step, satellite="G19")
    assert source.stamps.tolist() == [np.datetime64("2025-04-07T13:00:40", "ms")]
    frame = source.frame(source.stamps[0])["glm"]
    assert frame.sum() > 100 and source.frame(source.stamps[0] + step) == {} and list(source.used) == [GLM_G19.name]


def test_too_few_lightning_files(tmp_path):
    folder = copy_to(tmp_path / "glm", GLM_G19)
    with pytest.raises(InputError, match="cover at most 3% of a step"):
        Lightning(folder, hrrr_crop(**SMALL), np.timedelta64(10, "m"))


# ABI


def test_real_product_unpacks_as_xarray_does():
    images, view = abi.read_abi(ABI, ["cth"])
    about = abi.scan_abi(ABI)
    with xr.open_dataset(ABI, engine="h5netcdf") as dataset:
        expected = dataset["HT"].values.astype(np.float64)
        flags = dataset["DQF"].values
        start, end = (np.datetime64(dataset.attrs[f"time_coverage_{k}"][:-1]) for k in ("start", "end"))
    good = flags == 0
    assert np.nanmax(expected) > 32767 * 0.3052037  # beyond a signed integer: the unsigned reading matters
    assert np.abs(images["cth"] - expected)[good].max() < 0.01
    assert (images["cth"][flags == 4] == 0).all() and np.isnan(images["cth"][~good & (flags != 4)]).all()
    assert start < about.time < end and about.satellite == "G16" and view.longitude == -89.5


def test_geolocation_agrees_with_pyproj():
    _, view = abi.read_abi(ABI, ["cth"])
    geos = pyproj.Proj(
        proj="geos", h=view.height, lon_0=view.longitude, sweep="x", a=view.semi_major, b=view.semi_minor
    )
    x, y = np.meshgrid(np.linspace(-0.155, 0.155, 201), np.linspace(-0.155, 0.155, 200))  # the whole disc
    lon, lat = geos(x * view.height, y * view.height, inverse=True)
    earth = np.isfinite(lon)
    ours = view.latlon(x, y)
    assert np.array_equal(np.isfinite(ours[0]), earth) and 0.6 < earth.mean() < 0.8
    east = (ours[1] - lon + 180) % 360 - 180
    assert np.abs(ours[0] - lat)[earth].max() < 1e-6 and np.abs(east[earth]).max() < 1e-6
    grid = hrrr_crop(16)
    back = geos(grid.longitude, grid.latitude)
    angles = view.angles(grid.latitude, grid.longitude)
    assert np.abs(np.array(back) / view.height - angles).max() < 1e-9
    hidden = view.angles(np.array([0.0, 89.0, 0.0]), np.array([90.0, -89.5, -89.5]))
    assert np.isnan(hidden[0]).tolist() == [True, True, False]


def test_nearest_pixel_of_the_real_product():
    images, view = abi.read_abi(ABI, ["cth"])
    grid = hrrr_crop(2, slice(100, 160), slice(300, 380))
    on_grid = abi.NearestPixel(view, grid)(images["cth"])
    lat, lon = view.latlon(*np.meshgrid(view.x, view.y))
    geod, pitch = pyproj.Geod(ellps="GRS80"), view.pitch
    for i, j in ((0, 0), (30, 40), (59, 79), (12, 60)):
        away = geod.inv(np.full(lat.size, grid.longitude[i, j]), np.full(lat.size, grid.latitude[i, j]), lon.ravel(),
                        lat.ravel())[2]  # fmt: skip
        nearest = np.argmin(away)
        assert away[nearest] < pitch
        assert on_grid[i, j] == pytest.approx(images["cth"].ravel()[nearest], nan_ok=True)
    assert np.isnan(abi.NearestPixel(view, grid, limit=100)(images["cth"])).mean() > 0.9


def test_imagery_is_unsigned_and_judged(tmp_path):
    counts = np.array([[0, 1, 4095], [4000, 65535, 40000]])
    flags = np.array([[0, 1, 2], [0, 0, 0]])
    path = write_mcmip(tmp_path / "m.nc", {2: counts, 13: counts}, flags)
    assert abi.scan_abi(path).channels == ("c02", "bt13")
    images, _ = abi.read_abi(path, ["bt13", "c02"])
    kelvin = 89.62 + 0.06145332 * counts
    expected = [[kelvin[0, 0], kelvin[0, 1], np.nan], [kelvin[1, 0], np.nan, np.nan]]
    assert images["bt13"] == pytest.approx(np.array(expected), abs=1e-4, nan_ok=True)
    assert images["c02"][1, 0] == pytest.approx(4000 * 0.00031746, rel=1e-6)
    single = write_mcmip(tmp_path / "s.nc", {13: counts}, flags, single=True)
    assert abi.read_abi(single, ["bt13"])[0]["bt13"] == pytest.approx(images["bt13"], nan_ok=True)
    with pytest.raises(InputError, match="bt08.*It has c02, bt13"):
        abi.read_abi(path, ["bt08"])


def test_unpack_keeps_the_order_of_the_conventions():
    attrs = {"_Unsigned": "true", "_FillValue": np.int16(-1), "valid_range": np.array([0, -6], np.int16)}
    attrs |= {"scale_factor": np.float32(0.5), "add_offset": np.float32(10)}
    packed = xr.DataArray(np.array([0, 2, -32768, -6, -5, -1], np.int16), dims="x", attrs=attrs)
    assert unpack(packed) == pytest.approx([10, 11, 32768 / 2 + 10, 65530 / 2 + 10, np.nan, np.nan], nan_ok=True)


def test_time_units():
    assert decode_time([1.5], "Hour since 2001-12-31T23:00:00Z")[0] == np.datetime64("2002-01-01T00:30", "ms")
    assert decode_time(2000, "milliseconds since 2018-06-08 14:47:40.000") == np.datetime64("2018-06-08T14:47:42", "ms")
    with pytest.raises(ValueError, match="fortnights"):
        decode_time(1, "fortnights since 2000-01-01")


@pytest.mark.parametrize("read", [glm.scan_glm, glm.read_glm, abi.scan_abi, stageiv.read_stageiv])
def test_bad_netcdf_is_named(tmp_path, read):
    bad = tmp_path / "bad.nc"
    for content in (ABI.read_bytes()[:100000], STAGEIV.read_bytes()[:5000], b"junk", b""):
        bad.write_bytes(content)
        with pytest.raises(InputError, match="bad.nc"):
            read(bad)
    wrong = {glm.scan_glm: ABI, glm.read_glm: ABI, abi.scan_abi: GLM_G19, stageiv.read_stageiv: GLM_G19}[read]
    with pytest.raises(InputError, match=f"file .*{wrong.name}, variable (event_lat|CMI|Total)"):
        read(wrong)


# Stage IV


def test_stage_iv_lies_on_its_own_grid():
    grid, times, rain = stageiv.read_stageiv(STAGEIV)
    assert rain.shape == (23, 118, 87) and grid.shape == (118, 87)
    assert (times[0], times[-1]) == (np.datetime64("2018-09-13T19:00"), np.datetime64("2018-09-14T17:00"))
    proj = pyproj.CRS.from_cf(grid.crs)
    lon, lat = pyproj.Transformer.from_crs(proj, proj.geodetic_crs, always_xy=True).transform(
        *np.meshgrid(grid.x, grid.y)
    )
    assert np.abs(lat - grid.latitude).max() < 1e-4 and np.abs(lon - grid.longitude).max() < 1e-4
    with opened(STAGEIV) as dataset:
        assert np.array_equal(rain, dataset[stageiv.RAIN].values)


def test_stage_iv_grid_is_checked(tmp_path):
    with xr.open_dataset(STAGEIV, decode_times=False) as dataset:
        dataset.isel(y=slice(None, None, -1)).to_netcdf(tmp_path / "flipped.nc")
    with pytest.raises(InputError, match="flipped.nc, variable lat, lon"):
        stageiv.read_stageiv(tmp_path / "flipped.nc")


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
    assert dataset.channel_units.values.tolist() == ["dBZ", "K"]
    one = xr.open_dataset(storms.path, engine="zarr").fields.sel(channel="refc").isel(time=3, y=slice(0, 8))
    assert np.array_equal(one, storms.read("3", "fields", ALL)[0, :8], equal_nan=True)


def test_reader_survives_pickle_and_fork(storms):
    rows = (slice(None), slice(0, 8), slice(None))
    expected = storms.read("5", "fields", rows)
    copy = pickle.loads(pickle.dumps(storms))
    assert copy.bytes_read == 0 and np.array_equal(copy.read("5", "fields", rows), expected, equal_nan=True)
    with multiprocessing.get_context("fork").Pool(2) as pool:  # workers of a loader, after the parent has read
        jobs = [pool.apply_async(storms.read, ("5", "fields", rows)) for _ in range(4)]
        assert all(np.array_equal(job.get(timeout=60), expected, equal_nan=True) for job in jobs)


def test_reader_names_what_is_wrong(storms, tmp_path):
    for call in (lambda: storms.read("999", "fields", ALL), lambda: storms.shape("-1", "fields")):
        with pytest.raises(InputError, match="no sample .*144 frames"):
            call()
    with pytest.raises(InputError, match="variable rain: no such array"):
        storms.read("0", "rain", ALL)
    with pytest.raises(InputError, match="nowhere.*data.weather.build"):
        WeatherReader(tmp_path / "nowhere")
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
    assert all(np.isnan(day[~lost]).sum((1, 2)).min() > 1 for day, lost in zip(radar, whole))  # the hole


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


def test_storms_follow_their_seed():
    grid, times = hrrr_crop(**WINDOW), np.array(["2021-05-20T18:00"], "datetime64[s]")
    one, again, other, next_day = (
        next(day_frames(Storms(seed=seed, missing=0, hole=False), grid, day, times))
        for seed, day in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert np.array_equal(one, again) and not np.array_equal(one, other) and not np.array_equal(one, next_day)


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
assert WeatherReader({str(tmp_path / "s.zarr")!r}).mean.shape == (2,)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1], timeout=60)


# maps


def test_state_lines_are_where_states_are():
    lines = state_lines()
    points = np.concatenate(lines)
    assert len(lines) == len(json.loads((DATA / "geo/states-10m.json").read_text())["arcs"])
    four_corners = np.array([-109.045, 36.999])  # Utah, Colorado, Arizona, New Mexico
    assert np.hypot(*(points - four_corners).T).min() < 0.01
    near = state_lines_xy(hrrr_crop(**WINDOW))
    assert 3 < len(near) < 60 and np.abs(np.concatenate(near)).max() < 3e6


# the command

WEST_TEXAS = ["--resolution", "6km", "--rows", "90:150", "--cols", "380:480", "--split-longitude", "-99"]


def test_build_from_real_files(tmp_path, capsys):
    folder = copy_to(tmp_path / "mrms", MRMS[0], MRMS[2])
    out = tmp_path / "a.zarr"
    assert build.main(["--mrms", str(folder), "--out", str(out), *WEST_TEXAS]) == 0
    assert "3/3 frames" in capsys.readouterr().out
    reader = WeatherReader(out)
    assert reader.times.astype(str).tolist() == [f"2019-06-10T00:{m}:00" for m in ("00", "10", "20")]
    valid = [reader.read(str(i), "valid", ALL).mean() for i in range(3)]
    assert valid[0] > 0.9 and valid[1] == 0 and valid[2] > 0.9  # the gap is there, and empty
    first = reader.read("0", "fields", ALL)
    assert np.nanmin(first) == -10 and np.nanmax(first) > 45  # the storms of central Texas
    assert set(reader.attrs["provenance"]["files"]) == {MRMS[0].name, MRMS[2].name}
    assert reader.attrs["matching"] == {"radar": "nearest scan within half a step"}
    assert build.main(["--mrms", str(folder), "--out", str(out), *WEST_TEXAS]) == 2
    assert "exists already" in capsys.readouterr().err
    later = copy_to(tmp_path / "later", MRMS[3])
    assert build.main(["--mrms", str(later), "--out", str(out), "--append", *WEST_TEXAS]) == 0
    reader = WeatherReader(out)
    assert len(reader.times) == 4 and set(reader.attrs["provenance"]["files"]) == {MRMS[i].name for i in (0, 2, 3)}


def test_build_of_several_sensors(tmp_path):
    folder = tmp_path / "raw"
    copy_to(folder, GLM_G19)
    counts = np.full((1200, 1200), 3000)
    write_mcmip(folder / "OR_ABI-L2-MCMIPC-M6_G19_a.nc", {2: counts, 13: counts}, satellite="G19", seconds=797302840)
    out = tmp_path / "a.zarr"
    common = ["--abi", str(folder), "--glm", str(folder), "--step", "20s", "--out", str(out), *WEST_TEXAS]
    assert build.main([*common, "--channels", "bt13,glm"]) == 0
    reader = WeatherReader(out)
    assert reader.channels == ["bt13", "glm"] and reader.times.astype(str).tolist() == ["2025-04-07T13:00:40"]
    assert reader.read("0", "fields", ALL)[0].max() == pytest.approx(89.62 + 3000 * 0.06145332, abs=1e-3)


@pytest.mark.parametrize("fault", ["truncated", "wrong product", "wrong content", "empty folder", "two products"])
def test_bad_input_ends_with_status_2_and_no_output(tmp_path, capsys, fault):
    folder = copy_to(tmp_path / "raw", MRMS[1])
    if fault == "truncated":
        truncate(copy_to(tmp_path / "more", MRMS[2]) / MRMS[2].name).rename(folder / "later.grib2")
    elif fault == "wrong content":
        (folder / "later.grib2").write_bytes(GLM_G16.read_bytes())
    elif fault == "wrong product":
        write_mrms(folder / "later.grib2", np.eye(20, 30), product=(209, 3, 28))
    elif fault == "two products":
        write_mrms(folder / "later.grib2", np.eye(20, 30), time=(2019, 6, 10, 0, 20, 0))
    else:
        next(folder.iterdir()).unlink()
    out = tmp_path / "out" / "a.zarr"
    assert build.main(["--mrms", str(folder), "--out", str(out), *WEST_TEXAS]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and ("raw" if fault == "empty folder" else "later.grib2") in error
    assert not out.parent.exists() or list(out.parent.iterdir()) == []


def test_fault_in_the_middle_leaves_no_output(tmp_path, capsys):
    folder = copy_to(tmp_path / "raw", GLM_G19)
    noise = np.random.default_rng(0).integers(0, 4095, (900, 900))
    path = write_mcmip(folder / "OR_ABI-L2-MCMIPC-M6_G19_a.nc", {13: noise}, satellite="G19", seconds=797302840)
    with opened(path):
        data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 200000] = bytes(200000)  # the header stays whole, the image does not
    path.write_bytes(data)
    out = tmp_path / "a.zarr"
    assert build.main(["--abi", str(folder), "--step", "20s", "--out", str(out), *WEST_TEXAS]) == 2
    assert path.name in capsys.readouterr().err and sorted(p.name for p in tmp_path.iterdir()) == ["raw"]


def test_stage_iv_makes_an_archive_of_its_own(tmp_path):
    out = tmp_path / "rain.zarr"
    assert build.main(["--out", str(out), "--stageiv", str(STAGEIV)]) == 0
    reader = WeatherReader(out)
    assert reader.shape("22", "fields") == (1, 118, 87) and reader.channels == ["rain"]
    assert reader.crs["grid_mapping_name"] == "polar_stereographic"
    _, _, rain = stageiv.read_stageiv(STAGEIV)
    assert np.array_equal(reader.read("7", "fields", ALL)[0], rain[7], equal_nan=True)


def test_exit_status_of_the_command(tmp_path):
    command = [sys.executable, "-m", "data.weather.build", "--out", str(tmp_path / "a.zarr")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[1])
    assert done.returncode == 2 and "needs files" in done.stderr and list(tmp_path.iterdir()) == []


def test_regular_times_show_gaps_but_not_seasons():
    step, start = np.timedelta64(10, "m"), np.datetime64("2020-01-01T00:00", "ms")
    stamps = start + np.array([0, 1, 4, 1000, 1001]) * step
    assert ((regular(stamps, step) - start) / step).tolist() == [0, 1, 2, 3, 4, 1000, 1001]
