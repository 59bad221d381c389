"""The air around a body as this rank's rows of it: from an archive, from the cells of a VTU file, or drawn.

Without a file points are drawn around the body: most within a tenth of its length of the surface, the others in a box
with a wake. Every rank reads or draws its own points and measures their distances to the surface itself; only the
triangles of the body travel. Points and distances wait in a temporary file, so memory does not grow with their number.
"""

import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from apps.aero.dataset import KINDS, Points, rows_of
from apps.agree import together
from apps.outputs import on_disk
from core import InputError
from data.aero.distance import NearestSurface
from data.aero.drivaerml import whole_or_parts
from data.aero.geometry import Polygons, triangles
from data.aero.vtk_files import DRIVAERML, OPENFOAM
from data.aero.vtu_cells import BLOCK, VtuCells
from data.aero.vtu_writer import CellFile, Vertices

BOX = np.array([[-0.5, -0.75, 0.0], [1.5, 0.75, 1.5]])  # beyond the body, in its lengths
QUERY = 100_000
PLACE = {"position": slice(0, 3), "direction": slice(3, 6), "sdf": 6}


class RunCloud:
    """This rank's rows of the volume of a run of an archive (AeroReader), in the archive's order."""

    frame, names = np.eye(3), ("position", "sdf", "cell_id", "pressure", "velocity", "volume")

    def __init__(self, reader, run, scaling, domain, like):
        """like: a tensor of the device and dtype that features are wanted in."""
        rows, rank, ranks = rows_of(reader, run, "volume"), domain.get_local_rank(), domain.size()
        ends = [rows * k // ranks for k in range(ranks + 1)]
        self.points, self.run, self.scaling, self.like = Points(reader, scaling), run, scaling, like
        self.sizes, self.first, self.group = np.diff(ends).tolist(), ends[rank], domain.get_group()
        self.length, self.mesh = ends[rank + 1] - ends[rank], Vertices(rows)

    def __len__(self):
        return self.length

    def __getitem__(self, rows):
        first, last = self._range(rows)
        features = self.points.read(self.run, "features", (slice(first, last),))
        return torch.from_numpy(features).to(self.like)

    def known(self, rows):
        """{name: values} of the chunk ``rows``: position (n, 3) m, sdf (n,) m, pressure, velocity, volume, cell_id."""
        first, last = self._range(rows)
        return {name: self.points.rows(self.run, name, first, last) for name in self.names}

    def shown(self, position):
        """Positions in the frame and unit of the file."""
        return position

    def _range(self, rows):
        first, last, _ = rows.indices(self.length)
        return self.first + first, self.first + max(first, last)


class BodyCloud:
    """This rank's points around the body of a file, in the training's frame; sizes: points of every rank.

    mesh: what the written file consists of, the cells of ``file`` (a VtuFile) or points.
    """

    def __init__(self, config, case, scaling, domain, like):
        """Collective; case: apps.aero.body.Case on rank 0. Raises InputError as of VtuCells, and where no point is."""
        body = [None if case is None else (triangles(_clean(case)), case.scale, case.shift, case.frame)]
        dist.broadcast_object_list(body, src=0)
        corners, self.scale, shift, self.frame = body[0]
        self.shift, self.scaling, self.like, self.group = np.asarray(shift), scaling, like, domain.get_group()
        self.rows, rank, ranks = _Rows(7), domain.get_local_rank(), domain.size()
        with together(), on_disk(tempfile.gettempdir()):
            corners = self.placed(corners.reshape(-1, 3)).reshape(-1, 3, 3)
            surface = NearestSurface(corners)
            if config.volume is not None:
                self.mesh = CellFile(whole_or_parts(Path(config.volume)))
                self.file, self.cells = self.mesh.file, VtuCells(self.mesh.file)
                self.cells.check_around(corners, self.scale)
                self.first, last = (self.file.cells * k // ranks for k in (rank, rank + 1))
                parts = self._centres(surface, last)
            else:
                self.file, parts = None, _drawn(surface, corners, config.query or QUERY, rank, ranks)
            for position, sdf, direction in parts:
                self.rows.append(np.concatenate([position, direction, sdf[:, None]], axis=1))
        self.sizes = [None] * ranks
        dist.all_gather_object(self.sizes, len(self), group=self.group)
        if not sum(self.sizes):
            raise InputError("no point outside of the body", file=config.surface, remedy="Ask for more with --query")
        if self.file is None:
            self.mesh = Vertices(sum(self.sizes))
        self.truths = _truths(self.file)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, rows):
        own = self.rows.read(rows)
        features = self.scaling.features(*(own[:, PLACE[name]] for name in KINDS["volume"].place))
        return torch.from_numpy(features).to(self.like)

    def known(self, rows):
        """As of ``RunCloud``, of what is known: the flow where the file has it by its usual names."""
        own = self.rows.read(rows)
        found = {"position": own[:, PLACE["position"]], "sdf": own[:, PLACE["sdf"]]}
        if self.truths:
            first, last, _ = rows.indices(len(self))
            span = self.first + first, self.first + max(first, last)
            pressure, velocity = (self.file.read("CellData", name, *span) for name in self.truths)
            found |= {"pressure": pressure, "velocity": velocity @ self.frame.T}
            found["volume"] = self.cells.volumes(*span) * self.scale**3 if span[0] < span[1] else np.zeros(0)
        return found

    def placed(self, points):
        """Points (n, 3) of the file's frame and unit in the training's."""
        return points.astype(np.float64) * self.scale @ self.frame.T + self.shift

    def shown(self, position):
        """Positions in the frame and unit of the file: inverse of ``placed``."""
        return (position - self.shift) @ self.frame / self.scale

    def _centres(self, surface, last):
        for first in range(self.first, last, BLOCK):
            position = self.placed(self.cells.centers(first, min(first + BLOCK, last)))
            yield position, *surface.query(position)


class _Rows:
    """Rows of float32 in a temporary file: appended, then read by ranges, never in memory as a whole."""

    def __init__(self, columns):
        self.columns, self.count = columns, 0
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the rows)

    def __len__(self):
        return self.count

    def append(self, rows):
        """Add rows (n, columns) at the end."""
        self.file.write(np.ascontiguousarray(rows, np.float32).tobytes())
        self.count += len(rows)

    def read(self, rows):
        """Rows of a slice, float64."""
        first, last, _ = rows.indices(self.count)
        width = 4 * self.columns
        self.file.flush()
        data = os.pread(self.file.fileno(), max(0, last - first) * width, first * width)
        return np.frombuffer(data, np.float32).reshape(-1, self.columns).astype(np.float64)


