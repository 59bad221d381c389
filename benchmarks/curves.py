"""The figure of :mod:`benchmarks.many`: time against ranks, with the lines that a perfect cut would give.

A panel for each kind of case and a colour for each case; attention by several strategies, and data groups, differ by
marker and dashes. Dotted: the time on the smallest domain, divided as the points of a rank are.
"""

import re
from itertools import product

from apps.report import BLUE, GREEN, ORANGE, PINK, RED, SKY, new_figure, save_figure

COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, RED)
STYLES = {"": ("o", "-"), "ring": ("o", "-"), "heads": ("s", "--"), "gather": ("^", "-."), "ddp": ("D", "--")}


def draw_curves(path, rows, facts):
    """Draws the rows of ``benchmarks.many`` as a PNG; facts: "ranks", "machine" and "how" of the run."""
    kinds = {}
    for label, row in rows.items():
        if any("ms" in point for point in row["curve"]):
            kinds.setdefault(row["kind"], []).append((label, row["curve"]))
    columns = min(3, max(len(kinds), 1))
    lines = -(-max(len(kinds), 1) // columns)
    figure, axes = new_figure(lines, columns, 4.6 * columns, 4.3 * lines)
    axes = list(axes.flat)
    for ax, (kind, curves) in zip(axes, kinds.items()):
        _panel(ax, kind, curves)
    for ax in axes[len(kinds) :]:
        ax.set_axis_off()
    figure.suptitle(f"{facts['ranks']} x {facts['machine']}, {facts['how']}", fontsize=11)
    return save_figure(figure, path)


def _panel(ax, kind, curves):
    colours = {}
    for label, curve in curves:
        name, _, way = label.partition(", ")
        known = [point for point in curve if "ms" in point]
        fresh = name not in colours
        colour = colours.setdefault(name, COLOURS[len(colours) % len(COLOURS)])
        times = [point["ms"][0 if kind == "inference" else 1] for point in known]
        marker, dashes = STYLES[way]
        style = dict(marker=marker, ms=5, mfc="none", lw=1.4, color=colour)
        ax.plot(_ranks(known), times, dashes, label=_words(label.removeprefix(f"{kind} ")), **style)
        if fresh:
            ax.plot(_ranks(curve), _ideal(curve, known[0], times[0]), ":", lw=1.1, color=colour)
    ax.plot([], [], ":", lw=1.1, color="0.4", label="ideal")
    _scales(ax, _ranks(curves[0][1]))
    ax.set_title("exact inference" if kind == "inference" else f"{kind}, training step", fontsize=10)
    ax.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def _ranks(points):
    return [point["domain"] for point in points]


def _ideal(curve, first, time):
    """Times of all sizes if a point took as long everywhere as on the first."""
    each = [point["points"] / point["domain"] for point in curve]
    return [time * n / (first["points"] / first["domain"]) for n in each]


def _scales(ax, ranks):
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(ranks, [str(n) for n in ranks])
    low, high = ax.get_ylim()
    steps = (1, 2, 5) if high < 100 * low else (1,)
    marks = [m * 10.0**k for k, m in product(range(-4, 8), steps) if low <= m * 10.0**k <= high]
    ax.set_yticks(marks, [f"{mark:,g}" for mark in marks])
    ax.minorticks_off()
    ax.set(xlabel="ranks that share a sample", ylabel="time (ms)")
    ax.grid()


def _words(label):
    """With commas in large numbers."""
    return re.sub(r"\d{5,}", lambda found: f"{int(found[0]):,}", label)
