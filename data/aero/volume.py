"""Volume cells in blocks: centres, volumes, flow and distances of a few hundred thousand cells at a time.

Points, incidence and fields are read by ranges of cells and forgotten, so memory does not grow with the mesh.
"""

import gzip
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from core.errors import InputError
from data.aero.cells import check_values
from data.aero.distance import NearestSurface
from data.aero.vtk_files import read_stl
from data.aero.vtu import VtuFile
from data.aero.vtu_cells import BLOCK, VtuCells

MATCH = 2  # an STL may leave out a mirror or a wheel, not be a thousand times as long
NAMES = ("position", "velocity", "pressure", "sdf", "direction", "volume", "cell_id")


@dataclass
class VolumeCells:
    """The volume group of a run (data.aero.archive) to be read in blocks of rows, in the order of the file.

    paths: a VTU file, its parts in order, or one VTU.gz; names: {"velocity": array, "pressure": array} by cell;
    corners: triangles of the surface; scale: metres in a unit of the files; pressure: m2/s2 in a unit of theirs; block:
    rows at a time.
    """

    paths: list
    names: dict
    corners: np.ndarray
    scale: float = 1.0
    pressure: float = 1.0
    block: int = BLOCK

    def blocks(self):
        """Dicts of position (n, 3) m, velocity (n, 3) m/s, pressure (n,) m2/s2, sdf (n,) m, direction (n, 3), volume
        (n,) m3, cell_id.

        Raises InputError for arrays that are missing or only on points, values that are not finite, and as of VtuCells.
        """
        with _plain(self.paths) as paths:
            file = VtuFile(paths)
            for name in self._wanted():
                self._check(file, name)
            surface, cells = NearestSurface(self.corners * self.scale), VtuCells(file)
            cells.check_around(self.corners * self.scale, self.scale)
            for first in range(0, file.cells, self.block):
                last = min(first + self.block, file.cells)
                yield self._block(file, surface, cells, first, last)

    def arrays(self):
        """All blocks as one dict."""
        parts = list(self.blocks())
        return {name: np.concatenate([part[name] for part in parts]) for name in NAMES}

    def _wanted(self):
        return [self.names[key] for key in ("velocity", "pressure")]

    def _check(self, file, name):
        if name not in file.names("CellData"):
            where = "only on points" if name in file.names("PointData") else "not in the file"
            raise InputError(
                f"{where}; cell arrays are: {' '.join(file.names('CellData')) or 'none'}",
                file=self.paths[0],
                variable=name,
                remedy="Export cell data, or name the array with --pressure, --velocity",
            )

    def _block(self, file, surface, cells, first, last):
        velocity, pressure = (file.read("CellData", name, first, last) for name in self._wanted())
        check_values(velocity, (last - first, 3), self.paths[0], self.names["velocity"], first)
        check_values(pressure, (last - first,), self.paths[0], self.names["pressure"], first)
        position, volume = cells.centers(first, last) * self.scale, cells.volumes(first, last) * self.scale**3
        sdf, direction = surface.query(position)
        found = position, velocity, pressure * self.pressure, sdf, direction, volume
        return dict(zip(NAMES, (*found, np.arange(first, last, dtype=np.int64))))


def body_of(stl, points):
    """Corners (t, 3, 3) of an STL file that distances are measured to.

    points (n, 3): of the surface of the same run in the same unit. Raises InputError where the two are not of one size:
    CAD is in millimetres more often than not.
    """
    corners = read_stl(stl)
    spans = [np.linalg.norm(np.ptp(p.reshape(-1, 3), axis=0)) for p in (corners, points)]
    if not 1 / MATCH < spans[0] / spans[1] < MATCH:
        raise InputError(
            f"spans {spans[0]:.4g} where the surface of the run spans {spans[1]:.4g}: its unit is another",
            file=stl,
            variable="scale",
            remedy="Export the STL in the unit of the flow files",
        )
    return corners


@contextmanager
def _plain(paths):
    """The paths themselves, or of one .gz a temporary plain copy: gzip has no ranges."""
    if Path(paths[0]).suffix != ".gz":
        yield paths
        return
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / Path(paths[0]).stem
        try:
            with gzip.open(paths[0]) as source, open(plain, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 24)
        except (EOFError, OSError) as error:
            raise InputError(f"cannot be unpacked ({error})", file=paths[0], remedy="Fetch the file again") from None
        yield [plain]
