"""Figures from results: loss curves, maps, scores against lead. matplotlib is imported only to draw."""

import json
import os
from pathlib import Path


def draw_losses(path, log):
    """The loss curve of a run's ``log.jsonl``, with its validations."""
    rows = _last_run(json.loads(line) for line in Path(log).read_text().splitlines())
    steps = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    checks = [(row["step"], row["validation"]["loss"]) for row in rows if "validation" in row]
    figure, axes = _figure(1, 1, 7, 4)
    ax = axes[0][0]
    ax.plot(*zip(*steps), lw=1, color="0.6", label="training, one batch")
    ax.plot(*zip(*_smooth(steps)), lw=1.8, color="C0", label="training, running mean")
    if checks:
        ax.plot(*zip(*checks), "o", color="C1", label="validation")
    ax.set(xlabel="step", ylabel="loss", ylim=(0, None))
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    return _save(figure, path)


def _last_run(rows):
    """A log without what a later start overtook: a run that went on from an earlier step, or began anew."""
    kept = []
    for row in rows:
        if kept and row["step"] < kept[-1]["step"]:
            kept = [old for old in kept if old["step"] < row["step"]]
        kept.append(row)
    return kept


def draw_maps(path, rows, titles, x, y, lines, channel, units):
    """Maps {label: [field (y, x), ...]}, a row each, a column per title; NaN is grey.

    x, y: map coordinates in m, ascending; lines: borders as (x, y) arrays (n, 2) in m.
    """
    height = 4.0 * len(y) / len(x)
    figure, axes = _figure(len(rows), len(titles), 4.0 * len(titles) + 1.2, (height + 0.05) * len(rows) + 0.4)
    extent = [v / 1e3 for v in (x[0], x[-1], y[0], y[-1])]
    style = _style(channel, rows)
    for row, (label, fields) in zip(axes, rows.items()):
        for ax, field in zip(row, fields):
            ax.set_facecolor("0.75")
            image = ax.imshow(field, origin="lower", extent=extent, interpolation="nearest", **style)
            for line in lines:
                ax.plot(line[:, 0] / 1e3, line[:, 1] / 1e3, color="k", lw=0.7)
            ax.set(xlim=extent[:2], ylim=extent[2:], xticks=[], yticks=[])
        row[0].set_ylabel(label)
    for ax, title in zip(axes[0], titles):
        ax.set_title(title, fontsize=10)
    figure.colorbar(image, ax=axes, shrink=0.7, label=f"{channel} ({units})", extend="both")
    return _save(figure, path)


def _style(channel, rows):
    """Radar in colours above 5 dBZ, white below; cold cloud tops bright, as on satellite pictures."""
    import numpy
    from matplotlib import pyplot

    if channel.startswith("ref"):
        return dict(cmap=pyplot.get_cmap("turbo").with_extremes(under="white"), vmin=5, vmax=65)
    values = numpy.concatenate([numpy.ravel(field) for fields in rows.values() for field in fields])
    low, high = numpy.nanpercentile(values, (1, 99)) if numpy.isfinite(values).any() else (0, 1)
    return dict(cmap="gray_r" if channel.startswith("bt") else "viridis", vmin=low, vmax=max(high, low + 1e-6))


def draw_scores(path, results):
    """Scores against lead, a row a channel: errors, events by threshold, neighbourhoods by window."""
    channels, leads = list(results["scores"]), results["lead_minutes"]
    figure, axes = _figure(len(channels), 3, 13, 3.6 * len(channels) + 0.3)
    for row, channel in zip(axes, channels):
        scores, unit = results["scores"][channel], results["units"][channel]
        _against(row[0], leads, scores, {"RMSE of the mean": ("rmse",), "CRPS": ("crps",)})
        row[0].set(title=f"{channel}: errors, lower is better", ylabel=unit, ylim=(0, None))
        events = results["events"].get(channel)
        if events is None:
            row[1].set_axis_off(), row[2].set_axis_off()
            continue
        sign = "<" if events["below"] else "≥"
        names = [f"{sign} {t:g} {unit}" for t in events["thresholds"]]
        _against(row[1], leads, scores, {name: ("csi", i) for i, name in enumerate(names)})
        row[1].set(title=f"{channel}: CSI of the members, higher is better", ylim=(0, 1))
        _against(
            row[2], leads, scores, {f"{w} cell{'s' * (w > 1)}": ("fss", 0, i) for i, w in enumerate(results["windows"])}
        )
        row[2].set(title=f"{channel} {names[0]}: FSS by window", ylim=(0, 1))
    for ax in axes.ravel():
        ax.set(xlabel="lead (minutes)", xticks=leads[:: max(len(leads) // 6, 1)])
    return _save(figure, path)


def _against(ax, leads, scores, curves):
    for colour, (label, (name, *at)) in enumerate(curves.items()):
        for source, line in (("model", "-"), ("persistence", "--")):
            values = scores[source][name]
            for i in at:
                values = [v[i] for v in values]
            ax.plot(leads, values, line, marker="o", ms=3, color=f"C{colour}", label=label if line == "-" else None)
    ax.plot([], [], "--", color="0.4", label="persistence")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, fontsize=8)


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

    return pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="compressed")


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
