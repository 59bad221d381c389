"""What each choice is worth: trainings of equal steps that differ in one choice, as one table.

    python -m benchmarks.ablations --app aero                                    # the defaults of apps.aero.train
    python -m benchmarks.ablations --app weather --gpus 2 --at-once 2 -- --archive A --preset storms --capture
    python -m benchmarks.ablations --app aero --steps 300 --seeds 3 --only default "no EMA"

Flags behind ``--`` are those of the training, for all. All take ``--steps``, or as many as the default takes in
``--seconds`` by itself, which a short training tells before the others start. ``--at-once`` trainings share each of
``--gpus`` GPUs, which changes how long they take and nothing else. The table has the scores of the last validation, of
the same samples in all: those that have the longest history of the table behind them (the loss of the weather is no
measure where a choice changes the noise; RMSE and CRPS are).

After each training ``ablations.json`` is written, and the same command again does what is missing there; choices that
would be scored on other samples want another ``--out``. Small differences are noise: ``--seeds`` gives the spread.
"""

import argparse
import gc
import json
import os
import re
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from multiprocessing import cpu_count, get_context
from pathlib import Path

import torch

from apps.aero.config import TrainConfig as AeroConfig
from apps.cli import parse
from apps.outputs import write_json, written
from apps.weather.config import TrainConfig as WeatherConfig
from core import InputError
from core.command import command

SHORT = 40  # steps of which the later half tell how long one takes, when all is read, compiled and recorded
CONFIGS = {"aero": AeroConfig, "weather": WeatherConfig}
QUICK = {"aero": [], "weather": ["--cases", "1", "--members", "1"]}  # a validation that nobody looks at
SHOWN = {
    "aero": ("pressure_l2", "shear_l2", "Cd_mae", "Cd_r2", "Cl_mae"),
    "weather": ("loss", "refc/crps/model", "refc/rmse/model"),
}


# -- what is changed --------------------------------------------------------------------------------------------------
def every_training(base):
    """{name: flags} of choices that both trainings have; base: the configuration without them."""
    found = {"default": [], "no EMA": ["--ema", 0], "lr / 2": ["--lr", base.lr / 2], "lr x 2": ["--lr", base.lr * 2]}
    return found | {"Muon": ["--optimizer", "muon"], "AdamW": ["--optimizer", "adamw"]}


def aero(base):
    points = base.sample_points()
    return (
        {f"temperature {t}": ["--temperature", t] for t in (0.125, 0.25, 0.5, 1.0)}
        | {"temperature from 0.5 on": ["--temperature-low", 0.5, "--temperature", 0.5]}
        | {f"{n} slices": ["--slices", n] for n in (32, 64, 128) if n != base.model().slices}
        | {"normal slice init": ["--slice-init", "normal"], "tied": ["--tied"], "weighed by area": ["--weighed"]}
        | {"Transolver++": ["--plus", "--tied", "--no-capture"]}  # noise within the model cannot be recorded
        | {"loss huber": ["--loss", "huber"], "loss relative": ["--loss", "relative"]}
        | {"force term": ["--force-weight", 100]}
        | {f"points x {k}": ["--points", k * points] for k in (2, 4, 8)}
    )


