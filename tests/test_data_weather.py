"""Weather files: real samples read and laid on the HRRR crop as independent computations say they should be."""

import gzip
import json
from concurrent.futures import ThreadPoolExecutor

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
    SMALL,
    STAGEIV,
    copy_to,
    truncate,
    write_mcmip,
    write_mrms,
    write_quiet_glm,
)

from core.errors import InputError
from data.weather import abi, glm, mrms, stageiv
from data.weather.grid import cell_area, cell_of, hrrr_crop, lambert_latlon, lambert_xy
from data.weather.netcdf import decode_time, opened, unpack
from data.weather.regrid import CellMean
from data.weather.sources import Lightning
from data.weather.states import state_lines, state_lines_xy
from data.weather.synthetic import WINDOW

LCC = pyproj.Proj("+proj=lcc +lat_1=38.5 +lat_0=38.5 +lon_0=-97.5 +R=6371229")


@pytest.fixture(scope="module")
def frame():
    return mrms.read_mrms(MRMS[0])


@pytest.fixture(scope="module")
def on_6km(frame):
    grid = hrrr_crop(2)
    return grid, CellMean(frame.latitude, frame.longitude, grid)(frame.linear)


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
    with pytest.raises(InputError, match="0 x 896 points. The crop has 512 x 896"):
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


def test_a_frame_counts_the_step_before_it(tmp_path):
    folder, half, grid = copy_to(tmp_path / "glm", GLM_G19), np.timedelta64(10, "s"), hrrr_crop(2)
    source, events = Lightning(folder, grid, half), glm.read_glm(GLM_G19)
    start = glm.scan_glm(GLM_G19).start
    assert source.stamps.tolist() == [(start + half).item(), (start + 2 * half).item()]
    for stamp in source.stamps:
        expected = glm.count_events(events, grid, stamp - half, stamp)
        assert expected.sum() > 100 and np.array_equal(source.frame(stamp)["glm"], expected)


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


# maps


def test_state_lines_are_where_states_are():
    lines = state_lines()
    points = np.concatenate(lines)
    assert len(lines) == len(json.loads((DATA / "geo/states-10m.json").read_text())["arcs"])
    four_corners = np.array([-109.045, 36.999])  # Utah, Colorado, Arizona, New Mexico
    assert np.hypot(*(points - four_corners).T).min() < 0.01
    near = state_lines_xy(hrrr_crop(**WINDOW))
    assert 3 < len(near) < 60 and np.abs(np.concatenate(near)).max() < 3e6
