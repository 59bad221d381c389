"""The build command: real files in, an archive or a plain message out."""

import fcntl
import gzip
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr
from launch import exit_status
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

from data.files import sha256
from data.processes import end_with_parent
from data.weather import build, observations, stageiv, writer
from data.weather.archive import WeatherReader
from data.weather.netcdf import opened
from data.weather.sources import regular

WEST_TEXAS = ["--resolution", "6km", "--rows", "90:150", "--cols", "380:480", "--split-longitude", "-99"]


def test_build_from_real_files(tmp_path, capsys):
    folder = copy_to(tmp_path / "mrms", MRMS[0], MRMS[2])
    out = tmp_path / "a.zarr"
    build.main(["--mrms", str(folder), "--out", str(out), *WEST_TEXAS])
    assert "3/3 frames" in capsys.readouterr().out
    reader = WeatherReader(out)
    assert reader.times.astype(str).tolist() == [f"2019-06-10T00:{m}:00" for m in ("00", "10", "20")]
    valid = [reader.read(str(i), "valid", ALL).mean() for i in range(3)]
    assert valid[0] > 0.9 and valid[1] == 0 and valid[2] > 0.9  # the gap is there, and empty
    first = reader.read("0", "fields", ALL)
    assert np.nanmin(first) == -10 and np.nanmax(first) > 45  # the storms of central Texas
    assert reader.attrs["gaps"] == {"refc": [["2019-06-10T00:10:00"] * 2]}
    assert xr.open_zarr(out).coverage.values[:, 0].tolist() == pytest.approx(valid)
    assert reader.files["files"] == {file.name: sha256(file) for file in (MRMS[0], MRMS[2])}
    assert reader.attrs["matching"] == {"radar": {"rule": "nearest scan", "tolerance_minutes": 5.0}}
    assert exit_status(build.main, ["--mrms", str(folder), "--out", str(out), *WEST_TEXAS]) == 2
    assert "exists already" in capsys.readouterr().err
    later = copy_to(tmp_path / "later", MRMS[3])
    build.main(["--mrms", str(later), "--out", str(out), "--append", *WEST_TEXAS])
    reader = WeatherReader(out)
    assert len(reader.times) == 4 and set(reader.files["files"]) == {MRMS[i].name for i in (0, 2, 3)}
    build.main(["--mrms", str(later), "--out", str(out), "--append", *WEST_TEXAS])
    assert "nothing is later than 2019-06-10T00:30" in capsys.readouterr().out
    last = copy_to(tmp_path / "last", MRMS[3]) / MRMS[3].name
    write_mrms(last, np.zeros((20, 30)) + np.eye(20, 30), product=(209, 6, 1), time=(2019, 6, 10, 0, 40, 0))
    other = ["--mrms", str(last.parent), "--out", str(out), "--append", "--mrms-tolerance", "1min", *WEST_TEXAS]
    assert exit_status(build.main, other) == 2 and "variable matching" in capsys.readouterr().err


def test_build_of_several_sensors(tmp_path):
    folder = tmp_path / "raw"
    copy_to(folder, GLM_G19)
    counts = np.full((1200, 1200), 3000)
    write_mcmip(folder / "OR_ABI-L2-MCMIPC-M6_G19_a.nc", {2: counts, 13: counts}, satellite="G19", seconds=797302840)
    out = tmp_path / "a.zarr"
    common = ["--abi", str(folder), "--glm", str(folder), "--step", "20s", "--out", str(out), *WEST_TEXAS]
    build.main([*common, "--channels", "bt13,glm"])
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
    assert exit_status(build.main, ["--mrms", str(folder), "--out", str(out), "--strict", *WEST_TEXAS]) == 2
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
    assert (
        exit_status(build.main, ["--abi", str(folder), "--step", "20s", "--strict", "--out", str(out), *WEST_TEXAS])
        == 2
    )
    assert path.name in capsys.readouterr().err and sorted(p.name for p in tmp_path.iterdir()) == ["raw"]


