"""Raw flow files to the aero archive: python -m data.aero.build <source> --out PATH

    --synthetic                                   bodies with known forces, nothing to fetch
    --drivaerml DIR --split official              DrivAerML's own layout and split; --partial for the runs at hand
    --run ahmed25 --run ahmed00 --train ahmed25 --test ahmed00          solver runs, a folder each (data.aero.plain)
    --mapping cases.json                          any data set, its files and arrays named there (data.aero.mapped)
    --run ahmed25 --holdout-cells 0.2             one run, a part of its cells held back (interpolation)

Each run is checked (lengths, finite values, closed surface), and its fields must integrate to the stated forces,
before it is stored. Bad input ends with a message, exit status 2, and no archive; runs that are complete by then wait
in a hidden folder beside it, where the same command goes on.
"""

import argparse
import json
import math
import os
import shutil
import time
from pathlib import Path

from core.command import command
from core.errors import InputError
from data.aero import drivaerml, mapped, plain
from data.aero.loads import force_sums, load_coefficients
from data.aero.splits import OFFICIAL, check_splits, hold_out, official_split
from data.aero.synthetic import CELLS, synthetic_run, synthetic_splits
from data.aero.vtk_files import DRIVAERML, OPENFOAM
from data.aero.writing import Workplace, refuse_existing

OPEN_TOLD = 1e-3
DRAG_TOLD = 10  # no body has such a drag coefficient


def parser():
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m data.aero.build", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--synthetic", action="store_true", help="synthetic bodies")
    source.add_argument("--drivaerml", metavar="DIR", help="folder that holds run_1, run_2, ...")
    source.add_argument("--run", metavar="DIR", action="append", help="folder of one solver run; may be repeated")
    source.add_argument("--mapping", metavar="FILE", help="JSON file that names files, arrays and units")
    p.add_argument("--out", required=True, metavar="PATH", help="archive to write; must not exist")
    for name in ("train", "valid", "test"):
        p.add_argument(f"--{name}", nargs="*", metavar="ID", help=f"run ids to {name} on, such as run_3 or 3")
    p.add_argument("--split", choices=OFFICIAL, help="a published split of DrivAerML")
    p.add_argument("--partial", action="store_true", help="with --split: leave out the runs that are not there")
    p.add_argument("--volume", action="store_true", help="store the volume too (without it no volume file is touched)")
    p.add_argument("--holdout-cells", type=float, metavar="SHARE", help="share of cells kept out of training")
    p.add_argument("--holdout-by", choices=("blocks", "random"), default="blocks")
    p.add_argument("--seed", type=int, default=0, help="of row order, held-out cells and synthetic shapes")
    p.add_argument("--runs", type=int, default=12, help="synthetic bodies")
    p.add_argument("--cells", type=int, default=CELLS, help="surface cells of a synthetic body, about")
    p.add_argument("--force-tolerance", type=float, default=0.01, help="largest error of Cd and Cl from the cells")
    p.add_argument("--workers", type=int, default=1, help="processes that read runs, by dask (default %(default)s)")
    p.add_argument("--leave-out-broken", action="store_true", help="end without the runs that cannot be read")
    for name in ("pressure", "shear", "velocity"):
        p.add_argument(f"--{name}", metavar="ARRAY", help=f"name of the {name} array in the files")
    return p


@command
def main(argv=None):
    build(parser().parse_args(argv))


def build(args):
    """Write the archive that the parsed command line asks for.

    Runs are written one by one, each whole, to a hidden folder beside the archive; a build that was stopped goes on
    there. A run that is missing or broken is named and the others go on; only then the build fails, or, with
    --leave-out-broken, ends without it.
    """
    path, available = refuse_existing(args.out), _available(args)
    splits = _splits(args, list(available))
    check_splits(splits, available)
    wanted = list(dict.fromkeys(run for ids in splits.values() for run in ids))
    print(", ".join(f"{name} {len(ids)}" for name, ids in splits.items()), f"of {len(available)} runs", flush=True)
    folder = path.with_name(f".{path.name}.building")
    _begin(folder, args)
    here = set(_workplace(args, folder).runs())
    if here & set(wanted):
        print(f"going on in {folder}, where {len(here & set(wanted))} runs are complete", flush=True)
    jobs = [(run, available[run]) for run in available if run in wanted and run not in here]
    broken = {run: problem for run, problem in _all(args, folder, jobs, len(wanted)) if problem}
    _finish(args, path, folder, list(available), splits, broken)
    print(f"wrote {path}")


