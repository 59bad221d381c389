"""Other people's files by a mapping: names, units, signs and tables; two real runs serve under strange names."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import pyvista
from foam_case import write_case
from launch import exit_status

from core.errors import InputError
from data.aero import build, mapped, plain
from data.aero.archive import AeroReader
from data.aero.geometry import Polygons, triangles
from data.aero.loads import force_sums
from data.aero.synthetic import make_body, synthetic_run
from data.aero.vtk_files import write_hexahedra, write_stl, write_surface

AHMED = Path(__file__).parent / "data" / "aero"
BASE = {
    "surface": "case_{id}/wall_{id}.vtp",
    "arrays": {"pressure": "pd", "shear": "tau"},
    "pressure": "Pa",
    "shear": "Cf",
    "shear_sign": "on_wall",
    "rho": 1.2,
    "nu": 1.5e-5,
    "Lref": 1.044,
    "table": "forces.csv",
    "columns": {"run": "Case", "Cd": "drag", "Aref": "A", "U": "speed"},
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Two Ahmed bodies in millimetres, pressure in Pa, friction as a coefficient of the wall's own sign."""
    folder = tmp_path_factory.mktemp("cases")
    for name, angle in (("ahmed25", "s25"), ("ahmed00", "s00")):
        (folder / f"case_{angle}").mkdir()
        data = pyvista.read(AHMED / name / "body.vtp")
        data.points *= 1000
        data.cell_data["pd"] = data.cell_data["p"] * 1.2
        data.cell_data["tau"] = -data.cell_data["wallShearStress"] / 800
        data.save(folder / f"case_{angle}" / f"wall_{angle}.vtp")
    shutil.copy(folder / "case_s25/wall_s25.vtp", folder / "case_s25/wall_other.vtp")  # not the pattern
    (folder / "forces.csv").write_text("case, drag, A, speed\ns25,0.30098,0.112032,40\ns00,0.31069,0.112032,40\n")
    (folder / "map.json").write_text(json.dumps(BASE | {"scale": 0.001}))
    return folder


def test_a_mapped_run_is_the_plain_one(cases, tmp_path, capsys):
    command = ["--mapping", str(cases / "map.json"), "--train", "s25", "--test", "s00", "--out", str(tmp_path / "a")]
    build.main(command)
    assert "Cd 0.30098 from its cells (0.30098 stated)" in capsys.readouterr().out
    reader, expected = AeroReader(tmp_path / "a"), plain.read_run(AHMED / "ahmed25").surface
    order = reader.read("s25/surface", "cell_id")
    for name in ("pressure", "shear", "normal"):
        np.testing.assert_allclose(reader.read("s25/surface", name), expected[name][order], rtol=1e-4, atol=1e-5)
    attrs = reader.run_attrs("s00")
    assert reader.runs == ["s00", "s25"] and attrs["rho"] == 1.2 and attrs["Cd"] == 0.31069 and attrs["U"] == 40


@pytest.mark.parametrize(
    "change, message",
    [
        ({"colour": 1}, "variable colour: not known"),
        ({"surface": "wall.vtp"}, "variable surface: no path with {id}"),
        ({"arrays": {"pressure": "p"}}, "names no shear"),
        ({"pressure": "bar"}, "'bar' is none of m2/s2 Pa Cp"),
        ({"columns": {"Cd": "drag"}}, 'names no "run"'),
        ({"columns": {"run": "name"}}, "variable name: no such column"),
        ({"columns": BASE["columns"] | {"Cl": "lift"}}, "forces.csv, variable lift: no such column"),
    ],
)
def test_a_wrong_mapping_is_named(cases, change, message):
    (cases / "wrong.json").write_text(json.dumps(BASE | change))
    with pytest.raises(InputError, match=message.replace("{", "[{]").replace("}", "[}]")):
        mapped.read_mapping(cases / "wrong.json")


def test_a_wrong_unit_is_seen_by_the_forces(cases, tmp_path, capsys):
    (cases / "kinematic.json").write_text(json.dumps(BASE | {"pressure": "m2/s2", "scale": 0.001}))
    command = ["--mapping", str(cases / "kinematic.json"), "--train", "s25", "--out", str(tmp_path / "a")]
    assert exit_status(build.main, command) == 2
    assert "but 0.30098 is stated" in capsys.readouterr().err
    columns = {"run": "Case", "Aref": "A", "U": "speed"}  # no drag to compare with, and millimetres taken for metres
    (cases / "bare.json").write_text(json.dumps(BASE | {"columns": columns}))
    (cases / "still.json").write_text(json.dumps(BASE | {"columns": columns, "Lref": 0}))
    command = ["--train", "s25", "--out", str(tmp_path / "a"), "--mapping"]
    assert exit_status(build.main, [*command, str(cases / "still.json")]) == 2
    assert "variable Lref: is 0.0. State a number above 0" in capsys.readouterr().err
    build.main([*command, str(cases / "bare.json")])
    assert "no body has such a drag: are lengths in metres" in capsys.readouterr().out
    told = mapped.read_mapping(cases / "map.json")
    del told["nu"]
    with pytest.raises(InputError, match="variable nu: no number is given"):
        mapped.read_run(told, "s25")


