"""Figures of an evaluation from its results: scores against lead, events, probabilities, spectra, maps.

Colours are those of Okabe and Ito, told apart by any eye; lines differ by their dashes too. Bands are the intervals.
"""

from io import BytesIO

import numpy as np

from apps.report import new_figure, save_figure

SOURCES = {  # label, colour, dashes
    "model": ("model", "#0072B2", "-"),
    "persistence": ("persistence", "0.45", ":"),
    "extrapolation": ("extrapolation", "#E69F00", "--"),
    "steps": ("STEPS", "#009E73", "-."),
    "hrrr": ("HRRR", "#CC79A7", (0, (5, 1, 1, 1, 1, 1))),
    "observed": ("observed", "k", "-"),
}
MAPS = {"observed": "observed", "member 1": "model, member 1", "mean": "model, ensemble mean"}


def draw_errors(path, results, channel):
    """CRPS, RMSE of the mean, bias, and spread over skill against lead."""
    unit = results["units"][channel]
    figure, axes = new_figure(1, 4, 14, 3.4)
    panels = {"crps": f"CRPS ({unit})", "rmse": f"RMSE of the mean ({unit})", "bias": f"bias ({unit})"}
    for ax, (score, label) in zip(axes[0], (panels | {"spread_skill": "spread / skill"}).items()):
        _against_lead(ax, results, channel, score)
        ax.set_ylabel(label)
        if score in ("crps", "rmse"):
            ax.set_ylim(0, None)
        else:
            ax.axhline(float(score == "spread_skill"), color="k", lw=0.8)
    return _finish(figure, axes[0][0], path)


def draw_events(path, results, channel):
    """CSI, POD, FAR, frequency bias and Brier score against lead, a column a threshold."""
    rows = {"csi": "CSI", "pod": "POD", "far": "FAR", "frequency_bias": "frequency bias", "brier": "Brier score"}
    names = event_names(results, channel)
    figure, axes = new_figure(len(rows), len(names), max(3.3 * len(names), 6.5) + 0.5, 2.3 * len(rows) + 0.6)
    for ax, name in zip(axes[0], names):
        ax.set_title(name, fontsize=11)
    for row, (score, label) in zip(axes, rows.items()):
        for i, ax in enumerate(row):
            _against_lead(ax, results, channel, score, i)
            ax.set_ylim(*((0, 1) if score in ("csi", "pod", "far") else (0, None)))
            if score == "frequency_bias":
                ax.axhline(1, color="k", lw=0.8)
        row[0].set_ylabel(label)
    return _finish(figure, axes[0][0], path)


def draw_neighborhoods(path, results, channel):
    """FSS by threshold: against lead in the second window, and against the window at the last lead."""
    names, km = event_names(results, channel), results["windows"]["km"]
    figure, axes = new_figure(2, len(names), max(3.3 * len(names), 6.5) + 0.5, 6.2)
    window = min(1, len(km) - 1)
    for i, (above, under, name) in enumerate(zip(axes[0], axes[1], names)):
        _against_lead(above, results, channel, "fss", i, window)
        above.set(title=f"{name}, {km[window]:.0f} km", ylim=(0, 1))
        for source, value, low, high in _curves(results, channel, "fss"):
            _line(under, source, km, value[-1, i], low[-1, i], high[-1, i])
        under.set(xscale="log", xlabel="window (km)", ylim=(0, 1), title=f"{name}, {_lead(results, -1)}")
        under.set_xticks(km, [f"{v:.0f}" for v in km])
        under.minorticks_off()
        under.grid(alpha=0.3)
    for row in axes:
        row[0].set_ylabel("FSS")
    return _finish(figure, axes[0][0], path)


def draw_probabilities(path, results, channel):
    """Reliability and ROC at the last lead, a column a threshold."""
    names = event_names(results, channel)
    figure, axes = new_figure(2, len(names), max(3.3 * len(names), 6.5) + 0.5, 6.6)
    for i, (above, under, name) in enumerate(zip(axes[0], axes[1], names)):
        for ax in (above, under):
            ax.plot([0, 1], [0, 1], color="k", lw=0.8)
            ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
            ax.grid(alpha=0.3)
        for source, value, low, high in _curves(results, channel, "reliability"):
            chance = np.linspace(0, 1, value.shape[-1])
            _line(above, source, chance, value[-1, i], low[-1, i], high[-1, i])
        for source, own in results["scores"][channel].items():
            if "roc_pod" in own:
                at = (_array(own[k])[-1, i] for k in ("roc_pofd", "roc_pod"))
                _line(under, source, *at)
        above.set(title=f"{name}, {_lead(results, -1)}", xlabel="forecast probability")
        under.set_xlabel("false alarm rate (POFD)")
    axes[0][0].set_ylabel("observed frequency")
    axes[1][0].set_ylabel("hit rate (POD)")
    return _finish(figure, axes[0][0], path)


