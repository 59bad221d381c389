"""The commands of the README, one after another in an empty folder: with few steps, and at night as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FEW = {  # what is added to a command for a short run
    "apps.weather.train": "--steps 20 --cases 1 --members 1",
    "apps.weather.forecast": "--sampler-steps 1",
    "apps.weather.evaluate": "--steps 2 --cases 1 --members 2 --no-figures --baselines persistence",
    "apps.aero.train": "--steps 20",
    "apps.aero.evaluate": "--pictures 1",
}
ELSEWHERE = (  # needs files that somebody has to fetch first; other tests run these on files of their own
    "data.weather.fetch", "data.aero.fetch", "--drivaerml DIR", "runs/drivaerml.zarr", "--surface car.stl",
    "runs/mrms.zarr --preset small",  # hours
)  # fmt: skip


def commands(section):
    """Lines of bash of a section, as a person would type them."""
    part = (ROOT / "README.md").read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    text = "\n".join(re.findall(r"```bash\n(.*?)```", part, re.S)).replace("\\\n", " ")
    lines = [re.sub(r"\s+#.*", "", line) for line in text.splitlines()]
    return [line for line in lines if line and not any(words in line for words in ELSEWHERE)]


def blocks():
    """Name of a file -> its text, of those that the README gives."""
    found = re.findall(r"```python\n(# (\w+\.py): .*?)```", (ROOT / "README.md").read_text(), re.S)
    return {name: text for text, name in found}


# test_testing has one like the latter; own.py is run by test_docs
FILES = ["two.py", pytest.param("test_mine.py", marks=pytest.mark.nightly)]


@pytest.mark.parametrize("name", FILES)
def test_files_run_by_the_commands_in_their_first_line(name, tmp_path):
    text = blocks()[name]
    (tmp_path / name).write_text(text)
    calls = re.sub(r"\(.*?\)", "", text.splitlines()[0]).split(": ", 1)[1].split(", or ")
    for call in calls:
        assert name in call
        run(call, tmp_path)


def run(script, folder):
    """What a bash script printed, with this Python and its torchrun."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def shortened(line):
    return line + "".join(f" {few}" for module, few in FEW.items() if f"-m {module} " in f"{line} ")


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("section, count", [("Weather", 6), ("Aero", 4)])
def test_commands_run_as_they_stand(section, count, full, tmp_path, monkeypatch):
    lines = commands(section)
    assert len(lines) == count, lines
    if not full:  # many ranks train in test_weather.py
        lines = [shortened(line) for line in lines if not line.startswith("torchrun")]
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    printed = run("\n".join(["set -euo pipefail", *lines]), tmp_path)
    told = re.findall(r"^(?:report|results|figure|checkpoint)? ?(\S+[/.]\S+)$", printed, re.M)
    made = [path for path in told if path.startswith("runs/")]
    assert len(made) > 4 and not [path for path in made if not (tmp_path / path).exists()], told
    if section == "Weather":  # what docs/verification.md does with these results
        monkeypatch.chdir(tmp_path)
        page = (ROOT / "docs" / "verification.md").read_text()
        exec(re.search(r"```python\n(.*?)```", page, re.S)[1], found := {})
        assert found["first_half"]
