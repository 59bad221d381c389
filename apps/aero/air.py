"""The air around a body: where its fields are asked for, and the VTU file with the answer.

Points come from the cells of a VTU file or, without one, are drawn around the body: most within a tenth of its length
of the surface, the others in a box with a wake. Every rank reads or draws its own points and measures their distances
to the surface itself; only the triangles of the body travel.
"""

from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from apps.agree import together
from core import InputError
from data.aero.distance import NearestSurface
from data.aero.geometry import Polygons, triangles, vertex_mean
from data.aero.vtu import VtuFile
from data.aero.vtu_writer import CellFile, write_volume

BLOCK = 1 << 18
BOX = np.array([[-0.5, -0.75, 0.0], [1.5, 0.75, 1.5]])  # beyond the body, in its lengths
QUERY = 100_000


@dataclass
class OwnCloud:
    """This rank's points of the air: position (n, 3) m, direction (n, 3), sdf (n,) m, in the training's frame; sizes:
    points of every rank; case: apps.aero.body.Case on rank 0; file: the VTU that they are the cells of, or None."""

    position: np.ndarray
    direction: np.ndarray
    sdf: np.ndarray
    sizes: list
    case: object
    file: str | None
    group: object

    def gathered(self, predicted):
        """Air of all ranks' points on rank 0, from this rank's fields (n, 4); None elsewhere."""
        rows = np.concatenate([self.position, self.sdf[:, None], predicted], axis=1).astype(np.float32)
        parts = [None] * len(self.sizes) if dist.get_rank() == 0 else None
        dist.gather_object(rows, parts, group=self.group)
        if parts is None:
            return None
        rows = np.concatenate(parts)
        return Air({"position": rows[:, :3], "sdf": rows[:, 3], "predicted": rows[:, 4:]}, self.file, self.case)


def own_cloud(config, case, domain):
    """OwnCloud of this rank, collectively; case: on rank 0. Raises InputError as of VtuFile."""
    body = [None if case is None else (triangles(_clean(case)), case.scale, case.shift, case.frame)]
    dist.broadcast_object_list(body, src=0)
    corners, scale, shift, frame = body[0]
    rank, ranks = domain.get_local_rank(), domain.size()

    def placed(points):
        return points.astype(np.float64) * scale @ frame.T + np.asarray(shift)

    with together():
        corners = placed(corners.reshape(-1, 3)).reshape(-1, 3, 3)
        surface = NearestSurface(corners)
        if config.volume is not None:
            position = placed(_centres(VtuFile([config.volume]), rank, ranks))
            sdf, direction = surface.query(position)
        else:
            position, sdf, direction = _drawn(surface, corners, config.query or QUERY, rank, ranks)
        sizes = [None] * ranks
        dist.all_gather_object(sizes, len(position), group=domain.get_group())
        if not sum(sizes):
            raise InputError("no point outside of the body", file=config.surface, remedy="Ask for more with --query")
    return OwnCloud(position, direction, sdf, sizes, case, config.volume, domain.get_group())


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


def _centres(file, rank, ranks):
    """Centres of this rank's range of cells, in the frame of the file, a block of cells at a time."""
    points = np.concatenate([file.read("Points", file.names("Points")[0], k, min(k + BLOCK, file.points))
                             for k in range(0, file.points, BLOCK)])  # fmt: skip
    first, last = file.cells * rank // ranks, file.cells * (rank + 1) // ranks
    parts = [np.zeros((0, 3))]
    for start in range(first, last, BLOCK):
        end = min(start + BLOCK, last)
        before = int(file.read("Cells", "offsets", start - 1, start)[0]) if start else 0
        offsets = np.append(before, file.read("Cells", "offsets", start, end)).astype(np.int64)
        connectivity = file.read("Cells", "connectivity", before, int(offsets[-1]))
        parts.append(vertex_mean(Polygons(points, connectivity, offsets - before)))
    return np.concatenate(parts)


def _drawn(surface, corners, count, rank, ranks, block=4096):
    """Points of this rank outside of the body. Blocks of them are drawn by their number, so all ranks together draw the
    same points however many they are."""
    low, high = corners.reshape(-1, 3).min(axis=0), corners.reshape(-1, 3).max(axis=0)
    length = (high - low)[0]
    area = np.linalg.norm(np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]), axis=1)
    share, found = np.cumsum(area) / area.sum(), []
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
        found.append((points[outside], sdf[outside], direction[outside]))
    empty = np.zeros((0, 3)), np.zeros(0), np.zeros((0, 3))
    return tuple(np.concatenate(parts) for parts in zip(empty, *found))


@dataclass
class Air:
    """arrays: position (n, 3), sdf (n,), predicted (n, 4), and pressure, velocity where known, in the training's frame;
    file: VTU file whose cells they are, None for points; case: what takes vectors back to the frame of the file."""

    arrays: dict
    file: str | None = None
    case: object = None

    def scores(self):
        """Errors where the true fields are known: relative L2 of vector differences, and means."""
        if "velocity" not in self.arrays:
            return {"points": len(self.arrays["predicted"])}
        out = {"points": len(self.arrays["predicted"])}
        y = self.arrays["predicted"].astype(np.float64)
        for name, said, true in (("volume_pressure", y[:, :1], self.arrays["pressure"][:, None]),
                                 ("velocity", y[:, 1:], self.arrays["velocity"])):  # fmt: skip
            error = np.linalg.norm(said - true, axis=1)
            out[f"{name}_l2"] = float(np.linalg.norm(error) / np.linalg.norm(true))
            out[f"{name}_mae"] = float(error.mean())
        return out

    def lines(self):
        """The scores in words."""
        return [
            "volume: " + ", ".join(f"{k} {v:,}" if k == "points" else f"{k} {v:.4f}" for k, v in self.scores().items())
        ]

    def write(self, path, U):
        """A VTU file: the cells of ``file`` with fields added, or points; in the frame and unit of the file."""
        frame = np.eye(3) if self.case is None else self.case.frame
        y = self.arrays["predicted"]
        found = {"pressure_predicted": y[:, 0], "velocity_predicted": y[:, 1:] @ frame}
        if "velocity" in self.arrays:
            found |= {"pressure_true": self.arrays["pressure"], "velocity_true": self.arrays["velocity"] @ frame}
            found |= {f"{n}_error": found[f"{n}_predicted"] - found[f"{n}_true"] for n in ("pressure", "velocity")}
        found |= {"Cp_predicted": y[:, 0] / (0.5 * U**2), "sdf": self.arrays["sdf"]}
        found = {name: np.asarray(values, np.float32) for name, values in found.items()}
        points = self.arrays["position"] if self.case is None else self.case.restored(self.arrays["position"])
        write_volume(path, CellFile(self.file) if self.file else points.astype(np.float32), found)
