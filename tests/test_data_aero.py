"""Aero data: real and synthetic files, the archive, and the builder's manners."""

import gzip
import json
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pyvista
from aero_runs import cube
from drivaerml_files import write_drivaerml
from launch import exit_status
from vtkmodules import vtkIOXML

from core.errors import InputError
from data.aero import build, drivaerml, plain, writing
from data.aero.archive import AeroReader
from data.aero.cells import surface_arrays, volume_arrays
from data.aero.geometry import area_vectors, signed_volume, triangles
from data.aero.splits import check_splits, hold_out, official_split
from data.aero.synthetic import (
    make_body,
    synthetic_archive,
    synthetic_run,
    synthetic_splits,
)
from data.aero.volume import VolumeCells, _plain
from data.aero.vtk_files import DRIVAERML, OPENFOAM, read_stl, read_surface, write_hexahedra, write_surface
from data.aero.vtu import VtuFile, _Joined
from data.aero.vtu_cells import VtuCells
from data.aero.writing import Run, write_archive
from data.kept import Kept

AHMED = Path(__file__).parent / "data" / "aero"
FIELDS = ("position", "normal", "area", "pressure", "shear")
ALL = (slice(None),)


def fields_of(reader, run):
    return [reader.read(f"{run}/surface", name, ALL) for name in FIELDS]


@pytest.fixture(scope="session")
def archive(tmp_path_factory):
    return synthetic_archive(tmp_path_factory.mktemp("synthetic") / "a.zarr", runs=6, cells=2000)


@pytest.fixture(scope="session")
def layout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drivaerml")
    write_drivaerml(folder, runs=(1, 2, 3), seed=4, cells=500)
    return folder


def ahmed_copy(folder, *names):
    for name in names:
        shutil.copy(AHMED / "ahmed25" / name, folder / name)
    return folder


# Files


def test_ahmed_volume_is_read_from_gzip():
    run = plain.read_run(AHMED / "ahmed25", volume=True)
    first = next(replace(run.volume, block=20_000).blocks())
    assert first["velocity"].shape == (20_000, 3) and np.abs(first["velocity"]).max() < 100
    assert 0 < first["sdf"].min() < 0.1 and first["sdf"].max() < 6
    with _plain(run.volume.paths) as paths:
        cells = VtuCells(VtuFile(paths))
        assert cells.file.cells == 223_828
        assert cells.centers(0, 223_828).min(0) == pytest.approx([-2.99, -1.18, 0.01], abs=0.05)
        volumes = cells.volumes(0, 223_828)
    box, body = 30.889, 0.1107
    assert volumes.min() > 0 and volumes.sum() == pytest.approx(box - body, abs=1e-3)
    assert set(run.attrs["sources"]) == {"body.vtp", "body.stl", "internal.vtu.gz", "params.json", "coefficient.dat.gz"}


def test_surface_alone_touches_no_volume_file(tmp_path):
    ahmed_copy(tmp_path, "body.vtp", "params.json", "coefficient.dat.gz")
    assert plain.read_run(tmp_path).volume is None
    with pytest.raises(InputError, match="internal.vtu: no such file"):
        plain.read_run(tmp_path, volume=True)


def cut(path, share=0.5):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def test_broken_files_are_named(tmp_path):
    ahmed_copy(tmp_path, "body.vtp", "body.stl", "internal.vtu.gz", "params.json", "coefficient.dat.gz")
    for name in ("body.vtp", "body.stl", "internal.vtu.gz", "params.json", "coefficient.dat.gz"):
        cut(tmp_path / name, 0.7)
        with pytest.raises(InputError, match=name.replace(".", "[.]")):
            plain.read_run(tmp_path, volume=True).volume.arrays()
        ahmed_copy(tmp_path, name)
    (tmp_path / "body.vtp").unlink()
    with pytest.raises(InputError, match="body.vtp: no such file"):
        plain.read_run(tmp_path)


def test_missing_and_point_only_arrays_are_named(tmp_path):
    import pyvista

    with pytest.raises(InputError, match="pMeanTrim: not in the file; cell arrays are: nut p U wallShearStress"):
        read_surface(AHMED / "ahmed25" / "body.vtp", DRIVAERML)
    data = pyvista.read(AHMED / "ahmed25" / "body.vtp")
    data.cell_data.remove("p")
    data.save(tmp_path / "points.vtp")
    with pytest.raises(InputError, match="variable p: only on points"):
        read_surface(tmp_path / "points.vtp", OPENFOAM)


