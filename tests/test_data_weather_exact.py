"""What an archive keeps exactly, and where a cloud belongs: counts in 16 bits, and parallax undone by cloud heights."""

import netCDF4
import numpy as np
import pyproj
import pytest
import xarray as xr
from launch import exit_status
from weather_files import ABI, ALL, GLM_G19, copy_to, write_mcmip, write_mrms

from core.errors import InputError
from data.weather import abi, build
from data.weather.archive import WeatherReader
from data.weather.grid import hrrr_crop
from data.weather.packing import pack, unpack

WINDOW = ["--workers", "1", "--resolution", "6km", "--rows", "90:150", "--cols", "380:480", "--split-longitude", "-99"]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Imagery and lightning of one time, as float32 and as int16."""
    root = tmp_path_factory.mktemp("exact")
    folder = copy_to(root / "raw", GLM_G19)
    counts = np.random.default_rng(1).integers(0, 4096, (1200, 1200))
    write_mcmip(folder / "OR_ABI-L2-MCMIPC-M6_G19_a.nc", {2: counts, 13: counts}, satellite="G19", seconds=797302840)
    common = ["--abi", str(folder), "--glm", str(folder), "--step", "20s", *WINDOW]
    for dtype in ("float32", "int16"):
        build.main([*common, "--dtype", dtype, "--out", str(root / dtype)])
    return WeatherReader(root / "float32"), WeatherReader(root / "int16")


def test_counts_in_16_bits_are_exact(archives):
    plain, packed = archives
    want, got = (reader.read("0", "fields", ALL) for reader in archives)
    assert got.dtype == np.float32 and np.isfinite(want).mean() > 0.9
    assert np.array_equal(np.isnan(got), np.isnan(want)) and np.nanmax(np.abs(got - want) / np.abs(want + 1)) < 1e-7
    assert plain.attrs["mean"] == packed.attrs["mean"]  # of the values before they are stored
    part = (slice(1, 3), slice(7, 20), slice(3, 90))
    assert np.array_equal(packed.read("0", "fields", part), got[part], equal_nan=True)


def test_xarray_reads_packed_fields_with_scale_and_offset(archives):
    data = xr.open_zarr(archives[1].path)
    values = data.fields * data.channel_scale + data.channel_offset
    assert np.allclose(values[0], archives[0].read("0", "fields", ALL), rtol=1e-6, equal_nan=True)
    assert data.fields.attrs["comment"] == "value = fields * channel_scale + channel_offset"


def test_packing_refuses_what_it_would_change():
    steps = {"bt13": (0.06, 90.0), "refc": (0.01, 0.0), "glm": (1.0, 0.0)}
    frame = np.array([[[90.06, np.nan]], [[12.344, -10.0]], [[3.0, 0.0]]], np.float32)
    stored = pack(frame, list(steps), steps)
    back = unpack(stored, *np.array(list(steps.values())).T)
    assert stored.tolist() == [[[1, -32768]], [[1234, -1000]], [[3, 0]]]
    assert back == pytest.approx(np.array([[[90.06, np.nan]], [[12.34, -10]], [[3, 0]]]), abs=1e-5, nan_ok=True)
    for channel, value, message in ((0, 90.09, "beside the steps of 0.06"), (2, 4e4, "40000 does not fit 16 bits")):
        bad = frame.copy()
        bad[channel, 0, 0] = value
        with pytest.raises(InputError, match=message):
            pack(bad, list(steps), steps)


def test_raised_points_are_seen_where_ecef_says():
    view = abi.FixedGrid(np.array([0, 1e-4]), np.array([0, 1e-4]), -75.0, 35786023.0, 6378137.0, 6356752.31414)
    grid = hrrr_crop(32)
    ecef = pyproj.Transformer.from_crs("EPSG:4979", "EPSG:4978", always_xy=True)
    for height in (0.0, 12e3):
        east, north, up = ecef.transform(grid.longitude + 75.0, grid.latitude, np.full(grid.shape, height))
        away = view.semi_major + view.height - east
        x = np.arcsin(north / np.sqrt(away**2 + north**2 + up**2))
        assert (
            np.abs(np.array(view.angles(grid.latitude, grid.longitude, height)) - [x, np.arctan(up / away)]).max()
            < 1e-9
        )


def _with_tops(folder, tall):
    """An ACHA file of the image of `write_mcmip`: height 12 km where ``tall``, else clear; and the cold image."""
    write_mcmip(folder / "OR_ABI-L2-MCMIPC-M6_G16_a.nc", {13: np.where(tall, 2000, 3500)})
    top = write_mcmip(folder / "OR_ABI-L2-ACHAC-M6_G16_a.nc", {13: np.where(tall, 12000, 0)})
    with netCDF4.Dataset(top, "a") as file:
        file.renameVariable("CMI_C13", "HT")
        file.renameVariable("DQF_C13", "DQF")
        file["HT"].setncatts({"scale_factor": np.float32(1), "add_offset": np.float32(0), "units": "m"})
        file["HT"].setncattr("valid_range", np.array([0, 20000], np.int16))
        file["DQF"].setncatts({"flag_meanings": "good clear_or_probably_clear", "flag_values": np.array([0, 4], "i1")})


def test_parallax_puts_a_tall_cloud_above_its_ground(tmp_path):
    place = 31.2, -98.5
    _, view = abi.read_abi(write_mcmip(tmp_path / "view.nc", {13: np.zeros((1200, 1200))}), ["bt13"])
    x, y = view.angles(*place, 12e3)  # where the satellite shows a cloud top that stands above the place
    col, row = np.abs(view.x - x).argmin(), np.abs(view.y - y).argmin()
    tall = np.zeros((1200, 1200), bool)
    tall[row - 6 : row + 7, col - 6 : col + 7] = True
    folder = tmp_path / "raw"
    folder.mkdir()
    _with_tops(folder, tall)
    away = {}
    for name, more in (("plain", []), ("lifted", ["--parallax"])):
        out = tmp_path / f"{name}.zarr"
        assert (
            exit_status(build.main, ["--abi", str(folder), "--channels", "bt13", "--out", str(out), *WINDOW, *more])
            == 0
        )
        reader = WeatherReader(out)
        assert reader.channels == ["bt13"]
        cold = reader.read("0", "fields", ALL)[0] < 250
        centre = reader.grid.longitude[cold].mean(), reader.grid.latitude[cold].mean()
        away[name] = pyproj.Geod(ellps="WGS84").inv(*centre, *place[::-1])[2] / 1e3
        assert reader.attrs["matching"]["abi"]["parallax"] == ("cth" if more else "none")
    assert away["plain"] > 9 and away["lifted"] < 2  # km: 12 km high, seen from 40 degrees off the vertical
    hidden = ~reader.read("0", "valid", ALL)[0]
    behind = [axis[hidden].mean() - axis[cold].mean() for axis in (reader.grid.latitude, reader.grid.longitude)]
    assert 3 < hidden.sum() < 30 and behind[0] > 0.05 and behind[1] < -0.05  # away from the satellite


def test_parallax_needs_heights(tmp_path, capsys):
    folder = tmp_path / "raw"
    folder.mkdir()
    write_mcmip(folder / "OR_ABI-L2-MCMIPC-M6_G16_a.nc", {13: np.full((900, 900), 9)})
    assert (
        exit_status(build.main, ["--abi", str(folder), "--parallax", "--out", str(tmp_path / "a.zarr"), *WINDOW]) == 2
    )
    assert "no cloud top heights" in capsys.readouterr().err


def test_heights_of_the_real_product_lift_its_own_image():
    images, view = abi.read_abi(ABI, ["cth"])
    grid = hrrr_crop(2, slice(100, 160), slice(300, 380))
    plain = abi.NearestPixel(view, grid)(images["cth"])
    lifted = abi.along(images["cth"], view, *abi.CloudTops(view, grid)(images["cth"], view))
    both = np.isfinite(plain) & np.isfinite(lifted)
    assert both.mean() > 0.5 and (plain != lifted)[both].any()
    low = both & (plain == 0) & (lifted == 0)
    assert low.mean() > 0.05 and np.isfinite(lifted).mean() > 0.8 * np.isfinite(plain).mean()


def test_only_the_pixels_above_the_grid_are_read():
    images, view = abi.read_abi(ABI, ["cth"])
    grid = hrrr_crop(2, slice(100, 160), slice(300, 380))
    some, part = abi.read_abi(ABI, ["cth"], lambda view: abi.around(view, grid))
    assert some["cth"].size < 0.1 * images["cth"].size
    whole, cropped = (abi.NearestPixel(v, grid)(i["cth"]) for i, v in ((images, view), (some, part)))
    assert np.array_equal(whole, cropped, equal_nan=True) and np.isfinite(whole).mean() > 0.5
    tops = abi.CloudTops(view, grid)
    lifted = [abi.along(i["cth"], v, *tops(i["cth"], v)) for i, v in ((images, view), (some, part))]
    assert np.array_equal(*lifted, equal_nan=True)
    nowhere = abi.around(view, hrrr_crop(2, slice(0, 9), slice(0, 9)))
    assert all(0 <= s.start < s.stop for s in nowhere)


def test_radar_is_rounded_to_a_hundredth(tmp_path):
    (tmp_path / "raw").mkdir()
    write_mrms(tmp_path / "raw" / "a.grib2", np.random.default_rng(0).integers(-20, 120, (150, 200)) / 2)
    dates = ["--split", "2019-06-09/2019-06-11", "2019-06-20/2019-06-21", "2019-07-20/2019-07-21"]
    window = ["--resolution", "6km", "--rows", "280:292", "--cols", "448:460", *dates]
    for dtype in ("float32", "int16"):
        out = str(tmp_path / dtype)
        build.main(["--mrms", str(tmp_path / "raw"), "--out", out, "--dtype", dtype, *window])
    plain, packed = (WeatherReader(tmp_path / dtype).read("0", "fields", ALL) for dtype in ("float32", "int16"))
    assert 1e-4 < np.abs(plain - packed).max() <= 0.00501
