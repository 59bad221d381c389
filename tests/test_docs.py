"""Pages are held to their word: commands know their options and run, some at night only; pages of code are executed."""

import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from drivaerml_files import write_drivaerml
from launch import succeed
from pages import (
    EXAMPLES,
    FEW_OF_PAGES,
    INSTEAD,
    NOT_HERE,
    PAGES,
    README,
    ROOT,
    in_head,
    reasons,
    run,
    shortened,
    typed,
)
from weather_files import write_raw

from apps.cli import parse
from core import DistributedManager

MODULE = re.compile(r"-m ((?:apps|data|core|benchmarks)(?:\.\w+)+)((?:\\\n|[^\n|`#])*)")
OPTION = re.compile(r"(?<!\S)--[\w-]+")


def commands():
    """Module -> options that some page gives it; those behind "--" are of the training of ``--app``."""
    found = {}
    for page in PAGES:
        for module, rest in MODULE.findall(page.read_text()):
            own, _, passed = rest.partition(" -- ")
            found.setdefault(module, set()).update(OPTION.findall(own))
            if passed:
                train = re.search(r"--app (\w+)", own)[1]
                found.setdefault(f"apps.{train}.train", set()).update(OPTION.findall(passed))
    return sorted(found.items())


@pytest.mark.parametrize("module, options", commands())
def test_commands_have_these_options(module, options, monkeypatch, capsys):
    if not options:
        assert importlib.util.find_spec(module)
        return
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(module).main()
    known = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    assert end.value.code == 0 and options <= known, options - known


def calls():
    """Commands of the applications in blocks of bash: module and arguments."""
    text = "".join(block for page in PAGES for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.S))
    found = [(module, rest.partition(" -- ")[0].replace("\\\n", " ")) for module, rest in MODULE.findall(text)]
    return sorted({call for call in found if call[0].startswith("apps.")})


@pytest.mark.parametrize("module, arguments", calls())
def test_commands_take_these_values(module, arguments):
    name = f"{module.rpartition('.')[2].capitalize()}Config"
    assert parse(getattr(importlib.import_module(module), name), shlex.split(arguments))


def lines():
    """{page or example: its commands, where they stand first}, but the blocks of the README: those test_readme runs."""
    told = {page.name: typed(page.read_text()) for page in PAGES} | {file.name: in_head(file) for file in EXAMPLES}
    blocks = {line for page in PAGES for line in typed(page.read_text(), between=False)}
    everything, found = [line for those in told.values() for line in those], {}
    seen = set(typed(README.read_text(), between=False))
    for name, those in told.items():
        # in a sentence a command may be only named, without the arguments that it has elsewhere
        named = {line for line in those if line not in blocks and any(f"{line} " in other for other in everything)}
        found[name] = [line for line in dict.fromkeys(those) if line not in seen | named and not reasons(line)]
        seen.update(those)
    return {name: those for name, those in found.items() if those}


FILES = {  # part of a command -> what somebody would have who types it
    "--channels c02": lambda folder: write_raw(folder / "raw", np.datetime64("2024-05-06T18:00", "s")),
    "--append": lambda folder: write_raw(folder / "raw", np.datetime64("2024-05-06T18:10", "s")),
    "--drivaerml DIR": lambda folder: write_drivaerml(folder / "DIR", runs=(39, 4), volume=False),
}
STAGES = (".build ", ".train ")  # whatever the order on the page, files come before trainings and these before the rest
EVERY_TIME = ("data_aero.md",)


def stage(line):
    return next((i for i, words in enumerate(STAGES) if words in line), len(STAGES))


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=() if page in EVERY_TIME else pytest.mark.nightly) for page in lines()]
)
def test_commands_of_pages_run(page, tmp_path):
    """In few steps: at full length most need a GPU for minutes or hours."""
    (tmp_path / "docs").mkdir()
    for name in ("tests", "examples", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    for line in sorted(lines()[page], key=stage):
        for make in (make for words, make in FILES.items() if words in line):
            make(tmp_path)
        run(shortened(line, FEW_OF_PAGES, INSTEAD), tmp_path)
    if page == "data_weather.md":
        [(tmp_path / "look.py").write_text(block) for block in code(ROOT / "docs" / page)]
        run("python look.py", tmp_path)


def test_what_does_not_run_here_is_still_on_a_page():
    """Entries of the tables, and bash knows what to do with every block."""
    everything = "\n".join(line for page in PAGES for line in typed(page.read_text()))
    assert not [words for words in [*NOT_HERE, *FEW_OF_PAGES, *INSTEAD, *FILES] if words not in everything]
    blocks = [block for page in PAGES for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.S)]
    assert subprocess.run(["bash", "-n"], input="\n".join(blocks), text=True).returncode == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert not [target for target in links if not (page.parent / target).exists()]


def code(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.S)


RUN_BY = {  # pages with Python -> the test that runs it
    "README.md": "test_readme.py", "extending.md": "test_extending.py", "verification.md": "test_readme.py",
    "migrating.md": "test_docs.py", "data_weather.md": "test_docs.py",
}  # fmt: skip


def test_pages_with_code_are_run_by_a_test():
    assert {page.name for page in PAGES if code(page)} == RUN_BY.keys()
    for page, test in RUN_BY.items():
        assert Path(page).stem in (ROOT / "tests" / test).read_text()
    befores = [block for block in code(ROOT / "docs" / "migrating.md") if not block.startswith("# after\n")]
    assert [compile(block, "before", "exec") for block in befores if block.startswith("# before\n")]
    assert len(befores) == 3  # of other libraries or of GPUs, in part


def run_blocks(rank, folder):
    os.chdir(folder)
    DistributedManager.initialize()
    for path in sorted(Path(folder).glob("*.py")):
        runpy.run_path(str(path))
    DistributedManager.cleanup()


def test_scripts_of_pages_run(tmp_path):
    """Migrated ones, and the README's operation, data set and model."""
    blocks = [block for block in code(ROOT / "docs" / "migrating.md") if block.startswith("# after\n")]
    blocks += re.findall(r"```python\n(# own\.py: .*?)```", README.read_text(), re.S)
    assert len(blocks) == 4
    for i, block in enumerate(blocks):
        (tmp_path / f"{i}.py").write_text(block.replace("DistributedManager.cleanup()\n", ""))  # one start for all
    succeed(2, run_blocks, str(tmp_path))


def test_messages_are_said_by_the_code():
    """What the page of troubles quotes is what somebody sees."""
    said = "".join(p.read_text() for part in ("core", "data", "apps") for p in (ROOT / part).rglob("*.py"))
    said = re.sub(r'"\s*\n\s*f?"', "", said)  # messages over two lines
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"\*\*`(.*?)`\*\*", page.replace("\n", " "))
    assert len(quoted) > 15 and not [q for q in quoted if q not in said]
