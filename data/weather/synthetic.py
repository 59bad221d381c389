"""Synthetic storms: cells are born, drift, grow, decay and shear apart, seen by radar, satellite and lightning.

One latent sky feeds every channel: radar sees the rain cores, the infrared their spreading anvils, the visible the same
anvils in sunlight, lightning the tallest cores. They are no observations, but persistence fails on them as it does on
radar (frames 10 minutes apart correlate 0.84, 50 minutes 0.42; MRMS rain rates at 1 km 0.77 and 0.44, dBZ at 6 km over
Texas 0.87 and 0.42) and following the wind does better. Each day has weather of its own; the last one moves as no day
of training does. Only numpy: a training machine can make them.
"""

from dataclasses import asdict, dataclass

import numpy as np

from core.errors import InputError
from data.weather.channels import CHANNELS, RADAR_FLOOR
from data.weather.grid import hrrr_crop
from data.weather.scheduler import by_lots
from data.weather.splits import date_splits
from data.weather.sun import cos_zenith
from data.weather.writer import versions, write_archive

WINDOW = dict(stride=2, rows=slice(216, 280), cols=slice(420, 516))  # 64 x 96 points at 6 km: Kansas to Missouri
STEP = np.timedelta64(10, "m")
SEEN = ("refc", "bt13", "c02", "glm")


@dataclass(frozen=True)
class Storms:
    """What to make. ``days`` storm days of ``frames`` frames at 10 minutes, ``spacing`` days apart."""

    channels: tuple[str, ...] = SEEN
    days: int = 6
    frames: int = 24
    spacing: int = 4
    start: str = "2021-05-20T18:00"
    seed: int = 0
    density: float = 2.2e-4  # cells born per km2 in 1.4 h
    missing: float = 0.03  # share of scans of a channel that never came
    hole: bool = True  # a disc that no radar sees
    unseen: bool = True  # the last of four days or more is of another regime

    def strange(self, day):
        """Whether a day is of the regime that only the test shows: fast cells from the north-west, and more of them."""
        return self.unseen and self.days >= 4 and day == self.days - 1


