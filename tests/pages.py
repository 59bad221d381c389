"""The commands of the pages: as a person would type them, what shortens them, what cannot run on a CPU, and a shell.

A command stands in a block of bash or between backticks. ``FEW`` is added at its end, where the last of two equal flags
counts; ``INSTEAD`` puts something of the tests in the place of what somebody has.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

FEW = {  # what is added for a short run; of a training behind "--" its own comes last
    "-m apps.weather.train": "--steps 20 --cases 1 --members 1",
    "-m apps.weather.forecast": "--sampler-steps 1",
    "-m apps.weather.evaluate": "--steps 2 --cases 1 --members 2 --no-figures --baselines persistence",
    "-m apps.aero.train": "--steps 20",
    "-m apps.aero.evaluate": "--pictures 1",
}
FEW_OF_PAGES = FEW | {
    "--preset storms": "--batch 2 --cases 1 --members 1",
    "--width 192": "--batch 2",
    "--drivaerml DIR": "--workers 1",
    "--export DIR": "--checkpoint runs/many --archive runs/many.zarr --pictures 1",
    "data.weather.build --synthetic": "--days 4",
    "data.aero.build --synthetic": "--runs 4 --train 1 2 --valid 3 --test 4",
    "-m benchmarks.scaling": "--small --repeats 1",
    "-m benchmarks.training": "--small",
    "-m benchmarks.stream": "--cells 20000 --preset tiny --chunk 5000",
    "-m benchmarks.largest": "--small --gib 0.02",
    "--volume 1024": "--volume 32",
}
INSTEAD = {  # written -> what stands in for it
    " -k mine": " -k softmax",  # a row that the reader writes
    " --capture": "",  # records on a GPU only
    "--app weather": "--app weather --steps 20 --only default",
    "--app aero": "--app aero --steps 20 --only default",
    "--steps 600": "--steps 20",
    "--nproc-per-node 8": "--nproc-per-node 4",  # processes on two cores
    "--forecast FILE": "--forecast runs/coupled.zarr",
    "storm_bound RESULTS": "storm_bound runs/weather/evaluation/results.json",
    "--measured many.json": f"--measured {ROOT}/benchmarks/measured.json",  # constants are fitted to rows of GPUs
}
NOT_HERE = {  # part of a command -> why no test runs it; all are parsed
    "data.weather.fetch": "asks the public buckets of NOAA; test_data_weather_fetch.py has a server of its own",
    "data.aero.fetch": "asks a public store; test_data_aero_fetch.py has a server of its own",
    "--drivaerml DIR --split official": "needs all 484 runs of DrivAerML; docs/data_aero.md has it with --partial",
    "--archive runs/drivaerml.zarr": "needs them too",
    "runs/mrms.zarr --preset small": "takes hours",
    "pip install": "changes the environment that the tests run in",
    "--nnodes 8": "needs eight nodes",
    "srun": "needs Slurm",
    "--how captured": "records on GPUs",
    "benchmarks.neighborhood": "kernels for GPUs",
    "benchmarks.slots": "kernels for GPUs",
    "pytest -m gpu": "needs GPUs",
    ".ci/run": "is what runs these tests",
    "pytest -n 2": "is what runs these tests",
    "pytest -m nightly": "is what runs these tests",
    "pre-commit": "comes with '.[dev]'; its checks run on every commit",
}
BLOCKS = re.compile(r"```bash\n(.*?)```|```.*?```|`([^`]+)`", re.S)
COMMAND = re.compile(r"(?:python|torchrun .*) (?:-m \S|\S+\.py)|(?:pytest|pip|pre-commit) \S|\.ci/run")


def typed(text, between=True):
    """Commands of a text in bash blocks and between backticks, each on one line, without comments; a script is one."""
    found = []
    for block, code in BLOCKS.findall(text):
        lines = block.replace("\\\n", " ").splitlines() if block else [code.replace("\n", " ")]
        lines = [re.sub(r"(^|\s+)#.*", "", " ".join(line.split())) for line in lines]
        lines = ["; ".join(filter(None, lines))] if block.startswith("#!") else lines
        found += [line for line in lines if line and (block or between and COMMAND.match(line))]
    return found


def in_head(file):
    """Commands in the docstring of an example."""
    return re.findall(r"^    ((?:python|torchrun) .*)$", file.read_text().split('"""')[1], re.M)


def reasons(line):
    """Parts of the command for which it runs nowhere."""
    return [words for words in NOT_HERE if words in line]


def shortened(line, few=FEW, instead=()):
    for words in instead:
        line = line.replace(words, instead[words])
    return line + "".join(f" {more}" for words, more in few.items() if f"{words} " in f"{line} ")


def run(script, folder):
    """What a bash script printed, with this Python and its torchrun."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout
