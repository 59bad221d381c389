"""Fields that stand still and fields of weather models: files of users and agencies, onto the grid."""

import numpy as np
import pytest
import xarray as xr
from launch import exit_status
from weather_files import SMALL, hrrr_keys, write_grib, write_mrms, write_subhourly

from core.errors import InputError
from data.weather import build
from data.weather.archive import WeatherReader
from data.weather.fields import read_field, read_times, resample
from data.weather.grid import hrrr_crop
from data.weather.nwp import Model
from data.weather.static import static_fields

STEP = np.timedelta64(10, "m")
WINDOW = ["--workers", "1", "--resolution", "6km", "--rows", "280:292", "--cols", "448:460"]
DATES = ["--split", "2024-05-06/2024-05-07", "2024-05-10/2024-05-11", "2024-05-14/2024-05-15"]


def latlon_keys(north, south, west, east, step):
    return {
        "gridType": "regular_ll", "Ni": round((east - west) / step) + 1, "Nj": round((north - south) / step) + 1,
        "latitudeOfFirstGridPointInDegrees": north, "latitudeOfLastGridPointInDegrees": south,
        "longitudeOfFirstGridPointInDegrees": west, "longitudeOfLastGridPointInDegrees": east,
        "iDirectionIncrementInDegrees": step, "jDirectionIncrementInDegrees": step, "jScansPositively": 0,
    }  # fmt: skip


def test_hrrr_points_are_those_of_the_crop(tmp_path):
    grid = hrrr_crop(**SMALL)  # rows 200:240 of every second row from row 17 of the HRRR grid
    rows, cols = slice(400, 500), slice(795, 910)
    index = np.arange(100)[:, None] * 1000 + np.arange(115)
    field = read_field(write_grib(tmp_path / "h.grib2", index, "gh", hrrr_keys(rows, cols)), ("gh",), 500)
    expected = (17 + 2 * np.arange(200, 240) - 400)[:, None] * 1000 + (3 + 2 * np.arange(400, 450) - 795)
    assert field.units == "gpm" and np.array_equal(resample(field, grid), expected)
    assert field.times[0] == np.datetime64("2024-05-06T12:00")
    outside = resample(field, hrrr_crop(2, slice(200, 250), slice(400, 450)))
    assert np.isnan(outside[42:]).all() and np.isfinite(outside[:41]).all()


def test_latitudes_and_longitudes_are_interpolated(tmp_path):
    grid = hrrr_crop(**SMALL)
    lat, lon = np.arange(50, 19.9, -0.25), np.arange(230, 300.1, 0.25)
    values = 100 * lat[:, None] + lon  # linear, so a bilinear interpolation is exact
    keys = latlon_keys(50, 20, 230, 300, 0.25)
    gfs = read_field(write_grib(tmp_path / "g.grib2", values, "gh", keys, lead=6), ("gh", "z"), 500)
    assert gfs.times == (np.datetime64("2024-05-06T18:00"), np.datetime64("2024-05-06T12:00"))
    expected = 100 * grid.latitude + grid.longitude + 360
    assert resample(gfs, grid) == pytest.approx(expected, abs=0.01)
    place = {"pressure_level": [500.0], "latitude": lat, "longitude": lon}
    at = {"valid_time": np.array(["2024-05-06T17", "2024-05-06T18"], "M8[ns]"), **place}
    era = xr.DataArray(np.stack([0 * values, values])[:, None], at, list(at), "z", {"units": "m**2 s**-2"})
    era.to_netcdf(tmp_path / "e.nc")
    hours = read_times(tmp_path / "e.nc", ("gh", "z"), 500)
    assert hours == [(np.datetime64("2024-05-06T17"), None), (np.datetime64("2024-05-06T18"), None)]
    field = read_field(tmp_path / "e.nc", ("gh", "z"), 500, hours[1])
    assert field.times[1] is None and resample(field, grid) == pytest.approx(expected, abs=0.01)
    with pytest.raises(InputError, match="no such field. It holds z"):
        read_field(tmp_path / "e.nc", ("cape",))


