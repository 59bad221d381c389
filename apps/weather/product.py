"""The forecast as a file, laid out by `apps.weather.layout`: complete under its name or absent.

Zarr is written by all ranks, each its own rows and members, straight from the model. NetCDF is made from it by one rank
at the end.
"""

import math
import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import zarr

from apps.agree import together
from apps.weather import layout, products
from apps.weather.baselines import Observed, persistence
from apps.weather.layout import DONE, STATE
from core import InputError, ShardTensor, make_spec

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
        self.recut, self.before = (self.part.with_suffix(suffix) for suffix in (".recut", ".old"))
        self.chief = dist.get_rank() == 0
        self.window = tuple(slice(*frames.latitude.spec.local_range(dim)) for dim in (0, 1))
        # two more than a step needs: the next may be half written, and some members of a data group a step ahead
        self.slots = frames.facts.history + 2

    def __enter__(self):
        with together():
            if self.chief:
                self._mend()
            if self.chief and self.resume and self._goes_on():
                self._recut()
            elif self.chief:
                shutil.rmtree(self.part, ignore_errors=True)
                self.path.parent.mkdir(parents=True, exist_ok=True)
                layout.create(self.part, self)
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
        seen = persistence(frames.history(self._index())).valid
        valid = seen.expand(len(members), *seen.shape[1:])
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
        with together():
            for lead in range(dist.get_rank(), self.steps, dist.get_world_size()) if self.products else ():
                self._derive(lead)
        with together():
            if self.chief:
                self._finish()

    def _index(self):
        return int(np.flatnonzero(self.frames.reader.times == self.start)[0])

    def _mend(self):
        """Clears what a kill has left of `_recut`; between its renames, what was done has the name of the old cut."""
        if self.before.exists() and not self.part.exists():
            os.replace(self.before, self.part)
        for path in (self.before, self.recut):
            shutil.rmtree(path, ignore_errors=True)

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
        layout.create(self.recut, self)
        new = zarr.open_group(self.recut, mode="r+", zarr_format=3)
        for name, array in old.arrays():
            for at in np.ndindex(array.shape[:-2]):
                new[name][at or ...] = array[at or ...]
        os.replace(self.part, self.before)
        os.replace(self.recut, self.part)
        shutil.rmtree(self.before)

    def _derive(self, lead):
        """The products of one step, from all members of it."""
        facts = self.frames.facts
        for name in facts.channels:
            made = products.make(name, self.group[name][0, lead], facts.km)
            for suffix, values in made.items():
                self.group[f"{name}_{suffix}"][0, lead] = values

    def _finish(self):
        for name in (STATE, DONE):
            del self.group[name]
        with warnings.catch_warnings():
            # xarray opens consolidated stores in one request; zarr calls that not yet standard
            warnings.filterwarnings("ignore", message="Consolidated metadata")
            zarr.consolidate_metadata(self.part)
        done = self.part if self.path.suffix == ".zarr" else layout.to_netcdf(self.part)
        if self.path.is_dir():
            shutil.rmtree(self.path)
        os.replace(done, self.path)
        shutil.rmtree(self.part, ignore_errors=True)