def test_cells_that_are_no_polygons_are_refused(tmp_path):
    import pyvista

    faces = [4, 0, 1, 2, 3]
    data = pyvista.PolyData(np.eye(4, 3), faces=faces, lines=[2, 0, 1])
    data.cell_data.update({"p": np.zeros(2), "wallShearStress": np.zeros((2, 3))})
    data.save(tmp_path / "mixed.vtp")
    with pytest.raises(InputError, match="mixed.vtp: has vertices, lines or strips"):
        read_surface(tmp_path / "mixed.vtp", OPENFOAM)


def test_arrays_of_a_wrong_length_are_refused(tmp_path):
    mesh, pressure = cube(), np.arange(6, dtype=np.float32)
    write_surface(tmp_path / "cube.vtp", mesh, {"p": pressure, "wallShearStress": np.zeros((6, 3), np.float32)})
    text = (tmp_path / "cube.vtp").read_text()
    (tmp_path / "cube.vtp").write_text(text.replace('NumberOfPolys="6"', 'NumberOfPolys="7"'))
    with pytest.raises(InputError, match="cube.vtp"):
        read_surface(tmp_path / "cube.vtp", OPENFOAM)
    with pytest.raises(InputError, match=r"variable pressure: shape \(5,\), but the mesh needs \(6,\)"):
        surface_arrays(mesh, pressure[:5], np.zeros((6, 3)), file="cube")


def test_bad_values_and_cells_are_refused():
    mesh, fine = cube(), np.zeros((6, 3))
    with pytest.raises(InputError, match="file cube, variable pressure: 1 cells are not finite, the first is cell 4"):
        surface_arrays(mesh, np.array([0, 0, 0, 0, np.nan, 0]), fine, file="cube")
    with pytest.raises(InputError, match="variable Points: 3 cells are not finite"):  # of three that meet at a corner
        points = np.where(np.arange(len(mesh.points))[:, None] == 0, np.nan, mesh.points)
        surface_arrays(replace(mesh, points=points), np.zeros(6), fine, file="cube")
    flat = replace(mesh, connectivity=np.where(np.arange(len(mesh.connectivity)) < 4, 0, mesh.connectivity))
    with pytest.raises(InputError, match="1 cells have no area, the first is cell 0"):
        surface_arrays(flat, np.zeros(6), fine, file="cube")
    turned = mesh.connectivity.copy()
    turned[:4] = turned[:4][::-1]
    with pytest.raises(InputError, match="16.67% of the area winds against its neighbours, at 4 edges"):
        surface_arrays(replace(mesh, connectivity=turned), np.zeros(6), fine, file="cube")


def test_stl_ascii_with_solids_and_binary(tmp_path):
    import pyvista

    text = (AHMED / "ahmed25" / "body.stl").read_text()
    whole = read_stl(AHMED / "ahmed25" / "body.stl")
    (tmp_path / "two.stl").write_text(text + text.replace("solid body", "solid other"))
    assert len(read_stl(tmp_path / "two.stl")) == 2 * len(whole) == 232
    pyvista.read(AHMED / "ahmed25" / "body.stl").save(tmp_path / "binary.stl")
    assert np.sort(read_stl(tmp_path / "binary.stl"), axis=None) == pytest.approx(np.sort(whole, axis=None))
    cut(tmp_path / "binary.stl")
    with pytest.raises(InputError, match="binary.stl: cut short"):
        read_stl(tmp_path / "binary.stl")


# DrivAerML's layout


def test_layout_and_direct_archive_hold_the_same(layout, tmp_path):
    splits = {"train": ["run_1", "run_3"], "valid": [], "test": ["run_2"]}
    synthetic_archive(tmp_path / "direct.zarr", runs=3, seed=4, cells=500, volume=True, splits=splits)
    command = ["--drivaerml", str(layout), "--volume", "--seed", "4", "--train", "1", "run_3", "--test", "2"]
    command += ["--force-tolerance", "0.05"]
    build.main([*command, "--out", str(tmp_path / "files.zarr")])
    direct, files = AeroReader(tmp_path / "direct.zarr"), AeroReader(tmp_path / "files.zarr")
    assert direct.splits == files.splits == splits
    for run in direct.runs:
        for sample in (f"{run}/surface", f"{run}/volume"):
            assert direct.fields(sample) == files.fields(sample)
            for name in direct.fields(sample):
                a, b = (reader.read(sample, name, ALL) for reader in (direct, files))
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 if name in ("sdf", "direction") else 0, err_msg=name)
        ours, theirs = direct.run_attrs(run), files.run_attrs(run)
        assert len(theirs["sources"][f"boundary_{run[4:]}.vtp"]) == 64
        for key in ("U", "rho", "nu", "Aref", "Lref", "center", "Cd", "Cl", "constant", "winding"):
            assert ours[key] == theirs[key], key
        assert theirs["parameters"]["slant_angle"] == ours["parameters"]["slant_angle"]