def test_a_forecast_is_used_when_it_could_be_known(tmp_path):
    grid, keys = hrrr_crop(**SMALL), latlon_keys(50, 20, 230, 300, 1.0)
    flat = np.ones((31, 71))
    flat[0, 0] = 0
    for start, lead, value in ((1100, 1, 10), (1100, 2, 20), (1200, 0, 30), (1200, 1, 40)):
        write_grib(tmp_path / f"{start}_{lead}.grib2", flat * value, "gh", keys, (20240506, start), lead)
    source = Model(tmp_path, grid, STEP, ["z500"])

    def at(time):
        frame = source.frame(np.datetime64(f"2024-05-06T{time}", "ms"))
        return frame["z500"].mean() / 9.80665 if frame else None

    assert at("12:00") == pytest.approx(10)  # not the analysis of noon: it is an hour away
    assert at("12:40") == pytest.approx(20) and at("13:00") == pytest.approx(40)
    assert at("11:40") is None and at("14:00") is None
    (tmp_path / "1200_1.grib2").write_bytes((tmp_path / "1200_1.grib2").read_bytes()[:-30])
    source = Model(tmp_path, grid, STEP, ["z500"])
    assert at("13:00") == pytest.approx(20) and set(source.refused) == {"1200_1.grib2"}
    assert source.matching["delay_minutes"] == 60


def test_a_subhourly_file_has_a_field_for_each_quarter(tmp_path):
    rows, cols, quarters = slice(400, 500), slice(795, 910), {15: 1.0, 30: 2.0, 45: 3.0, 60: 4.0}
    flat = {minutes: np.full((100, 115), dbz) for minutes, dbz in quarters.items()}
    path = write_subhourly(tmp_path / "hrrr.t12z.wrfsubhf01.grib2", flat, hrrr_keys(rows, cols))
    start, noon = np.datetime64("2024-05-06T12:00"), np.timedelta64(1, "m")
    times = read_times(path, ("refc",))
    assert times == [(start + minutes * noon, start) for minutes in quarters]
    assert [read_field(path, ("refc",), times=pair).values.mean() for pair in times] == list(quarters.values())
    with pytest.raises(InputError, match="wrfsubhf01.grib2, variable refc: has 4 times"):
        read_field(path, ("refc",))
    source, found = Model(tmp_path, hrrr_crop(**SMALL), STEP, ["nwp_refc"], np.timedelta64(7, "m")), {}
    for minutes in (50, 65, 66, 70):
        frame = source.frame(start + minutes * noon)
        found[minutes] = np.nanmean(frame["nwp_refc"]) if frame else None
    assert found == {50: None, 65: 4.0, 66: 4.0, 70: None}  # known from 13:00 on
    assert source.model_times["nwp_refc"] == (start + 60 * noon, start + 60 * noon)
    assert source.all_files() == [path] and list(source.used) == [path.name]
    path.write_bytes(path.read_bytes() + write_grib(tmp_path / "x", flat[15], "refc", hrrr_keys(rows, cols),
                                                    (20240506, 1300), 1, None).read_bytes())  # fmt: skip
    with pytest.raises(InputError, match="holds many starts, each with many steps"):
        read_times(path, ("refc",))


