"""Raw files to an archive: ``python -m data.weather.build --mrms DIR --resolution 6km --out storms.zarr``.

Sources are laid frame by frame on one window of the HRRR crop. A broken file stops the build, names what to do, and
leaves no output behind.
"""

import argparse
import re
import sys
import time as clock
from pathlib import Path

import numpy as np

from core.errors import InputError
from data.weather.archive import WeatherReader
from data.weather.channels import CHANNELS
from data.weather.grid import hrrr_crop
from data.weather.splits import choose_splits, date_splits, longitude_splits
from data.weather.synthetic import Storms, build_synthetic
from data.weather.writer import versions, write_archive

STRIDES = {"3km": 1, "6km": 2}


def build_observations(out, grid, sources, step, splits=None, mode="w-", report=print):
    """Write the archive of some `data.weather.sources.Source` on a grid.

    step: timedelta64; splits: see `data.weather.splits`, chosen from the times or longitudes when None; mode: see
    `write_archive`. Raises `InputError`; then nothing is left at ``out`` that was not there before.
    """
    from data.weather.sources import regular

    names = [name for source in sources for name in source.channels]
    times = regular(np.concatenate([source.stamps for source in sources]), step)
    before = WeatherReader(out).attrs if mode == "a" else {"splits": splits, "provenance": {"files": {}}}
    splits, used = before["splits"] or choose_splits(times, grid), dict(before["provenance"]["files"])
    report(f"{len(times)} frames of {','.join(names)}, {grid.shape[0]} x {grid.shape[1]} points, splits {splits}")
    for source in sources:
        source.used = used  # fills while the frames stream, and is stored when they are through
    frames = _progress(_frames(sources, names, grid, times), len(times), report)
    about = {
        "title": "radar, satellite and lightning on the HRRR grid",
        "step_minutes": step / np.timedelta64(1, "m"),
        "matching": {type(source).__name__.lower(): source.matching for source in sources},
        "provenance": {"files": used, "versions": versions()},
    }
    write_archive(out, grid, [CHANNELS[name] for name in names], times, frames, splits, mode=mode, attrs=about)


def _frames(sources, names, grid, times):
    missing = np.full(grid.shape, np.nan, np.float32)
    for time in times:
        seen = {name: values for source in sources for name, values in source.frame(time).items()}
        yield np.stack([seen.get(name, missing) for name in names]).astype(np.float32)


def build_stageiv(out, path, splits=None, mode="w-", report=print):
    """Write the archive of one Stage IV file on its own grid, hourly, odd sizes kept; arguments as above."""
    from data.weather.sources import sha256
    from data.weather.stageiv import read_stageiv

    grid, times, rain = read_stageiv(path)
    about = {
        "title": "Stage IV hourly rain",
        "step_minutes": 60,
        "provenance": {"files": {Path(path).name: sha256(path)}, "versions": versions()},
    }
    splits = splits or choose_splits(times, grid)
    frames = _progress((frame[None] for frame in rain), len(times), report)
    write_archive(out, grid, [CHANNELS["rain"]], times, frames, splits, mode=mode, attrs=about)


def _progress(frames, count, report):
    """Pass frames on and say now and then how far and how fast."""
    start = said = clock.monotonic()
    for done, frame in enumerate(frames, 1):
        yield frame
        now = clock.monotonic()
        if done == count or now - said > 5:
            report(f"{done}/{count} frames, {done / (now - start):.2f} frames/s")
            said = now


def _parser():
    parser = argparse.ArgumentParser(prog="python -m data.weather.build", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", required=True, type=Path, help="the archive to write")
    add("--mrms", type=Path, help="folder of MRMS .grib2 or .grib2.gz files")
    add("--abi", type=Path, help="folder of ABI level 2 files: MCMIP, CMIP, ACHA")
    add("--glm", type=Path, help="folder of GLM L2 LCFA files")
    add("--stageiv", type=Path, help="a Stage IV NetCDF file; makes an archive on its own grid")
    add("--synthetic", action="store_true", help="made storms instead of files")
    add("--resolution", choices=STRIDES, help="grid spacing (default 3km; of synthetic storms 6km)")
    add("--rows", type=_window, help="a:b, rows of the crop from its south")
    add("--cols", type=_window, help="a:b, columns of the crop from its west")
    add("--step", type=_step, default=np.timedelta64(10, "m"), help="time between frames (default 10min)")
    add("--channels", type=lambda text: text.split(","), help="comma-separated; default all")
    add("--satellite", help="the satellite to keep where a folder mixes them, such as G16")
    add("--glm-coverage", type=float, default=0.9, help="share of a step that GLM files must cover")
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
    if args.mode == "w-" and args.out.exists():
        raise InputError("exists already", file=args.out, remedy="Choose another --out, or --overwrite or --append")
    splits = date_splits(*args.split) if args.split else None
    if args.stageiv:
        return build_stageiv(args.out, args.stageiv, splits, args.mode, report)
    if args.synthetic and not (args.rows or args.cols or args.resolution):
        grid = None
    else:
        grid = hrrr_crop(STRIDES[args.resolution or "3km"], args.rows or slice(None), args.cols or slice(None))
    if args.synthetic:
        storms = Storms(channels=tuple(args.channels or Storms.channels), days=args.days, seed=args.seed)
        return build_synthetic(args.out, storms, grid, args.mode)
    splits = longitude_splits(grid, args.split_longitude) if args.split_longitude is not None else splits
    build_observations(args.out, grid, _sources(args, grid), args.step, splits, args.mode, report)


def _sources(args, grid):
    from data.weather.sources import Abi, Lightning, Radar

    sources = []
    if args.mrms:
        sources.append(Radar(args.mrms, grid, args.step, args.channels))
    if args.abi:
        sources.append(Abi(args.abi, grid, args.step, args.satellite, args.channels))
    if args.glm:
        sources.append(Lightning(args.glm, grid, args.step, args.satellite, args.glm_coverage))
    found = [name for source in sources for name in source.channels]
    for name in args.channels or ():
        if name not in found:
            raise InputError("no file has this channel", variable=name, remedy=f"Found: {', '.join(found)}")
    return sources


def main(argv=None):
    args = _parser().parse_args(argv)
    try:
        run(args)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
