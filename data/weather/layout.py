"""How an archive lies in Zarr v3: one shard a frame, chunks of whole rows of ranks, all that CF tools ask for.

A frame is one shard of chunks, each chunk a band of rows (a quarter of them where they are long), so that a rank that
owns rows can fetch those bytes and no others. What is missing is NaN and invalid, never filled.
"""

import numpy as np
import zarr

from core.errors import InputError
from data.weather.archive import SCHEMA, TIMES
from data.weather.packing import FILL

EPOCH, TIME_CHUNK = "seconds since 1970-01-01", 4096
DIMS = ("time", "channel", "y", "x")
NEVER = np.datetime64("NaT").astype("int64").item()


def chunk_rows(ny):
    """Rows of one chunk: an eighth of the frame, halved until <= 128, so that cuts into 2, 4, 8 meet chunk borders."""
    rows = -(-ny // 8)
    while rows > 128:
        rows = -(-rows // 2)
    return rows


def chunk_columns(nx):
    """Columns of one chunk: a quarter of a wide frame, so that it may also be cut from west to east."""
    return nx // 4 if nx >= 512 and nx % 4 == 0 else nx


def create(path, grid, channels, splits, packing, static):
    """A new archive without frames; see `data.weather.writer.write_archive`. Returns the group."""
    group = zarr.open_group(path, mode="w", zarr_format=3)
    _frames(group, grid.shape, channels, packing)
    time = group.create_array("time", shape=(0,), chunks=(TIME_CHUNK,), dtype="int64", dimension_names=("time",))
    time.attrs.update({"standard_name": "time", "units": EPOCH, "calendar": "proleptic_gregorian"})
    share = group.create_array("coverage", shape=(0, len(channels)), chunks=(TIME_CHUNK, len(channels)),
                               dtype="float32", dimension_names=("time", "channel"))  # fmt: skip
    share.attrs.update({"long_name": "share of the grid that was observed; 0 is a gap", "units": "1"})
    for name, text in TIMES.items() if any(c.model for c in channels) else ():
        array = group.create_array(name, shape=(0, len(channels)), chunks=(TIME_CHUNK, len(channels)), dtype="int64",
                                   fill_value=NEVER, dimension_names=("time", "channel"))  # fmt: skip
        array.attrs.update({"long_name": text, "units": EPOCH, "calendar": "proleptic_gregorian", "_FillValue": NEVER})
    _put(group, "channel", np.array([c.name for c in channels], object), ("channel",), long_name="channel")
    _put(group, "channel_units", np.array([c.units for c in channels], object), ("channel",), long_name="units")
    _place(group, grid)
    for name, (values, attrs) in static.items():
        _put(group, name, np.asarray(values, np.float32), ("y", "x"), chunks=(chunk_rows(grid.shape[0]), grid.shape[1]),
             grid_mapping="crs", coordinates="latitude longitude", **attrs)  # fmt: skip
    group.attrs.update({
        "Conventions": "CF-1.11", "schema": SCHEMA, "splits": splits,
        "units": {c.name: c.units for c in channels},
        "floor": {c.name: c.floor for c in channels if c.floor is not None},
        "log": [c.name for c in channels if c.log],
        "long_names": {c.name: c.long_name for c in channels},
        "static": list(static),
    })  # fmt: skip
    return group


def _frames(group, shape, channels, packing):
    ny, nx = shape
    rows = chunk_rows(ny)
    chunk, whole = (1, len(channels), rows, chunk_columns(nx)), (1, len(channels), -(-ny // rows) * rows, nx)
    kind = ("fields", "int16", FILL) if packing else ("fields", "float32", np.nan)
    for name, dtype, fill in (kind, ("valid", "bool", False)):
        array = group.create_array(
            name, shape=(0, len(channels), ny, nx), chunks=chunk, shards=whole, dtype=dtype, fill_value=fill,
            dimension_names=DIMS,
        )  # fmt: skip
        array.attrs.update({"grid_mapping": "crs", "coordinates": "latitude longitude channel_units"})
    group["fields"].attrs["long_name"] = "observed fields, NaN where missing; units in channel_units"
    group["valid"].attrs["long_name"] = "true where a value was observed"
    if packing:
        group["fields"].attrs.update({"_FillValue": FILL, "comment": "value = fields * channel_scale + channel_offset"})
        for part, name in enumerate(("scale", "offset")):
            values = np.array([packing[c.name][part] for c in channels])
            _put(group, f"channel_{name}", values, ("channel",), long_name=f"{name} of the packed numbers")


def _place(group, grid):
    for name in ("y", "x"):
        about = dict(standard_name=f"projection_{name}_coordinate", units="m", axis=name.upper())
        _put(group, name, np.asarray(getattr(grid, name), np.float64), (name,), **about)
    chunks = (chunk_rows(grid.shape[0]), grid.shape[1])
    for name, unit in (("latitude", "degrees_north"), ("longitude", "degrees_east")):
        values = np.asarray(getattr(grid, name), np.float64)
        _put(group, name, values, ("y", "x"), chunks=chunks, standard_name=name, units=unit)
    _put(group, "crs", np.array(0, np.int32), (), **grid.crs)


def _put(group, name, values, dims, chunks="auto", **attrs):
    dtype = "string" if values.dtype == object else values.dtype
    array = group.create_array(name, shape=values.shape, chunks=chunks, dtype=dtype, dimension_names=dims)
    array[...] = values
    array.attrs.update(attrs)


def extend(group, path, grid, channels, times):
    """Make room for ``times``; returns the index of the first of them."""
    old = group["time"][:]
    new = times.astype("int64")
    if list(group["channel"][:]) != [c.name for c in channels]:
        raise InputError("holds other channels", file=path, variable=",".join(group["channel"][:]))
    if not (np.array_equal(group["y"][:], grid.y) and np.array_equal(group["x"][:], grid.x)):
        raise InputError("lies on another grid", file=path, remedy="Append on the same window and spacing")
    if len(new) == 0 or (np.diff(np.concatenate([old[-1:], new])) <= 0).any():
        raise InputError("needs at least one time, in ascending order, after those stored", file=path, variable="time")
    count = len(old) + len(new)
    for name in ("fields", "valid", "time", "coverage", *(n for n in TIMES if n in group)):
        group[name].resize((count, *group[name].shape[1:]))
    group["time"][len(old) :] = new
    return len(old)
