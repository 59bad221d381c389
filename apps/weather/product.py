"""The forecast as a file: CF names, map and units, provenance; complete under its name or absent.

Zarr is written by all ranks, each its own rows and members, straight from the model. NetCDF is made from it by one rank
at the end.
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

from apps.agree import together
from apps.weather import products
from apps.weather.baselines import Observed, persistence
from apps.weather.events import EVENTS
from core import InputError, ShardTensor, make_spec

_EPOCH = "seconds since 1970-01-01"
STATE, DONE = "unfinished_state", "unfinished_done"  # what a forecast needs to go on; gone when it is complete
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

    Dims of each channel: (time, lead_time, member, y, x), float32, NaN where nothing was ever observed. Until it is
    complete it lies beside ``path`` under another name, with the last frames as the model has them, so that a forecast
    that was killed goes on from there (``resume``).
    """

    def __init__(self, path, frames, start, steps, members, about, resume=False, products=True):
        self.path, self.frames, self.start, self.steps, self.members = Path(path), frames, start, steps, members
        self.about, self.resume, self.products = about, resume, products
        self.part = self.path.with_name(f".{self.path.stem}.partial.zarr")
        self.chief = dist.get_rank() == 0
        self.window = tuple(slice(*frames.latitude.spec.local_range(dim)) for dim in (0, 1))
        # two more than a step needs: the next may be half written, and some members of a data group a step ahead
        self.slots = frames.facts.history + 2

    def __enter__(self):
        with together():
            if self.chief and self.resume and self._goes_on():
                self._recut()
            elif self.chief:
                shutil.rmtree(self.part, ignore_errors=True)
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._create()
        self.group = zarr.open_group(self.part, mode="r+", zarr_format=3, use_consolidated=False)
        for name in ("latitude", "longitude"):
            part = getattr(self.frames, name)
            self.group[name][self.window] = part.to_local().cpu().numpy()
        valid = persistence(self.frames.history(self._index())).valid[0].to_local().cpu().numpy()
        for c, name in enumerate(self.frames.facts.channels):
            self.group[f"{name}_seen"][0, *self.window] = valid[c]
        self.done = np.cumprod(self.group[DONE][...], 0).sum(0)  # steps of each member
        dist.barrier()
        return self

    def past(self, members):
        """How many steps these members have done, and their last ensembles, oldest first, for
        `apps.weather.rollout.rollout`. Every rank calls it; data groups that had come further go on from there.

        Raises:
            InputError: members of other data groups than before, one of which was too far ahead of the others.
        """
        frames, out, counts = self.frames, [], self.done[list(members)]
        done = int(counts.min(initial=self.steps))
        first = max(done - frames.facts.history, 0)
        with together():
            if first + self.slots <= counts.max(initial=0):
                raise InputError("has members of different steps, as data groups do not wait for each other",
                                 file=self.part, remedy="Resume with as many processes and the same --domain, or leave "
                                 "out --resume")  # fmt: skip
        if not members:
            return done, out
        valid = _many(persistence(frames.history(self._index())).valid, len(members))
        spec = make_spec(valid.device_mesh, valid.spec.placements, valid.shape, dict(enumerate(valid.spec.sizes)))
        for lead in range(first, done):
            values = [self.group[STATE][lead % self.slots, m, :, *self.window] for m in members]
            values = torch.from_numpy(np.stack(values)).to(valid.device, frames.dtype)
            out.append(Observed(ShardTensor(values, spec), valid))
        return done, out

    def write(self, lead, members, ensemble):
        """Stores `Observed` members (member, channel, y, x) of one step, scaled; each rank its rows.

        members: their numbers.
        """
        values = torch.where(ensemble.valid, self.frames.physical(ensemble.values), math.nan).to_local()
        values, state = values.float().cpu().numpy(), ensemble.values.to_local().cpu().numpy()
        for i, member in enumerate(members):
            for c, name in enumerate(self.frames.facts.channels):
                self.group[name][0, lead, member, *self.window] = values[i, c]
            self.group[STATE][lead % self.slots, member, :, *self.window] = state[i]
        for axis in range(self.frames.mesh.ndim):  # nothing is called done before all ranks of the domain wrote it
            dist.barrier(self.frames.mesh.get_group(axis))
        if not any(self.frames.mesh.get_coordinate()):
            for member in members:
                self.group[DONE][lead, member] = True

    def __exit__(self, kind, error, trace):
        if kind is not None:
            return
        dist.barrier()
        if self.products:
            for lead in range(dist.get_rank(), self.steps, dist.get_world_size()):
                self._derive(lead)
        dist.barrier()
        if self.chief:
            self._finish()
        dist.barrier()

    def _index(self):
        return int(np.flatnonzero(self.frames.reader.times == self.start)[0])

    def _goes_on(self):
        """Whether there is a part of this very forecast.

        Raises:
            InputError: there is one of another forecast.
        """
        if not (self.part / "zarr.json").exists():
            return False
        group = zarr.open_group(self.part, mode="r", zarr_format=3, use_consolidated=False)
        for name, value in self.about.items():
            if name != "history" and group.attrs.get(name) != value:
                raise InputError(
                    f"was {group.attrs.get(name)} in the forecast that was broken off, and is {value}",
                    file=self.part, variable=name, remedy="Give the same options, or leave out --resume",
                )  # fmt: skip
        return DONE in group

    def _recut(self):
        """Gives the part chunks of the present cut, where it was begun under another: of two ranks that write into one
        chunk each would lose what the other wrote."""
        old = zarr.open_group(self.part, mode="r", zarr_format=3, use_consolidated=False)
        chunks = old[self.frames.facts.channels[0]].chunks[-2:]
        starts = [(axis, sum(sizes[:i])) for axis, sizes in self.frames.sizes.items() for i in range(len(sizes))]
        if all(start % chunks[axis] == 0 for axis, start in starts):
            return
        part, self.part = self.part, self.part.with_suffix(".recut")
        self._create()
        new = zarr.open_group(self.part, mode="r+", zarr_format=3)
        for name, array in old.arrays():
            for at in np.ndindex(array.shape[:-2]):
                new[name][at or ...] = array[at or ...]
        before = part.with_suffix(".old")
        shutil.rmtree(before, ignore_errors=True)  # of a kill between these lines
        os.replace(part, before)
        os.replace(self.part, part)
        shutil.rmtree(before)
        self.part = part

    def _create(self):
        facts, frames, (x, y) = self.frames.facts, self.frames, self.frames.reader.axes
        group = zarr.open_group(self.part, mode="w", zarr_format=3)
        chunks = tuple(_chunk(frames.sizes.get(dim), n) for dim, n in enumerate((len(y), len(x))))
        shape, place = (1, self.steps, self.members, len(y), len(x)), ("y", "x")
        dims = ("time", "lead_time", "member", *place)
        on_map = {"grid_mapping": "crs", "coordinates": "latitude longitude valid_time"}

        def array(name, shape, chunks, dims, dtype="float32", **attrs):
            empty = np.nan if dtype == "float32" else 0
            made = group.create_array(
                name, shape=shape, chunks=chunks, dtype=dtype, fill_value=empty, dimension_names=dims
            )
            made.attrs.update(attrs)

        for name, units in zip(facts.channels, facts.units):
            about = {"units": units, "long_name": frames.reader.attrs["long_names"][name], **on_map}
            about |= {"ancillary_variables": f"{name}_seen"} | _standard(name)
            array(name, shape, (1, 1, 1, *chunks), dims, **about)
            flags = {"flag_values": [0, 1], "flag_meanings": "never_observed observed", "grid_mapping": "crs"}
            array(f"{name}_seen", (1, *shape[3:]), (1, *chunks), ("time", *place), "int8", **flags,
                  long_name="observed in the history; forecasts are made nowhere else")  # fmt: skip
            sizes = {"member": self.members, "threshold": len(EVENTS[name].thresholds) if name in EVENTS else 0}
            for suffix, (more, attrs) in products.kinds(name, units).items() if self.products else ():
                extra = tuple(sizes[dim] for dim in more)
                own = ("time", "lead_time", *(dim if dim == "member" else f"threshold_{name}" for dim in more), *place)
                array(f"{name}_{suffix}", (1, self.steps, *extra, *shape[3:]), (1, 1, *extra, *shape[3:]), own,
                      **on_map, **attrs)  # fmt: skip
            if name in EVENTS and self.products:
                _put(group, f"threshold_{name}", np.array(EVENTS[name].thresholds), (f"threshold_{name}",), units=units)
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
            standard = f"projection_{name}_coordinate"
            _put(group, name, values, (name,), standard_name=standard, units="m", axis=name.upper())
        for name, units in (("latitude", "degrees_north"), ("longitude", "degrees_east")):
            array(name, shape[3:], chunks, place, "float64", standard_name=name, units=units)
        _put(group, "crs", np.array(0, np.int32), (), **facts.crs)
        kept = (self.slots, self.members, len(facts.channels), *shape[3:])
        array(STATE, kept, (1, 1, len(facts.channels), *chunks), ("slot", "member", "channel", *place),
              str(frames.dtype).removeprefix("torch."))  # fmt: skip
        array(DONE, (self.steps, self.members), (1, 1), ("lead_time", "member"), "bool")
        about = {"channels": " ".join(facts.channels), "history_frames": facts.history, "grid_km": _spacing(facts)}
        group.attrs.update({"Conventions": "CF-1.11", "neighborhood_km": products.RADIUS_KM, **about, **self.about})

    def _derive(self, lead):
        """The products of one step, from all members of it."""
        facts = self.frames.facts
        for name in facts.channels:
            made = products.make(name, self.group[name][0, lead], _spacing(facts))
            for suffix, values in made.items():
                self.group[f"{name}_{suffix}"][0, lead] = values

    def _finish(self):
        for name in (STATE, DONE):
            del self.group[name]
        with warnings.catch_warnings():
            # xarray opens consolidated stores in one request; zarr calls that not yet standard
            warnings.filterwarnings("ignore", message="Consolidated metadata")
            zarr.consolidate_metadata(self.part)
        done = self.part if self.path.suffix == ".zarr" else _netcdf(self.part)
        if self.path.is_dir():
            shutil.rmtree(self.path)
        os.replace(done, self.path)
        shutil.rmtree(self.part, ignore_errors=True)


def _many(x, count):
    return x.expand(count, *x.shape[1:])


def _chunk(sizes, count):
    """Extent of a chunk of ``count`` rows, so that none belongs to two ranks."""
    return math.gcd(*np.cumsum(sizes)[:-1].tolist()) if sizes and len(sizes) > 1 else count


def _standard(channel):
    kind = channel.rstrip("0123456789")
    names = {"refc": "equivalent_reflectivity_factor", "refb": "equivalent_reflectivity_factor",
             "bt": "toa_brightness_temperature", "c": "toa_bidirectional_reflectance"}  # fmt: skip
    return {"standard_name": names[kind]} if kind in names else {}


def _spacing(facts):
    """km between points."""
    return (facts.x[1] - facts.x[0]) / (facts.shape[1] - 1) / 1e3


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


def provenance(stages, reader, **facts):
    """Attributes that say where a result comes from: models, data, seeds, versions. JSON in strings, for NetCDF."""
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
