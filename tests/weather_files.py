"""Small weather files in the exact formats of the agencies, for what no real sample covers."""

import shutil
from pathlib import Path

import numpy as np

from data.weather.grid import X0, Y0, lambert_latlon

ALL = (slice(None),) * 3
SMALL = dict(stride=2, rows=slice(200, 240), cols=slice(400, 450))  # 40 x 50 cells of the crop
DATA = Path(__file__).parent / "data"
MRMS = sorted((DATA / "mrms").glob("*.grib2"))
GLM_G16, GLM_G19 = sorted((DATA / "glm").glob("*.nc"))
ABI = next((DATA / "abi").glob("*.nc"))
STAGEIV = next((DATA / "stageiv").glob("*.nc"))


def write_mrms(path, values, product=(209, 10, 0), north=40.995, west=262.005, step=0.01, time=None, south_first=False):
    """A PNG-packed GRIB2 message like a real MRMS file: ``values`` (lat, lon), north first unless told otherwise."""
    import eccodes

    message = eccodes.codes_new_from_message(MRMS[0].read_bytes())
    nj, ni = values.shape
    south, east = north - step * (nj - 1), west + step * (ni - 1)
    first, last = (south, north) if south_first else (north, south)
    keys = dict(zip(("discipline", "parameterCategory", "parameterNumber"), product))
    keys |= dict(Ni=ni, Nj=nj, jScansPositively=int(south_first), iDirectionIncrementInDegrees=step)
    keys |= dict(latitudeOfFirstGridPointInDegrees=first, latitudeOfLastGridPointInDegrees=last)
    keys |= dict(longitudeOfFirstGridPointInDegrees=west, longitudeOfLastGridPointInDegrees=east)
    if time:
        year, month, day, hour, minute, second = time
        keys |= dict(year=year, month=month, day=day, hour=hour, minute=minute, second=second)
    for key, value in keys.items():
        eccodes.codes_set(message, key, value)
    eccodes.codes_set_values(message, np.asarray(values, np.float64).ravel())
    path.write_bytes(eccodes.codes_get_message(message))
    eccodes.codes_release(message)
    return path


def write_mcmip(path, bands, flags=None, satellite="G16", longitude=-75.0, single=False, seconds=6.0e8):
    """An ABI-L2-MCMIPC (or one-band CMIPC) file with the packing of NOAA: ``bands`` {13: uint16 counts (ny, nx)}.

    The image is the north-west corner of the 2 km CONUS sector of GOES-East. Counts of 65535 are fill.
    """
    import netCDF4

    scale = {2: (0.00031746, 0.0, "1"), 7: (0.01309618, 197.31, "K"), 8: (0.04224216, 138.05, "K")}
    scale[13] = (0.06145332, 89.62, "K")
    with netCDF4.Dataset(path, "w") as file:
        ny, nx = next(iter(bands.values())).shape
        file.createDimension("y", ny)
        file.createDimension("x", nx)
        file.setncatts({
            "platform_ID": satellite, "title": "ABI L2 Cloud and Moisture Imagery", "scene_id": "CONUS",
            "time_coverage_start": "2019-01-05T22:38:00.0Z", "time_coverage_end": "2019-01-05T22:42:00.0Z",
        })  # fmt: skip
        for name, size, step, offset in (("y", ny, -5.6e-05, 0.128212), ("x", nx, 5.6e-05, -0.101332)):
            axis = file.createVariable(name, "i2", (name,))
            axis.setncatts({"scale_factor": np.float32(step), "add_offset": np.float32(offset), "units": "rad"})
            axis.set_auto_maskandscale(False)
            axis[:] = np.arange(size)
        for band, counts in bands.items():
            suffix = "" if single else f"_C{band:02d}"
            factor, offset, units = scale[band]
            field = file.createVariable(f"CMI{suffix}", "i2", ("y", "x"), fill_value=np.int16(-1), zlib=True)
            field.set_auto_maskandscale(False)
            field.setncatts({
                "_Unsigned": "true", "valid_range": np.array([0, 4095], np.int16), "units": units,
                "scale_factor": np.float32(factor), "add_offset": np.float32(offset),
                "grid_mapping": "goes_imager_projection", "ancillary_variables": f"DQF{suffix}",
            })  # fmt: skip
            field[:] = counts.astype(np.uint16).view(np.int16)
            flag = file.createVariable(f"DQF{suffix}", "i1", ("y", "x"), fill_value=np.int8(-1), zlib=True)
            flag.set_auto_maskandscale(False)
            flag.setncatts({"_Unsigned": "true", "flag_values": np.arange(5, dtype=np.int8)})
            flag[:] = 0 if flags is None else flags
            if single:
                file.createDimension("band", 1)
                file.createVariable("band_id", "i1", ("band",))[:] = band
        file.createVariable("t", "f8", ())[...] = seconds
        file["t"].units = "seconds since 2000-01-01 12:00:00"
        file.createVariable("goes_imager_projection", "i4", ())
        file["goes_imager_projection"].setncatts({
            "grid_mapping_name": "geostationary", "perspective_point_height": 35786023.0,
            "semi_major_axis": 6378137.0, "semi_minor_axis": 6356752.31414, "inverse_flattening": 298.2572221,
            "latitude_of_projection_origin": 0.0, "longitude_of_projection_origin": longitude,
            "sweep_angle_axis": "x",
        })  # fmt: skip
    return path


