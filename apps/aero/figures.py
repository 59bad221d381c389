"""Figures of surfaces and of scores. matplotlib is imported only where something is drawn.

A body is drawn as its cells, those that face the viewer from far to near: as the triangles that they are where these
are few and known, else each as a disc of the cell's area and normal. No renderer and no polygons are needed, so the
same picture comes from a few thousand cells and from a sample of millions.
"""

import json
from pathlib import Path

import numpy as np

from apps.aero.slices import Slice
from data.aero.resample import fans

# name: what points right, what points up, what points at the viewer
VIEWS = {
    "side": ((1, 0, 0), (0, 0, 1), (0, -1, 0)),
    "top": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "rear": ((0, 1, 0), (0, 0, 1), (1, 0, 0)),
}
COLUMNS = ("true", "predicted", "predicted - true")
LIMITS = (-1.0, 1.0)
# perceptually even and legible to the colour-blind: fields, friction, and errors about zero
FIELD, FRICTION, ERROR = "viridis", "magma", "RdBu_r"
LABELS = {FIELD: "$C_p$", FRICTION: "$|C_f|$", ERROR: "$\\Delta C_p$"}
MOST_TRIANGLES, MOST_DISCS = 60_000, 40_000


def sampled(arrays, mesh, frame):
    """What is drawn of a body: its triangles where they are few, else a random sample of its cells, areas scaled up.

    arrays: of Solution.arrays; mesh: its Polygons, or None; frame (3, 3): from the frame of the mesh to that of arrays.
    """
    rows = len(arrays["area"])
    if mesh is not None and len(mesh.connectivity) <= 3 * MOST_TRIANGLES:
        corners, cell = (np.concatenate(parts) for parts in zip(*fans(mesh)))
        row = np.full(len(mesh), -1)
        row[arrays["cell_id"]] = np.arange(rows)
        drawn = row[cell] >= 0
        corners, row = corners[drawn] @ frame.T, row[cell][drawn]
        return {name: values[row] for name, values in arrays.items()} | {"corners": corners}
    if rows <= MOST_DISCS:
        return arrays
    taken = np.random.default_rng(0).choice(rows, MOST_DISCS, replace=False)
    return {name: values[taken] for name, values in arrays.items()} | {
        "area": arrays["area"][taken] * rows / MOST_DISCS
    }


def draw_training(path, losses, log, arrays, attrs, title):
    """Losses of all steps with the validations in ``log`` (a log.jsonl), and one body: true, predicted, error.

    arrays: of predict.Surface.whole. attrs: of the run.
    """
    figure, axes = _mosaic([["loss"] * 3, list(COLUMNS)], (11, 5.8), height_ratios=[1.7, 1])
    _losses(axes["loss"], losses, Path(log))
    if "area" in arrays:
        _bodies(figure, {"side": [axes[name] for name in COLUMNS]}, arrays, _columns(arrays, attrs, f"{title}: "))
    else:
        _slab(figure, [axes[name] for name in COLUMNS], arrays, attrs, f"{title}: ")
    _save(figure, path)


def draw_volume(path, arrays, attrs, title):
    """Velocity along the flow in the middle plane of a volume: true, predicted and error, or predicted alone."""
    names = COLUMNS if "velocity" in arrays else COLUMNS[1:2]
    figure, axes = _mosaic([[name] for name in names], (9, 3.1 * len(names) + 0.4))
    _slab(figure, list(axes.values()), arrays, attrs, "")
    figure.suptitle(title)
    _save(figure, path)


def draw_profiles(path, profiles, title):
    """Curves of apps.aero.profiles: Cp along the centreline, suction upward, and u / U on lines in the wake."""
    lines = profiles.get("wake", {"lines": []})["lines"]
    names = [*(["centreline"] if "centreline" in profiles else []), *range(len(lines))]
    size, widths = (5 + 2 * len(names), 4), [3 if n == "centreline" else 1 for n in names]
    figure, axes = _mosaic([names], size, width_ratios=widths)
    if "centreline" in profiles:
        ax, curves = axes["centreline"], profiles["centreline"]
        for colour, side in (("C0", "upper"), ("C1", "under")):
            _curve(ax, curves["x"], curves[side], colour, f"{side} side, ")
        ax.invert_yaxis()
        ax.set(xlabel="x, m", ylabel="$C_p$", title=_with_r2("centreline", curves["r2"]))
        ax.legend(frameon=False, fontsize=8)
    for number, line in enumerate(lines):
        z = profiles["wake"]["z"]
        _curve(axes[number], z, line, "C0", "", upright=True)
        axes[number].set(xlabel="$u / U$", title=f"x = {line['x']:.2f} m", ylim=(z[0], z[-1]), xlim=(-0.4, 1.2))
        axes[number].tick_params(labelleft=number == 0)
    if lines:
        axes[0].set(ylabel="z, m", title=_with_r2(f"x = {lines[0]['x']:.2f} m", profiles["wake"]["r2"]))
        axes[0].legend(frameon=False, fontsize=8)
    for ax in axes.values():
        ax.grid(alpha=0.3)
        ax.title.set_fontsize(10)
    figure.suptitle(title)
    _save(figure, path)


