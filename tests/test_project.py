"""The borders of the house: who may import whom, and what training must not need."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RAW_READERS = {"vtk", "vtkmodules", "pyvista", "cfgrib", "eccodes", "netCDF4", "matplotlib", "scipy", "pyproj"}
LAYERS = ("core", "data", "apps")


def imports(path):
    """Absolute module names that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{a.name}" for a in node.names)


def files(folder):
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_run_one_way(layer):
    above = LAYERS[LAYERS.index(layer) + 1 :]
    wrong = [f"{p.relative_to(ROOT)}: {m}" for p in files(layer) for m in imports(p) if m.split(".")[0] in above]
    assert not wrong, wrong


@pytest.mark.parametrize("one,other", [("weather", "aero"), ("aero", "weather")])
def test_applications_do_not_know_each_other(one, other):
    for layer in ("apps", "data"):
        wrong = [
            p for p in files(f"{layer}/{one}") for m in imports(p) if m.startswith((f"apps.{other}", f"data.{other}"))
        ]
        assert not wrong, wrong


def test_core_needs_torch_alone():
    allowed = {"core", "torch", "triton", *sys.stdlib_module_names}
    wrong = [f"{p.name}: {m}" for p in files("core") for m in imports(p) if m.split(".")[0] not in allowed]
    assert wrong == ["natten.py: natten"], wrong  # by one function, where it is installed


@pytest.mark.parametrize("app", ["weather", "aero"])
def test_model_files_name_no_rank(app):
    text = (ROOT / "apps" / app / "model.py").read_text()
    assert not [w for w in ("ShardTensor", "torch.distributed", "get_rank", "redistribute", "device_mesh") if w in text]


def test_a_folder_called_data_hides_nothing(tmp_path):
    """A person who starts a command beside a folder of data must not meet that folder in place of the package."""
    for name in ("data", "core", "apps"):
        (tmp_path / name / "aero").mkdir(parents=True)
    code = "import core.mesh, data.aero.archive, apps.loop"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=120)


def test_imports_only_define():
    """Importing the packages starts no process group and loads no reader of raw files."""
    code = (
        "import sys, core, data.sharded, apps.loop, apps.weather.train, apps.aero.train, torch.distributed as dist\n"
        "assert not dist.is_initialized()\n"
        f"bad = {RAW_READERS | {'triton'}} & set(sys.modules)\nassert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)