def test_stl_of_the_layout_winds_outward_and_the_surface_inward(layout):
    corners = read_stl(layout / "run_1" / "drivaer_1.stl")
    vectors = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]) / 2
    mesh, _ = read_surface(layout / "run_1" / "boundary_1.vtp", DRIVAERML)
    volume = signed_volume(vectors.astype(np.float64), corners.mean(axis=1))
    assert volume > 5 and signed_volume(*area_vectors(mesh)) == pytest.approx(-volume, rel=1e-3)
    assert triangles(mesh).shape == corners.shape and set(np.diff(mesh.offsets)) == {3, 4}


def test_headers_differ_in_case_and_blanks(layout, tmp_path):
    shutil.copytree(layout / "run_1", tmp_path / "run_1")
    table = tmp_path / "run_1" / "force_mom_1.csv"
    table.write_text(table.read_text().replace("Cd, Cl", " CD ,cl").replace("\n", "\r\n"))
    assert drivaerml.read_run(tmp_path, 1).attrs["Cd"] == drivaerml.read_run(layout, 1).attrs["Cd"]
    table.write_text("Cl\n0.1\n")
    with pytest.raises(InputError, match="force_mom_1.csv, variable Cd: no such column"):
        drivaerml.read_run(tmp_path, 1)


# The volume in blocks


def write_vtu(path, mode, compressor, header):
    """A synthetic volume as VTK itself writes it, and what is in it."""
    body = make_body(0, 1, 200, volume=True)
    padded = np.insert(body.volume.connectivity, body.volume.offsets[:-1], 8)
    grid = pyvista.UnstructuredGrid(padded, np.full(len(body.volume), 12), body.volume.points)
    grid.point_data["p"] = np.zeros(grid.n_points, np.float32)  # the same name on points is not taken
    grid.cell_data.update({"U": body.volume_velocity, "p": body.volume_pressure})
    writer = vtkIOXML.vtkXMLUnstructuredGridWriter(file_name=str(path))
    writer.SetInputData(grid)
    writer.SetDataModeToBinary() if mode == "inline" else writer.SetDataModeToAppended()
    writer.SetEncodeAppendedData(mode == "appended base64")
    getattr(writer, f"SetCompressorTypeTo{compressor}")()
    getattr(writer, f"SetHeaderTypeToUInt{header}")()
    writer.SetBlockSize(1024)
    assert writer.Write()
    return body


@pytest.mark.parametrize("mode", ["inline", "appended raw", "appended base64"])
@pytest.mark.parametrize("compressor", ["None", "ZLib", "LZ4"])
def test_ranges_of_rows_are_read_from_every_encoding(mode, compressor, tmp_path):
    for header in (32, 64):
        body = write_vtu(tmp_path / "v.vtu", mode, compressor, header)
        file, mesh = VtuFile([tmp_path / "v.vtu"]), body.volume
        expected = {("CellData", "U"): body.volume_velocity, ("CellData", "p"): body.volume_pressure}
        expected |= {("Points", "Points"): mesh.points, ("Cells", "connectivity"): mesh.connectivity}
        for key, values in expected.items():
            for first, last in ((0, len(values)), (7, 8), (100, 701), (len(values) - 3, len(values)), (5, 5)):
                np.testing.assert_array_equal(file.read(*key, first, last), values[first:last], err_msg=str(key))


