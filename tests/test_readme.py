"""The commands of the README, one after another in an empty folder: with few steps, and at night as they stand."""

import re

import pytest
from pages import README, ROOT, reasons, run, shortened, typed


def commands(section):
    """Lines of bash of a section, as a person would type them."""
    part = README.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    blocks = "".join(re.findall(r"```bash\n.*?```", part, re.S))
    return [line for line in typed(blocks) if not reasons(line)]


def blocks():
    """Name of a file -> its text, of those that the README gives."""
    found = re.findall(r"```python\n(# (\w+\.py): .*?)```", README.read_text(), re.S)
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


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("section, count", [("Weather", 6), ("Aero", 5)])
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
