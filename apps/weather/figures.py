"""Figures of an evaluation from its results: scores against lead, events, probabilities, spectra.

Lines differ by their dashes too, not by colour only, and the model's lies on top. Bands are the intervals.
"""

import numpy as np

from apps.report import BLUE, GREEN, ORANGE, PINK, new_figure, save_figure

SOURCES = {  # label, colour, dashes
    "model": ("model", BLUE, "-"),
    "persistence": ("persistence", "0.45", ":"),
    "extrapolation": ("extrapolation", ORANGE, "--"),
    "steps": ("STEPS", GREEN, "-."),
    "hrrr": ("HRRR", PINK, (0, (5, 1, 1, 1, 1, 1))),
    "observed": ("observed", "k", "-"),
}


def draw_errors(path, results, channel):
    """CRPS, RMSE of the mean, bias, and spread over skill against lead."""
    unit = in_units(results["units"][channel])
    figure, axes = new_figure(1, 4, 11.5, 3.0)
    panels = {"crps": f"CRPS{unit}", "rmse": f"RMSE of the mean{unit}", "bias": f"bias{unit}"}
    for ax, (score, label) in zip(axes[0], (panels | {"spread_skill": "spread / skill"}).items()):
        _against_lead(ax, results, channel, score)
        ax.set_ylabel(label)
        if score in ("bias", "spread_skill"):
            ax.axhline(float(score == "spread_skill"), color="k", lw=0.8)
        if score != "bias":
            ax.set_ylim(0, None)
    return _finish(figure, axes[0][0], path, results, channel)


def draw_events(path, results, channel):
    """CSI, POD, FAR, frequency bias and Brier score against lead, a column a threshold."""
    rows = {"csi": "CSI", "pod": "POD", "far": "FAR", "frequency_bias": "frequency bias", "brier": "Brier score"}
    names = event_names(results, channel)
    figure, axes = new_figure(len(rows), len(names), _width(names), 1.9 * len(rows) + 0.6)
    for ax, name in zip(axes[0], names):
        ax.set_title(name)
    for row, (score, label) in zip(axes, rows.items()):
        for i, ax in enumerate(row):
            _against_lead(ax, results, channel, score, i)
            ax.set_xlabel("lead (minutes)" if score == "brier" else "")  # below the last row
            if score == "frequency_bias":
                ax.axhline(1, color="k", lw=0.8)
        top = 1.05 * max(ax.get_ylim()[1] for ax in row)  # a row has one scale, but for Brier scores, which fall
        for ax in row:  # with the frequency of the event
            ax.set_ylim(0, None if score == "brier" else top if score == "frequency_bias" else min(top, 1.03))
        row[0].set_ylabel(label)
    return _finish(figure, axes[0][0], path, results, channel)


def draw_neighborhoods(path, results, channel):
    """FSS by threshold: against lead in the second window, also of the matched mean, and against the window at last."""
    names, km = event_names(results, channel), results["windows"]["km"]
    figure, axes = new_figure(3, len(names), _width(names), 8.0)
    window = min(1, len(km) - 1)
    for i, (above, matched, under, name) in enumerate(zip(*axes, names)):
        for ax, score in ((above, "fss"), (matched, "fss_matched_mean")):
            _against_lead(ax, results, channel, score, i, window)
            ax.set(title=f"{name}, {km[window]:.0f} km", ylim=(0, 1))
        for source, value, low, high in _curves(results, channel, "fss"):
            _line(under, source, km, value[-1, i], low[-1, i], high[-1, i])
        under.set(xscale="log", xlabel="window (km)", ylim=(0, 1), title=f"{name}, {_lead(results, -1)}")
        under.set_xticks(km, [f"{v:.0f}" for v in km])
        under.minorticks_off()
        under.grid()
    for row, label in zip(axes, ("FSS", "FSS of the matched mean", "FSS")):
        row[0].set_ylabel(label)
    return _finish(figure, axes[0][0], path, results, channel)


