"""A seeded family of car-like bodies whose flow is a formula of position and shape, so that exact answers are known.

The body is a rounded box, |a|^6 + |b|^6 + |c|^6 = 1, bent by smooth functions of the position along its length: a
bonnet and a windscreen in front, a slant behind, sides that draw in. Pressure and wall shear have what makes real ones
hard: a stagnation region, suction where roof and slant begin, a separation line and a base pressure that move with the
slant angle, vortices on the slant, and a pressure drag above 60 % of the whole. Forces come from Gauss-Legendre
quadrature of the formula, not from a mesh.

In the volume, pressure fades from its surface value with the cube of the radius and velocity follows by Bernoulli's
rule, with a boundary layer and a wake. There is no ground: it is a task for learning, not a solution of the flow
equations. numpy only (the distances of a volume need scipy).
"""

from dataclasses import asdict, dataclass

import numpy as np

from data.aero.cells import surface_arrays, volume_arrays
from data.aero.geometry import area_vectors, triangles, vertex_mean
from data.aero.loads import force_sums, load_coefficients
from data.aero.synthetic_mesh import surface_mesh, volume_mesh
from data.aero.writing import Run, write_archive

U, RHO, NU = 38.889, 1.0, 1.507e-5
CELLS = 5000  # of so many, forces summed over the mesh are those of the formula to 1e-3 of a coefficient
POWER = 6
CONSTANT = dict(Aref=2.17, Lref=2.78618, center=[1.40009, 0.0, -0.3176])
RANGES = dict(
    length=(4.2, 5.0),
    width=(1.7, 1.95),
    height=(1.25, 1.6),
    clearance=(0.12, 0.28),
    slant_angle=(5, 40),
    slant_length=(0.7, 1.2),
    hood_height=(0.5, 0.68),
    windscreen=(0.25, 0.36),
    taper=(0.05, 0.2),
)


@dataclass(frozen=True)
class Shape:
    """One body, in m and degrees; hood_height is a share of height, windscreen of length, taper of width.

    Flow along +x, z up, the ground at z = 0, mid-length at x = 0.
    """

    length: float = 4.6
    width: float = 1.85
    height: float = 1.4
    clearance: float = 0.2
    slant_angle: float = 25.0
    slant_length: float = 1.0
    hood_height: float = 0.55
    windscreen: float = 0.30
    taper: float = 0.12

    @property
    def slant_start(self):
        """Where the slant begins, m along x."""
        return self.length / 2 - self.slant_length

    @property
    def references(self):
        """Aref, width times height, m2; Lref, a wheelbase of 0.6 lengths, m; center of moments, m."""
        return dict(Aref=self.width * self.height, Lref=0.6 * self.length, center=[0.0, 0.0, 0.0])


def sample_shape(seed, number):
    """Shape of run ``number`` of the family ``seed``; the same whatever other runs are made."""
    rng = np.random.default_rng([seed, number])
    return Shape(**{name: float(rng.uniform(*limits)) for name, limits in RANGES.items()})


def _step(x):
    return 1 / (1 + np.exp(-x))


def _profile(shape, x):
    """Height and width of the section at x, as shares of the full ones. Analytic, for complex steps."""
    screen = (shape.windscreen - 0.5) * shape.length
    front = shape.hood_height + (1 - shape.hood_height) * _step((x - screen) / (0.05 * shape.length))
    drop = 0.1 * np.tan(np.radians(shape.slant_angle)) * np.log(1 + np.exp((x - shape.slant_start) / 0.1))
    high = front * (0.35 + 0.65 * np.exp(-drop / (0.65 * shape.height)))
    return high, 1 - shape.taper * _step((x - 0.3 * shape.length) / (0.08 * shape.length))


def to_space(shape, unit):
    """Points (..., 3) of the rounded unit box (|a|, |b|, |c| <= 1) to points of the body, m."""
    x = unit[..., 0] * shape.length / 2
    high, wide = _profile(shape, x)
    y = unit[..., 1] * wide * shape.width / 2
    return np.stack([x, y, shape.clearance + (unit[..., 2] + 1) * high * shape.height / 2], axis=-1)


def to_unit(shape, position):
    """Inverse of ``to_space``, exact: the bends depend on x alone."""
    x, y, z = np.moveaxis(position, -1, 0)
    high, wide = _profile(shape, x)
    return np.stack(
        [2 * x / shape.length, 2 * y / (shape.width * wide), 2 * (z - shape.clearance) / (shape.height * high) - 1],
        axis=-1,
    )


