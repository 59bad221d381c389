"""Figures from results: loss curves, maps, scores against lead. matplotlib is imported only where something is drawn."""

import json
import os
from pathlib import Path


def draw_losses(path, log):
    """The loss curve of a run's ``log.jsonl``, with its validations."""
    rows = [json.loads(line) for line in Path(log).read_text().splitlines()]
    steps = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    checks = [(row["step"], row["validation"]["loss"]) for row in rows if "validation" in row]
    figure, axes = _figure(1, 1, 7, 4)
    ax = axes[0][0]
    ax.plot(*zip(*steps), lw=1, color="0.6", label="training, one batch")
    ax.plot(*zip(*_smooth(steps)), lw=1.8, color="C0", label="training, running mean")
    if checks:
        ax.plot(*zip(*checks), "o", color="C1", label="validation")
    ax.set(xlabel="step", ylabel="loss", yscale="log")
    ax.grid(alpha=0.3, which="both")
    ax.legend(frameon=False)
    return _save(figure, path)


def _smooth(points, share=0.9):
    mean, weight, out = 0.0, 0.0, []
    for at, value in points:
        mean, weight = share * mean + (1 - share) * value, share * weight + (1 - share)
        out.append((at, mean / weight))
    return out


def _figure(rows, columns, width, height):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained")


def _save(figure, path):
    """Written beside and renamed, as every output."""
    from matplotlib import pyplot

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.partial.png")
    figure.savefig(part, dpi=130)
    pyplot.close(figure)
    os.replace(part, path)
    return path
