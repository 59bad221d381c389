"""``python -m apps.weather.look --forecast runs/forecast.zarr``: pictures of a forecast, its members and its chances.

For each channel a map of two members and of their mean (of radar with its own places and the members' values) at three
leads; for channels with events another of the share of members that have the event somewhere within 20 km.
"""

from dataclasses import dataclass, field
from importlib.util import find_spec

import numpy as np

from apps.cli import parse
from apps.weather import maps
from apps.weather.events import EVENTS
from apps.weather.figures import in_units
from apps.weather.products import RADIUS_KM, make
from apps.weather.stored import Stored
from core import InputError
from core.command import command
from data.weather.channels import CHANNELS
from data.weather.grid import HRRR_CRS
from data.weather.states import state_lines_xy


@dataclass
class LookConfig:
    """Options of python -m apps.weather.look."""

    forecast: tuple[str, ...] = field(metadata={"help": "files of apps.weather.forecast; pictures go beside them"})


@command
def main(argv=None):
    config = parse(LookConfig, argv, __doc__.splitlines()[0])
    if find_spec("matplotlib") is None:
        raise InputError("pictures need matplotlib", remedy="pip install matplotlib")
    for path in config.forecast:
        for picture in draw(Stored(path)):
            print(f"figure {picture}")


def draw(file):
    """Writes NAME_refc.png, NAME_refc_chance.png and so on beside a `Stored` forecast; returns their paths."""
    data, made = file.data, []
    leads = sorted({0, (file.steps - 1) // 2, file.steps - 1})
    titles = [_title(file.start, float(data.lead_time[lead])) for lead in leads]
    x, y = data.x.values, data.y.values
    on_map = all(data.crs.attrs.get(name) == value for name, value in HRRR_CRS.items())
    place = x, y, state_lines_xy(data) if on_map else []
    for channel in file.channels:
        unit, name = data[channel].attrs["units"], CHANNELS[channel].long_name.replace(" um", " µm")
        members = [data[channel][0, lead].values.astype(float) for lead in leads]
        found = [make(channel, fields, (x[1] - x[0]) / 1e3) for fields in members]
        best = "probability_matched_mean" if channel.startswith("ref") else "mean"
        rows = {f"member {m + 1}": [fields[m] for fields in members] for m in range(min(file.members, 2))}
        rows |= {best: [products[best] for products in found]}
        path = file.path.with_name(f"{file.path.stem}_{channel}.png")
        made.append(maps.draw_maps(path, rows, titles, *place, channel, name + in_units(unit)))
        if channel in EVENTS:
            chances = [products["neighborhood_maximum_probability"] for products in found]
            side = "<" if EVENTS[channel].below else "≥"
            rows = {f"{side} {t:g} {unit}": [c[i] for c in chances] for i, t in enumerate(EVENTS[channel].thresholds)}
            path = path.with_name(f"{path.stem}_chance.png")
            label = f"share of {file.members} members with the event within {RADIUS_KM:g} km"
            made.append(maps.draw_maps(path, rows, titles, *place, maps.CHANCE, label))
    return made


def _title(start, minutes):
    time = str(start + np.timedelta64(round(minutes), "m"))[:16].replace("T", " ")
    return f"{time} UTC, +{minutes:g} min"


if __name__ == "__main__":
    main()
