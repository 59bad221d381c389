"""Raw flow files to the aero archive: python -m data.aero.build <source> --out PATH

    --synthetic                                   bodies with known forces, nothing to fetch
    --drivaerml DIR --split official              DrivAerML's own layout and split; --partial for the runs at hand
    --run ahmed25 --run ahmed00 --train ahmed25 --test ahmed00          solver runs, a folder each (data.aero.plain)
    --run ahmed25 --holdout-cells 0.2             one run, a part of its cells held back (interpolation)

Each run is checked (lengths, finite values, closed surface), and its fields must integrate to the stated forces,
before it is stored. Bad input ends with a message, exit status 2, and no output.
"""

import argparse
import math
import sys
import time
from pathlib import Path

from core.errors import InputError
from data.aero import drivaerml, plain
from data.aero.archive import write_archive
from data.aero.loads import force_sums, load_coefficients
from data.aero.splits import OFFICIAL, check_splits, hold_out, official_split
from data.aero.synthetic import synthetic_run, synthetic_splits
from data.aero.vtk_files import DRIVAERML, OPENFOAM


def parser():
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m data.aero.build", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--synthetic", action="store_true", help="synthetic bodies")
    source.add_argument("--drivaerml", metavar="DIR", help="folder that holds run_1, run_2, ...")
    source.add_argument("--run", metavar="DIR", action="append", help="folder of one solver run; may be repeated")
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
    p.add_argument("--cells", type=int, default=4000, help="surface cells of a synthetic body, about")
    p.add_argument("--force-tolerance", type=float, default=0.01, help="largest error of Cd and Cl from the cells")
    for name in ("pressure", "shear", "velocity"):
        p.add_argument(f"--{name}", metavar="ARRAY", help=f"name of the {name} array in the files")
    return p


def main(argv=None):
    """Build an archive; returns the exit status."""
    args = parser().parse_args(argv)
    try:
        build(args)
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def build(args):
    """Write the archive that the parsed command line asks for."""
    available, read = _source(args)
    splits = _splits(args, list(available))
    check_splits(splits, available)
    wanted = {run for ids in splits.values() for run in ids}
    chosen = {run: key for run, key in available.items() if run in wanted}
    print(", ".join(f"{name} {len(ids)}" for name, ids in splits.items()), f"of {len(available)} runs", flush=True)
    attrs, holdout = {"source": args.drivaerml or args.run or f"synthetic bodies, seed {args.seed}"}, None
    if args.holdout_cells is not None:
        holdout = hold_out(args.holdout_cells, args.holdout_by, args.seed)
        attrs["holdout"] = dict(label="interpolation", share=args.holdout_cells, by=args.holdout_by)
    # A coarse synthetic mesh is a choice, not a fault.
    runs = _with_progress(chosen, read, math.inf if args.synthetic else args.force_tolerance)
    write_archive(args.out, runs, splits, seed=args.seed, holdout=holdout, attrs=attrs)
    print(f"wrote {args.out}")


def _source(args):
    """({run id: its key}, function of the key that reads the run)."""
    given = {name: getattr(args, name) for name in ("pressure", "shear", "velocity") if getattr(args, name)}
    if args.synthetic:
        numbers = {f"run_{i}": i for i in range(1, args.runs + 1)}
        return numbers, lambda i: synthetic_run(args.seed, i, args.cells, args.volume)
    if args.drivaerml:
        numbers = {f"run_{i}": i for i in drivaerml.run_numbers(args.drivaerml)}
        names = DRIVAERML | given
        return numbers, lambda i: drivaerml.read_run(args.drivaerml, i, volume=args.volume, names=names)
    folders = {Path(folder).resolve().name: folder for folder in args.run}
    if len(folders) < len(args.run):
        raise InputError("two folders of one name", variable="run", remedy="Rename one: the name is the run id")
    return folders, lambda folder: plain.read_run(folder, volume=args.volume, names=OPENFOAM | given)


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


def _with_progress(chosen, read, tolerance):
    """Runs one by one, each with a line on what came in and how its forces compare."""
    for number, (run_id, key) in enumerate(chosen.items(), 1):
        start = time.perf_counter()
        run = read(key)
        _compare_forces(run, tolerance)
        rows = len(run.surface["area"]) + (len(run.volume["sdf"]) if run.volume else 0)
        rate = rows / max(time.perf_counter() - start, 1e-9)
        stated = f"{run.attrs['Cd']:.5f}" if "Cd" in run.attrs else "unknown"
        print(
            f"{number}/{len(chosen)} {run_id}: {rows:,} cells, {rate:,.0f} cells/s, winding {run.attrs['winding']}, "
            f"Cd {run.attrs['Cd_cells']:.5f} from its cells ({stated} stated)",
            flush=True,
        )
        yield run


def _compare_forces(run, tolerance):
    """Add Cd_cells and Cl_cells, the coefficients that the fields integrate to; InputError where they are far off.

    Files that VTK decodes to garbage, pressure in Pa for m2/s2 and wrong reference areas all end here.
    """
    fields = [run.surface[name] for name in ("position", "normal", "area", "pressure", "shear")]
    a = run.attrs
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
    sys.exit(main())