def _curve(ax, along, curve, colour, side, upright=False):
    """True values solid, predicted ones dashed; upright: along the vertical axis, the true ones black."""
    for kind, style, paint in (("true", "-", "k" if upright else colour), ("predicted", "--", colour)):
        there = [(x, v) for x, v in zip(along, curve[kind]) if v is not None]  # a coarse mesh has no cell in some bins
        place, values = zip(*there) if there else ((), ())
        pair = (values, place) if upright else (place, values)
        ax.plot(*pair, style, color=paint, marker=".", ms=4, lw=1.2, label=f"{side}{kind}")


def _with_r2(name, value):
    return name if value is None else f"{name}, R2 {value:.3f}"


def _slab(figure, axes, arrays, attrs, title):
    """The middle plane in side view, u / U: true, predicted and error, or predicted alone."""
    plane = Slice(arrays["position"], arrays["sdf"])
    predicted = arrays["predicted"][:, 1] / attrs["U"]
    shown = [("predicted", predicted, (-0.3, 1.4), FIELD)]
    if "velocity" in arrays:
        true = arrays["velocity"][:, 0] / attrs["U"]
        limit = max(float(np.quantile(np.abs(predicted - true)[plane.rows], 0.99)), 1e-3)
        shown = [("true", true, *shown[0][2:]), *shown, (COLUMNS[2], predicted - true, (-limit, limit), ERROR)]
    for ax, (name, values, limits, colours) in zip(axes, shown):
        place = dict(extent=plane.extent, origin="lower", interpolation="nearest")
        image = ax.imshow(plane.image(values), cmap=colours, vmin=limits[0], vmax=limits[1], **place)
        ax.set(aspect="equal", xlabel="x, m (grey: body, or no point near)", ylabel="z, m", facecolor="0.85")
        ax.set_title(f"{title}{name}", fontsize=10)
        label = "$\\Delta u / U$" if colours == ERROR else "$u / U$"
        figure.colorbar(image, ax=ax, shrink=0.85, pad=0.02, extend="both", label=label)


def draw_surface(path, arrays, attrs, title):
    """One body from three sides: pressure coefficient true, predicted and error; where the true fields are not known,
    the predicted coefficients of pressure and, by size, of friction."""
    columns = _columns(arrays, attrs, "")
    names = [[f"{view} {name}" for name, *_ in columns] for view in VIEWS]
    heights = [_height(arrays, view) for view in VIEWS]
    size = 11 / 3 * len(columns), 3.5 * sum(heights) + 1.3
    figure, axes = _mosaic(names, size, height_ratios=heights)
    _bodies(figure, {view: [axes[name] for name in row] for view, row in zip(VIEWS, names)}, arrays, columns)
    figure.suptitle(title)
    _save(figure, path)


def draw_parity(path, cases, title):
    """Cd, Cl and pitch of all cases {run: scores}: predicted against true, the line of no error and of Cd 3 counts."""
    figure, axes = _mosaic([["Cd", "Cl", "CmPitch"]], (14, 4.8))
    for name, ax in axes.items():
        true, predicted = (np.array([case[key] for case in cases.values()]) for key in (f"{name}_true", name))
        both = np.concatenate([true, predicted])
        room = 0.08 * max(np.ptp(both), 0.02)
        ends = np.array([both.min() - room, both.max() + room])
        if name == "Cd":
            ax.fill_between(ends, ends - 0.003, ends + 0.003, color="0.9", lw=0, label="3 counts")
            ax.legend(frameon=False, loc="upper left", fontsize=8)
        ax.plot(ends, ends, color="0.6", lw=1, zorder=1)
        ax.scatter(true, predicted, s=28, zorder=2)
        for k, (run, x, y) in enumerate(sorted(zip(cases, true, predicted), key=lambda case: case[1])[:12]):
            ax.annotate(run, (x, y), (0, 6 if k % 2 else -12), textcoords="offset points", ha="center", fontsize=8)
        error = np.abs(predicted - true).mean()
        ax.locator_params(nbins=5)
        ax.set(xlim=ends, ylim=ends, aspect="equal", xlabel=f"{name}, true fields", ylabel=f"{name}, predicted")
        ax.set_title(f"{name}: mean |error| {error:.4f} over {len(cases)} cases", fontsize=10)
        ax.grid(alpha=0.3)
    figure.suptitle(title)
    _save(figure, path)


