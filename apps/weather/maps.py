"""Maps of what was observed and forecast, still and moving, in colours whose lightness falls as values rise.

Radar is drawn in steps of 5 dBZ, cool for light rain, warm from 30 dBZ on, purple for hail, as weather services do;
each step is darker than the one below, so that it reads without telling red from green, and in grey. Clouds are bright
where they are cold, as on satellite pictures, and tops of storms, below 235 K, have colours that darken as they rise.
"""

from io import BytesIO

import numpy as np

from apps.outputs import written
from apps.report import new_figure, save_figure
from apps.weather.events import EVENTS, LEAST, SOLAR
from apps.weather.figures import SOURCES

ROWS = {
    **{name: label for name, (label, *_) in SOURCES.items()},
    **{f"member {number}": f"model, member {number}" for number in (1, 2)},
    "mean": "model, ensemble mean",
    "probability_matched_mean": "model, matched mean",
}
CHANCE = "chance"  # in place of a channel: shares from 0 to 1
UNSEEN = "#e3d5b8"  # sand
RADAR = [  # from 5 dBZ on
    "#e6f0f8", "#cfe2f1", "#b0d1e8", "#8ebfdb", "#70b1c4",
    "#d6a016", "#d0741a", "#c04a1e", "#a02532", "#7b0f43", "#560a50", "#2e083f",
]  # fmt: skip
TOPS = (190, 235, 310)  # K: the coldest, where grey begins, the warmest
COLD = tuple(name for name, events in EVENTS.items() if events.below)
STEPS = np.array([1, 2, 5, 10, 20, 50, 100, 200, 500, 1000])  # times the least that is something, of what is counted


def draw_maps(path, rows, titles, x, y, lines, channel, label):
    """Maps {source: [field (y, x), ...]}, a row each, a column per title; NaN has the colour of sand.

    x, y: map coordinates in m, ascending; lines: borders as (x, y) arrays (n, 2) in m; label: what is shown and units.
    """
    from matplotlib.patches import Patch

    height = 3.4 * len(y) / len(x)
    figure, axes = new_figure(len(rows), len(titles), 3.4 * len(titles) + 1.1, (height + 0.12) * len(rows) + 0.5)
    extent = [v / 1e3 for v in (x[0], x[-1], y[0], y[-1])]
    style = _style(channel, rows)
    for row, (source, fields) in zip(axes, rows.items()):
        for ax, field in zip(row, fields):
            ax.set_facecolor(UNSEEN)
            image = ax.imshow(field, origin="lower", extent=extent, interpolation="nearest", **style)
            _borders(ax, lines, extent)
        row[0].set_ylabel(ROWS.get(source, source), fontsize=11)
    for ax, title in zip(axes[0], titles):
        ax.set_title(title, fontsize=11)
    _scale_bar(axes[-1][0], extent)
    _bar(figure, image, axes, 0.6 if len(rows) > 2 else 1.0, label)
    if any(np.isnan(field).any() for fields in rows.values() for field in fields):
        figure.legend(handles=[Patch(color=UNSEEN, label="not observed")], loc="outside lower left", frameon=False)
    return save_figure(figure, path)


