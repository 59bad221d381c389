"""Figures of surfaces and of scores. matplotlib is imported only where something is drawn.

A body is drawn as its cells, each a disc of the cell's area and normal, those that face the viewer from far to near: no
renderer and no polygons are needed, so the same picture comes from a few thousand cells and from a sample of millions.
"""

import json
from pathlib import Path

import numpy as np

# name: what points right, what points up, what points at the viewer
VIEWS = {
    "side": ((1, 0, 0), (0, 0, 1), (0, -1, 0)),
    "top": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "rear": ((0, 1, 0), (0, 0, 1), (1, 0, 0)),
}
COLUMNS = ("true", "predicted", "predicted - true")
LIMITS = (-1.0, 1.0)


def draw_training(path, losses, log, arrays, attrs, title):
    """Losses of all steps with the validations in ``log`` (a log.jsonl), and one body: true, predicted, error.

    arrays: of predict.Surface.whole. attrs: of the run.
    """
    figure, axes = _mosaic([["loss"] * 3, list(COLUMNS)], (11, 5.8), height_ratios=[1.7, 1])
    _losses(axes["loss"], losses, Path(log))
    _bodies(figure, {"side": [axes[name] for name in COLUMNS]}, arrays, attrs, f"{title}: ")
    _save(figure, path)


def draw_surface(path, arrays, attrs, title):
    """Pressure coefficient of one body, true, predicted and error, from three sides."""
    names = [[f"{view} {name}" for name in COLUMNS] for view in VIEWS]
    heights = [_height(arrays, view) for view in VIEWS]
    figure, axes = _mosaic(names, (11, 3.5 * sum(heights) + 1.3), height_ratios=heights)
    _bodies(figure, {view: [axes[name] for name in row] for view, row in zip(VIEWS, names)}, arrays, attrs, "")
    figure.suptitle(title)
    _save(figure, path)


def draw_parity(path, cases, title):
    """Cd and Cl of all cases {run: scores}: predicted against true, and the line of no error."""
    figure, axes = _mosaic([["Cd", "Cl"]], (9.6, 4.8))
    for name, ax in axes.items():
        true, predicted = (np.array([case[key] for case in cases.values()]) for key in (f"{name}_true", name))
        both = np.concatenate([true, predicted])
        room = 0.08 * max(np.ptp(both), 0.02)
        ends = both.min() - room, both.max() + room
        ax.plot(ends, ends, color="0.6", lw=1, zorder=1)
        ax.scatter(true, predicted, s=28, zorder=2)
        for run, x, y in list(zip(cases, true, predicted))[:12]:
            side, offset = ("right", -6) if x > np.mean(ends) else ("left", 6)
            ax.annotate(run, (x, y), (offset, -3), textcoords="offset points", ha=side, fontsize=7, color="0.35")
        error = np.abs(predicted - true).mean()
        ax.set(xlim=ends, ylim=ends, aspect="equal", xlabel=f"{name}, true fields", ylabel=f"{name}, predicted")
        ax.set_title(f"{name}: mean |error| {error:.4f} over {len(cases)} cases", fontsize=10)
        ax.grid(alpha=0.3)
    figure.suptitle(title)
    _save(figure, path)


def _losses(ax, losses, log):
    ax.semilogy(range(1, len(losses) + 1), losses, lw=0.8, color="0.75", label="training, one batch")
    ax.semilogy(range(1, len(losses) + 1), _smooth(losses), lw=1.6, color="C0", label="training, running mean")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    rows = [row for row in rows if "validation" in row and row["step"] <= len(losses)]  # a log may be of two trainings
    checks = {row["step"]: row["validation"]["loss"] for row in rows}
    ax.semilogy(checks.keys(), checks.values(), "o", ms=5, color="C1", label="validation, averaged weights")
    ax.set(xlabel="step", ylabel="mean squared error, standardised")
    ax.grid(alpha=0.3, which="both")
    ax.legend(frameon=False)


def _smooth(values, keep=0.9):
    total, weight, out = 0.0, 0.0, []
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        out.append(total / weight)
    return out


def _bodies(figure, rows, arrays, attrs, title):
    """Three panels in each of ``rows`` {view: axes}, and below them one colour bar for values and one for errors."""
    scale = 0.5 * attrs["U"] ** 2
    true, predicted = arrays["pressure"] / scale, arrays["predicted"][:, 0] / scale
    limit = max(float(np.quantile(np.abs(predicted - true), 0.99)), 1e-3)
    values, limits = (true, predicted, predicted - true), (LIMITS, LIMITS, (-limit, limit))
    for view, axes in rows.items():
        discs = [
            _discs(ax, arrays, values[k], view, limits[k], "RdBu_r" if k == 2 else "turbo") for k, ax in enumerate(axes)
        ]
    for ax, name in zip(next(iter(rows.values())), COLUMNS):
        ax.set_title(f"{title}$C_p$ {name}", fontsize=10)
    for columns, shown in ((slice(0, 2), discs[0]), (slice(2, 3), discs[2])):
        below = [ax for axes in rows.values() for ax in axes[columns]]
        figure.colorbar(shown, ax=below, location="bottom", shrink=0.7, pad=0.03, aspect=30, extend="both")


def _discs(ax, arrays, values, view, limits, colours):
    from matplotlib.collections import EllipseCollection

    right, up, viewer = (np.array(v, dtype=float) for v in VIEWS[view])
    seen = np.flatnonzero(arrays["normal"] @ viewer > 0)
    seen = seen[np.argsort(arrays["position"][seen] @ viewer)]
    at = arrays["position"][seen] @ np.stack([right, up], axis=1)
    normal, size = arrays["normal"][seen], 1.7 * np.sqrt(arrays["area"][seen])
    turn = np.degrees(np.arctan2(normal @ up, normal @ right))  # a tilted disc is narrow along its normal
    place = {"units": "xy", "offsets": at, "transOffset": ax.transData}
    discs = EllipseCollection(size * (normal @ viewer), size, turn, **place, cmap=colours, lw=0)
    discs.set_array(values[seen])
    discs.set_clim(*limits)
    ax.add_collection(discs)
    ax.set(aspect="equal", xticks=[], yticks=[])
    ax.margins(0.04)
    ax.autoscale_view()
    ax.spines[:].set_visible(False)
    return discs


def _height(arrays, view):
    spans = np.ptp(arrays["position"] @ np.array(VIEWS[view][:2], dtype=float).T, axis=0)
    return spans[1] / max(spans[0], 1e-9) + 0.05


def _mosaic(names, size, **ratios):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplot_mosaic(names, figsize=size, layout="constrained", gridspec_kw=ratios)


def _save(figure, path):
    from matplotlib import pyplot

    figure.savefig(path, dpi=130, format="png")
    pyplot.close(figure)
