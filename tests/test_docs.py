"""Pages are held to their word: commands are asked whether they know their options, pages of code are executed."""

import importlib
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from launch import succeed

from apps.cli import parse
from core import DistributedManager

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
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


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert not [target for target in links if not (page.parent / target).exists()]


def code_after(page):
    """The blocks of a page that show the side after a change."""
    return [b for b in re.findall(r"```python\n(.*?)```", page.read_text(), re.S) if b.startswith("# after\n")]


def run_blocks(rank, folder):
    os.chdir(folder)
    DistributedManager.initialize()
    for path in sorted(Path(folder).glob("*.py")):
        runpy.run_path(str(path))
    DistributedManager.cleanup()


def test_scripts_of_pages_run(tmp_path):
    """Migrated ones, and the README's operation, data set and model."""
    blocks = code_after(ROOT / "docs" / "migrating.md")
    blocks += re.findall(r"```python\n(# own\.py: .*?)```", (ROOT / "README.md").read_text(), re.S)
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
