"""The forecast as a file: CF names, map and units, provenance; complete under its name or absent.

Zarr is written by all ranks, each its own rows, straight from the model. NetCDF is made from it by one rank at the end.
"""

import hashlib
import json
import math
import os
import shutil
import warnings
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import zarr

from core import InputError

_EPOCH = "seconds since 1970-01-01"
FORMATS = (".zarr", ".nc")


def check_path(path, overwrite):
    """Refuses an output of unknown format, or one that exists unless it may be replaced."""
    path = Path(path)
    if path.suffix not in FORMATS:
        raise InputError("has no format that can be written", file=path, remedy="End the name in .zarr or .nc")
    if path.exists() and not overwrite:
        raise InputError("exists already", file=path, remedy="Choose another --out, or --overwrite")


class Product:
    """A forecast on its way to ``path``; a context manager that every rank enters.

    Dims of each channel: (time, lead_time, member, y, x), float32, NaN where nothing was ever observed.
    """

    def __init__(self, path, frames, start, steps, members, about):
        self.path, self.frames, self.start, self.steps, self.members = Path(path), frames, start, steps, members
        self.about = about
        self.part = self.path.with_name(f".{self.path.stem}.partial.zarr")
        self.chief = dist.get_rank() == 0

    def __enter__(self):
        if self.chief:
            shutil.rmtree(self.part, ignore_errors=True)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._create()
        dist.barrier()
        self.group = zarr.open_group(self.part, mode="r+", zarr_format=3, use_consolidated=False)
        for name in ("latitude", "longitude"):
            part = getattr(self.frames, name)
            self.group[name][self._rows] = part.to_local().cpu().numpy()
        return self

    def write(self, lead, ensemble):
        """Stores `Observed` members (member, channel, y, x) of one step, scaled; each rank its rows."""
        values = torch.where(ensemble.valid, self.frames.physical(ensemble.values), math.nan).to_local()
        for c, name in enumerate(self.frames.facts.channels):
            self.group[name][0, lead, :, self._rows] = values[:, c].float().cpu().numpy()

    def __exit__(self, kind, error, trace):
        if kind is None:
            dist.barrier()
        if self.chief:
            try:
                if kind is None:
                    self._finish()
            finally:
                shutil.rmtree(self.part, ignore_errors=True)
        if kind is None:
            dist.barrier()

    @property
    def _rows(self):
        return slice(*self.frames.latitude.spec.local_range(0))

    def _create(self):
        facts, (x, y) = self.frames.facts, self.frames.reader.axes
        group = zarr.open_group(self.part, mode="w", zarr_format=3)
        starts = np.cumsum(self.frames.sizes[0])[:-1].tolist()
        rows = math.gcd(*starts) if starts else len(y)  # no chunk belongs to two ranks
        shape, dims = (1, self.steps, self.members, len(y), len(x)), ("time", "lead_time", "member", "y", "x")
        for name, units in zip(facts.channels, facts.units):
            array = group.create_array(
                name,
                shape=shape,
                chunks=(1, 1, 1, rows, len(x)),
                dtype="float32",
                fill_value=np.nan,
                dimension_names=dims,
            )
            long_name = self.frames.reader.attrs["long_names"][name]
            array.attrs.update(
                {
                    "units": units,
                    "long_name": long_name,
                    "grid_mapping": "crs",
                    "coordinates": "latitude longitude valid_time",
                }
            )
        leads = np.arange(1, self.steps + 1) * facts.step
        start = np.array([self.start], "datetime64[s]")
        seconds = {"units": _EPOCH, "calendar": "proleptic_gregorian"}
        _put(group, "time", start.astype("int64"), ("time",), standard_name="forecast_reference_time", **seconds)
        minutes = (leads / np.timedelta64(1, "m")).astype("int64")
        _put(group, "lead_time", minutes, ("lead_time",), standard_name="forecast_period", units="minutes")
        valid = (start[:, None] + leads).astype("int64")
        _put(group, "valid_time", valid, ("time", "lead_time"), standard_name="time", **seconds)
        _put(group, "member", np.arange(self.members), ("member",), standard_name="realization", units="1")
        for name, values in (("y", y), ("x", x)):
            _put(
                group,
                name,
                values,
                (name,),
                standard_name=f"projection_{name}_coordinate",
                units="m",
                axis=name.upper(),
            )
        for name, units in (("latitude", "degrees_north"), ("longitude", "degrees_east")):
            array = group.create_array(
                name, shape=shape[3:], chunks=(rows, len(x)), dtype="float64", dimension_names=("y", "x")
            )
            array.attrs.update({"standard_name": name, "units": units})
        _put(group, "crs", np.array(0, np.int32), (), **facts.crs)
        group.attrs.update({"Conventions": "CF-1.11", **self.about})

    def _finish(self):
        with (
            warnings.catch_warnings()
        ):  # xarray opens consolidated stores in one request; zarr calls that not yet standard
            warnings.filterwarnings("ignore", message="Consolidated metadata")
            zarr.consolidate_metadata(self.part)
        done = self.part if self.path.suffix == ".zarr" else _netcdf(self.part)
        if self.path.is_dir():
            shutil.rmtree(self.path)
        os.replace(done, self.path)


def _put(group, name, values, dims, **attrs):
    array = group.create_array(name, shape=values.shape, chunks="auto", dtype=values.dtype, dimension_names=dims)
    array[...] = values
    array.attrs.update(attrs)


def _netcdf(store):
    """The same dataset as NetCDF 4 beside the store."""
    import xarray

    part = store.with_suffix(".nc")
    with xarray.open_dataset(store, engine="zarr", decode_cf=False) as data:
        for variable in data.variables.values():
            variable.encoding = {"_FillValue": np.float32(np.nan)} if variable.dtype == np.float32 else {}
        data.to_netcdf(part, engine="h5netcdf")
    return part


def provenance(checkpoint, state, reader, process, **facts):
    """Attributes that say where a result comes from: model, data, seeds, versions. JSON in strings, for NetCDF."""
    return {
        "title": "forecast of a diffusion model",
        "source": f"shardfield {_version('shardfield')}, torch {torch.__version__}, zarr {_version('zarr')}",
        "history": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} apps.weather",
        "checkpoint": str(checkpoint),
        "checkpoint_step": state["step"],
        "checkpoint_sha256": checkpoint_hash(checkpoint),
        "archive": str(reader.path),
        "archive_statistics_hash": reader.attrs["statistics_hash"],
        "archive_provenance": json.dumps(reader.attrs.get("provenance", {})),
        "sampler": json.dumps(asdict(process)),
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
