"""How a forecast lies in its file: dims, CF names, map, units, and what it needs to go on until it is complete."""

import math

import numpy as np
import zarr

from apps.weather import products
from apps.weather.events import EVENTS

STATE, DONE = "unfinished_state", "unfinished_done"  # what a forecast needs to go on; gone when it is complete
PLACE = ("y", "x")
ON_MAP = {"grid_mapping": "crs", "coordinates": "latitude longitude valid_time"}
SEEN = {"flag_values": [0, 1], "flag_meanings": "never_observed observed", "grid_mapping": "crs",
        "long_name": "observed in the history; forecasts are made nowhere else"}  # fmt: skip
STANDARD = {"refc": "equivalent_reflectivity_factor", "refb": "equivalent_reflectivity_factor",
            "bt": "toa_brightness_temperature", "c": "toa_bidirectional_reflectance"}  # fmt: skip


def create(path, product):
    """An empty Zarr group at ``path`` for an `apps.weather.product.Product`, all its arrays and attributes in place."""
    facts, frames = product.frames.facts, product.frames
    group = zarr.open_group(path, mode="w", zarr_format=3)
    chunks = tuple(_chunk(frames.sizes.get(dim), n) for dim, n in enumerate(facts.shape))
    for name, units in zip(facts.channels, facts.units):
        _channel(group, name, units, product, chunks)
        if product.products:
            _derived(group, name, units, product)
    _coordinates(group, product)
    for name, units in (("latitude", "degrees_north"), ("longitude", "degrees_east")):
        _array(group, name, facts.shape, chunks, PLACE, "float64", standard_name=name, units=units)
    kept = (product.slots, product.members, len(facts.channels), *facts.shape)
    _array(group, STATE, kept, (1, 1, len(facts.channels), *chunks), ("slot", "member", "channel", *PLACE),
           str(frames.dtype).removeprefix("torch."))  # fmt: skip
    _array(group, DONE, (product.steps, product.members), (1, 1), ("lead_time", "member"), "bool")
    about = {"channels": " ".join(facts.channels), "history_frames": facts.history, "grid_km": facts.km}
    group.attrs.update({"Conventions": "CF-1.11", "neighborhood_km": products.RADIUS_KM, **about, **product.about})


def _channel(group, name, units, product, chunks):
    """The members of a channel, and where it was observed."""
    ny, nx = product.frames.facts.shape
    long_name = product.frames.reader.attrs["long_names"][name]
    about = {"units": units, "long_name": long_name, "ancillary_variables": f"{name}_seen", **ON_MAP}
    kind = name.rstrip("0123456789")
    about |= {"standard_name": STANDARD[kind]} if kind in STANDARD else {}
    shape, dims = (1, product.steps, product.members, ny, nx), ("time", "lead_time", "member", *PLACE)
    _array(group, name, shape, (1, 1, 1, *chunks), dims, **about)
    _array(group, f"{name}_seen", (1, ny, nx), (1, *chunks), ("time", *PLACE), "int8", **SEEN)


def _derived(group, name, units, product):
    """The products of a channel: a chunk is whole in place, as one rank writes it."""
    sizes, shape = {"member": product.members}, product.frames.facts.shape
    if name in EVENTS:
        thresholds = np.array(EVENTS[name].thresholds)
        sizes["threshold"] = len(thresholds)
        _put(group, f"threshold_{name}", thresholds, (f"threshold_{name}",), units=units)
    for suffix, (more, attrs) in products.kinds(name, units).items():
        extra = tuple(sizes[dim] for dim in more)
        dims = ("time", "lead_time", *(dim if dim == "member" else f"threshold_{name}" for dim in more), *PLACE)
        _array(group, f"{name}_{suffix}", (1, product.steps, *extra, *shape), (1, 1, *extra, *shape), dims,
               **ON_MAP, **attrs)  # fmt: skip


def _coordinates(group, product):
    facts, (x, y) = product.frames.facts, product.frames.reader.axes
    leads = np.arange(1, product.steps + 1) * facts.step
    start = np.array([product.start], "datetime64[s]")
    seconds = {"units": "seconds since 1970-01-01", "calendar": "proleptic_gregorian"}
    _put(group, "time", start.astype("int64"), ("time",), standard_name="forecast_reference_time", **seconds)
    minutes = (leads / np.timedelta64(1, "m")).astype("int64")
    _put(group, "lead_time", minutes, ("lead_time",), standard_name="forecast_period", units="minutes")
    valid = (start[:, None] + leads).astype("int64")
    _put(group, "valid_time", valid, ("time", "lead_time"), standard_name="time", **seconds)
    _put(group, "member", np.arange(product.members), ("member",), standard_name="realization", units="1")
    for name, values in (("y", y), ("x", x)):
        standard = f"projection_{name}_coordinate"
        _put(group, name, values, (name,), standard_name=standard, units="m", axis=name.upper())
    _put(group, "crs", np.array(0, np.int32), (), **facts.crs)


def _chunk(sizes, count):
    """Extent of a chunk of ``count`` rows, so that none belongs to two ranks."""
    return math.gcd(*np.cumsum(sizes)[:-1].tolist()) if sizes and len(sizes) > 1 else count


def _array(group, name, shape, chunks, dims, dtype="float32", **attrs):
    empty = np.nan if dtype == "float32" else 0
    array = group.create_array(name, shape=shape, chunks=chunks, dtype=dtype, fill_value=empty, dimension_names=dims)
    array.attrs.update(attrs)


def _put(group, name, values, dims, **attrs):
    array = group.create_array(name, shape=values.shape, chunks="auto", dtype=values.dtype, dimension_names=dims)
    array[...] = values
    array.attrs.update(attrs)


def to_netcdf(store):
    """The same dataset as NetCDF 4 beside the Zarr ``store``; returns its path."""
    import xarray

    part = store.with_suffix(".nc")
    with xarray.open_dataset(store, engine="zarr", decode_cf=False) as data:
        for variable in data.variables.values():
            variable.encoding = {"_FillValue": np.float32(np.nan)} if variable.dtype == np.float32 else {}
        data.to_netcdf(part, engine="h5netcdf")
    return part
