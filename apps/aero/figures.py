"""Figures of surfaces and of scores. matplotlib is imported only where something is drawn.

A body is drawn as its cells, each a disc of the cell's area, those that face the viewer from far to near: no renderer
and no polygons are needed, so the same picture comes from a few thousand cells and from a sample of millions.
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
LIMITS = (-1.0, 1.0)


def draw_training(path, losses, log, arrays, attrs, title):
    """Losses of all steps with the validations in ``log`` (a log.jsonl), and one body: true, predicted, error.

    arrays: of predict.Surface.whole. attrs: of the run.
    """
    figure, axes = _mosaic([["loss"] * 3, ["true", "predicted", "error"]], (11, 5.6), height_ratios=[1.6, 1])
    _losses(axes["loss"], losses, Path(log))
    panels = [axes[name] for name in ("true", "predicted", "error")]
    _row(figure, panels, arrays, attrs, "side", f"{title}: $C_p$", "bottom")
    _save(figure, path)


def draw_surface(path, arrays, attrs, title):
    """Pressure coefficient of one body, true, predicted and error, from three sides."""
    names = [[f"{view} {name}" for name in ("true", "predicted", "error")] for view in VIEWS]
    figure, axes = _mosaic(names, (11, 9.5), height_ratios=[_height(arrays, view) for view in VIEWS])
    for row, view in zip(names, VIEWS):
        _row(figure, [axes[name] for name in row], arrays, attrs, view, "$C_p$" if view == "side" else None, "right")
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
            ax.annotate(run, (x, y), xytext=(5, -9), textcoords="offset points", fontsize=7, color="0.35")
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
    checks = {row["step"]: row["validation"]["loss"] for row in rows if "validation" in row}
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


def _row(figure, axes, arrays, attrs, view, title, bars):
    """Three panels of one view, titled where ``title`` is given, with colour bars at their side ``bars``."""
    scale = 0.5 * attrs["U"] ** 2
    true, predicted = arrays["pressure"] / scale, arrays["predicted"][:, 0] / scale
    error = predicted - true
    limit = max(float(np.quantile(np.abs(error), 0.99)), 1e-3)
    panels = (("true", true, LIMITS), ("predicted", predicted, LIMITS), ("predicted - true", error, (-limit, limit)))
    for ax, (name, values, limits) in zip(axes, panels):
        discs = _discs(ax, arrays, values, view, limits, "RdBu_r" if ax is axes[2] else "turbo")
        if title:
            ax.set_title(f"{title} {name}", fontsize=10)
        if ax is not axes[0]:
            part = axes[:2] if ax is axes[1] else [ax]
            figure.colorbar(discs, ax=part, location=bars, shrink=0.7, pad=0.02, aspect=25, extend="both")


def _discs(ax, arrays, values, view, limits, colours):
    from matplotlib.collections import EllipseCollection

    right, up, viewer = (np.array(v, dtype=float) for v in VIEWS[view])
    seen = np.flatnonzero(arrays["normal"] @ viewer > 0)
    seen = seen[np.argsort(arrays["position"][seen] @ viewer)]
    at = arrays["position"][seen] @ np.stack([right, up], axis=1)
    width = 1.7 * np.sqrt(arrays["area"][seen])
    discs = EllipseCollection(
        width, width, np.zeros(len(seen)), units="xy", offsets=at, transOffset=ax.transData, cmap=colours, lw=0
    )
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