def test_stage_iv_makes_an_archive_of_its_own(tmp_path):
    out = tmp_path / "rain.zarr"
    build.main(["--out", str(out), "--stageiv", str(STAGEIV)])
    reader = WeatherReader(out)
    assert reader.shape("22", "fields") == (1, 118, 87) and reader.channels == ["rain"]
    assert reader.crs["grid_mapping_name"] == "polar_stereographic"
    _, _, rain = stageiv.read_stageiv(STAGEIV)
    assert np.array_equal(reader.read("7", "fields", ALL)[0], rain[7], equal_nan=True)


@pytest.mark.parametrize("options", [["--parallax"], ["--radars", "x"], ["--glm-window", "5min"], ["--dtype", "int16"]])
def test_options_that_nothing_hears_are_refused(tmp_path, capsys, options):
    assert exit_status(build.main, ["--synthetic", "--out", str(tmp_path / "a.zarr"), *options]) == 2
    assert options[0] in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_exit_status_of_the_command(tmp_path):
    command = [sys.executable, "-m", "data.weather.build", "--out", str(tmp_path / "a.zarr")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[1])
    assert done.returncode == 2 and "needs files" in done.stderr and list(tmp_path.iterdir()) == []


def test_regular_times_show_gaps_but_not_seasons():
    step, start = np.timedelta64(10, "m"), np.datetime64("2020-01-01T00:00", "ms")
    stamps = start + np.array([0, 1, 4, 1000, 1001]) * step
    assert ((regular(stamps, step) - start) / step).tolist() == [0, 1, 2, 3, 4, 1000, 1001]


# faults, and many workers

DATES = ["2024-05-06/2024-05-07", "2024-05-10/2024-05-11", "2024-05-14/2024-05-15"]
SMALL_WINDOW = ["--workers", "1", "--resolution", "6km", "--rows", "280:292", "--cols", "448:460", "--split", *DATES]


