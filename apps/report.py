"""Figures: the loss curve, and how every figure is opened and stored. matplotlib is imported only to draw."""

import json
from pathlib import Path

from apps.outputs import written


def draw_losses(path, log):
    """The loss curve of a run's ``log.jsonl``, with its validations."""
    rows = _last_run(json.loads(line) for line in Path(log).read_text().splitlines())
    steps = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    checks = [(row["step"], row["validation"]["loss"]) for row in rows if "validation" in row]
    figure, axes = new_figure(1, 1, 7, 4)
    ax = axes[0][0]
    ax.plot(*zip(*steps), lw=1, color="0.6", label="training, one batch")
    ax.plot(*zip(*_smooth(steps)), lw=1.8, color="C0", label="training, running mean")
    if checks:
        ax.plot(*zip(*checks), "o", color="C1", label="validation")
    ax.set(xlabel="step", ylabel="loss", ylim=(0, None))
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    return save_figure(figure, path)


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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="compressed")


def save_figure(figure, path):
    """Writes a PNG and forgets the figure; returns the path."""
    from matplotlib import pyplot

    with written(path) as (part,):
        figure.savefig(part, dpi=110, bbox_inches="tight")
    pyplot.close(figure)
    return Path(path)
