"""Figures: the loss curve, and the look of all of them. matplotlib is imported only to draw."""

import json
from pathlib import Path

from apps.outputs import written

# of Okabe and Ito, told apart by any eye
BLUE, ORANGE, GREEN, PINK, SKY, RED = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"
LOOK = {"axes.titlesize": 11, "figure.titlesize": 12, "legend.fontsize": 10, "legend.frameon": False, "grid.alpha": 0.3}


def draw_losses(path, log):
    """The loss curve of a run's ``log.jsonl``, with its validations."""
    rows = _last_run(json.loads(line) for line in Path(log).read_text().splitlines())
    steps = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    checks = [(row["step"], row["validation"]["loss"]) for row in rows if "validation" in row]
    figure, axes = new_figure(1, 1, 7, 4)
    plot_losses(axes[0][0], steps, checks)
    axes[0][0].set_title(f"{Path(log).resolve().parent.name}, {rows[-1]['step']:,} steps")
    return save_figure(figure, path)


def plot_losses(ax, steps, checks):
    """Losses [(step, loss)] of batches and, ``checks``, of validations; logarithmic where they fall tenfold."""
    dots = {"marker": "o", "ms": 3} if len(steps) < 10 else {}
    ax.plot(*zip(*steps), lw=0.8, color="0.7", label="training, one batch", **dots)
    ax.plot(*zip(*_smooth(steps)), lw=1.8, color=BLUE, label="training, running mean")
    if checks:
        ax.plot(*zip(*checks), "o", ms=6, color=ORANGE, mec="k", mew=0.6, label="validation, averaged weights")
    ax.set(xlabel="step", ylabel="loss, of standardised fields")
    losses = [loss for _, loss in (*steps, *checks)]
    if max(losses) > 10 * min(losses):
        ax.set_yscale("log")
    else:
        ax.set_ylim(0, 1.05 * max(losses))
    ax.set_xlim(0, None)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid()
    ax.legend()


def name_points(ax, points, names, size=8, dot=4):
    """Writes names beside some of the ``points`` (n, 2) of a settled figure, where they cover no point, legend or other
    name and stay within the axes; a name for which there is no such place is left out.

    names: {row of points: (name, (right, up) of the side that it prefers, each 1 or -1)}; size, dot: of letters and of
    the radius of a point, points of print.
    """
    from matplotlib.transforms import Bbox

    legend, scale = ax.get_legend(), ax.figure.dpi / 72
    at, most = ax.transData.transform(points), dot * scale
    taken = [Bbox([place - most, place + most]) for place in at]
    taken += [legend.get_window_extent()] if legend else []
    for row, (name, (right, up)) in names.items():
        for x, y in ((right, up), (0, up), (right, 0), (-right, up), (right, -up), (-right, 0), (0, -up)):
            look = dict(ha=("center", "left", "right")[x], va=("center", "bottom", "top")[y], fontsize=size)
            shift = 5 * x, (3 if x else 6) * y
            text = ax.annotate(name, points[row], shift, textcoords="offset points", **look)
            box = text.get_window_extent()
            within = ax.bbox.contains(*box.min) and ax.bbox.contains(*box.max)
            if within and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()


def _last_run(rows):
    """A log without what a later start overtook: a run that went on from an earlier step, or began anew."""
    kept = []
    for row in rows:
        if kept and row["step"] < kept[-1]["step"]:
            kept = [old for old in kept if old["step"] < row["step"]]
        kept.append(row)
    return kept


def _smooth(points, share=0.9):
    mean, weight, out = 0.0, 0.0, []
    for at, value in points:
        mean, weight = share * mean + (1 - share) * value, share * weight + (1 - share)
        out.append((at, mean / weight))
    return out


def new_figure(rows, columns, width, height):
    """A figure (width, height in inches) and its axes (rows, columns)."""
    return _pyplot().subplots(rows, columns, figsize=(width, height), squeeze=False, layout="compressed")


def new_mosaic(names, width, height, **ratios):
    """A figure (width, height in inches) and its axes {name: axes} by the rows of ``names``; ratios: of the grid."""
    return _pyplot().subplot_mosaic(names, figsize=(width, height), layout="constrained", gridspec_kw=ratios)


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(LOOK)
    return pyplot


def save_figure(figure, path):
    """Writes a PNG and forgets the figure; returns the path."""
    from matplotlib import pyplot

    with written(path) as (part,):
        figure.savefig(part, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return Path(path)
