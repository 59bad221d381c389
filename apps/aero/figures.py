"""Figures of surfaces, of the air around them, and of scores.

A body is drawn as its cells, those that face the viewer from far to near: as the triangles that they are where these
are few and known, else each as a disc of the cell's area and normal. No renderer and no polygons are needed, so the
same picture comes from a few thousand cells and from a sample of millions.
"""

import json
from pathlib import Path

import numpy as np

from apps.aero.slices import Slice
from apps.report import BLUE, ORANGE, PINK, RED, name_points, new_figure, new_mosaic, plot_losses, save_figure
from data.aero.resample import fans

# name: what points right, what points up, what points at the viewer
VIEWS = {
    "side": ((1, 0, 0), (0, 0, 1), (0, -1, 0)),
    "top": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "front": ((0, -1, 0), (0, 0, 1), (-1, 0, 0)),
    "rear": ((0, 1, 0), (0, 0, 1), (1, 0, 0)),
}
ROWS = {"side": ("side",), "top": ("top",), "front, rear": ("front", "rear")}  # all to one scale
GAP = 0.15  # between two views in a row, in lengths of the body
COLUMNS = ("true", "predicted", "predicted − true")
LIMITS = (-1.0, 1.0)
# perceptually even and legible to the colour-blind: Cp about that of the free stream (red: pressed, blue: sucked),
# velocity, friction, and errors about zero, which no field looks like
PRESSURE, VELOCITY, FRICTION, ERROR = "RdBu_r", "viridis", "magma", "PuOr_r"
LABELS = {PRESSURE: "$C_p$", FRICTION: "$|C_f|$", ERROR: "$\\Delta C_p$"}
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
    figure, axes = new_mosaic([["loss"] * 3, list(COLUMNS)], 11, 5.8, height_ratios=[1.7, 1])
    plot_losses(axes["loss"], list(enumerate(losses, 1)), _validations(Path(log), len(losses)))
    if "area" in arrays:
        _bodies(figure, {"side": [axes[name] for name in COLUMNS]}, arrays, _columns(arrays, attrs, f"{title}: "))
    else:
        _slab(figure, [axes[name] for name in COLUMNS], arrays, attrs, f"{title}: ")
    save_figure(figure, path)


def draw_volume(path, arrays, attrs, title):
    """Velocity along the flow in the middle plane of a volume: true, predicted and error, or predicted alone."""
    names = COLUMNS if "velocity" in arrays else COLUMNS[1:2]
    figure, axes = new_mosaic([[name] for name in names], 9, 3.0 * len(names) + 0.6)
    _slab(figure, list(axes.values()), arrays, attrs, "")
    figure.suptitle(title)
    save_figure(figure, path)


def draw_profiles(path, profiles, title):
    """Curves of apps.aero.profiles: Cp along the centreline, suction upward, and u / U on lines in the wake."""
    lines = profiles.get("wake", {"lines": []})["lines"]
    names = [*(["centreline"] if "centreline" in profiles else []), *range(len(lines))]
    widths = [3 if n == "centreline" else 1 for n in names]
    figure, axes = new_mosaic([names], 5 + 2 * len(names), 4, width_ratios=widths)
    if "centreline" in profiles:
        ax, curves = axes["centreline"], profiles["centreline"]
        for colour, side in ((BLUE, "upper"), (RED, "under")):
            _curve(ax, curves["x"], curves[side], colour, f"{side} side, ")
        ax.invert_yaxis()
        ax.set(xlabel="x (m)", ylabel="$C_p$, suction upward", title=_with_r2("centreline", curves["r2"]))
        ax.legend(fontsize=8)
    for number, line in enumerate(lines):
        z = profiles["wake"]["z"]
        _curve(axes[number], z, line, BLUE, "", upright=True)
        axes[number].set(xlabel="$u / U$", title=f"x = {line['x']:.2f} m", ylim=(z[0], z[-1]), xlim=(-0.4, 1.2))
        axes[number].tick_params(labelleft=number == 0)
    if lines:
        axes[0].set_ylabel("z (m)")
        axes[0].legend(fontsize=8, title=_with_r2("wake", profiles["wake"]["r2"]), title_fontsize=8)
    for ax in axes.values():
        ax.grid()
    figure.suptitle(title)
    save_figure(figure, path)


def _curve(ax, along, curve, colour, side, upright=False):
    """True values solid, predicted ones dashed; upright: along the vertical axis, the true ones black."""
    for kind, style, paint in (("true", "-", "k" if upright else colour), ("predicted", "--", colour)):
        there = [(x, v) for x, v in zip(along, curve[kind]) if v is not None]  # a coarse mesh has no cell in some bins
        place, values = zip(*there) if there else ((), ())
        pair = (values, place) if upright else (place, values)
        ax.plot(*pair, style, color=paint, marker=".", ms=4, lw=1.2, label=f"{side}{kind}")


def _with_r2(name, value):
    return name if value is None else f"{name}, $R^2$ = {value:.3f}"


