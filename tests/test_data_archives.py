"""What lies where an archive should: nothing, a file, one of the other application, one of an earlier version."""

import re

import pytest
import zarr

from core.errors import InputError
from data.aero.archive import FORMAT, AeroReader, _listed
from data.weather.archive import SCHEMA, WeatherReader

READERS = {  # who reads, its build, and what the archive of the other application says of itself
    "weather": (lambda path: WeatherReader(path).attrs, "schema", {"format": FORMAT}),
    "aero": (lambda path: AeroReader(path).attrs, "format", {"schema": SCHEMA, "title": "synthetic storms"}),
}


@pytest.mark.parametrize("kind", READERS)
def test_a_path_that_is_no_archive_is_told(kind, tmp_path):
    read, key, other = READERS[kind]
    for name in ("folder", "damaged"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "damaged" / "zarr.json").write_text("{")
    for name, attrs in (("other", other), ("unnamed", {}), ("old", {key: f"shardfield-{kind}-0"})):
        zarr.open_group(tmp_path / name, mode="w").attrs.update(attrs)
    build = f"python -m data.{kind}.build"
    for name, problem, remedy in (
        ("nowhere", f"there is no such file or folder, so no {kind} archive", build),
        ("folder", f"is no {kind} archive: it holds no zarr.json", build),
        ("file", f"is no {kind} archive: it holds no zarr.json", build),
        ("damaged", "cannot be opened as Zarr", "Build the archive again"),
        ("other", f"is no {kind} archive: it is '{FORMAT if kind == 'weather' else SCHEMA}'", build),
        ("unnamed", f"is no {kind} archive: it names no format", build),
        ("old", f"is of the version shardfield-{kind}-0, not shardfield-{kind}-", "Build it again"),
    ):
        with pytest.raises(InputError, match=f"{name}.*{re.escape(problem)}.*{remedy}"):
            read(tmp_path / name)


def test_many_runs_are_counted_and_every_split_is_shown():
    runs = [f"run_{k}" for k in range(1, 31)]
    told = _listed(runs, {"train": runs[:20], "valid": [], "test": runs[20:24]})
    assert told.startswith("train: run_1 run_2 ") and " run_12 and 8 more; test: run_21 run_22 run_23 run_24" in told
    assert told.endswith("in no split: run_25 run_26 run_27 run_28 run_29 run_30") and "valid" not in told