def test_archive_with_static_and_model_fields(tmp_path, capsys):
    raw = tmp_path / "raw"
    raw.mkdir()
    echo = np.random.default_rng(0).integers(0, 120, (150, 200)) / 2
    for minute in (0, 10):
        write_mrms(raw / f"{minute}.grib2", echo, time=(2024, 5, 6, 13, minute, 41))
    (tmp_path / "nwp").mkdir()
    heights = np.linspace(5400, 5500, 31)[:, None] * np.ones(71)
    write_grib(tmp_path / "nwp" / "g.grib2", heights, "gh", latlon_keys(50, 20, 230, 300, 1.0), lead=1)
    lat, lon = np.arange(39.0, 42.0, 0.05), np.arange(-99.0, -95.0, 0.05)
    ground = 300 + 0 * lat[:, None] + 10 * lon
    ground = xr.DataArray(ground, {"lat": lat, "lon": lon}, ("lat", "lon"), name="elevation", attrs={"units": "m"})
    ground.to_netcdf(tmp_path / "ground.nc")
    (tmp_path / "radars.csv").write_text("id,latitude,longitude\nKUEX,40.32,-98.44\n")
    out = tmp_path / "a.zarr"
    sources = ["--mrms", str(raw), "--nwp", str(tmp_path / "nwp"), *WINDOW, *DATES, "--out", str(out)]
    more = ["--topography", str(tmp_path / "ground.nc"), "--radars", str(tmp_path / "radars.csv")]
    assert exit_status(build.main, [*sources, *more]) == 0, capsys.readouterr().err
    reader, everything = WeatherReader(out), (slice(None), slice(None))
    assert reader.static == ["topography", "radar_proximity"] and reader.channels == ["refc", "z500"]
    assert reader.background == ["z500"]
    valid, known = (times.astype(str).tolist() for times in reader.background_times)
    assert valid == [["NaT", "2024-05-06T13:00:00"]] * 2 == known  # a run of noon, after an hour
    assert str(xr.open_zarr(out).model_valid_time.values[1, 1])[:16] == "2024-05-06T13:00"
    grid = reader.grid
    ground = reader.read("0", "topography", everything)
    assert ground == pytest.approx(300 + 10 * grid.longitude, abs=0.1)
    near = reader.read("1", "radar_proximity", (slice(2, 5), slice(None)))
    assert near.shape == (3, 12) and 0.2 < near.min() < near.max() < 0.7
    about = reader.attrs["provenance"]["static"]
    assert about["topography"].startswith("ground.nc ") and len(about["radar_proximity"].split()[1]) == 64
    assert reader.read("0", "fields", (slice(1, 2), *everything)).mean() == pytest.approx(5432 * 9.80665, rel=1e-3)
    sun = reader.read("1", "cos_zenith", (slice(0, 2), slice(None)))
    assert sun.shape == (2, 12) and reader.shape("1", "cos_zenith") == (12, 12)
    assert xr.open_zarr(out).topography.attrs["units"] == "m"
    plain = [*sources[:-1], str(tmp_path / "b.zarr")]
    build.main(plain)
    reader = WeatherReader(tmp_path / "b.zarr")
    assert reader.static == [] and reader.attrs["provenance"]["static"]["topography"] == "absent"
    with pytest.raises(InputError, match="no such array"):
        reader.read("0", "topography", everything)


def test_bad_static_files_are_named(tmp_path):
    grid = hrrr_crop(**SMALL)
    sites = tmp_path / "sites.csv"
    for text in ("a,b\n1,2\n", "latitude,longitude\nx,y\n", "latitude,longitude\n", "latitude,longitude\n100,3\n"):
        sites.write_text(text)
        with pytest.raises(InputError, match="sites.csv, variable latitude, longitude"):
            static_fields(grid, radars=sites)
    lat, lon = np.arange(39.0, 42.0, 0.05), np.arange(-99.0, -95.0, 0.05)
    ground = xr.DataArray(np.ones((len(lat), len(lon))), name="z", dims=("lat", "lon"), coords={"lat": lat, "lon": lon})
    ground.to_netcdf(tmp_path / "ground.nc")
    with pytest.raises(InputError, match="has units ''"):
        static_fields(grid, topography=tmp_path / "ground.nc")
    ground.assign_attrs(units="m").to_netcdf(tmp_path / "metres.nc")
    with pytest.raises(InputError, match="does not cover the grid"):
        static_fields(grid, topography=tmp_path / "metres.nc")