def _slab(figure, axes, arrays, attrs, title):
    """The middle plane in side view, u / U: true, predicted and error, or predicted alone."""
    plane = Slice(arrays["position"], arrays["sdf"])
    predicted = arrays["predicted"][:, 1] / attrs["U"]
    shown = [("predicted", predicted, (-0.3, 1.4), VELOCITY)]
    if "velocity" in arrays:
        true = arrays["velocity"][:, 0] / attrs["U"]
        limit = max(float(np.quantile(np.abs(predicted - true)[plane.rows], 0.99)), 1e-3)
        shown = [("true", true, *shown[0][2:]), *shown, (COLUMNS[2], predicted - true, (-limit, limit), ERROR)]
    for ax, (name, values, limits, colours) in zip(axes, shown):
        place = dict(extent=plane.extent, origin="lower", interpolation="nearest")
        image = ax.imshow(plane.image(values), cmap=colours, vmin=limits[0], vmax=limits[1], **place)
        ax.set(aspect="equal", xlabel="x (m)", ylabel="z (m)", facecolor="0.85", title=f"{title}{name}")
        label = "$\\Delta u / U$" if colours == ERROR else "$u / U$"
        wide = ax.get_subplotspec().get_gridspec().ncols == 1
        where = dict(shrink=0.85, aspect=15) if wide else dict(location="bottom", shrink=0.7, aspect=30, pad=0.03)
        figure.colorbar(image, ax=ax, extend="both", label=label, **where)
    axes[-1].set_xlabel("x (m); grey: body, or no point near")


def draw_surface(path, arrays, attrs, title):
    """One body from three sides: pressure coefficient true, predicted and error; where the true fields are not known,
    the predicted coefficients of pressure and, by size, of friction."""
    columns = _columns(arrays, attrs, "")
    names = [[f"{row} {name}" for name, *_ in columns] for row in ROWS]
    length, width, height = _spans(arrays)
    heights = [span / max(length, 2 * width + GAP * length) + 0.04 for span in (height, width, height)]
    size = 11 / 3 * len(columns), 3.5 * sum(heights) + 1.5
    figure, axes = new_mosaic(names, *size, height_ratios=heights)
    _bodies(figure, {row: [axes[name] for name in line] for row, line in zip(ROWS, names)}, arrays, columns)
    figure.suptitle(title)
    save_figure(figure, path)


def draw_parity(path, cases, title):
    """Cd, Cl and pitch of all cases {run: scores}: predicted against true, the line of no error and of Cd 3 counts."""
    (figure, axes), drawn = new_figure(1, 3, 13, 4.9), []
    for name, ax in zip(("Cd", "Cl", "CmPitch"), axes[0]):
        true, predicted = (np.array([case[key] for case in cases.values()]) for key in (f"{name}_true", name))
        both = np.concatenate([true, predicted])
        room = 0.08 * max(np.ptp(both), 0.02)
        ends = np.array([both.min() - room, both.max() + room])
        if name == "Cd":
            ax.fill_between(ends, ends - 0.003, ends + 0.003, color="0.88", lw=0, label="within 3 counts")
            ax.legend(loc="upper left", fontsize=8)
        ax.plot(ends, ends, color="0.6", lw=1, zorder=1)
        ax.scatter(true, predicted, s=28, color=BLUE, zorder=2)
        drawn.append((ax, list(cases), true, predicted))
        ax.locator_params(nbins=5)
        ax.set(xlim=ends, ylim=ends, aspect="equal", xlabel=f"{name}, true fields", ylabel=f"{name}, predicted")
        ax.set_title(f"{name}: mean |error| {np.abs(predicted - true).mean():.4f}")
        ax.grid()
    figure.suptitle(f"{len(cases)} {title}; named: the largest errors")
    figure.draw_without_rendering()  # settles where the axes lie
    for panel in drawn:
        _name_worst(*panel)
    save_figure(figure, path)


def _name_worst(ax, runs, true, predicted, most=3):
    """Names the runs that lie farthest from the diagonal, outward of it where there is room."""
    worst = np.argsort(-np.abs(predicted - true))[:most]
    sides = [(-1, 1) if predicted[k] > true[k] else (1, -1) for k in worst]
    name_points(ax, np.stack([true, predicted], axis=1), {int(k): (runs[k], side) for k, side in zip(worst, sides)})


def draw_trend(path, cases, others, title):
    """Cd of the cases in the order of their true values: true, predicted, and as ``others`` {label: {run: Cd}} say."""
    figure, axes = new_mosaic([["Cd"]], max(7, min(13, 0.35 * len(cases) + 4)), 4.2)
    ax, runs = axes["Cd"], sorted(cases, key=lambda run: cases[run]["Cd_true"])
    place = np.arange(len(runs))
    ax.plot(place, [cases[run]["Cd_true"] for run in runs], "_-", color="k", lw=1.2, ms=12, label="true fields")
    ax.plot(place, [cases[run]["Cd"] for run in runs], "o", color=BLUE, label="predicted")
    for (label, values), colour, marker in zip(others.items(), (PINK, ORANGE), "xd"):
        ax.plot(place, [values[run] for run in runs], marker, color=colour, ms=5, label=label, zorder=1)
    ax.set_xticks(place, runs, rotation=90 if len(runs) > 8 else 0, fontsize=8)
    ax.set(xlabel="run, by its true Cd", ylabel="Cd", title=title)
    ax.grid()
    figure.legend(loc="outside right upper")
    save_figure(figure, path)


