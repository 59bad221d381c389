"""Both training loops as a person starts them, on one device and on all of one host: rate and memory.

    python -m benchmarks.training                 # GPUs: forecaster conus6km, Transolver on 300,000 points
    python -m benchmarks.training --capture       # the same with the passes recorded and replayed
    python -m benchmarks.training --small         # CPU, toy sizes, one process and two

Archives of made storms and bodies are built first, in a temporary folder. The rate is that of the last log interval.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch


def build(folder, small):
    """Archives of synthetic storms and bodies."""
    from data.aero.synthetic import synthetic_archive
    from data.weather.grid import hrrr_crop
    from data.weather.synthetic import Storms, build_synthetic

    grid = hrrr_crop(2, slice(0, 64), slice(0, 96)) if small else hrrr_crop(2)
    build_synthetic(folder / "storms.zarr", Storms(days=3, frames=8), grid)
    synthetic_archive(folder / "bodies.zarr", runs=5, cells=2000 if small else 320_000)


def commands(folder, small):
    """name -> module and flags of a training."""
    common = ["--log-every", "5", "--validate-every", "1000", "--checkpoint-every", "1000"]
    weather = ["--archive", str(folder / "storms.zarr"), "--cases", "1", "--members", "1", "--sampler-steps", "2"]
    aero = ["--archive", str(folder / "bodies.zarr")]
    if small:
        yield "weather, tiny", ["apps.weather.train", *weather, *common, "--steps", "10", "--batch", "1"]
        yield "aero, tiny", ["apps.aero.train", *aero, *common, "--steps", "10", "--batch", "1"]
        return
    big = ["--preset", "conus6km", "--steps", "25", "--batch", "1", "--precision", "bf16"]
    yield "weather, conus6km (195 M, 512 x 896, kernel 31), bf16", ["apps.weather.train", *weather, *common, *big]
    paper = ["--preset", "paper", "--slices", "32", "--points", "300000", "--steps", "40", "--batch", "1"]
    paper += ["--precision", "bf16"]
    yield "aero, paper, 300,000 points, bf16", ["apps.aero.train", *aero, *common, *paper]


def train(module, flags, ranks, out):
    """Last log line of a run, and its wall time; the process's own words where it fails."""
    start = time.perf_counter()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", module]
    done = subprocess.run([*launch, *flags, "--out", str(out), "--domain", str(ranks)], capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        return None
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [r for r in rows if "loss" in r][-1] | {"wall": time.perf_counter() - start}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--capture", action="store_true", help="record the passes of the model and replay them")
    args = parser.parse_args()
    ranks = max(torch.cuda.device_count(), 1) if not args.small else 2
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        start = time.perf_counter()
        build(folder, args.small)
        print(f"archives built in {time.perf_counter() - start:.0f} s", flush=True)
        for name, (module, *flags) in commands(folder, args.small):
            flags += ["--capture"] * args.capture
            print(f"{name}{', captured' * args.capture}", flush=True)
            base = None
            for n in sorted({1, ranks}):
                row = train(module, flags, n, folder / f"{module}-{n}")
                if row is None:
                    continue
                seconds = 1 / row["samples_per_s"]
                base = base or seconds
                print(
                    f"  {n} device(s): {seconds:8.3f} s a step, efficiency {base / (n * seconds):.2f}, "
                    f"{row['GiB']:.1f} GiB, loss {row['loss']:.4f}, {row['wall']:.0f} s in all",
                    flush=True,
                )


if __name__ == "__main__":
    main()
