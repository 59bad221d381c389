"""Inference of an input that does not fit one rank: rows are read, computed and written by their own rank.

    python examples/larger_than_one_rank.py
    torchrun --nproc-per-node 2 examples/larger_than_one_rank.py

Nobody ever holds the whole: the array lies on disk in chunks of rows, every rank reads its own and writes its own. The
peak that is printed is of everything alive on rank 0, activations included, and falls with the number of ranks.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import zarr
from torch import nn
from torch.distributed.tensor import Shard

from core import DistributedManager, ShardTensor, make_spec
from core.meter import Meter
from core.spec import chunk_sizes

CHUNK = 64  # rows


def main(folder=None, rows=512):
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = manager.initialize_mesh((-1,), ("domain",))
    folder = Path(folder or tempfile.gettempdir()) / "larger_than_one_rank"
    if manager.rank == 0:
        _make_files(folder, rows)
    dist.barrier()
    source, target = (zarr.open_array(folder / name) for name in ("field.zarr", "result.zarr"))
    bands = chunk_sizes(source.shape[2] // CHUNK, mesh.size())
    spec = make_spec(mesh, [Shard(2)], source.shape, {0: [CHUNK * n for n in bands]})  # no chunk has two writers
    first, last = spec.local_range(2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 32, 5, padding=2), nn.GELU(), nn.Conv2d(32, 1, 5, padding=2)).to(manager.device)
    with torch.inference_mode(), Meter() as meter:
        part = torch.from_numpy(source[:, :, first:last]).to(manager.device)
        result = model(ShardTensor(part, spec))
        first, last = result.spec.local_range(2)
        target[:, :, first:last] = result.to_local().cpu().numpy()
    dist.barrier()
    if manager.rank == 0:
        print(f"{tuple(source.shape)} on {mesh.size()} ranks: at most {meter.peak / 2**20:.1f} MiB alive on rank 0")
    manager.cleanup()
    return meter.peak, target


def _make_files(folder, rows):
    """A field of two channels, and room for a result of one; the field is written by bands of rows."""
    for name, channels in (("field", 2), ("result", 1)):
        shape, chunks = (1, channels, rows, 256), (1, channels, CHUNK, 256)
        zarr.create_array(folder / f"{name}.zarr", shape=shape, chunks=chunks, dtype="f4", overwrite=True)
    field = zarr.open_array(folder / "field.zarr")
    for row in range(0, rows, CHUNK):
        field[:, :, row : row + CHUNK] = np.random.default_rng(row).standard_normal((1, 2, CHUNK, 256))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", help="where the arrays lie; the system's folder for temporary files otherwise")
    parser.add_argument("--rows", type=int, default=512, help=f"a multiple of {CHUNK}")
    main(**vars(parser.parse_args()))