def radius(shape, position):
    """1 on the body, more outside; analytic."""
    return (to_unit(shape, position) ** POWER).sum(axis=-1) ** (1 / POWER)


def outward(shape, position):
    """Unit normals (..., 3) of the surface of equal radius through each position, by complex steps."""
    tiny = 1e-30
    gradient = np.stack([radius(shape, position + 1j * tiny * axis).imag / tiny for axis in np.eye(3)], axis=-1)
    return gradient / np.linalg.norm(gradient, axis=-1, keepdims=True)


def _separated(shape, position, normal):
    """0 where the flow is attached, 1 where it is separated: the base, and the slant when it is steep."""
    x, nx, nz = position[..., 0], normal[..., 0], normal[..., 2]
    stalled = _step((shape.slant_angle - 30) / 2.5)
    line = shape.slant_start + shape.slant_length * (1 - stalled)
    base = _step((nx - 0.75) / 0.05) * _step(x / 0.2)
    return 1 - (1 - base) * (1 - _step((x - line) / 0.06) * _step((nz - 0.2) / 0.05))


def surface_flow(shape, position, normal):
    """Pressure (...,) and wall shear stress (..., 3), m2/s2, OpenFOAM sign, at points of the surface."""
    x, y, z = np.moveaxis(position, -1, 0)
    nx, _, nz = np.moveaxis(normal, -1, 0)
    across = (2 * y / shape.width) ** 2
    stalled = _step((shape.slant_angle - 30) / 2.5)
    up, down = _step((nz - 0.2) / 0.05), _step((-nz - 0.5) / 0.1)
    screen = (shape.windscreen - 0.5) * shape.length
    cp = 1 - 1.22 * (1 - nx**2) - nx**2 * (0.45 * across + 0.5 * ((z - shape.clearance) / shape.height - 0.3) ** 2)
    cp -= 0.55 * up * np.exp(-((((x - screen) / shape.length - 0.09) / 0.05) ** 2))
    cp -= up * (0.9 * (1 - stalled) + 0.2) * shape.slant_angle / 30 * np.exp(-(((x - shape.slant_start) / 0.18) ** 2))
    vortex = np.exp(-(((across - 0.5) / 0.15) ** 2)) * _step((x - shape.slant_start) / 0.1)
    cp -= 0.7 * (1 - stalled) * shape.slant_angle / 30 * up * vortex
    cp -= down * 0.35 * np.exp(-shape.clearance / 0.15) * np.cos(np.pi * x / shape.length)
    separated = _separated(shape, position, normal)
    base = -0.13 - 0.14 * np.exp(-(((shape.slant_angle - 28) / 6) ** 2)) - 0.05 * stalled + 0.06 * shape.taper / 0.2
    cp = cp * (1 - separated) + separated * (base + 0.04 * ((z - shape.clearance) / shape.height - 0.5))
    q = 0.5 * U**2
    friction = 0.0576 * (U / NU * (x + 0.55 * shape.length)) ** -0.2 * (1 - 0.5 * cp) * (1 - 1.25 * separated)
    along = np.stack([1 - nx * nx, -nx * normal[..., 1], -nx * nz], axis=-1)
    return q * cp, -q * friction[..., None] * along


def volume_flow(shape, position):
    """Velocity (..., 3) m/s and pressure (...,) m2/s2 at points outside the body."""
    r = np.maximum(radius(shape, position), 1)
    foot = to_space(shape, to_unit(shape, position) / r[..., None])
    normal = outward(shape, foot)
    pressure = surface_flow(shape, foot, normal)[0] / r**3
    speed = U * np.sqrt(np.maximum(1 - pressure / (0.5 * U**2), 0))
    heading = np.array([1.0, 0, 0]) - normal * (normal[..., 0] / r**3)[..., None]
    heading /= np.sqrt((heading**2).sum(axis=-1, keepdims=True) + 0.01)
    wake = (_separated(shape, foot, normal) * np.exp(-(r - 1) / 1.2))[..., None]
    layer = (1 - np.exp(-(r - 1) / 0.04))[..., None]
    return layer * (speed[..., None] * heading * (1 - wake) - 0.15 * U * wake * np.array([1.0, 0, 0])), pressure