@pytest.mark.parametrize("mode", ["inline", "appended raw", "appended base64"])
@pytest.mark.parametrize("compressor", ["None", "ZLib", "LZ4"])
def test_a_volume_damaged_within_is_named(mode, compressor, tmp_path):
    """Zeros as a broken download leaves them, and a piece that is missing, wherever they begin."""
    write_vtu(tmp_path / "v.vtu", mode, compressor, 64)
    whole = (tmp_path / "v.vtu").read_bytes()
    pieces = [b""] if mode == "appended raw" and compressor == "None" else [b"", bytes(3001)]  # else zeros are values
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        at = int(share * len(whole))
        for piece in pieces:
            (tmp_path / "bad.vtu").write_bytes(whole[:at] + piece + whole[at + 3001 :])
            with pytest.raises(InputError, match="bad.vtu"):
                VolumeCells([tmp_path / "bad.vtu"], OPENFOAM, np.eye(3)[None]).arrays()


def test_blocks_and_parts_of_a_volume_are_the_whole(tmp_path):
    body = write_vtu(tmp_path / "v.vtu", "inline", "None", 64)
    corners, data = triangles(body.mesh), (tmp_path / "v.vtu").read_bytes()
    parts = [tmp_path / f"volume_1.vtu.{k:02d}.part" for k in range(3)]
    for part, piece in zip(parts, (data[:5000], data[5000:60001], data[60001:])):
        part.write_bytes(piece)
    assert drivaerml.volume_files(tmp_path, 1) == parts
    whole = volume_arrays(
        body.volume,
        body.volume_velocity,
        body.volume_pressure,
        corners,
        file="body",
        types=np.full(len(body.volume), 12),
    )
    found = VolumeCells(parts, OPENFOAM, corners, block=333).arrays()
    assert set(found) == set(whole)
    for name, values in whole.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    parts[1].unlink()
    with pytest.raises(InputError, match="volume_1.vtu: parts 00 02 only"):
        drivaerml.volume_files(tmp_path, 1)
    with pytest.raises(InputError, match="v.vtu, variable q: not in the file; cell arrays are: U p"):
        VolumeCells([tmp_path / "v.vtu"], {"velocity": "U", "pressure": "q"}, corners).arrays()