def _begin(folder, args):
    """Make the folder of a build, or go on in it, if it was begun with the same options."""
    told = {name: value for name, value in vars(args).items() if name not in ("workers", "leave_out_broken", "out")}
    told = {name: value for name, value in told.items() if name not in ("train", "valid", "test", "split", "partial")}
    note = folder / "options.json"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "runs").mkdir(exist_ok=True)
    if note.exists() and json.loads(note.read_text()) != told:
        raise InputError("holds a build with other options", file=folder, remedy="Repeat those, or remove the folder")
    note.write_text(json.dumps(told))


def _workplace(args, folder):
    holdout = None
    if args.holdout_cells is not None:
        holdout = hold_out(args.holdout_cells, args.holdout_by, args.seed)
    return Workplace(folder, args.seed, holdout)


def _all(args, folder, jobs, count):
    """(run, None or what is wrong with it) of all jobs (run, key), over --workers processes."""
    if args.workers == 1:
        return [_one(args, folder, count, *job) for job in jobs]
    import dask

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // args.workers)))  # its share each
    tasks = [dask.delayed(_one)(args, folder, count, *job) for job in jobs]
    return dask.compute(*tasks, scheduler="processes", num_workers=args.workers)


def _one(args, folder, count, run_id, key):
    """Read, check and write one run, with a line on what came in and how its forces compare."""
    start, work = time.perf_counter(), _workplace(args, folder)
    try:
        run = _read(args, key)
        # A coarse synthetic mesh is a choice, not a fault.
        _compare_forces(run, math.inf if args.synthetic else args.force_tolerance)
        rows = work.write(run)
    except InputError as error:
        print(f"{run_id}: broken: {error}", flush=True)
        return run_id, str(error)
    rate = rows / max(time.perf_counter() - start, 1e-9)
    stated = f"{run.attrs['Cd']:.5f}" if "Cd" in run.attrs else "unknown"
    print(
        f"{len(work.runs())}/{count} {run_id}: {rows:,} cells, {rate:,.0f} cells/s, winding {run.attrs['winding']}, "
        f"Cd {run.attrs['Cd_cells']:.5f} from its cells ({stated} stated){_doubts(run.attrs)}",
        flush=True,
    )
    return run_id, None


def _doubts(attrs):
    """What a person should know of a surface that is taken nevertheless, in words."""
    told = []
    if attrs["open_share"] > OPEN_TOLD:
        told.append(f"open: area vectors add up to {attrs['open_share']:.2%} of the area")
    if attrs["mixed_edges"]:
        told.append(f"{attrs['mixed_edges']} edges where neighbours wind unlike")
    if abs(attrs["Cd_cells"]) > DRAG_TOLD:
        told.append("no body has such a drag: are lengths in metres, pressures in m2/s2, and is Aref of this body?")
    return "".join(f"; {words}" for words in told)