def weather(base):
    return (
        {f"history {n}": ["--history", n] for n in (1, 3, 6)}
        | {f"kernel {n}": ["--kernel", n] for n in (5, 7, 9, 13)}
        | {"width / 2": ["--width", base.width // 2], "width x 1.5": ["--width", base.width * 3 // 2]}
        | {f"p_mean {m}": ["--p-mean", m] for m in (-1.2, -0.8, -0.4)}
    )


def choices(app, base):
    """{name: flags} that change the training with the flags ``base``; and "default", which changes nothing."""
    config = parse(CONFIGS[app], base)
    found = every_training(config) | {"aero": aero, "weather": weather}[app](config)
    found = {name: [str(flag) for flag in flags] for name, flags in found.items()}
    return {name: flags for name, flags in found.items() if not flags or parse(CONFIGS[app], [*base, *flags]) != config}


def same_cases(app, base, chosen):
    """Flags that have choices of several histories validated on the samples that all of them have."""
    configs = [parse(CONFIGS[app], [*base, *flags]) for flags in chosen.values()]
    if app == "aero" or len({config.history for config in configs}) == 1:
        return []
    return ["--cases-after", str(max(configs[0].cases_after, *(config.history for config in configs)))]


# -- one training -----------------------------------------------------------------------------------------------------
def trained(app, flags, out, steps):
    """Scores of a training of so many steps. Its log stays, and what it says, in ``said.txt``; its weights go."""
    out.mkdir(parents=True, exist_ok=True)
    train = import_module(f"apps.{app}.train").main
    with open(out / "said.txt", "w") as said, redirect_stdout(said), redirect_stderr(said):
        found = train([*flags, *counts(steps, max(1, steps // 10)), "--out", str(out / "training")]).scores
    for name in ("checkpoints", "best"):
        shutil.rmtree(out / "training" / name)
    return found


def steps_in(seconds, app, flags, out):
    """Steps that a training takes in so many seconds, by a short one of which nothing stays."""
    train = import_module(f"apps.{app}.train").main
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        train([*flags, *QUICK[app], *counts(SHORT, SHORT // 2), "--out", str(out)])
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    shutil.rmtree(out)
    gc.collect()  # what it recorded must not be given up while the next training records
    a_second = [row["samples_per_s"] for row in rows if "loss" in row][-1] / parse(CONFIGS[app], flags).batch
    return max(1, round(seconds * a_second))


def counts(steps, log):
    """Flags of a training that validates and saves at its end only."""
    numbers = {"--steps": steps, "--validate-every": steps, "--checkpoint-every": steps, "--log-every": log}
    return [str(part) for pair in numbers.items() for part in pair]


# -- all of them ------------------------------------------------------------------------------------------------------
def at_home(places, threads):
    """What a process does before its first training: it takes one of the GPUs, "" for none, and stays there."""
    os.environ["CUDA_VISIBLE_DEVICES"] = places.get()
    torch.set_num_threads(threads)


def folder(out, name, seed):
    return out / f"{re.sub('[^a-zA-Z0-9.]+', '_', name).strip('_')}_{seed}"


def workers(args):
    """A pool of processes: ``--at-once`` on each GPU, or on the CPU."""
    places, context = [str(gpu) for gpu in range(args.gpus)] or [""], get_context("spawn")
    queue = context.Queue()
    for place in places * args.at_once:
        queue.put(place)
    count = len(places) * args.at_once
    return ProcessPoolExecutor(count, context, at_home, (queue, max(1, cpu_count() // count)))


def line(name, trainings, shown):
    """A row of the table: means over seeds and, of several, half of the range."""
    cells = []
    for key in shown:
        values = [one[key] for one in trainings if one.get(key) is not None]
        spread = f" +- {(max(values) - min(values)) / 2:.2g}" if len(values) > 1 else ""
        cells.append(f"{sum(values) / len(values):.4g}{spread}" if values else "-")
    return f"{name:<24}" + "".join(f"{cell:>20}" for cell in cells)


def table(told):
    """All rows, in the order of the choices."""
    app, base = told["asked"]["app"], told["asked"]["base"]
    head = f"{told['steps']} steps each".ljust(24) + "".join(f"{key:>20}" for key in SHOWN[app])
    order = [name for name in choices(app, base) if name in told["trainings"]]
    return "\n".join([head, *(line(name, told["trainings"][name], SHOWN[app]) for name in order)])


def options(argv):
    """The options, and behind "--" the flags of the trainings."""
    argv = list(sys.argv[1:] if argv is None else argv)
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--app", required=True, choices=tuple(CONFIGS))
    parser.add_argument("--seconds", type=float, default=90, help="that the steps of the default take by itself")
    parser.add_argument("--steps", type=int, help="of each training, in place of seconds")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each choice")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="choices by name; left out: all")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="left out: all")
    parser.add_argument("--at-once", type=int, default=1, help="trainings on each GPU, or on the CPU")
    parser.add_argument("--out", type=Path, help="folder; left out: runs/ablations-APP")
    args, base = parser.parse_args(argv[:split]), argv[split + 1 :]
    args.out = args.out or Path(f"runs/ablations-{args.app}")
    known = choices(args.app, base)
    if unknown := set(args.only or ()) - set(known):
        parser.error(f"no choice {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if args.at_once * max(1, args.gpus) > 1 and parse(CONFIGS[args.app], base).archive is None:
        parser.error("several trainings would build the same archive at once: give -- --archive")
    chosen = {name: flags for name, flags in known.items() if args.only is None or name in args.only}
    return args, [*base, *same_cases(args.app, base, chosen)], chosen


def begun(args, base):
    """What is in the file, of the same trainings; or an empty one.

    Raises:
        InputError: the file is of other trainings.
    """
    path = args.out / "ablations.json"
    asked = {"app": args.app, "base": base, "steps": args.steps, "seconds": None if args.steps else args.seconds}
    told = json.loads(path.read_text()) if path.exists() else {"asked": asked, "steps": args.steps, "trainings": {}}
    if told.get("asked") != asked:
        raise InputError("is of other trainings", file=path, remedy="Choose another --out, or remove it")
    return told


@command
def main(argv=None):
    """Runs the command; returns what is in ablations.json."""
    args, base, chosen = options(argv)
    told, failed = begun(args, base), []
    trainings = told["trainings"]
    have = {(name, one["seed"]) for name, those in trainings.items() for one in those}
    first = parse(CONFIGS[args.app], base).seed
    jobs = {
        (name, seed): [*base, *flags, "--seed", str(seed)]
        for seed in range(first, first + args.seeds)
        for name, flags in chosen.items()
        if (name, seed) not in have
    }
    args.out.mkdir(parents=True, exist_ok=True)

    def keep(name, seed, found):
        if isinstance(found, BaseException):
            failed.append(name)
            said = folder(args.out, name, seed) / "said.txt"  # not there where its process died before it began
            last = said.read_text()[-1000:] if said.exists() else ""
            print(f"{name}, seed {seed}, failed: {found!r}\n{last}", flush=True)
            return
        trainings.setdefault(name, []).append({"seed": seed, "changed": chosen[name]} | found)
        write(args.out / "ablations.json", told)
        print(line(name, trainings[name][-1:], SHOWN[args.app]), flush=True)

    with workers(args) as pool:
        if told["steps"] is None:
            told["steps"] = pool.submit(steps_in, args.seconds, args.app, base, args.out / "short").result()
            write(args.out / "ablations.json", told)
        steps, started = told["steps"], {}
        for job, flags in jobs.items():
            started[pool.submit(trained, args.app, flags, folder(args.out, *job), steps)] = job
        for done in as_completed(started):
            keep(*started[done], done.exception() or done.result())
    print("", table(told), sep="\n", flush=True)
    if failed:
        raise SystemExit(1)
    return told


def write(path, told):
    with written(path) as (part,):
        write_json(part, told)


if __name__ == "__main__":
    main()
