"""A forecast that was written before, as an evaluation takes it: its members at the points and leads of an archive."""

import json
from pathlib import Path

import numpy as np
import torch

from apps.weather.facts import Facts
from apps.weather.policy import Policy
from core import InputError, ShardTensor, make_spec


class Stored:
    """A file of apps.weather.forecast; it has the ``channels``, ``start``, ``members``, ``history``, ``policy`` of it.

    Raises:
        InputError: no such file, one that cannot be read, or one that lacks what a forecast has.
    """

    def __init__(self, path):
        import xarray

        self.path = Path(path)
        if not self.path.exists():
            raise InputError("no such forecast", file=path, remedy="Make one with python -m apps.weather.forecast")
        engine = "zarr" if self.path.is_dir() else "h5netcdf"
        try:
            self.data = xarray.open_dataset(self.path, engine=engine, decode_timedelta=False)
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"cannot be read as a forecast, damaged or of another format ({error})", file=path,
                             remedy="Give an output of python -m apps.weather.forecast") from error  # fmt: skip
        dims = ("time", "lead_time", "member", "y", "x")
        self.channels = tuple(name for name in self.data.attrs.get("channels", "").split() if name in self.data)
        if not self.channels or any(self.data[name].dims != dims for name in self.channels):
            raise InputError(f"holds no channel of dims {', '.join(dims)}", file=path, variable="channels",
                             remedy="Give an output of python -m apps.weather.forecast")  # fmt: skip
        self.start = self.data.time.values[0].astype("datetime64[s]")
        self.steps, self.members = self.data.sizes["lead_time"], self.data.sizes["member"]
        self.history = int(self.data.attrs["history_frames"])
        self.policy = Policy(**json.loads(self.data.attrs.get("missing_pixels", "{}")))

    def facts(self, reader):
        """`Facts` of the archive for these channels. Raises `InputError` where grid or step differ."""
        facts = Facts.of(reader, self.history, self.channels)
        (x, y), minutes = reader.axes, float(self.data.lead_time[0])
        here = self.data.x.values, self.data.y.values
        if not (np.array_equal(here[0], x) and np.array_equal(here[1], y) and minutes == facts.step_minutes):
            raise InputError("stands on another grid or step than the archive", file=self.path,
                             variable="x, y, lead_time",
                             remedy=f"Score it with an archive like {self.data.attrs.get('archive')}")  # fmt: skip
        return facts

    def ensembles(self, frames, steps):
        """Yields (member, channel, y, x) fp64 for each lead, in units, NaN where nothing was forecast."""
        place = frames.latitude.spec
        rows, columns = (slice(*place.local_range(dim)) for dim in (0, 1))
        shape = (self.members, len(self.channels), *place.shape)
        placements = [type(p)(p.dim + 2) if hasattr(p, "dim") else p for p in place.placements]
        spec = make_spec(place.mesh, placements, shape, dict(enumerate(place.sizes)))
        for lead in range(steps):
            own = [self.data[name][0, lead, :, rows, columns].values for name in self.channels]
            values = torch.from_numpy(np.stack(own, 1).astype(np.float64))
            yield ShardTensor(values.to(frames.latitude.device), spec)