EVENT_DIMS = {"number_of_events", "number_of_groups", "number_of_flashes"}


def write_quiet_glm(path, source=GLM_G19):
    """A GLM file like ``source`` in which no lightning happened: every event, group and flash dim has length 0."""
    import netCDF4

    with netCDF4.Dataset(source) as old, netCDF4.Dataset(path, "w") as new:
        new.setncatts(old.__dict__)
        for name, dim in old.dimensions.items():
            new.createDimension(name, None if name in EVENT_DIMS else dim.size)
        for name, variable in old.variables.items():
            attrs = dict(variable.__dict__)
            fill = attrs.pop("_FillValue", None)
            copy = new.createVariable(name, variable.dtype, variable.dimensions, fill_value=fill)
            copy.setncatts(attrs)
            variable.set_auto_maskandscale(False)
            copy.set_auto_maskandscale(False)
            if not EVENT_DIMS & set(variable.dimensions):
                copy[...] = variable[...]
    return path


def write_raw(folder, start):
    """One step of all sensors as `data.weather.fetch` leaves them, in ``folder``/abi, mrms and glm; datetime64."""
    import netCDF4

    stamp = str(start.astype("datetime64[s]"))
    for name in ("abi", "mrms", "glm"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    seconds = (start - np.datetime64("2000-01-01T12:00")) / np.timedelta64(1, "s")
    counts = np.full((1200, 1200), 3000)
    name = f"OR_ABI-L2-MCMIPC-M6_G16_{stamp}.nc"
    write_mcmip(folder / "abi" / name, dict.fromkeys((2, 7, 8, 13), counts), seconds=seconds)
    when = start.astype("datetime64[s]").item().timetuple()[:6]
    for name, number in (("refc", 10), ("refb", 11)):
        write_mrms(folder / "mrms" / f"{name}_{stamp}.grib2", np.eye(200) * 30, (209, number, 0), time=when)
    with netCDF4.Dataset(write_quiet_glm(folder / "glm" / f"OR_GLM-L2-LCFA_{stamp}.nc", GLM_G16), "a") as file:
        for name, time in (("start", start - np.timedelta64(10, "m")), ("end", start)):
            file.setncattr(f"time_coverage_{name}", f"{time.astype('datetime64[s]')}.0Z")


def copy_to(folder, *files):
    """Copies of files in a new folder."""
    folder.mkdir()
    for file in files:
        shutil.copy(file, folder / file.name)
    return folder


def truncate(path, share=0.5):
    """Cut a file short."""
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    return path


def write_grib(path, values, name, keys, start=(20240506, 1200), lead=0, level=500):
    """One GRIB2 message with a grid given by ``keys``."""
    import eccodes

    message = eccodes.codes_grib_new_from_samples("GRIB2")
    levels = {"typeOfLevel": "isobaricInhPa", "level": level} if level else {"typeOfLevel": "surface"}
    times = {"dataDate": start[0], "dataTime": start[1]} | ({} if lead is None else {"step": lead})
    for key, value in {**keys, "shortName": name, **levels, **times}.items():
        eccodes.codes_set(message, key, value)
    eccodes.codes_set(message, "bitsPerValue", 24)
    eccodes.codes_set_values(message, np.asarray(values, float).ravel())
    path.write_bytes(eccodes.codes_get_message(message))
    eccodes.codes_release(message)
    return path


def write_subhourly(path, values, keys, start=(20240506, 1200)):
    """A file like HRRR's wrfsubh: reflectivity for several minutes after one start, ``values`` {minutes: field}."""
    parts = []
    for minutes, field in values.items():
        minute = keys | {"indicatorOfUnitOfTimeRange": 0, "forecastTime": minutes}
        parts.append(write_grib(path, field, "refc", minute, start, None, None).read_bytes())
    path.write_bytes(b"".join(parts))
    return path


def hrrr_keys(rows, cols):
    """A window of the HRRR grid, 3 km, as its files describe it."""
    latitude, longitude = lambert_latlon(X0 + 3000 * cols.start, Y0 + 3000 * rows.start)
    return {
        "centre": "kwbc",
        "gridType": "lambert", "Nx": cols.stop - cols.start, "Ny": rows.stop - rows.start, "shapeOfTheEarth": 6,
        "latitudeOfFirstGridPointInDegrees": float(latitude),
        "longitudeOfFirstGridPointInDegrees": float(longitude) + 360,
        "LaDInDegrees": 38.5, "LoVInDegrees": 262.5, "DxInMetres": 3000, "DyInMetres": 3000, "Latin1InDegrees": 38.5,
        "Latin2InDegrees": 38.5, "jScansPositively": 1,
    }  # fmt: skip