def draw_ranks(path, results, channel):
    """Rank histograms, a column a lead, of the forecasts that have members."""
    leads = _some(results)
    figure, axes = new_figure(1, len(leads), 3.6 * len(leads) + 0.5, 3.3)
    curves = list(_curves(results, channel, "rank_histogram"))
    for ax, lead in zip(axes[0], leads):
        for j, (source, value, low, high) in enumerate(curves):
            label, colour, _ = SOURCES[source]
            share, width = value[lead], 0.8 / len(curves)
            at = np.arange(len(share)) + (j - (len(curves) - 1) / 2) * width
            error = np.clip([share - low[lead], high[lead] - share], 0, None)
            ax.bar(at, share, width, color=colour, label=label, yerr=error, ecolor="0.3", error_kw={"lw": 0.8})
            ax.axhline(1 / len(share), color="k", lw=0.8)
        ax.set(title=_lead(results, lead), xlabel="members below what was observed")
        ax.set_xticks(range(len(share)))
    axes[0][0].set_ylabel("share of points")
    return _finish(figure, axes[0][0], path)


def draw_spectra(path, results, channel):
    """Power against wavelength above its ratio to what was observed, a column a lead."""
    leads, unit = _some(results), results["units"][channel]
    wave = np.sqrt(np.prod(results["wavelengths_km"], axis=0))
    figure, axes = new_figure(2, len(leads), 3.9 * len(leads) + 0.5, 6.4)
    for (above, under), lead in zip(axes.T, leads):
        for ax, score in ((above, "power"), (under, "power_ratio")):
            for source, value, low, high in _curves(results, channel, score):
                _line(ax, source, wave, value[lead], low[lead], high[lead], marker=None)
            ax.set(xscale="log", yscale="log", xlabel="wavelength (km)", xlim=(wave[0], wave[-1]))
            _plain_ticks(ax.xaxis, wave)
            ax.grid(alpha=0.3)
        above.set_title(_lead(results, lead))
        under.axhline(1, color="k", lw=0.8)
        under.set_ylim(0.1, 10)
        _plain_ticks(under.yaxis, (0.1, 10))
    axes[0][0].set_ylabel(f"power ({unit}²)" if unit != "1" else "power")
    axes[1][0].set_ylabel("power / observed power")
    return _finish(figure, axes[0][0], path)


def draw_maps(path, rows, titles, x, y, lines, channel, units):
    """Maps {source: [field (y, x), ...]}, a row each, a column per title; NaN has the colour of sand.

    x, y: map coordinates in m, ascending; lines: borders as (x, y) arrays (n, 2) in m.
    """
    height = 4.0 * len(y) / len(x)
    figure, axes = new_figure(len(rows), len(titles), 4.0 * len(titles) + 1.2, (height + 0.12) * len(rows) + 0.5)
    extent = [v / 1e3 for v in (x[0], x[-1], y[0], y[-1])]
    style = _style(channel, rows)
    for row, (source, fields) in zip(axes, rows.items()):
        for ax, field in zip(row, fields):
            ax.set_facecolor("#dcc9a3")
            image = ax.imshow(field, origin="lower", extent=extent, interpolation="nearest", **style)
            for line in lines:
                ax.plot(line[:, 0] / 1e3, line[:, 1] / 1e3, color="k", lw=0.8, path_effects=_halo())
            ax.set(xlim=extent[:2], ylim=extent[2:], xticks=[], yticks=[])
        row[0].set_ylabel(MAPS.get(source) or SOURCES[source][0], fontsize=11)
    for ax, title in zip(axes[0], titles):
        ax.set_title(title, fontsize=11)
    _scale_bar(axes[-1][0], extent)
    figure.colorbar(image, ax=axes, shrink=0.6, pad=0.01, label=f"{channel} ({units})", extend="both")
    return save_figure(figure, path)


def animate(path, rows, titles, x, y, channel, units):
    """The fields of `draw_maps` one lead after another, sources beside each other: a GIF that starts over."""
    from matplotlib import pyplot
    from PIL import Image

    extent, style, height = [v / 1e3 for v in (x[0], x[-1], y[0], y[-1])], _style(channel, rows), len(y) / len(x)
    figure, axes = new_figure(1, len(rows), 3.2 * len(rows) + 0.9, 3.2 * height + 0.7)
    images = []
    for ax, (source, fields) in zip(axes[0], rows.items()):
        ax.set_facecolor("#dcc9a3")
        images.append(ax.imshow(fields[0], origin="lower", extent=extent, interpolation="nearest", **style))
        ax.set(xticks=[], yticks=[], title=MAPS.get(source) or SOURCES[source][0])
    figure.colorbar(images[0], ax=axes, shrink=0.8, pad=0.01, label=f"{channel} ({units})", extend="both")

    frames, box = [], None
    for lead, title in enumerate(titles):
        figure.suptitle(title, fontsize=11)
        for image, fields in zip(images, rows.values()):
            image.set_data(fields[lead])
        if box is None:  # the first frame is laid out, the others lie as it does, without the margins it left
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
            box = figure.get_tightbbox().padded(0.1)
        picture = BytesIO()
        figure.savefig(picture, dpi=60, bbox_inches=box)
        frames.append(Image.open(picture).convert("RGB").quantize(dither=Image.Dither.NONE))
    part = path.with_name(f".{path.name}")
    frames[0].save(part, "GIF", save_all=True, append_images=frames[1:], duration=500, loop=0)
    pyplot.close(figure)
    part.rename(path)
    return path


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
    """Scales of what was observed, which no forecast can stretch, in colours of even lightness.

    Radar from 5 dBZ on, white below; cold cloud tops bright, as on satellite pictures.
    """
    from matplotlib import pyplot

    if channel.startswith("ref"):
        return dict(cmap=pyplot.get_cmap("inferno_r").with_extremes(under="white"), vmin=5, vmax=60)
    values = np.concatenate([np.ravel(field) for name in ("observed", "persistence") for field in rows.get(name, [])])
    low, high = np.nanpercentile(values, (1, 99)) if np.isfinite(values).any() else (0, 1)
    return dict(cmap="gray_r" if channel.startswith("bt") else "viridis", vmin=low, vmax=max(high, low + 1e-6))


