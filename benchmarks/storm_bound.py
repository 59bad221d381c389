"""What a forecaster could reach on the synthetic storms who knows how they are made, at the starts of an evaluation.

``all known`` knows every cell that is born by the start, its end too, and draws those that come from the wind, clusters
and rate of the day: no model can be better but by luck. ``tracked`` knows of each cell where it is, how it moves, and
how high, wide and veiled it was in the last three frames; life, age and strength are draws from those that look alike.
"""

import argparse
import copy
import json
import sys
from pathlib import Path

import numpy as np
import torch

from apps import metrics
from apps.weather.events import EVENTS
from apps.weather.results import pick
from apps.weather.verify import score_field
from data.weather.archive import WeatherReader
from data.weather.channels import RADAR_FLOOR
from data.weather.synthetic import STEP, Sky, Storms

KEYS = ("birth", "x0", "y0", "life", "radius", "peak", "vx", "vy", "stretch", "angle")
EARLY, MARGIN = 5.0, 150.0  # h and km around a day and its map in which cells are born
ECHO = 15.0  # dB above the floor, 5 dBZ: the least that radar shows
SECONDS = STEP / np.timedelta64(1, "s")
KINDS = ("all known", "tracked")
SHOWN = {"crps": (), "spread_skill": (), "fss": (2, 1), "fss_matched_mean": (2, 1)}  # 35 dBZ, three points


