"""Predictions in the layout that the AutoCFD5 benchmark takes: every native cell, in chunks, each with its hash.

    DIR/run_1/surface_000_000.npz   raw_cell_id (n,) int64, pMeanTrim (n,), wallShearStressMeanTrim (n, 3) float32
    DIR/run_1/volume_000_000.npz    raw_cell_id, UMeanTrim (n, 3), pMeanTrim (n,)
    DIR/manifest.json               {run: {file: {"rows", "sha256"}}}

Numbers are those of the rank that wrote a chunk and of the chunk; every rank writes its own rows, in kinematic units
and with OpenFOAM's sign of the shear. Format: the rules of neilashton/autocfd5-aiml as of August 2026.
"""

from pathlib import Path

import numpy as np
import torch.distributed as dist

from apps.outputs import write_json
from core import InputError
from data.files import sha256

ROWS = 1_000_000
VECTOR = {"surface": "wallShearStressMeanTrim", "volume": "UMeanTrim"}


def export(folder, run, cells, rank):
    """Writes this rank's rows of a run, {kind: predict.Cells}; returns {file: {"rows", "sha256"}}."""
    target, found = Path(folder) / run, {}
    target.mkdir(parents=True, exist_ok=True)
    for kind, part in cells.items():
        ids, fields = part.fields["cell_id"].cpu().numpy(), part.predicted.cpu().numpy().astype(np.float32)
        for number, first in enumerate(range(0, len(ids), ROWS)):
            rows = slice(first, first + ROWS)
            path = target / f"{kind}_{rank:03d}_{number:03d}.npz"
            arrays = {"raw_cell_id": ids[rows].astype(np.int64), "pMeanTrim": fields[rows, 0]}
            np.savez(path, **arrays, **{VECTOR[kind]: fields[rows, 1:]})
            found[path.name] = {"rows": len(ids[rows]), "sha256": sha256(path)}
    return found


def finish(folder, written):
    """Writes manifest.json of {run: {file: ...}} that each rank wrote; collective. Refuses a folder that has one."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, written)
    if dist.get_rank() == 0:
        runs = sorted({run for part in parts for run in part})
        merged = {run: {k: v for part in parts for k, v in part.get(run, {}).items()} for run in runs}
        write_json(Path(folder) / "manifest.json", merged)


def refuse_old(folder):
    """InputError where an earlier export lies, whose files would mix with the new ones."""
    if (Path(folder) / "manifest.json").exists():
        raise InputError("holds an earlier export", file=folder, variable="export", remedy="Choose another folder")
