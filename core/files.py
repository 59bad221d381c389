"""How torch.distributed.checkpoint writes and reads the files of a checkpoint here: whole or not at all.

torch carries an error that one rank meets while it plans, writes or reads to all of them, so whatever may go wrong
happens in these classes.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from core.errors import InputError

EARLIER = "Use an earlier step_... folder."


class Writer(dcp.FileSystemWriter):
    """Writes beside, and renames when all ranks have written."""

    def __init__(self, final, about, keep):
        super().__init__(final.with_name(final.name + ".part"))
        self.final, self.about, self.keep = final, about, keep

    def prepare_local_plan(self, plan):
        return plan

    def prepare_global_plan(self, plans):
        """On the first rank, before any other writes."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan, planner):
        self.path.mkdir(parents=True, exist_ok=True)
        done = super().write_data(plan, planner)
        done.wait()
        names = sorted({result.storage_data.relative_path for result in done.value()})
        digests = {name: _digest(self.path / name) for name in names}
        (self.path / f"digests_{dist.get_rank()}").write_text(json.dumps(digests))
        return done

    def finish(self, metadata, results):
        """On the first rank, when all have written."""
        super().finish(metadata, results)
        files = {".metadata": _digest(self.path / ".metadata")}
        for part in self.path.glob("digests_*"):
            files |= json.loads(part.read_text())
            part.unlink()
        (self.path / "state.json").write_text(json.dumps(json.loads(self.about) | {"files": files}, indent=1))
        before = self.final.with_name(self.final.name + ".before.part")
        if self.final.exists():
            os.replace(self.final, before)
        os.replace(self.path, self.final)
        older = [p for p in complete(self.final.parent) if p < self.final]
        excess = older[: max(0, len(older) + 1 - self.keep)] if self.keep else []
        for path in [*self.final.parent.glob("step_*.part"), *excess]:
            shutil.rmtree(path)


def _digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


def complete(folder):
    return sorted(p for p in Path(folder).glob("step_*") if p.suffix != ".part" and (p / "state.json").exists())


def check_file(path, name, files):
    file = Path(path) / name
    if not file.exists():
        raise InputError("missing from the checkpoint", file=file, remedy=EARLIER)
    if _digest(file) != files[name]:
        raise InputError("damaged: not the bytes that were written", file=file, remedy=EARLIER)


class Reader(dcp.FileSystemReader):
    """Refuses damaged files; each rank looks at its share of them before any is read."""

    def __init__(self, path, files):
        super().__init__(path)
        self.files = files

    def set_up_storage_reader(self, metadata, is_coordinator):
        super().set_up_storage_reader(metadata, is_coordinator)
        for name in sorted(self.files)[dist.get_rank() :: dist.get_world_size()]:
            check_file(self.path, name, self.files)


class Planner(DefaultLoadPlanner):
    """Names the first tensor that the checkpoint lacks or holds in another shape. Parameters that had no gradient yet
    have no state in an optimizer: these, ``absent``, may be lacking."""

    def __init__(self, path):
        super().__init__()
        self.path, self.absent = path, set()

    def create_local_plan(self):
        stored = self.metadata.state_dict_metadata
        states = {name: self.mappings[name][2] for name in self.state_dict if name.startswith("optimizer.state.")}
        kept = {parameter for name, parameter in states.items() if name in stored}
        self.absent = set(states.values()) - kept
        self.state_dict = {n: v for n, v in self.state_dict.items() if states.get(n) not in self.absent}
        for name, value in self.state_dict.items():
            self._check(name, value, stored.get(name))
        return super().create_local_plan()

    def _check(self, name, value, entry):
        shape = getattr(value, "shape", None)
        if entry is None or getattr(entry, "size", None) != shape:
            has = "nothing" if entry is None else tuple(getattr(entry, "size", ()))
            raise InputError(
                f"holds {has} where this model has shape {tuple(shape or ())}",
                file=self.path,
                variable=name.partition(".")[2],
                remedy="Use the checkpoint of a model with the same configuration.",
            )
