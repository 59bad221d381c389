"""``report.html``: all of an evaluation."""

import json
from html import escape

from apps.page import figure, write_page
from apps.weather.figures import SOURCES, event_names, in_units
from apps.weather.results import FEWEST, better, pick

MATCHED = (
    " FSS takes the share of members, a chance, and chances are low where little can be foreseen. FSS of the matched "
    "mean takes one field of each forecast, with the places of the mean and the values of the members: like against "
    "like. Of a forecast without members both are the same."
)
MARKS = {"+": " ▲", "-": " ▼", " ": ""}


def write_report(path, results, figures):
    """The report of ``results``; figures: {channel: [(title, caption, path of a PNG or GIF)]}."""
    parts = [_head(results)]
    for channel in results["scores"]:
        parts.append(f"<h2>{escape(channel)}: {escape(results['long_names'][channel])}</h2>{_table(results, channel)}")
        parts.append(_sun_table(results, channel))
        parts += [figure(title, file, caption) for title, caption, file in figures.get(channel, [])]
    parts.append(f"<details><summary>Provenance</summary><pre>{escape(_provenance(results))}</pre></details>")
    return write_page(path, "Verification", parts)


def _head(results):
    cases, leads, boot = results["cases"], results["lead_minutes"], results["bootstrap"]
    text = (
        f"{len(cases)} starting times of the {results['split']} split, {min(cases)} to {max(cases)} UTC; "
        f"{leads[0]:.0f} to {leads[-1]:.0f} minutes ahead. Members: "
        + ", ".join(f"{SOURCES[s][0]} {n}" for s, n in results["members"].items())
        + ". All forecasts are scored on the same points: those seen in the history and at the valid time. "
    )
    if boot["blocks"] >= FEWEST:
        text += f"Intervals, bands in the figures, hold 95 % of {boot['draws']} draws of {boot['blocks']} " + (
            f"blocks of {boot['block_hours']:g} h." if boot["block_hours"] else "starting times, as if independent."
        )
    else:
        text += f"Starting times are fewer than {FEWEST}, too few to tell how sure the scores are."
    return f"<h1>Verification</h1><p>{escape(text)}</p>"


def _table(results, channel):
    """Scores by lead; a mark stands beside a baseline from which the model's differs for sure."""
    unit, names = in_units(results["units"][channel]), event_names(results, channel)
    rows = [(f"CRPS{unit}", "crps", (), True), (f"RMSE of the mean{unit}", "rmse", (), True)]
    if names:
        main, window = len(names) // 2, min(1, len(results["windows"]["km"]) - 1)
        where = f"{names[main]}, {results['windows']['km'][window]:.0f} km"
        rows += [(f"FSS ({where})", "fss", (main, window), False)]
        rows += [(f"FSS of the matched mean ({where})", "fss_matched_mean", (main, window), False)]
        rows += [(f"CSI ({names[main]})", "csi", (main,), False)]
    head = "".join(f"<th>+{lead:.0f} min</th>" for lead in results["lead_minutes"])
    body = "".join(_rows(results, channel, *row) for row in rows)
    note = "▲ the model is better than this baseline, ▼ worse: the interval of the difference leaves zero out."
    note += MATCHED if names else ""
    return f"<div class='scroll'><table class='two'><tr><th></th><th></th>{head}</tr>{body}</table></div><p>{note}</p>"


def _sun_table(results, channel):
    """CRPS of reflected sunlight by the height of the sun; nothing for other channels."""
    if channel not in results["sun"]:
        return ""
    head = "".join(f"<th>+{lead:.0f} min</th>" for lead in results["lead_minutes"])
    body = ""
    for part in results["sun"][channel]:
        low, high = part["cos_zenith"]
        for source, own in part["scores"].items():
            cells = "".join(f"<td>{'' if v is None else f'{v:.3f}'}</td>" for v in own["crps"])
            body += f"<tr><td>{low:g} to {high:g}</td><td>{SOURCES[source][0]}</td>{cells}</tr>"
    note = "CRPS by the cosine of the solar zenith angle; empty where no point had such a sun."
    return f"<p>{note}</p><div class='scroll'><table class='two'><tr><th></th><th></th>{head}</tr>{body}</table></div>"


def _rows(results, channel, label, score, at, lower):
    out = ""
    for source, own in results["scores"][channel].items():
        if score in own:
            marks = better(results, channel, source, score, at, lower)
            cells = zip((pick(row, at) for row in own[score]), marks)
            cells = "".join(f"<td>{'' if v is None else f'{v:.3f}'}{MARKS[m]}</td>" for v, m in cells)
            out += f"<tr><td>{escape(label)}</td><td>{SOURCES[source][0]}</td>{cells}</tr>"
    return out


def _provenance(results):
    return json.dumps(results["provenance"], indent=1)