# Volumes


def test_a_volume_in_millimetres_and_pascal_is_that_in_metres(tmp_path):
    body, expected = make_body(0, 1, 150, volume=True), synthetic_run(0, 1, 150, volume=True)
    mesh, air = (Polygons(m.points * np.float32(1000), m.connectivity, m.offsets) for m in (body.mesh, body.volume))
    write_surface(tmp_path / "wall_1.vtp", mesh, {"p": body.pressure * np.float32(1.2), "tau": body.shear})
    write_hexahedra(
        tmp_path / "air_1.vtu", air, {"p": body.volume_pressure * np.float32(1.2), "U": body.volume_velocity}
    )
    write_stl(tmp_path / "car_1.stl", triangles(mesh).astype(np.float32))
    write_stl(tmp_path / "metres_1.stl", triangles(body.mesh).astype(np.float32))
    told = {name: value for name, value in BASE.items() if name not in ("table", "columns")}
    told |= {"surface": "wall_{id}.vtp", "volume": "air_{id}.vtu", "stl": "car_{id}.stl", "scale": 0.001, "U": 38.889}
    told |= {"shear": "m2/s2", "shear_sign": "on_fluid", "Aref": 1.0}
    told |= {"arrays": {"pressure": "p", "shear": "tau", "velocity": "U"}}
    (tmp_path / "map.json").write_text(json.dumps(told))
    found = mapped.read_run(mapped.read_mapping(tmp_path / "map.json"), "1", volume=True).volume.arrays()
    for name, values in expected.volume.items():
        np.testing.assert_allclose(found[name], values, rtol=2e-5, atol=2e-4, err_msg=name)
    wrong = mapped.read_mapping(tmp_path / "map.json")
    with pytest.raises(InputError, match="metres_1.stl, variable scale: spans .* its unit is another"):
        mapped.read_run(wrong | {"stl": "metres_{id}.stl"}, "1", volume=True)
    with pytest.raises(InputError, match="variable arrays: names no velocity"):
        mapped.read_run(wrong | {"arrays": {"pressure": "p", "shear": "tau"}}, "1", volume=True)


# OpenFOAM


FOAM = {name: value for name, value in BASE.items() if name not in ("table", "columns")}
FOAM |= {"surface": "cases/{id}", "patches": ["bo*"], "arrays": {"pressure": "p", "shear": "wallShearStress"}}
FOAM |= {"pressure": "m2/s2", "shear": "m2/s2", "shear_sign": "on_fluid", "U": 2.0, "Aref": 1.0}


@pytest.fixture
def foam(tmp_path):
    """A unit cube in a box of 27 cells: pressure 3 in front, 1 behind, and a friction of 0.5 on all sides."""
    case = tmp_path / "cases" / "one"
    write_case(case, {"p": [3.0, 0, 0, 0, 0, 1.0], "wallShearStress": [[-0.5, 0, 0]] * 6})
    write_case(tmp_path / "early", {"p": [0.0] * 6}, "100")
    shutil.move(tmp_path / "early/100", case / "100")
    (tmp_path / "map.json").write_text(json.dumps(FOAM))
    return tmp_path


def test_patches_of_an_openfoam_case_are_a_body(foam):
    told = mapped.read_mapping(foam / "map.json")
    assert list(mapped.run_ids(told)) == ["one"]
    run = mapped.read_run(told, "one")
    s, x = run.surface, run.surface["normal"][:, 0]
    assert run.attrs["winding"] == "inward" and len(x) == 6 and {"p", "points"} < set(run.attrs["sources"])
    assert s["pressure"][x < -0.9] == 3 and s["pressure"][x > 0.9] == 1 and s["position"].mean() == 1.5
    rows = [s[name] for name in ("position", "normal", "area", "pressure", "shear")]
    forces = force_sums(*rows, rho=1.0, center=(0, 0, 0))[:2]
    np.testing.assert_allclose(forces, [[2, 0, 0], [3, 0, 0]], atol=1e-9)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"patches": ["car"]}, "variable car: no such patch; there are body far"),
        ({"patches": "body"}, "variable patches: is no list of names"),
        (
            {"arrays": {"pressure": "p", "shear": "tau"}},
            "patch body, variable tau: not in the file; cell arrays are: p",
        ),
    ],
)
def test_a_wrong_case_is_named(foam, change, message):
    (foam / "wrong.json").write_text(json.dumps(FOAM | change))
    with pytest.raises(InputError, match=message):
        mapped.read_run(mapped.read_mapping(foam / "wrong.json"), "one")


def test_a_case_in_parts_is_told_to_be_joined(foam):
    shutil.move(foam / "cases/one/constant", foam / "cases/one/processor0")
    with pytest.raises(InputError, match="no OpenFOAM case: there is no constant/polyMesh/points .it has processor"):
        mapped.read_run(mapped.read_mapping(foam / "map.json"), "one")