def _validations(log, steps):
    """[(step, loss)] of the validations in a log.jsonl, which may be of two trainings, up to a number of steps."""
    rows = (json.loads(line) for line in log.read_text().splitlines())
    checks = {row["step"]: row["validation"]["loss"] for row in rows if "validation" in row and row["step"] <= steps}
    return list(checks.items())


def _columns(arrays, attrs, title):
    """Columns of a picture, a list of (title, values (n,), limits, colours)."""
    q = 0.5 * attrs["U"] ** 2
    predicted = arrays["predicted"][:, 0] / q
    if "pressure" not in arrays:
        friction = np.linalg.norm(arrays["predicted"][:, 1:], axis=1) / q
        limits = 0.0, max(float(np.quantile(friction, 0.99)), 1e-6)
        names = (f"{title}$C_p$ predicted", f"{title}$|C_f|$ predicted")
        return [(names[0], predicted, LIMITS, PRESSURE), (names[1], friction, limits, FRICTION)]
    true = arrays["pressure"] / q
    limit = max(float(np.quantile(np.abs(predicted - true), 0.99)), 1e-3)
    names = [f"{title}$C_p$ {name}" for name in COLUMNS]
    shown = ((true, LIMITS, PRESSURE), (predicted, LIMITS, PRESSURE), (predicted - true, (-limit, limit), ERROR))
    return [(name, *rest) for name, rest in zip(names, shown)]


def _bodies(figure, rows, arrays, columns):
    """The body in each of ``rows`` {name of ROWS: axes of all columns}, a colour bar below columns of one scale."""
    from matplotlib.ticker import MaxNLocator

    for row, axes in rows.items():
        shown = [_row(ax, arrays, ROWS[row], *column[1:]) for ax, column in zip(axes, columns)]
        axes[0].set_ylabel(row)
    for ax, column in zip(next(iter(rows.values())), columns):
        ax.set_title(column[0])
    for scale in dict.fromkeys(column[2:] for column in columns):
        alike = [k for k, column in enumerate(columns) if column[2:] == scale]
        below = [axes[k] for axes in rows.values() for k in alike]
        extend = "max" if scale[0][0] == 0 else "both"
        options = dict(location="bottom", shrink=0.7, pad=0.03, aspect=30, extend=extend, label=LABELS[scale[1]])
        options["ticks"] = MaxNLocator(4)
        figure.colorbar(shown[alike[0]], ax=below, **options)


def _row(ax, arrays, views, values, limits, colours):
    """Views of the body beside each other on axes as wide as the body is long, so that rows have one scale."""
    length, width, _ = _spans(arrays)
    apart = (width + GAP * length) / 2
    for view, shift in zip(views, (-apart, apart) if len(views) > 1 else (0.0,)):
        cells = _cells(ax, arrays, view, shift, values, limits, colours)
    half = 0.52 * max(length, 2 * width + GAP * length)
    ax.set(aspect="equal", xticks=[], yticks=[], xlim=(-half, half))
    ax.margins(y=0.04)
    ax.autoscale_view(scalex=False)
    ax.spines[:].set_visible(False)
    return cells


def _cells(ax, arrays, view, shift, values, limits, colours):
    """The cells that face the viewer, the middle of the body at ``shift`` on the horizontal axis; in their colours."""
    from matplotlib.collections import EllipseCollection, PolyCollection

    right, up, viewer = (np.array(v, dtype=float) for v in VIEWS[view])
    place = arrays["corners"].mean(axis=1) if "corners" in arrays else arrays["position"]
    seen = np.flatnonzero(arrays["normal"] @ viewer > 0)
    seen = seen[np.argsort(place[seen] @ viewer)]
    across = arrays["position"] @ right
    plane, origin = np.stack([right, up], axis=1), np.array([(across.min() + across.max()) / 2 - shift, 0.0])
    if "corners" in arrays:
        cells = PolyCollection(arrays["corners"][seen] @ plane - origin, cmap=colours, lw=0, antialiased=False)
    else:
        overlap = 3.0 if len(values) >= MOST_DISCS else 1.7  # a random sample has gaps, which larger discs close
        normal, size = arrays["normal"][seen], overlap * np.sqrt(arrays["area"][seen])
        turn = np.degrees(np.arctan2(normal @ up, normal @ right))  # a tilted disc is narrow along its normal
        where = {"units": "xy", "offsets": place[seen] @ plane - origin, "transOffset": ax.transData}
        cells = EllipseCollection(size * (normal @ viewer), size, turn, **where, cmap=colours, lw=0)
    cells.set_array(values[seen])
    cells.set_clim(*limits)
    ax.add_collection(cells)
    return cells


def _spans(arrays):
    """Length, width and height of the body, m."""
    return np.maximum(np.ptp(arrays["position"], axis=0), 1e-9)
