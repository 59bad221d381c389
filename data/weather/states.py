"""State lines for maps without a network: the arcs of a small TopoJSON file that travels with the package.

Source: npm us-atlas 3.0.1 (ISC), from the US Census Bureau's cartographic boundaries.
"""

import json
from pathlib import Path

import numpy as np

from data.weather.grid import lambert_xy

_FILE = Path(__file__).with_name("states-10m.json")


def state_lines():
    """Borders and coasts, each once: a list of (longitude, latitude) arrays (n, 2) in degrees."""
    topology = json.loads(_FILE.read_text())
    scale, shift = (np.array(topology["transform"][key]) for key in ("scale", "translate"))
    return [np.cumsum(arc, axis=0) * scale + shift for arc in topology["arcs"]]  # arcs are stored as differences


def state_lines_xy(grid):
    """The same lines on the Lambert map, those that meet ``grid``: a list of (x, y) arrays (n, 2) in m."""
    lines = [np.stack(lambert_xy(line[:, 1], line[:, 0]), axis=1) for line in state_lines()]
    low, high = np.array([grid.x[0], grid.y[0]]), np.array([grid.x[-1], grid.y[-1]])
    return [line for line in lines if ((line >= low) & (line <= high)).all(axis=1).any()]