class Day:
    """One storm day, with the law that its cells were drawn from: the draws of `Sky` once more."""

    def __init__(self, storms, grid, number):
        self.hours = (storms.frames - 1) * SECONDS / 3600
        seed, strange = [storms.seed, number], storms.strange(number)
        self.sky = Sky(np.random.default_rng(seed), grid, self.hours, storms.density, strange)
        rng, (x, y) = np.random.default_rng(seed), (self.sky.x, self.sky.y)
        self.wind = rng.uniform(6, 11), rng.uniform(-4, 4)
        if strange:
            self.wind = self.wind[0] + 2, -14 - self.wind[1] / 2
        self.shear = rng.normal(0, 2.5, (2, 2)) / (500 * np.ptp(x))
        area = (np.ptp(x) + 2 * MARGIN) * (np.ptp(y) + 2 * MARGIN)
        n = rng.poisson((1.5 if strange else 1) * storms.density * area * (self.hours + EARLY) / 1.4)
        self.home = rng.integers(max(3, n // 25), size=n)
        rng.uniform(-EARLY, self.hours, n)
        self.cx = rng.uniform(x[0] - MARGIN, x[-1] + MARGIN, n)[: max(3, n // 25)]
        rng.normal(0, 45, n)
        self.cy = rng.uniform(y[0] - MARGIN, y[-1] + MARGIN, n)[: max(3, n // 25)]
        self.rate = n / (self.hours + EARLY)  # born in an hour

    def cells(self, rng, n, birth):
        """``n`` new cells of this day's law, {name: (n,)}, born at ``birth`` (n,) s."""
        home, broad, strong = rng.integers(len(self.cx), size=n), rng.random(n) < 0.045, rng.random(n)
        x0, y0 = (c[home] + rng.normal(0, 45, n) for c in (self.cx, self.cy))
        away = 1e3 * np.stack([x0 - self.sky.x.mean(), y0 - self.sky.y.mean()])
        vx, vy = np.array(self.wind)[:, None] + self.shear @ away + rng.normal(0, 1.5, (2, n))
        return {
            "birth": birth, "x0": x0, "y0": y0, "vx": vx, "vy": vy,
            "life": np.where(broad, 5.0, 0.3 + 0.5 * strong) * rng.gamma(5, 1 / 5, n) * 3600 + 900,
            "radius": np.where(broad, 45.0, 3.5 + 4.0 * strong) * rng.lognormal(0, 0.3, n),
            "peak": np.where(broad, 22 + 14 * strong, 38 + 34 * strong),
            "stretch": rng.uniform(1.0, 2.2, n),
            "angle": np.arctan2(self.wind[1], self.wind[0]) + rng.normal(0.6, 0.4, n),
        }  # fmt: skip

    def radar(self, cells, seconds, rng):
        """Reflectivity of ``cells`` as the radar sees it, dBZ (y, x)."""
        sky = copy.copy(self.sky)
        sky.__dict__ |= cells
        wet = sky.at(seconds)[0] + RADAR_FLOOR
        return np.where(wet < 5, RADAR_FLOOR, wet + rng.normal(0, 1.5, wet.shape))

    def ensemble(self, kind, start, leads, members, rng):
        """Forecasts after ``start`` (s since the day's first frame): (lead, member, y, x)."""
        old = {k: getattr(self.sky, k) for k in KEYS}
        old = {k: v[(old["birth"] <= start) & (start - old["birth"] < old["life"])] for k, v in old.items()}
        alike = self.alike(old, start, members, rng) if kind == "tracked" else [old] * members
        span, out = len(leads) * SECONDS, []
        for mine in alike:
            n = rng.poisson(self.rate * span / 3600)
            born = self.cells(rng, n, start + rng.uniform(0, span, n))
            cells = {k: np.concatenate([mine[k], born[k]]) for k in KEYS}
            out.append([self.radar(cells, start + lead * SECONDS, rng) for lead in leads])
        return np.stack(out, 1)

    def alike(self, old, start, count, rng, pool=60_000):
        """Yields ``count`` times the cells ``old``, each as one of ``pool`` draws that looked like it last."""
        drawn = self.cells(rng, pool, start - rng.uniform(0, EARLY, pool) * 3600)
        picked = np.stack([rng.choice(pool, count, p=_likeness({k: old[k][i] for k in KEYS}, drawn, start))
                           for i in range(len(old["birth"]))])  # fmt: skip
        height, reach, _ = _looks(old, start)
        for chosen in picked.T:
            cells = old | {k: drawn[k][chosen] for k in ("birth", "life", "radius", "peak")}
            heights, reaches, _ = _looks(cells, start)
            both = (height >= ECHO) & (heights >= ECHO)  # then it is now what it was seen to be
            cells["peak"] = np.where(both, cells["peak"] * height / np.maximum(heights, ECHO), cells["peak"])
            cells["radius"] = np.where(both, cells["radius"] * reach / reaches, cells["radius"])
            back = (cells["birth"] - old["birth"]) / 1e3  # it is where it is, whenever it was born
            yield cells | {"x0": old["x0"] + old["vx"] * back, "y0": old["y0"] + old["vy"] * back}


def _likeness(cell, drawn, start):
    """How likely each of the cells ``drawn`` is to have been seen as ``cell``, which sums to 1."""
    cost = 0.0
    for ago in (1200, 600, 0):
        (height, reach, veil), (heights, reaches, veils) = (_looks(c, start - ago) for c in (cell, drawn))
        echo, echoes = height >= ECHO, heights >= ECHO
        cost = cost + np.where(echoes | echo, (np.where(echoes, heights, 10) - np.where(echo, height, 10)) ** 2, 0)
        cost = cost + np.where(echoes & echo, np.log(np.maximum(reaches, 0.1) / max(reach, 0.1)) ** 2 / 0.05**2, 0)
        cost = cost + (veils - veil) ** 2 / (2 * 0.02**2)
    weight = np.exp((cost.min() - cost) / 2)
    return weight / weight.sum()


def _looks(cell, seconds):
    """Height of the core (dB above the floor), its reach (km) and the cover of its anvil, as `Sky.at` has them."""
    age = (seconds - cell["birth"]) / cell["life"]
    core, veil = ((age > 0) & (age < end) for end in (1, 1.6))
    height = np.where(core, cell["peak"] * np.sin(np.pi * np.clip(age, 0, 1) ** 0.7).clip(0) ** 0.8, 0)
    cover = np.clip(cell["peak"] / 55, 0, 1) * np.sin(np.pi * np.clip(age, 0, 1.6) / 1.6)
    return height, cell["radius"] * (0.7 + 0.5 * age), np.where(veil, cover, 0)


def bound(reader, times, steps, members, seed=0):
    """{kind: scores, each (lead, ...)} of reflectivity after the starting ``times`` of an archive of made storms."""
    made = reader.attrs["provenance"]["synthetic"]
    storms, c = Storms(**made | {"channels": tuple(made["channels"])}), reader.channels.index("refc")
    leads, sums = range(1, steps + 1), {kind: [{} for _ in range(steps)] for kind in KINDS}
    for time in times:
        at = int(np.flatnonzero(reader.times == np.datetime64(time))[0])
        day, start = Day(storms, reader.grid, at // storms.frames), at % storms.frames * SECONDS
        seen = [reader.read(str(at + k), "fields", (slice(None),) * 3)[c] for k in (-2, -1, 0, *leads)]
        seen = torch.from_numpy(np.stack(seen)).double()
        known = seen[:3].isfinite().any(0)
        for kind in KINDS:
            made = day.ensemble(kind, start, leads, members, np.random.default_rng([seed, at]))
            for i, (said, truth) in enumerate(zip(torch.from_numpy(made), seen[3:])):
                own = score_field(said, truth, known & truth.isfinite(), known, EVENTS["refc"])
                sums[kind][i] = metrics.add(sums[kind][i], own)
        print(time, file=sys.stderr, flush=True)
    stacked = {kind: {k: torch.stack([row[k] for row in rows]) for k in rows[0]} for kind, rows in sums.items()}
    return {kind: metrics.scores(own) for kind, own in stacked.items()}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", help="results.json of apps.weather.evaluate, whose starts and members are taken")
    parser.add_argument("--archive", help="left out: the one that was evaluated")
    args = parser.parse_args(argv)
    told = json.loads(Path(args.results).read_text())
    reader = WeatherReader(args.archive or told["provenance"]["archive"])
    found = bound(reader, told["cases"], len(told["lead_minutes"]), told["members"]["model"])
    print(f"{'after (minutes)':32}" + "".join(f"{lead:8.0f}" for lead in told["lead_minutes"]))
    for kind, score in ((kind, score) for kind in found for score in SHOWN):
        values = (pick(row, SHOWN[score]) for row in found[kind][score])
        print(f"{kind:12}{score:20}" + "".join(f"{v:8.3f}" for v in values))


if __name__ == "__main__":
    main()