def exact_forces(shape, order=96, center=(0.0, 0.0, 0.0)):
    """Force sums (4, 3), N and N m (loads.force_sums), by quadrature on the six sides of the box."""
    nodes, weights = np.polynomial.legendre.leggauss(order)
    u, v = np.meshgrid(nodes, nodes, indexing="ij")
    weight = np.outer(weights, weights).ravel()
    total = np.zeros((4, 3))
    for axis in range(3):
        for side in (-1.0, 1.0):
            cube = np.insert(np.stack([u.ravel(), v.ravel()], axis=-1), axis, side, axis=1)
            position, normal, jacobian = _patch(shape, cube, axis)
            pressure, shear = surface_flow(shape, position, normal)
            total += force_sums(position, normal, jacobian * weight, pressure, shear, rho=RHO, center=center)
    return total


def _patch(shape, cube, axis):
    """Position, outward normal and area element of points on the side of the cube across ``axis``."""

    def place(c):
        return to_space(shape, c / (c**POWER).sum(axis=-1, keepdims=True) ** (1 / POWER))

    tangents = [place(cube + 1e-30j * np.eye(3)[k]).imag / 1e-30 for k in range(3) if k != axis]
    position = place(cube)
    return position, outward(shape, position), np.linalg.norm(np.cross(*tangents), axis=1)


def truth(shape):
    """Attributes of a run: constants, references, exact coefficients, and under "constant" those of CONSTANT."""
    return (
        dict(U=U, rho=RHO, nu=NU)
        | _coefficients(shape, shape.references)
        | dict(constant=_coefficients(shape, CONSTANT), parameters=asdict(shape))
    )


def _coefficients(shape, references):
    sums = exact_forces(shape, center=references["center"])
    found = load_coefficients(sums, U=U, rho=RHO, Aref=references["Aref"], Lref=references["Lref"])
    return {name: found[name] for name in ("Cd", "Cl", "Clf", "Clr", "Cs")} | references


@dataclass(frozen=True)
class Body:
    """Meshes (data.aero.geometry.Polygons, inward winding as in DrivAerML) and their float32 fields."""

    shape: Shape
    mesh: object
    pressure: np.ndarray
    shear: np.ndarray
    volume: object = None
    volume_velocity: np.ndarray | None = None
    volume_pressure: np.ndarray | None = None


def make_body(seed, number, cells=CELLS, volume=False):
    """Body ``number`` of the family ``seed``: about ``cells`` polygons, and with volume eight layers of hexahedra."""
    shape = sample_shape(seed, number)
    mesh = surface_mesh(lambda unit: to_space(shape, unit), cells, POWER, np.random.default_rng([seed, number, 1]))
    position = area_vectors(mesh)[1]
    flow = [f.astype(np.float32) for f in surface_flow(shape, position, outward(shape, position))]
    if not volume:
        return Body(shape, mesh, *flow)
    hexes = volume_mesh(lambda unit: to_space(shape, unit), cells, POWER)
    return Body(shape, mesh, *flow, hexes, *(f.astype(np.float32) for f in volume_flow(shape, vertex_mean(hexes))))


def synthetic_run(seed, number, cells=CELLS, volume=False):
    """Run (data.aero.archive) of one body, the same as through files in the DrivAerML layout."""
    body = make_body(seed, number, cells, volume)
    surface, facts = surface_arrays(body.mesh, body.pressure, body.shear, file=f"synthetic body {number}")
    arrays = None
    if volume:
        corners = triangles(body.mesh).astype(np.float32)
        arrays = volume_arrays(
            body.volume,
            body.volume_velocity,
            body.volume_pressure,
            corners,
            file=f"synthetic body {number}",
            types=np.full(len(body.volume), 12),
        )
    return Run(f"run_{number}", surface, arrays, truth(body.shape) | facts | {"sources": {}})


def synthetic_splits(runs):
    """Run ids run_1 ... in their order, about two thirds for training, a sixth each for validation and test."""
    ids = [f"run_{i}" for i in range(1, runs + 1)]
    part = max(1, runs // 6)
    return dict(train=ids[: runs - 2 * part], valid=ids[runs - 2 * part : runs - part], test=ids[runs - part :])


def synthetic_archive(path, *, runs=12, cells=CELLS, seed=0, volume=False, splits=None):
    """Write an aero archive of ``runs`` synthetic bodies of about ``cells`` surface cells each; returns its path.

    splits: run ids, as of ``synthetic_splits`` where None. Raises InputError where ``path`` exists.
    """
    bodies = (synthetic_run(seed, number, cells, volume) for number in range(1, runs + 1))
    return write_archive(
        path, bodies, splits or synthetic_splits(runs), seed=seed, attrs={"source": f"synthetic bodies, seed {seed}"}
    )