def test_a_volume_passes_through_block_by_block(tmp_path, monkeypatch):
    """Written over several shard files; no read is larger than a block or the points."""
    body = make_body(0, 1, 1000, volume=True)
    write_hexahedra(tmp_path / "v.vtu", body.volume, {"U": body.volume_velocity, "p": body.volume_pressure})
    monkeypatch.setattr(writing, "CHUNK_ROWS", 64)
    volume, asked, read = VolumeCells([tmp_path / "v.vtu"], OPENFOAM, triangles(body.mesh), block=200), [], _Joined.read
    monkeypatch.setattr(_Joined, "read", lambda self, at, count: asked.append(count) or read(self, at, count))
    surface = surface_arrays(cube(), np.zeros(6), np.zeros((6, 3)), file="cube")[0]
    splits = {"train": ["a"], "valid": [], "test": []}
    write_archive(tmp_path / "a.zarr", [Run("a", surface, volume)], splits, seed=1)
    assert max(asked) <= 4 / 3 * body.volume.points.nbytes + 100 < (tmp_path / "v.vtu").stat().st_size / 5
    assert len(list((tmp_path / "a.zarr/runs/a/volume/sdf/c").iterdir())) == -(-len(body.volume) // (64 * 64)) > 1
    reader = AeroReader(tmp_path / "a.zarr")
    order = reader.read("a/volume", "cell_id")
    assert sorted(order) == list(range(len(body.volume)))
    np.testing.assert_array_equal(reader.read("a/volume", "velocity"), body.volume_velocity[order])
    np.testing.assert_allclose(
        reader.mean["volume/velocity"], body.volume_velocity.mean(axis=0, dtype=np.float64), rtol=1e-9, atol=1e-9
    )


# Splits


def test_official_split_has_the_published_counts():
    split = official_split("official", [])
    assert [len(split[name]) for name in ("train", "valid", "test")] == [400, 34, 50]
    assert len(set(split["train"] + split["valid"] + split["test"])) == 484
    assert "run_167" not in split["train"] and "run_11" in split["test"]
    assert [len(ids) for ids in official_split("scarce", []).values()] == [67, 34, 50]
    assert official_split("official", ["run_11", "run_1"], partial=True) == {
        "train": ["run_1"],
        "valid": [],
        "test": ["run_11"],
    }


def test_splits_must_be_disjoint_and_there():
    with pytest.raises(InputError, match="run b is in train and in test"):
        check_splits({"train": ["a", "b"], "valid": [], "test": ["b"]}, ["a", "b"])
    with pytest.raises(InputError, match="1 of 2 runs are not there: c"):
        check_splits({"train": ["a"], "valid": ["c"], "test": []}, ["a", "b"])
    for runs in (3, 12, 20):
        splits = synthetic_splits(runs)
        check_splits(splits, [f"run_{i}" for i in range(1, runs + 1)])
        assert sum(map(len, splits.values())) == runs and all(splits.values())


@pytest.mark.parametrize("by", ["blocks", "random"])
def test_held_out_cells_stay_out_of_the_statistics(by, tmp_path):
    path = tmp_path / "h.zarr"
    command = ["--run", str(AHMED / "ahmed25"), "--holdout-cells", "0.2", "--holdout-by", by, "--out", str(path)]
    build.main(command)
    reader = AeroReader(path)
    held, pressure = (reader.read("ahmed25/surface", name, ALL) for name in ("heldout", "pressure"))
    assert held.dtype == bool and 0.15 < held.mean() < 0.25
    assert reader.attrs["holdout"]["label"] == "interpolation" and reader.splits["train"] == ["ahmed25"]
    np.testing.assert_allclose(reader.mean["surface/pressure"], pressure[~held].astype(np.float64).mean(), rtol=1e-6)
    assert abs(pressure[held].mean() - pressure[~held].mean()) > 1e-3


def test_held_out_blocks_are_blocks():
    position = np.random.default_rng(0).random((20000, 3))
    held = hold_out(0.2, "blocks", 1)("run", "surface", position)
    cubes = np.floor((position - position.min(0)) / (np.ptp(position, axis=0).max() / 10)).astype(int)
    for cell in np.unique(cubes, axis=0)[::37]:
        assert len(set(held[(cubes == cell).all(axis=1)])) == 1


# Archive


def test_statistics_come_from_training_runs_only(archive):
    reader = AeroReader(archive)
    for name in ("pressure", "shear", "position"):
        rows = {run: reader.read(f"{run}/surface", name, ALL).astype(np.float64) for run in reader.runs}
        train = np.concatenate([rows[run] for run in reader.splits["train"]])
        np.testing.assert_allclose(reader.mean[f"surface/{name}"], train.mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(reader.std[f"surface/{name}"], train.std(0), rtol=1e-5)
    everything = np.concatenate([reader.read(f"{run}/surface", "pressure", ALL) for run in reader.runs])
    assert abs(everything.mean() - reader.mean["surface/pressure"]) > 0.1


def test_statistics_hash_follows_the_training_runs(tmp_path):
    runs = [Run(f"run_{i}", synthetic_run(0, i, 300).surface) for i in (1, 2, 3)]

    def build_with(name, train, test):
        write_archive(tmp_path / name, iter(runs), {"train": train, "valid": [], "test": test})
        return AeroReader(tmp_path / name).attrs["statistics_hash"]

    first = build_with("a", ["run_1"], ["run_2", "run_3"])
    assert first == build_with("b", ["run_1"], ["run_3"]) != build_with("c", ["run_2"], ["run_3"])


@pytest.mark.parametrize("name", ["pressure", "shear", "cell_id"])
def test_half_the_rows_are_half_the_bytes(ahmed, name):
    reader = AeroReader(ahmed)
    rows, *rest = reader.shape("ahmed25/surface", name)
    assert reader.bytes_read == 0
    whole = reader.read("ahmed25/surface", name, ALL)
    total = reader.bytes_read
    assert whole.nbytes <= total < 1.1 * whole.nbytes
    for parts in (2, 4):
        size = -(-rows // parts)
        for start in range(0, rows, size):
            before = reader.bytes_read
            part = reader.read(
                "ahmed25/surface", name, (slice(start, min(rows, start + size)), *(slice(None) for _ in rest))
            )
            np.testing.assert_array_equal(part, whole[start : start + size])
            assert reader.bytes_read - before < total / parts * 1.15


def test_what_was_read_last_is_kept_up_to_a_number_of_bytes():
    made = []

    def read(kept, key, nbytes=40):
        return kept.of(key, lambda: made.append(key) or np.full(nbytes, key, np.uint8))[0]

    kept = Kept(100, lambda values: values.nbytes, least=1)
    assert [read(kept, key) for key in (1, 2, 1, 3, 1, 2)] == [1, 2, 1, 3, 1, 2]
    assert made == [1, 2, 3, 2]  # 2 was asked for before 1
    kept[1] = np.zeros(50, np.uint8)  # anew: 40 + 50
    assert 1 in kept and 2 in kept and 3 not in kept
    read(kept, 4, 1000)
    assert [key for key in range(5) if key in kept] == [4]  # the least


def test_rows_are_shuffled_and_cell_id_leads_back(ahmed):
    reader = AeroReader(ahmed)
    cell = reader.read("ahmed25/surface", "cell_id", ALL)
    assert sorted(cell) == list(range(9760)) and abs(np.corrcoef(cell, np.arange(9760))[0, 1]) < 0.05
    mesh, fields = read_surface(AHMED / "ahmed25" / "body.vtp", OPENFOAM)
    np.testing.assert_array_equal(reader.read("ahmed25/surface", "pressure", ALL), fields["pressure"][cell])
    np.testing.assert_array_equal(reader.read("ahmed25/surface", "shear", ALL), fields["shear"][cell])
    centers = area_vectors(mesh)[1]
    np.testing.assert_array_equal(reader.read("ahmed25/surface", "position", ALL), centers[cell].astype(np.float32))
    assert reader.read("ahmed25/surface", "position", (slice(7, 7), slice(None))).shape == (0, 3)
    part = reader.read("ahmed25/surface", "position", (slice(0, 2000),))
    assert np.abs(part.mean(0) - centers.mean(0)).max() < 0.03, "any range of rows is a fair sample"


def test_reader_pickles_and_names_what_is_missing(archive, tmp_path):
    reader = AeroReader(archive)
    reader.read("run_1/surface", "area", (slice(0, 10),))
    twin = pickle.loads(pickle.dumps(reader))
    assert twin.bytes_read == 0
    np.testing.assert_array_equal(twin.read("run_2/surface", "area", ALL), reader.read("run_2/surface", "area", ALL))
    for sample, name, message in [
        ("run_99/surface", "area", "no such run; the archive has train: run_1"),
        ("run_1/volume", "sdf", "--volume"),
        ("run_1/surface", "p", "no such field; there are area cell_id normal"),
    ]:
        with pytest.raises(InputError, match=message):
            reader.read(sample, name, ALL)


def test_archive_needs_no_vtk(tmp_path):
    code = (
        "import sys\n"
        "for name in ('vtk', 'vtkmodules', 'pyvista', 'netCDF4', 'cfgrib', 'scipy'): sys.modules[name] = None\n"
        "from data.aero.synthetic import synthetic_archive; from data.aero.archive import AeroReader\n"
        f"path = synthetic_archive({str(tmp_path / 'a.zarr')!r}, runs=3, cells=200)\n"
        "assert len(AeroReader(path).read('run_1/surface', 'shear', (slice(0, 5),))) == 5\n"
    )
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=60)


# The builder's manners


def refuse(capsys, folder, *command):
    """The message of a command that must end with status 2 and leave ``folder`` empty."""
    assert exit_status(build.main, [*map(str, command), "--out", str(folder / "out.zarr")]) == 2
    assert list(folder.iterdir()) == []  # no partial output, no temporary name
    return capsys.readouterr().err


def test_bad_input_leaves_a_message_status_2_and_nothing_else(layout, tmp_path, capsys):
    out, source = tmp_path / "out", tmp_path / "source"
    out.mkdir()
    shutil.copytree(layout, source)
    message = refuse(capsys, out, "--drivaerml", source, "--train", "1", "--valid", "2", "--test", "7", "8")
    assert "2 of 4 runs are not there: run_7 run_8" in message
    assert "481 of 484 runs are not there: run_5 run_6" in refuse(
        capsys, out, "--drivaerml", source, "--split", "official"
    )
    assert "no split of the runs run_1 run_2 run_3" in refuse(capsys, out, "--drivaerml", source)
    assert "run_1 is in train and in test" in refuse(capsys, out, "--drivaerml", source, "--train", "1", "--test", "1")
    cut(source / "run_3" / "boundary_3.vtp")
    message = refuse(capsys, out, "--drivaerml", source, "--train", "3")
    assert "boundary_3.vtp: cut short" in message and "Fetch the file again" in message
    assert "nowhere: no such folder" in refuse(capsys, out, "--run", tmp_path / "nowhere", "--train", "nowhere")
    ahmed = ["--run", AHMED / "ahmed25", "--train", "ahmed25"]
    message = refuse(capsys, out, *ahmed, "--pressure", "q")
    assert "body.vtp, variable q: not in the file; cell arrays are: nut p U" in message
    message = refuse(capsys, out, *ahmed, "--pressure", "nut")
    assert "variable Cd: the cells integrate to 0.04016, but 0.30098 is stated" in message


def test_a_build_goes_on_past_broken_runs_and_where_it_stopped(layout, tmp_path, capsys):
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(layout, source)
    cut(source / "run_2" / "boundary_2.vtp")
    (source / "run_3" / "geo_ref_3.csv").unlink()
    command = ["--drivaerml", str(source), "--train", "1", "2", "3", "--force-tolerance", "1"]
    assert exit_status(build.main, [*command, "--out", str(out / "a.zarr")]) == 2
    told, error = capsys.readouterr()
    assert "run_2: broken" in told and "1/3 run_1" in told
    assert "2 runs are broken" in error and "boundary_2.vtp: cut short" in error and "geo_ref_3.csv: no such" in error
    assert not (out / "a.zarr").exists()
    assert exit_status(build.main, [*command, "--seed", "5", "--out", str(out / "a.zarr")]) == 2
    assert "holds a build with other options" in capsys.readouterr().err
    shutil.copy(layout / "run_2" / "boundary_2.vtp", source / "run_2")
    for run in ("run_2", "run_3"):  # as a killed build leaves them
        (out / ".a.zarr.building" / "runs" / f".{run}" / ".rows.x").mkdir(parents=True)
    more = ["--leave-out-broken", "--workers", "2"]
    build.main([*command, *more, "--out", str(out / "a.zarr")])
    assert "1 runs are complete" in capsys.readouterr().out
    assert [path.name for path in out.iterdir()] == ["a.zarr"] and not list((out / "a.zarr").rglob(".*"))
    reader, manifest = AeroReader(out / "a.zarr"), json.loads((out / "a.zarr/manifest.json").read_text())
    assert reader.splits["train"] == reader.runs == list(manifest["runs"]) == ["run_1", "run_2"]
    assert list(manifest["left_out"]) == ["run_3"] and manifest["runs"]["run_2"]["split"] == "train"
    assert len(manifest["runs"]["run_2"]["sources"]["boundary_2.vtp"]) == 64


def test_command_ends_with_status_2(tmp_path):
    command = [sys.executable, "-m", "data.aero.build", "--run", str(tmp_path), "--train", tmp_path.name]
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "a")], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "params.json: no such file" in done.stderr and "Traceback" not in done.stderr