def animate(path, rows, titles, x, y, lines, channel, label):
    """The fields of `draw_maps` one lead after another, sources beside each other: a GIF that starts over."""
    from matplotlib import pyplot
    from PIL import Image

    extent, style, height = [v / 1e3 for v in (x[0], x[-1], y[0], y[-1])], _style(channel, rows), len(y) / len(x)
    across = min(len(rows), 3)
    down = -(-len(rows) // across)
    figure, axes = new_figure(down, across, 3.4 * across + 1.1, (3.4 * height + 0.35) * down + 0.4)
    images = []
    for ax in axes.flat[len(rows) :]:
        ax.set_axis_off()
    for ax, (source, fields) in zip(axes.flat, rows.items()):
        ax.set_facecolor(UNSEEN)
        images.append(ax.imshow(fields[0], origin="lower", extent=extent, interpolation="nearest", **style))
        _borders(ax, lines, extent)
        ax.set_title(ROWS.get(source, source), fontsize=11)
    _bar(figure, images[0], axes, 0.8, label)

    frames, box = [], None
    for lead, title in enumerate(titles):
        figure.suptitle(title, fontsize=12, y=1.01, va="bottom")
        for image, fields in zip(images, rows.values()):
            image.set_data(fields[lead])
        if box is None:  # the first frame is laid out, the others lie as it does, without the margins it left
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
            box = figure.get_tightbbox().padded(0.1)
        picture = BytesIO()
        figure.savefig(picture, dpi=75, bbox_inches=box)
        frames.append(Image.open(picture).convert("RGB").quantize(dither=Image.Dither.NONE))
    pyplot.close(figure)
    with written(path) as (part,):
        frames[0].save(part, "GIF", save_all=True, append_images=frames[1:], duration=500, loop=0)
    return path


def _bar(figure, image, axes, shrink, label):
    ends = getattr(image.norm, "boundaries", None)
    closed = ends is not None and ends[0] == 0  # shares
    bar = figure.colorbar(image, ax=axes, shrink=shrink, pad=0.01, extend="neither" if closed else "both")
    bar.set_label(label, fontsize=11)
    if ends is not None:
        ends = ends[0 if closed else 1 :: 2] if len(ends) > 8 else ends
        bar.set_ticks(ends, labels=[f"{end:g}" for end in ends])
    bar.minorticks_off()


def _borders(ax, lines, extent):
    """State lines, finer on a map of the country, where they would hide what lies below."""
    wide = extent[1] - extent[0] > 1500
    look = dict(color="0.3", lw=0.35) if wide else dict(color="k", lw=0.8, path_effects=_halo())
    for line in lines:
        ax.plot(line[:, 0] / 1e3, line[:, 1] / 1e3, **look)
    ax.set(xlim=extent[:2], ylim=extent[2:], xticks=[], yticks=[])


def _scale_bar(ax, extent):
    """A length that a reader knows, 1, 2 or 5 times a power of ten of km, at the lower left."""
    (left, right), (low, high) = extent[:2], extent[2:]
    size = 10 ** np.floor(np.log10((right - left) / 3))
    size *= max(k for k in (1, 2, 5) if k * size <= (right - left) / 3)
    at, level = left + 0.04 * (right - left), low + 0.06 * (high - low)
    ax.plot([at, at + size], [level] * 2, color="k", lw=3, solid_capstyle="butt", path_effects=_halo())
    ax.text(at + size / 2, level + 0.03 * (high - low), f"{size:g} km", ha="center", va="bottom", fontsize=9,
            path_effects=_halo())  # fmt: skip


def _halo():
    """White around what is black, so that it is seen on dark and light."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2.2, foreground="white", alpha=0.8)]


def _style(channel, rows):
    """Scales of what was observed, where it is there, which no forecast can stretch; less than the least is white."""
    from matplotlib import colormaps
    from matplotlib.colors import BoundaryNorm

    if channel.startswith("ref"):
        ends = np.arange(5, 5 * len(RADAR) + 6, 5)
        return dict(cmap=_open(RADAR), norm=BoundaryNorm(ends, len(RADAR)))
    if channel == CHANCE:
        colours = colormaps["BuPu"](np.linspace(0.2, 1, 10))
        return dict(cmap=_open([(1, 1, 1, 1), *colours[1:]]), norm=BoundaryNorm(np.linspace(0, 1, 11), 10))
    seen = [rows[name] for name in ("observed", "persistence") if name in rows] or rows.values()
    values = np.concatenate([np.ravel(field) for fields in seen for field in fields])
    if channel in LEAST:
        values = values[values >= LEAST[channel]]
    low, high = np.nanpercentile(values, (1, 99)) if np.isfinite(values).any() else (0, 1)
    if channel in LEAST:
        ends = LEAST[channel] * STEPS[: max(int(np.searchsorted(STEPS, high / LEAST[channel])) + 1, 3)]
        colours = colormaps["BuPu"](np.linspace(0.2, 1, len(ends) - 1))
        return dict(cmap=_open(colours), norm=BoundaryNorm(ends, len(colours)))
    if channel in COLD:
        return dict(cmap=_infrared(), vmin=TOPS[0], vmax=TOPS[2])
    cmap = "gray_r" if channel.startswith("bt") else "gray" if channel in SOLAR else "viridis"
    return dict(cmap=cmap, vmin=low, vmax=max(high, low + 1e-6))


def _infrared():
    """Brightness temperatures over TOPS: tops of storms from dark blue to yellow, all that is warmer in greys."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    cold, warm = (round(256 * span / (TOPS[2] - TOPS[0])) for span in np.diff(TOPS))
    colours = [colormaps["plasma"](np.linspace(0, 0.95, cold)), colormaps["gray_r"](np.linspace(0.05, 1, warm))]
    return ListedColormap(np.concatenate(colours))


def _open(colours):
    """Steps of colours: white below them, the last one above."""
    from matplotlib.colors import ListedColormap

    return ListedColormap(colours).with_extremes(under="white", over=colours[-1])