def event_names(results, channel):
    """The events of a channel as a reader sees them, such as "≥ 35 dBZ"; none for a channel without."""
    events, unit = results["events"].get(channel), results["units"][channel]
    return [f"{'<' if events['below'] else '≥'} {t:g} {unit}" for t in events["thresholds"]] if events else []


def _against_lead(ax, results, channel, score, *at):
    leads = results["lead_minutes"]
    for source, *bounds in _curves(results, channel, score):
        _line(ax, source, leads, *(v[(slice(None), *at)] for v in bounds))
    ax.set(xlabel="lead (minutes)", xticks=leads[:: max(len(leads) // 6, 1)])
    ax.grid(alpha=0.3)


def _curves(results, channel, score):
    """(source, values, low, high) of the sources that have a score; the ends are NaN without an interval."""
    for source, own in results["scores"][channel].items():
        if score in own:
            value = _array(own[score])
            ends = results["intervals"][channel].get(source, {}).get(score)
            low, high = (_array(ends[k]) if ends else np.full_like(value, np.nan) for k in ("low", "high"))
            yield source, value, low, high


def _line(ax, source, x, value, low=None, high=None, marker="o"):
    label, colour, dashes = SOURCES[source]
    ax.plot(x, value, dashes, color=colour, marker=marker, ms=3.5, lw=1.6, label=label)
    if low is not None:
        ax.fill_between(x, low, high, color=colour, alpha=0.18, lw=0)


def _plain_ticks(axis, values):
    """1, 2 and 5 times powers of ten on a logarithmic axis, in plain numbers."""
    powers = range(int(np.floor(np.log10(min(values)))), int(np.ceil(np.log10(max(values)))) + 1)
    at = [k * 10.0**p for p in powers for k in (1, 2, 5) if min(values) <= k * 10.0**p <= max(values)]
    axis.set_ticks(at, [f"{v:g}" for v in at])
    axis.set_ticks([], minor=True)


def _array(values):
    return np.array(values, dtype=float)  # None becomes NaN


def _some(results):
    """Indices of the first, a middle and the last lead."""
    last = len(results["lead_minutes"]) - 1
    return sorted({0, last // 2, last})


def _lead(results, at):
    return f"+{results['lead_minutes'][at]:.0f} min"


def _finish(figure, ax, path):
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    return save_figure(figure, path)


OF_EVENTS = ("events", "neighborhoods", "probabilities")
CHAPTERS = {  # name of the file: drawing, title, caption
    "errors": (
        draw_errors,
        "Errors against lead",
        "CRPS and RMSE: lower is better. Bias is forecast less observed. Spread over skill is 1 for members that are "
        "as far from their mean as the truth is. A forecast without members has its absolute error as CRPS.",
    ),
    "events": (
        draw_events,
        "Events against lead",
        "Each member counts as a forecast of its own in CSI, POD, FAR and frequency bias; the Brier score takes the "
        "share of members as a probability.",
    ),
    "neighborhoods": (
        draw_neighborhoods,
        "Events nearby",
        "Fractions skill score: how well the share of a window that an event covers was foreseen; higher is better.",
    ),
    "probabilities": (
        draw_probabilities,
        "Reliability and ROC",
        "Above, how often the event happened where a share of the members foresaw it: on the diagonal if forecasts are "
        "reliable. Below, hit rate against false alarm rate as ever fewer members are asked for.",
    ),
    "ranks": (
        draw_ranks,
        "Rank histograms",
        "Where the truth falls among the members: flat if it is like one of them, high at the ends if they are too "
        "much alike. Equal values, such as no echo, share their places evenly.",
    ),
    "spectra": (
        draw_spectra,
        "Spectra",
        "Power of a member by wavelength, and its ratio to that of what was observed, under the same mask: below 1 "
        "where a forecast is too smooth.",
    ),
}