def test_partial_official_split_counts_what_is_there(layout, tmp_path, capsys):
    command = [
        "--drivaerml",
        str(layout),
        "--split",
        "official",
        "--partial",
        "--force-tolerance",
        "1",
        "--out",
        str(tmp_path / "a.zarr"),
    ]
    build.main(command)
    assert "train 3, valid 0, test 0 of 3 runs" in capsys.readouterr().out


def test_an_archive_is_never_overwritten(archive, capsys):
    before = json.loads((archive / "zarr.json").read_text())
    assert exit_status(build.main, ["--synthetic", "--runs", "3", "--cells", "100", "--out", str(archive)]) == 2
    assert "already exists" in capsys.readouterr().err and json.loads((archive / "zarr.json").read_text()) == before


def test_parameters_must_agree_with_the_solver(tmp_path):
    ahmed_copy(tmp_path, "body.vtp", "params.json", "coefficient.dat.gz")
    given = json.loads((tmp_path / "params.json").read_text())
    (tmp_path / "params.json").write_text(json.dumps(given | {"Aref": 0.2}))
    with pytest.raises(InputError, match="variable Aref: 0.112032 m2, but params.json says 0.2"):
        plain.read_run(tmp_path)
    del given["U"]
    (tmp_path / "params.json").write_text(json.dumps(given))
    with pytest.raises(InputError, match="params.json, variable U"):
        plain.read_run(tmp_path)


def test_coefficients_may_be_plain_text(tmp_path):
    ahmed_copy(tmp_path, "body.vtp", "params.json")
    text = gzip.decompress((AHMED / "ahmed25" / "coefficient.dat.gz").read_bytes())
    (tmp_path / "coefficient.dat").write_bytes(text)
    assert plain.read_run(tmp_path).attrs["Cd"] == 0.300982225
