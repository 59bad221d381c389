"""What the tests of the aero application share: small settings, and Python in processes of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
AHMED = Path(__file__).parent / "data" / "aero"
SMALL = ["--points", "256", "--width", "16", "--layers", "1", "--heads", "2", "--slices", "4", "--log-every", "1"]


def python(*args, ranks=1):
    """Runs python (under torchrun where there are several ranks) and returns the finished process."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launch, *map(str, args)]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)


def environment(**more):
    """Of a process that finds this checkout and computes on one thread."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more
