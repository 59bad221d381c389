"""The build command: real files in, an archive or a plain message out."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from weather_files import (
    ALL,
    GLM_G16,
    GLM_G19,
    MRMS,
    STAGEIV,
    copy_to,
    truncate,
    write_mcmip,
    write_mrms,
)

from data.weather import build, stageiv
from data.weather.archive import WeatherReader
from data.weather.netcdf import opened
from data.weather.sources import regular

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
    assert reader.attrs["matching"] == {"radar": "nearest scan within 5 min"}
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