def _finish(args, path, folder, order, splits, broken):
    work = _workplace(args, folder)
    if broken and not (args.leave_out_broken and work.runs()):
        told = "; ".join(broken.values())
        if not work.runs():
            shutil.rmtree(folder)
            raise InputError(told)
        raise InputError(
            f"{len(broken)} runs are broken: {told}",
            file=path,
            remedy="Mend them and run the same command, which goes on, or add --leave-out-broken",
        )
    splits = {name: [run for run in ids if run not in broken] for name, ids in splits.items()}
    wanted = {run for ids in splits.values() for run in ids}
    runs = [run for run in order if run in wanted and run in work.runs()]
    check_splits(splits, runs)
    attrs = {
        "source": args.drivaerml or args.run or args.mapping or f"synthetic bodies, seed {args.seed}",
        "left_out": broken,
    }
    if args.holdout_cells is not None:
        attrs["holdout"] = dict(label="interpolation", share=args.holdout_cells, by=args.holdout_by)
    for run in set(work.runs()) - set(runs):
        shutil.rmtree(folder / "runs" / run)
    (folder / "options.json").unlink()
    work.finish(path, runs, splits, attrs)


def _available(args):
    """{run id: key that ``_read`` knows it by}."""
    if args.synthetic:
        return {f"run_{i}": i for i in range(1, args.runs + 1)}
    if args.drivaerml:
        return {f"run_{i}": i for i in drivaerml.run_numbers(args.drivaerml)}
    if args.mapping:
        return mapped.run_ids(mapped.read_mapping(args.mapping))
    folders = {Path(folder).resolve().name: folder for folder in args.run}
    if len(folders) < len(args.run):
        raise InputError("two folders of one name", variable="run", remedy="Rename one: the name is the run id")
    return folders


def _read(args, key):
    """The Run of a key of ``_available``."""
    given = {name: getattr(args, name) for name in ("pressure", "shear", "velocity") if getattr(args, name)}
    if args.synthetic:
        return synthetic_run(args.seed, key, args.cells, args.volume)
    if args.drivaerml:
        return drivaerml.read_run(args.drivaerml, key, volume=args.volume, names=DRIVAERML | given)
    if args.mapping:
        return mapped.read_run(mapped.read_mapping(args.mapping), key, volume=args.volume)
    return plain.read_run(key, volume=args.volume, names=OPENFOAM | given)


def _splits(args, available):
    """Run ids of train, valid and test."""
    named = any(getattr(args, name) is not None for name in ("train", "valid", "test"))
    if args.split:
        if named:
            raise InputError("--split and run ids exclude each other", variable="split", remedy="Use one of them")
        return official_split(args.split, available, args.partial)
    if named:
        return {
            name: [_run_id(run, available) for run in getattr(args, name) or []] for name in ("train", "valid", "test")
        }
    if args.holdout_cells is not None:
        return {"train": available, "valid": [], "test": []}
    if args.synthetic:
        return synthetic_splits(args.runs)
    raise InputError(
        f"no split of the runs {' '.join(available[:20])}",
        variable="splits",
        remedy="Give --train, --valid and --test, --split, or --holdout-cells",
    )


def _run_id(text, available):
    return f"run_{text}" if text not in available and text.isdecimal() else text


def _compare_forces(run, tolerance):
    """Add Cd_cells and Cl_cells, the coefficients that the fields integrate to; InputError where they are far off.

    Files that VTK decodes to garbage, pressure in Pa for m2/s2 and wrong reference areas all end here.
    """
    fields = [run.surface[name] for name in ("position", "normal", "area", "pressure", "shear")]
    a = run.attrs
    for name in ("U", "rho", "Aref", "Lref"):
        if not 0 < a[name] < math.inf:
            raise InputError(f"is {a[name]}", file=run.id, variable=name, remedy="State a number above 0")
    sums = force_sums(*fields, rho=a["rho"], center=a["center"])
    found = load_coefficients(sums, U=a["U"], rho=a["rho"], Aref=a["Aref"], Lref=a["Lref"])
    for name in ("Cd", "Cl"):
        a[f"{name}_cells"] = found[name]
        if not abs(found[name] - a.get(name, found[name])) <= tolerance:
            raise InputError(
                f"the cells integrate to {found[name]:.5f}, but {a[name]:.5f} is stated",
                file=run.id,
                variable=name,
                remedy="Check units, density, Aref and the file, or raise --force-tolerance",
            )


if __name__ == "__main__":
    main()