def build_synthetic(path, storms=None, grid=None, mode="w-", each=map):
    """Write a synthetic archive with the schema of a real one.

    storms: `Storms`; grid: `data.weather.grid.Grid` (default 64 x 96 points at 6 km); mode, each: see `write_archive`;
    the same archive whatever makes it.
    A tenth of the days, one at least, is the valid split; after it come as many of the test split and one more, of a
    regime that training never sees; three days have no such one. Raises `InputError`.
    """
    storms, grid = storms or Storms(), grid or hrrr_crop(**WINDOW)
    if storms.days < 3:
        raise InputError("leave no day for validation or test", variable="days", remedy="Make at least 3")
    for name in storms.channels:
        if name not in SEEN:
            raise InputError("is not made", variable=name, remedy=f"Choose among {', '.join(SEEN)}")
    first = np.datetime64(storms.start, "s") + np.arange(storms.days) * np.timedelta64(storms.spacing, "D")
    times = (first[:, None] + np.arange(storms.frames) * STEP).reshape(storms.days, -1)
    held = max(storms.days // 10, 1)
    test = storms.days - held - (storms.days >= 4)
    days = (0, test - held - 1), (test - held, test - 1), (test, storms.days - 1)
    splits = date_splits(*((times[a, 0], times[b, -1]) for a, b in days))
    strange = [[str(t[0]), str(t[-1])] for day, t in enumerate(times) if storms.strange(day)]
    made = {"synthetic": asdict(storms), "unseen_regime": strange, "versions": versions()}
    about = {"title": "synthetic storms", "provenance": made, "step_minutes": 10}
    channels = [CHANNELS[name] for name in storms.channels]
    write_archive(
        path, grid, channels, times.ravel(), _Frames(storms, grid, times), splits, mode=mode, attrs=about,
        key=f"{storms}", each=by_lots(each, storms.frames),
    )  # fmt: skip


class _Frames:
    """The frames of all days by number; those of the last day that was asked for are kept."""

    def __init__(self, storms, grid, times):
        self.storms, self.grid, self.times = storms, grid, times
        self.day, self.frames = None, []

    def __call__(self, i):
        day, frame = divmod(i, self.storms.frames)
        if day != self.day:
            self.day, self.frames = day, list(day_frames(self.storms, self.grid, day, self.times[day]))
        return self.frames[frame], {}


def day_frames(storms, grid, day, times):
    """Yield the frames (channel, y, x) float32 of one storm day; the same for the same seed, day and grid."""
    rng = np.random.default_rng([storms.seed, day])
    seconds = (times - times[0]) / np.timedelta64(1, "s")
    sky = Sky(rng, grid, seconds[-1] / 3600, storms.density, storms.strange(day))
    hole = radar_hole(storms, grid)
    for time, since in zip(times, seconds):
        rain, anvil = sky.at(since)
        views = _observe(rng, grid, time, rain, anvil, storms.channels)
        for name in storms.channels:
            if name == "refc":
                views[name][hole] = np.nan
            if rng.random() < storms.missing:
                views[name][:] = np.nan
        yield np.stack([views[name] for name in storms.channels]).astype(np.float32)


class Sky:
    """Cells of one day: where and when each is born, how it moves, how wide and how strong it becomes."""

    def __init__(self, rng, grid, hours, density, strange=False):
        self.x, self.y = grid.x / 1e3, grid.y / 1e3  # km
        wind = rng.uniform(6, 11), rng.uniform(-4, 4)  # m/s, steering wind
        if strange:
            wind, density = (wind[0] + 2, -14 - wind[1] / 2), 1.5 * density
        shear = rng.normal(0, 2.5, (2, 2)) / (500 * np.ptp(self.x))  # 1/s: 2.5 m/s from centre to edge
        margin, early = 150.0, 5.0  # km, h: room and time for cells to come in
        width, height = np.ptp(self.x) + 2 * margin, np.ptp(self.y) + 2 * margin
        n = rng.poisson(density * width * height * (hours + early) / 1.4)
        home = rng.integers(max(3, n // 25), size=n)  # cells come in clusters, as storms do
        self.birth = rng.uniform(-early, hours, n) * 3600
        self.x0 = rng.uniform(self.x[0] - margin, self.x[-1] + margin, n)[home] + rng.normal(0, 45, n)
        self.y0 = rng.uniform(self.y[0] - margin, self.y[-1] + margin, n)[home] + rng.normal(0, 45, n)
        broad = rng.random(n) < 0.045  # wide, weak, long-lived rain among the cores
        strong = rng.random(n)  # strong cores are also wider and live longer
        self.life = np.where(broad, 5.0, 0.3 + 0.5 * strong) * rng.gamma(5, 1 / 5, n) * 3600 + 900  # s
        self.radius = np.where(broad, 45.0, 3.5 + 4.0 * strong) * rng.lognormal(0, 0.3, n)  # km
        self.peak = np.where(broad, 22 + 14 * strong, 38 + 34 * strong)  # dB above the floor
        away = 1e3 * np.stack([self.x0 - self.x.mean(), self.y0 - self.y.mean()])  # m from the centre
        own = rng.normal(0, 1.5, (2, n))  # m/s, each cell's own way
        self.vx, self.vy = np.array(wind)[:, None] + shear @ away + own
        self.stretch = rng.uniform(1.0, 2.2, n)
        self.angle = np.arctan2(wind[1], wind[0]) + rng.normal(0.6, 0.4, n)

    def at(self, seconds):
        """Rain cores in dBZ above the floor, and anvil cover 0..1, both (y, x), at a time."""
        rain = np.zeros((len(self.y), len(self.x)))
        anvil = np.zeros_like(rain)
        age = (seconds - self.birth) / self.life
        east = self.x0 + self.vx * (seconds - self.birth) / 1e3
        north = self.y0 + self.vy * (seconds - self.birth) / 1e3
        for i in np.flatnonzero((age > 0) & (age < 1.6)):
            x, y = east[i], north[i]
            if age[i] < 1:
                growth = np.sin(np.pi * age[i] ** 0.7) ** 0.8
                reach = self.radius[i] * (0.7 + 0.5 * age[i])
                self._stamp(rain, i, x, y, reach, self.peak[i] * growth, self.stretch[i], np.maximum)
            cover = np.clip(self.peak[i] / 55, 0, 1) * np.sin(np.pi * age[i] / 1.6)  # later, wider, downwind
            ahead = 12.0 * self.life[i] * age[i] / 3600
            self._stamp(anvil, i, x + ahead, y, self.radius[i] * (1.2 + 0.9 * age[i]), cover, 1.3, _veil)
        return rain, anvil

    def _stamp(self, field, i, x, y, reach, height, stretch, join):
        """Join one elliptic bump into the part of the field that it reaches."""
        far = 3 * reach * stretch
        rows = slice(*np.searchsorted(self.y, (y - far, y + far)))
        cols = slice(*np.searchsorted(self.x, (x - far, x + far)))
        dy, dx = self.y[rows, None] - y, self.x[cols] - x
        if dy.size == 0 or dx.size == 0:
            return
        c, s = np.cos(self.angle[i]), np.sin(self.angle[i])
        r2 = ((c * dx + s * dy) / stretch) ** 2 + (c * dy - s * dx) ** 2
        field[rows, cols] = join(field[rows, cols], height * np.exp(-r2 / (2 * reach**2)))


def _veil(a, b):
    """Two semi-transparent covers, one over the other."""
    return 1 - (1 - a) * (1 - b)


def _observe(rng, grid, time, rain, anvil, names):
    """What each instrument reports of the sky, {channel: (y, x)}."""
    wet = rain + RADAR_FLOOR
    sun = cos_zenith(grid.latitude, grid.longitude, time)
    warm = 303 - 0.7 * (grid.latitude - 38.5) + 4 * np.clip(sun, 0, 1)
    top = 245 - 0.75 * np.clip(rain, 0, 60)  # the taller the core, the colder its top
    views = {
        "refc": np.where(wet < 5, RADAR_FLOOR, wet + rng.normal(0, 1.5, wet.shape)),
        "bt13": warm + anvil * (top - warm) + rng.normal(0, 0.3, wet.shape),
        "c02": np.clip(sun, 0, None) * (0.08 + 0.77 * anvil) + rng.normal(0, 0.003, wet.shape),
        "glm": rng.poisson(0.3 * np.clip(wet - 30, 0, None) ** 1.5).astype(float),
    }
    return {name: views[name] for name in names}


def radar_hole(storms, grid):
    """Cells that no radar ever sees, bool (ny, nx): a disc, a sixth of the window across; none without ``hole``."""
    ny, nx = grid.shape
    rng = np.random.default_rng([storms.seed, 2**31])
    y, x = rng.integers(ny // 4, ny), rng.integers(nx // 4, nx)
    return storms.hole & (np.hypot(np.arange(ny)[:, None] - y, np.arange(nx) - x) < min(ny, nx) / 12)
