"""Where a result comes from: models, data, seeds, versions."""

import hashlib
import json
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def provenance(stages, reader, **facts):
    """Attributes of a result, JSON in strings for NetCDF; ``facts`` are taken as they are."""
    paths = [path for stage in stages for path in stage.paths]
    return {
        "title": "forecast of a diffusion model",
        "source": f"shardfield {_version('shardfield')}, torch {torch.__version__}, zarr {_version('zarr')}",
        "history": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} apps.weather",
        "checkpoint": " ".join(map(str, paths)),
        "checkpoint_step": stages[-1].state["step"],
        "checkpoint_sha256": " ".join(map(checkpoint_hash, paths)),
        "archive": str(reader.path),
        "archive_statistics_hash": reader.attrs["statistics_hash"],
        "archive_provenance": json.dumps(reader.attrs.get("provenance", {})),
        "sampler": json.dumps([asdict(stage.process) for stage in stages]),
        "background": " ".join(dict.fromkeys(name for stage in stages for name in stage.facts.background)),
        **facts,
    }


def checkpoint_hash(path):
    """sha256 of all files of a checkpoint, names and contents."""
    digest = hashlib.sha256()
    for file in sorted(p for p in Path(path).rglob("*") if p.is_file()):
        digest.update(str(file.relative_to(path)).encode())
        with open(file, "rb") as f:
            while block := f.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def _version(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "from source"
