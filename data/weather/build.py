"""Raw files to an archive: ``python -m data.weather.build --mrms DIR --resolution 6km --out storms.zarr``.

Sources are laid frame by frame on one window of the HRRR crop. A broken file is named and left out; a wrong one ends
the build and leaves no output behind; a killed build goes on when the same command is given again.
"""

import argparse
import os
import re
from concurrent.futures import BrokenExecutor
from functools import partial
from pathlib import Path

import numpy as np

from core.command import command
from core.errors import InputError
from data.weather.grid import hrrr_crop
from data.weather.nwp import FIELDS, Model
from data.weather.observations import build_observations, build_stageiv, counted
from data.weather.scheduler import spread
from data.weather.sources import Abi, Lightning, Radar
from data.weather.splits import date_splits, longitude_splits
from data.weather.static import static_fields
from data.weather.synthetic import Storms, build_synthetic

STRIDES = {"3km": 1, "6km": 2}
OPTIONS_OF = {
    "abi": ("abi_tolerance", "parallax"),
    "mrms": ("mrms_tolerance",),
    "glm": ("glm_window",),
    "nwp": ("nwp_tolerance", "nwp_delay"),
}


def _parser():
    parser = argparse.ArgumentParser(prog="python -m data.weather.build", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", required=True, type=Path, help="the archive to write")
    add("--mrms", type=Path, help="folder of MRMS .grib2 or .grib2.gz files")
    add("--abi", type=Path, help="folder of ABI level 2 files: MCMIP, CMIP, ACHA")
    add("--glm", type=Path, help="folder of GLM L2 LCFA files")
    add("--nwp", type=Path, help="folder of HRRR, GFS or ERA5 files, GRIB2 or NetCDF, one start each")
    add("--nwp-fields", nargs="+", choices=FIELDS, default=["z500"], help="fields to take from them (default z500)")
    add("--topography", type=Path, help="NetCDF or GRIB file of heights in m, becomes a static field")
    add("--radars", type=Path, help="CSV file, columns latitude and longitude, becomes radar proximity")
    add("--stageiv", type=Path, help="a Stage IV NetCDF file; makes an archive on its own grid")
    add("--synthetic", action="store_true", help="made storms instead of files")
    add("--resolution", choices=STRIDES, help="grid spacing (default 3km; of synthetic storms 6km)")
    add("--rows", type=_window, help="a:b, rows of the crop from its south")
    add("--cols", type=_window, help="a:b, columns of the crop from its west")
    add("--step", type=_step, default=np.timedelta64(10, "m"), help="time between frames (default 10min)")
    add("--channels", type=lambda text: text.split(","), help="comma-separated; default all")
    add("--satellite", help="the satellite to keep where a folder mixes them, such as G16")
    add("--parallax", action="store_true", help="put clouds above the ground they stand on; needs ACHA files in --abi")
    add("--abi-tolerance", type=_step, help="longest time between a scan and its frame (default half a step)")
    add("--mrms-tolerance", type=_step, help="the same of radar")
    add("--glm-window", type=_step, help="lightning is counted over this time before a frame (default a step)")
    add("--glm-coverage", type=float, default=0.9, help="share of the window that GLM files must cover")
    add("--nwp-tolerance", type=_step, help="longest time between a field's valid time and its frame (default 30min)")
    add("--nwp-delay", type=_step, help="age of a forecast before it may be used (default 1h; none of ERA5)")
    add("--dtype", choices=("float32", "int16"), default="float32",
        help="int16: counts with a scale a channel; exact for imagery and lightning, radar to 0.005 dBZ")  # fmt: skip
    add("--strict", action="store_true", help="end at the first broken file instead of leaving it out")
    add("--workers", type=int, default=os.cpu_count(), help="frames made at a time (default the number of cores)")
    add("--scheduler", default="processes", help="processes of this machine, or the address of a dask scheduler")
    split = parser.add_mutually_exclusive_group()
    split.add_argument("--split", nargs=3, type=_span, metavar="FIRST/LAST", help="train, valid and test dates")
    split.add_argument("--split-longitude", type=float, help="train west of it, validate east of it past 200 km")
    add("--seed", type=int, default=0, help="of the synthetic storms")
    add("--days", type=int, default=Storms.days, help="synthetic storm days")
    exist = parser.add_mutually_exclusive_group()
    exist.add_argument("--overwrite", dest="mode", action="store_const", const="w", default="w-")
    exist.add_argument("--append", dest="mode", action="store_const", const="a", help="add later frames")
    return parser


def _window(text):
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no window; write 100:356")
    return slice(int(match[1]), int(match[2]))


def _step(text):
    match = re.fullmatch(r"(\d+)\s*(min|m|h|s)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no step; write 10min, 1h or 30s")
    return np.timedelta64(int(match[1]), {"min": "m"}.get(match[2], match[2]))


def _span(text):
    try:
        first, last = map(np.datetime64, text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no span; write 2021-05-01/2021-05-20") from None
    return first, last


def run(args, report=print):
    """Do what parsed arguments ask. Raises `InputError`."""
    folders = [args.mrms, args.abi, args.glm]
    if sum([any(folders), bool(args.stageiv), args.synthetic]) != 1:
        raise InputError("needs files of --mrms, --abi, --glm together, or --stageiv, or --synthetic, one of the three")
    _heard(args, any(folders))
    if args.mode == "w-" and args.out.exists():
        raise InputError("exists already", file=args.out, remedy="Choose another --out, or --overwrite or --append")
    splits = date_splits(*args.split) if args.split else None
    if args.stageiv:
        return build_stageiv(args.out, args.stageiv, splits, args.mode, report)
    if args.synthetic and not (args.rows or args.cols or args.resolution):
        grid = None
    else:
        grid = hrrr_crop(STRIDES[args.resolution or "3km"], args.rows or slice(None), args.cols or slice(None))
    each = spread(args.scheduler, args.workers)
    if args.synthetic:
        storms = Storms(channels=tuple(args.channels or Storms.channels), days=args.days, seed=args.seed)
        return build_synthetic(args.out, storms, grid, args.mode, each)
    splits = longitude_splits(grid, args.split_longitude) if args.split_longitude is not None else splits
    static, told = static_fields(grid, args.topography, args.radars)
    sources = _sources(args, grid, partial(counted, each, report, "files looked through"))
    packing = _packing(sources) if args.dtype == "int16" else None
    build_observations(args.out, grid, sources, args.step, splits, args.mode, report, each, told,
                       static=static, packing=packing)  # fmt: skip


def _heard(args, observed):
    """Refuses options that nothing would listen to."""
    needs = {name: getattr(args, of) for of, names in OPTIONS_OF.items() for name in names}
    needs |= dict.fromkeys(("nwp", "topography", "radars", "strict", "satellite"), observed)
    for name, met in needs.items():
        if getattr(args, name) and not met:
            raise InputError(
                f"--{name.replace('_', '-')} has nothing to act on", remedy="Leave it out, or give its files"
            )
    if args.dtype != "float32" and not observed:
        raise InputError("--dtype is for observations", remedy="Leave it out")


def _packing(sources):
    for source in sources:
        for name in source.channels:
            if name not in source.packing:
                raise InputError("is not known in steps that 16 bits can hold", variable=name,
                                 remedy="Build with --dtype float32")  # fmt: skip
    return {name: source.packing[name] for source in sources for name in source.channels}


def _sources(args, grid, each):
    sources, common = [], dict(strict=args.strict, each=each)
    if args.mrms:
        sources.append(Radar(args.mrms, grid, args.step, args.channels, args.mrms_tolerance, **common))
    if args.abi:
        sources.append(Abi(args.abi, grid, args.step, args.satellite, args.channels, args.abi_tolerance,
                           parallax=args.parallax, **common))  # fmt: skip
    if args.glm:
        coverage, window = args.glm_coverage, args.glm_window
        sources.append(Lightning(args.glm, grid, args.step, args.satellite, coverage, window, **common))
    found = [name for source in sources for name in source.channels]
    if args.nwp:
        delay, tolerance = args.nwp_delay, args.nwp_tolerance
        sources.append(Model(args.nwp, grid, args.step, args.nwp_fields, tolerance, delay, **common))
    for name in args.channels or ():
        if name not in found:
            raise InputError("no file has this channel", variable=name, remedy=f"Found: {', '.join(found)}")
    return sources


@command
def main(argv=None):
    args = _parser().parse_args(argv)
    try:
        run(args)
    except (BrokenExecutor, OSError) as error:
        remedy = "Give disk and memory (fewer --workers), and run it again: it goes on"
        raise InputError(str(error), file=args.out, remedy=remedy) from error
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