def _truths(file):
    """Names of pressure and velocity by cell, where the file has both as DrivAerML or OpenFOAM call them; else None."""
    names = file.names("CellData") if file else ()
    usual = [(known["pressure"], known["velocity"]) for known in (DRIVAERML, OPENFOAM)]
    return next((pair for pair in usual if set(pair) <= set(names)), None)


def _clean(case):
    """Polygons of the cells that have an area."""
    counts = np.diff(case.mesh.offsets)
    keep = np.zeros(len(counts), bool)
    keep[case.arrays["cell_id"]] = True
    kept = counts[keep]
    return Polygons(
        np.asarray(case.mesh.points, np.float64),
        np.asarray(case.mesh.connectivity)[np.repeat(keep, counts)],
        np.concatenate([[0], np.cumsum(kept)]),
    )


def _drawn(surface, corners, count, rank, ranks, block=4096):
    """Blocks (position, sdf, direction) of this rank's points outside of the body. Blocks are drawn by their number, so
    all ranks together draw the same points however many they are."""
    low, high = corners.reshape(-1, 3).min(axis=0), corners.reshape(-1, 3).max(axis=0)
    length = (high - low)[0]
    area = np.linalg.norm(np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]), axis=1)
    share = np.cumsum(area) / area.sum()
    blocks = -(-count // block)
    for number in range(blocks * rank // ranks, blocks * (rank + 1) // ranks):
        rng = np.random.default_rng([0, number])
        size = min(block, count - number * block)
        near = size * 3 // 4
        owner = corners[np.minimum(np.searchsorted(share, rng.random(near)), len(corners) - 1)]
        weight = rng.dirichlet(np.ones(3), near)
        shell = np.einsum("nk,nkd->nd", weight, owner)
        shell = shell + rng.normal(size=(near, 3)) * length * 10 ** rng.uniform(-4, -1, (near, 1))
        box = rng.uniform(low + BOX[0] * length, high + BOX[1] * length, (size - near, 3))
        points = np.concatenate([shell, box])
        sdf, direction = surface.query(points)
        inside = np.flatnonzero(sdf[:near] < 0)  # mirrored at the wall
        points[inside] -= 2 * sdf[inside, None] * direction[inside]
        sdf[inside], direction[inside] = surface.query(points[inside])
        outside = (sdf > 0) & (points[:, 2] > low[2])
        yield points[outside], sdf[outside], direction[outside]
