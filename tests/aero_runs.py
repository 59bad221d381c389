"""What the aero tests share: small settings, a small body, and Python in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from data.aero.geometry import Polygons

ROOT = Path(__file__).parent.parent
AHMED = Path(__file__).parent / "data" / "aero"
SMALL = ["--points", "256", "--width", "16", "--layers", "1", "--heads", "2", "--slices", "4", "--log-every", "1"]


def python(*args):
    """Runs python, which finds this checkout and computes on one thread, and returns the finished process."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *map(str, args)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )


def cube(reverse=False):
    """Unit cube with an edge point on the top face: five quads, one pentagon; outward."""
    points = np.array(
        [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 1], [1, 0, 1], [1, 1, 1], [0, 1, 1], [0.5, 0, 1]]
    )
    faces = [[0, 3, 2, 1], [4, 8, 5, 6, 7], [0, 1, 5, 8, 4], [1, 2, 6, 5], [2, 3, 7, 6], [3, 0, 4, 7]]
    faces = [face[::-1] for face in faces] if reverse else faces
    return Polygons(points, np.concatenate(faces), np.cumsum([0] + [len(face) for face in faces]))