def draw_probabilities(path, results, channel):
    """Reliability with the use of each probability, and ROC, at a middle lead, a column a threshold."""
    names, lead = event_names(results, channel), _some(results)[len(_some(results)) // 2]
    figure, axes = new_figure(2, len(names), _width(names), 1.9 * _width(names) / max(len(names), 2) + 0.9)
    for i, (above, under, name) in enumerate(zip(axes[0], axes[1], names)):
        for ax in (above, under):
            ax.plot([0, 1], [0, 1], color="k", lw=0.8)
            ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
            ax.grid()
        for source, value, low, high in _curves(results, channel, "reliability"):
            chance = np.linspace(0, 1, value.shape[-1])
            _line(above, source, chance, value[lead, i], low[lead, i], high[lead, i])
        for source, own in results["scores"][channel].items():
            if "roc_pod" in own:
                at = (_array(own[k])[lead, i] for k in ("roc_pofd", "roc_pod"))
                _line(under, source, *at)
        _uses(above, _array(results["scores"][channel]["model"]["forecasts"])[lead, i])
        above.set(title=f"{name}, {_lead(results, lead)}", xlabel="forecast probability")
        under.set_xlabel("false alarm rate (POFD)")
    axes[0][0].set_ylabel("observed frequency")
    axes[1][0].set_ylabel("hit rate (POD)")
    return _finish(figure, axes[0][0], path, results, channel)


def _uses(ax, counts):
    """How often the model gave each probability, in a corner, on a logarithmic scale."""
    corner = ax.inset_axes([0.06, 0.68, 0.32, 0.2])
    share = counts / max(counts.sum(), 1)
    corner.bar(np.arange(len(share)), share, color=SOURCES["model"][1])
    corner.set(yscale="log", xticks=[], ylim=(1e-5, 2))
    corner.yaxis.tick_right()
    corner.set_yticks([1e-4, 1e-2, 1], ["0.0001", "0.01", "1"], fontsize=7)
    corner.minorticks_off()
    corner.set_title("share of uses", fontsize=8, pad=2)


def draw_ranks(path, results, channel):
    """Rank histograms, a column a lead, of the forecasts that have members."""
    leads = _some(results)
    figure, axes = new_figure(1, len(leads), 3.4 * len(leads) + 0.5, 3.0)
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
    top = max(ax.get_ylim()[1] for ax in axes[0])
    for ax in axes[0]:
        ax.set_ylim(0, top)
    axes[0][0].set_ylabel("share of points")
    return _finish(figure, axes[0][0], path, results, channel)


def draw_spectra(path, results, channel):
    """Power against wavelength above its ratio to what was observed, a column a lead."""
    leads, unit = _some(results), in_units(results["units"][channel], "²")
    wave = np.sqrt(np.prod(results["wavelengths_km"], axis=0))
    figure, axes = new_figure(2, len(leads), 3.5 * len(leads) + 0.5, 5.8)
    for (above, under), lead in zip(axes.T, leads):
        for ax, score in ((above, "power"), (under, "power_ratio")):
            curves = list(_curves(results, channel, score))
            for source, value, low, high in curves:
                _line(ax, source, wave, value[lead], low[lead], high[lead], marker=None)
            seen = any((value[lead] > 0).any() for _, value, _, _ in curves)
            ax.set(xscale="log", yscale="log" if seen else "linear", xlim=(wave[0], wave[-1]))
            ax.set_xlabel("wavelength (km)")
            _plain_ticks(ax.xaxis, wave)
            ax.grid()
        above.set_title(_lead(results, lead))
        under.axhline(1, color="k", lw=0.8)
        under.set_ylim(0.1, 10)
        _plain_ticks(under.yaxis, (0.1, 10))
    seen = [ax for ax in axes[0] if ax.get_yscale() == "log"]
    ends = [ax.get_ylim() for ax in seen]
    for ax in seen:
        ax.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))
    axes[0][0].set_ylabel(f"power{unit}")
    axes[1][0].set_ylabel("power / observed power")
    return _finish(figure, axes[0][0], path, results, channel)


def in_units(unit, power=""):
    """What follows the name of a score: its unit in brackets, nothing for pure numbers."""
    return "" if unit == "1" else f" ({unit}{power})"


def event_names(results, channel):
    """The events of a channel as a reader sees them, such as "≥ 35 dBZ"; none for a channel without."""
    events, unit = results["events"].get(channel), results["units"][channel]
    return [f"{'<' if events['below'] else '≥'} {t:g} {unit}" for t in events["thresholds"]] if events else []


def _width(names):
    """Of a figure with a column a threshold, inches."""
    return max(2.75 * len(names), 6) + 0.5


def _against_lead(ax, results, channel, score, *at):
    leads = results["lead_minutes"]
    for source, *bounds in _curves(results, channel, score):
        _line(ax, source, leads, *(v[(slice(None), *at)] for v in bounds))
    ax.set(xlabel="lead (minutes)", xticks=leads[:: max(len(leads) // 6, 1)])
    ax.grid()


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
    level = 3 if source == "model" else 2
    ax.plot(x, value, dashes, color=colour, marker=marker, ms=3.5, lw=1.6, label=label, zorder=level)
    if low is not None:
        ax.fill_between(x, low, high, color=colour, alpha=0.18, lw=0, zorder=1)


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


def _finish(figure, ax, path, results, channel):
    """Above the panels what was forecast when, over the legend."""
    handles, labels = ax.get_legend_handles_labels()
    days = sorted(str(case)[:10] for case in results["cases"])
    when = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    what = f"{results['long_names'][channel]}: {len(days)} starting times ({results['split']} split), {when}"
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), title=what, title_fontsize=11)
    figure.get_layout_engine().set(w_pad=0.1)
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
        "Fractions skill score: how well the share of a window that an event covers was foreseen; higher is better. "
        "Above of the share of members, then of one field, the matched mean; below by the width of the window.",
    ),
    "probabilities": (
        draw_probabilities,
        "Reliability and ROC",
        "Above, how often the event happened where a share of the members foresaw it: on the diagonal if forecasts are "
        "reliable; in the corner, how often the model gave each probability. Below, hit rate against false alarm rate "
        "as ever fewer members are asked for.",
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
        "where a forecast is too smooth. Where a ratio has no curve it is off by more than tenfold.",
    ),
}