def _bytes(path):
    """{file: content} of an archive, but for the versions of libraries nothing else varies."""
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def radar(tmp_path_factory):
    """Twelve small composites ten minutes apart, the seventh missing, and the archive of them."""
    root, rng = tmp_path_factory.mktemp("radar"), np.random.default_rng(3)
    (root / "raw").mkdir()
    for i in (i for i in range(12) if i != 6):
        values = np.where(rng.random((150, 200)) < 0.2, -999, rng.uniform(-20, 60, (150, 200)))
        values[rng.random(values.shape) < 0.3] = -99
        stamp = (2024, 5, 6, 18 + i // 6, i % 6 * 10, 41)
        write_mrms(root / "raw" / f"{i:02d}.grib2", values, time=stamp)
    build.main(["--mrms", str(root / "raw"), "--out", str(root / "whole.zarr"), *SMALL_WINDOW])
    return root


def test_two_workers_write_what_one_writes(radar, tmp_path):
    out = tmp_path / "a.zarr"
    command = ["--mrms", str(radar / "raw"), "--out", str(out), *SMALL_WINDOW, "--workers", "2"]
    build.main(command)
    assert _bytes(out) == _bytes(radar / "whole.zarr")


def test_a_cluster_writes_what_one_writes(radar, tmp_path, monkeypatch):
    """With a stand-in for the package ``distributed``: jobs are pickled, results come by their futures."""

    class Client:
        def __init__(self, address):
            assert address == "tcp://host:8786"

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def scatter(self, values, broadcast):
            return [pickle.loads(pickle.dumps(value)) for value in values]

        def submit(self, function, kept, item, pure):
            done = Future()
            done.set_result(pickle.loads(pickle.dumps(function(kept, item))))
            return done

    monkeypatch.setitem(sys.modules, "dask.distributed", SimpleNamespace(Client=Client))
    out = tmp_path / "a.zarr"
    command = ["--mrms", str(radar / "raw"), "--out", str(out), *SMALL_WINDOW, "--scheduler", "tcp://host:8786"]
    build.main(command)
    assert _bytes(out) == _bytes(radar / "whole.zarr")


def test_a_killed_build_goes_on_to_the_same_result(radar, tmp_path, monkeypatch):
    command = ["--mrms", str(radar / "raw"), "--out", str(tmp_path / "a.zarr"), *SMALL_WINDOW]
    made, make = [], observations.Frames.__call__
    monkeypatch.setattr(writer, "SAVE", 0.0)

    def dying(self, i):
        if i == 5:
            os._exit(9)
        return make(self, i)

    def counted(self, i):
        made.append(i)
        return make(self, i)

    monkeypatch.setattr(observations.Frames, "__call__", dying)
    child = multiprocessing.get_context("fork").Process(target=build.main, args=(command,))
    child.start()
    child.join(60)
    assert child.exitcode == 9 and not (tmp_path / "a.zarr").exists() and (tmp_path / ".a.zarr.partial").exists()
    monkeypatch.setattr(observations.Frames, "__call__", counted)
    assert exit_status(build.main, command) == 0 and made == list(range(5, 12))
    assert _bytes(tmp_path / "a.zarr") == _bytes(radar / "whole.zarr")
    assert [p.name for p in tmp_path.iterdir()] == ["a.zarr"]


def test_a_full_disk_ends_in_words_and_can_go_on(radar, tmp_path, monkeypatch, capsys):
    command, make = (
        ["--mrms", str(radar / "raw"), "--out", str(tmp_path / "a.zarr"), *SMALL_WINDOW],
        observations.Frames.__call__,
    )

    def full(self, i):
        if i == 4:
            raise OSError(28, "No space left on device")
        return make(self, i)

    monkeypatch.setattr(writer, "SAVE", 0.0)
    monkeypatch.setattr(observations.Frames, "__call__", full)
    assert exit_status(build.main, command) == 2
    assert "No space left on device. Give disk" in capsys.readouterr().err and not (tmp_path / "a.zarr").exists()
    monkeypatch.setattr(observations.Frames, "__call__", make)
    assert exit_status(build.main, command) == 0 and "8/8 frames" in capsys.readouterr().out
    assert _bytes(tmp_path / "a.zarr") == _bytes(radar / "whole.zarr")


def test_what_a_kill_left_is_not_used_for_other_files(radar, tmp_path, monkeypatch):
    folder = copy_to(tmp_path / "raw", *sorted((radar / "raw").iterdir())[:6])
    command = ["--mrms", str(folder), "--out", str(tmp_path / "a.zarr"), *SMALL_WINDOW]
    (tmp_path / ".a.zarr.partial").mkdir()
    (tmp_path / ".a.zarr.partial" / "resume.json").write_text('{"key": "other", "state": {"done": 4}}')
    assert exit_status(build.main, command) == 0 and len(WeatherReader(tmp_path / "a.zarr").times) == 6


def test_a_broken_file_is_named_and_its_neighbour_taken(radar, tmp_path, capsys):
    folder = tmp_path / "raw"
    shutil.copytree(radar / "raw", folder)
    truncate(folder / "03.grib2")  # found when the folder is looked through
    broken = bytearray((folder / "08.grib2").read_bytes())
    broken[len(broken) // 2 : len(broken) // 2 + 50] = bytes(50)
    (folder / "08.grib2").write_bytes(broken)  # found when it is decoded
    near = np.full((150, 200), 30.0)
    near[0, 0] = -999  # PNG packing wants a range
    write_mrms(folder / "later.grib2", near, time=(2024, 5, 6, 19, 23, 41))
    out = tmp_path / "a.zarr"
    build.main(["--mrms", str(folder), "--out", str(out), *SMALL_WINDOW])
    said = capsys.readouterr().out
    assert "left out: file" in said and "03.grib2" in said and "08.grib2" in said
    reader = WeatherReader(out)
    assert (
        set(reader.files["refused"]) == {"03.grib2", "08.grib2"} and "truncated" in reader.files["refused"]["03.grib2"]
    )
    assert reader.attrs["provenance"]["refused"] == 2 and reader.attrs["provenance"]["files"] == 10
    gaps = [g[0][11:16] for g in reader.attrs["gaps"]["refc"]]
    assert gaps == ["18:30", "19:00"]
    assert np.nanmax(np.abs(reader.read("8", "fields", ALL) - 30)) < 0.01  # the scan 3 min later
    other = ["--mrms", str(folder), "--out", str(tmp_path / "b.zarr"), "--mrms-tolerance", "2min", *SMALL_WINDOW]
    build.main(other)
    reader = WeatherReader(tmp_path / "b.zarr")
    assert [g[0][11:16] for g in reader.attrs["gaps"]["refc"]] == ["18:30", "19:00", "19:20"]
    assert reader.attrs["matching"]["radar"]["tolerance_minutes"] == 2.0


def test_two_builds_of_one_archive_do_not_meet(radar, tmp_path, capsys):
    lock = tmp_path / ".a.zarr.lock"
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert (
            exit_status(build.main, ["--mrms", str(radar / "raw"), "--out", str(tmp_path / "a.zarr"), *SMALL_WINDOW])
            == 2
        )
    assert "being written by another process" in capsys.readouterr().err


def test_full_disk_and_single_bands_beside_each_other(tmp_path):
    folder = tmp_path / "raw"
    folder.mkdir()
    counts, at = np.full((1200, 1200), 3000), 797302840
    write_mcmip(folder / "OR_ABI-L2-MCMIPF-M6_G19_a.nc", {2: counts}, satellite="G19", seconds=at)
    write_mcmip(folder / "OR_ABI-L2-CMIPF-M6C13_G19_a.nc", {13: counts}, satellite="G19", seconds=at + 5, single=True)
    flags = np.zeros((1200, 1200), np.int8)
    flags[:, ::2] = 2
    write_mcmip(
        folder / "OR_ABI-L2-CMIPF-M6C13_G19_b.nc", {13: counts - 9}, flags, "G19", seconds=at + 600, single=True
    )
    out = tmp_path / "a.zarr"
    build.main(["--abi", str(folder), "--out", str(out), *WEST_TEXAS])
    data = xr.open_zarr(out)
    assert data.channel.values.tolist() == ["c02", "bt13"] and data.sizes["time"] == 2
    assert data.coverage.values[0].tolist() == [1, 1] and data.coverage.values[1, 0] == 0
    assert 0.3 < data.coverage.values[1, 1] < 0.7  # what its flags call out of range is missing
    assert WeatherReader(out).attrs["matching"]["abi"]["satellite"] == "G19"


def _parent(pipe):
    child = multiprocessing.get_context("fork").Process(target=_child, args=(pipe,))
    child.start()
    child.join()


def _child(pipe):
    end_with_parent()
    pipe.send("here")
    time.sleep(600)


def test_workers_end_when_their_parent_is_killed():
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    parent = context.Process(target=_parent, args=(theirs,))
    parent.start()
    theirs.close()
    assert ours.recv() == "here"
    parent.kill()
    with pytest.raises(EOFError):  # the child held the last end of the pipe
        assert not ours.poll(60) or ours.recv()


def test_composite_and_base_in_one_archive_and_a_frame_in_the_dark(tmp_path):
    folder, echo = tmp_path / "raw", np.random.default_rng(0).integers(0, 120, (150, 200)) / 2
    folder.mkdir()
    for number, category in enumerate((10, 11)):
        plain = write_mrms(folder / "a", echo + number, product=(209, category, 0), time=(2024, 5, 6, 18, 0, 41))
        (folder / f"{category}.grib2.gz").write_bytes(gzip.compress(plain.read_bytes()))
    counts, at = np.full((1200, 1200), 3000), 768290400 + 41  # 18:00:41 of the same day
    for name, flag, later in (("a", 0, 0), ("b", 3, 600)):  # the second has no value anywhere, as in an eclipse
        write_mcmip(folder / f"OR_ABI-L2-MCMIPC-M6_G16_{name}.nc", {13: counts}, flag, seconds=at + later)
    out = tmp_path / "a.zarr"
    build.main(["--mrms", str(folder), "--abi", str(folder), "--out", str(out), *SMALL_WINDOW])
    reader = WeatherReader(out)
    assert reader.channels == ["refc", "refb", "bt13"] and len(reader.times) == 2
    first = reader.read("0", "fields", ALL)
    assert 0.5 < (first[1] - first[0]).mean() < 1.5 and first[2].min() > 270
    assert reader.attrs["gaps"] == {name: [["2024-05-06T18:10:00"] * 2] for name in reader.channels}