def draw_trend(path, cases, others, title):
    """Cd of the cases in the order of their true values: true, predicted, and as ``others`` {label: {run: Cd}} say."""
    figure, axes = _mosaic([["Cd"]], (max(7, min(14, 0.35 * len(cases) + 4)), 4.2))
    ax, runs = axes["Cd"], sorted(cases, key=lambda run: cases[run]["Cd_true"])
    place = np.arange(len(runs))
    for (label, values), colour in zip(others.items(), ("0.7", "C2")):
        ax.plot(place, [values[run] for run in runs], "x--", color=colour, lw=0.8, ms=5, label=label)
    ax.plot(place, [cases[run]["Cd"] for run in runs], "o", color="C0", label="predicted")
    ax.plot(place, [cases[run]["Cd_true"] for run in runs], "_-", color="k", lw=1.2, ms=12, label="true fields")
    ax.set_xticks(place, runs, rotation=90 if len(runs) > 8 else 0, fontsize=8)
    ax.set(ylabel="Cd", title=title)
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, fontsize=8)
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


def _columns(arrays, attrs, title):
    """Columns of a picture, a list of (title, values (n,), limits, colours)."""
    q = 0.5 * attrs["U"] ** 2
    predicted = arrays["predicted"][:, 0] / q
    if "pressure" not in arrays:
        friction = np.linalg.norm(arrays["predicted"][:, 1:], axis=1) / q
        limits = 0.0, max(float(np.quantile(friction, 0.99)), 1e-6)
        names = (f"{title}$C_p$ predicted", f"{title}$|C_f|$ predicted")
        return [(names[0], predicted, LIMITS, FIELD), (names[1], friction, limits, FRICTION)]
    true = arrays["pressure"] / q
    limit = max(float(np.quantile(np.abs(predicted - true), 0.99)), 1e-3)
    names = [f"{title}$C_p$ {name}" for name in COLUMNS]
    shown = ((true, LIMITS, FIELD), (predicted, LIMITS, FIELD), (predicted - true, (-limit, limit), ERROR))
    return [(name, *rest) for name, rest in zip(names, shown)]


def _bodies(figure, rows, arrays, columns):
    """The body in each of ``rows`` {view: axes of all columns}, with a colour bar below columns of the same scale."""
    from matplotlib.ticker import MaxNLocator

    for view, axes in rows.items():
        shown = [_cells(ax, arrays, view, *column[1:]) for ax, column in zip(axes, columns)]
        axes[0].set_ylabel(view)
    for ax, column in zip(next(iter(rows.values())), columns):
        ax.set_title(column[0], fontsize=10)
    for scale in dict.fromkeys(column[2:] for column in columns):
        alike = [k for k, column in enumerate(columns) if column[2:] == scale]
        below = [axes[k] for axes in rows.values() for k in alike]
        extend = "max" if scale[0][0] == 0 else "both"
        options = dict(location="bottom", shrink=0.7, pad=0.03, aspect=30, extend=extend, label=LABELS[scale[1]])
        options["ticks"] = MaxNLocator(4)
        figure.colorbar(shown[alike[0]], ax=below, **options)


def _cells(ax, arrays, view, values, limits, colours):
    from matplotlib.collections import EllipseCollection, PolyCollection

    right, up, viewer = (np.array(v, dtype=float) for v in VIEWS[view])
    place = arrays["corners"].mean(axis=1) if "corners" in arrays else arrays["position"]
    seen = np.flatnonzero(arrays["normal"] @ viewer > 0)
    seen = seen[np.argsort(place[seen] @ viewer)]
    plane = np.stack([right, up], axis=1)
    if "corners" in arrays:
        cells = PolyCollection(arrays["corners"][seen] @ plane, cmap=colours, lw=0, antialiased=False)
    else:
        overlap = 3.0 if len(values) >= MOST_DISCS else 1.7  # a random sample has gaps, which larger discs close
        normal, size = arrays["normal"][seen], overlap * np.sqrt(arrays["area"][seen])
        turn = np.degrees(np.arctan2(normal @ up, normal @ right))  # a tilted disc is narrow along its normal
        where = {"units": "xy", "offsets": place[seen] @ plane, "transOffset": ax.transData}
        cells = EllipseCollection(size * (normal @ viewer), size, turn, **where, cmap=colours, lw=0)
    cells.set_array(values[seen])
    cells.set_clim(*limits)
    ax.add_collection(cells)
    ax.set(aspect="equal", xticks=[], yticks=[])
    ax.margins(0.04)
    ax.autoscale_view()
    ax.spines[:].set_visible(False)
    return cells


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
