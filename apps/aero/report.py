"""The report of an evaluation."""

from html import escape
from pathlib import Path

from apps.page import figure, write_page

PARITY, TREND = "Coefficients, predicted against true", "Drag, run by run"  # titles of figures
CAPTIONS = {  # by the first word of a title
    "Coefficients": "A point is a run, its true coefficient that of the true fields over all cells. Line: no error; "
    "the band around it, 3 counts of drag. The runs that are farthest off are named.",
    "Drag": "Runs in the order of their true drag: what the model says, and what it has to beat.",
    "Surface": "Cp is pressure over the dynamic pressure of the free stream: red where it presses, blue where it "
    "sucks, white as far upstream. All views are to one scale.",
    "Air": "Velocity along the flow in the middle plane, as a share of that of the free stream: each pixel has the "
    "value of the nearest cell beside the plane.",
    "Curves": "Cp in a narrow strip around the middle plane, upper and under side apart, suction upward; velocity "
    "along the flow on vertical lines behind the body. True solid, predicted dashed.",
}
COEFFICIENTS = ("Cd", "Cl", "Cs", "CmPitch", "Clf", "Clr")


def write_report(path, results, pictures):
    """Write the report of ``results`` (of apps.aero.evaluate) to ``path``; pictures {title: PNG file}, where drawn."""
    parts = [
        f"<h1>Aerodynamic surrogate: {escape(results['label'])}</h1>",
        _facts(results),
        _fields(results),
        _coefficients(results),
        _pairs(results),
        *(_figure(title, file) for title, file in pictures.items() if Path(file).exists()),
        _runs(results["runs"]),
    ]
    write_page(path, "Evaluation", parts)


def _figure(title, file):
    return figure(title, file, CAPTIONS[title.split()[0].rstrip(",")])


def _facts(results):
    trained = results["runs_that_were_trained_on"]
    lines = [
        f"Checkpoint {escape(str(results['checkpoint']))}, archive {escape(str(results['archive']))}, "
        f"split {escape(results['split'])}: runs: {results['summary']['cases']}.",
        f"Units: {escape(results['units'])}.",
    ]
    if trained:
        lines.append(f"<b>{len(trained)} of these runs were trained on.</b>")
    if not results["same_statistics_as_training"]:
        lines.append("<b>The archive is not the one that the model was trained on.</b>")
    return "".join(f'<p class="quiet">{line}</p>' for line in lines)


def _fields(results):
    """Relative L2 by field and component, with its interval and the baselines."""
    s, low = results["summary"], results["intervals"]
    rows = []
    names = ("pressure", "shear", "shear_x", "shear_y", "shear_z", "volume_pressure", "velocity")
    for name in (name for name in (*names, *(f"velocity_{axis}" for axis in "xyz")) if f"{name}_l2" in s):
        l2 = f"{name}_l2"
        row = [name, _percent(s[l2]), _range(low.get(l2), _percent), _percent(s[f"{l2}_std"]), _percent(s[f"{l2}_max"])]
        by = "area" if f"{l2}_area" in s else "volume"
        row += [_percent(s[f"{l2}_{by}"]), _percent(s[f"{l2}_{by}_max"])]
        row += [_number(s.get(f"{name}_mae")), _number(s.get(f"{name}_largest_max"))]
        row += [_percent(_baseline(results, key).get(l2)) for key in ("nearest_shape", "mean_field")]
        rows.append(row)
    heads = ["relative L2", "mean", "95 % interval", "std", "worst run", "by area or volume", "worst of these"]
    heads += ["mean |error|", "largest error", "nearest shape", "mean field"]
    return _table("Fields: model, and what it has to beat", heads, rows)


def _coefficients(results):
    s, rows = results["summary"], []
    if "Cd_mae" not in s:
        return '<p class="quiet">The model predicts no surface, so there are no forces.</p>'
    for name in [*COEFFICIENTS, *(f"{c}_constant" for c in COEFFICIENTS if f"{c}_constant_mae" in s)]:
        row = [name, *(_number(s[f"{name}_{key}"]) for key in ("mae", "max", "r2", "spearman"))]
        row += [_range(results["intervals"].get(f"{name}_{key}"), _number) for key in ("mae", "r2")]
        for key in ("nearest_shape", "mean_field"):
            found = _baseline(results, key)
            row += [_number(found.get(f"{name}_mae")), _number(found.get(f"{name}_r2"))]
        rows.append(row)
    heads = ["coefficient", "mean |error|", "largest", "R2", "rank correlation"]
    heads += ["interval of |error|", "interval of R2"]
    heads += ["nearest shape |error|", "R2", "mean of shapes |error|", "R2"]
    counts = f"{_number(s['Cd_mae_counts'])} counts, {_number(s['Cd_max_counts'])} at most"
    return _table(f"Coefficients from all cells; Cd off by {counts}", heads, rows)


def _pairs(results):
    pairs = results["pairs"]
    if pairs is None and "Cd_mae" not in results["summary"]:
        return ""
    if pairs is None:
        return '<p class="quiet">No two runs differ in Cd, so there is nothing to rank.</p>'
    row = [pairs["pairs"], _number(pairs["mae_counts"]), _number(pairs["max_counts"]), _percent(pairs["right_sign"])]
    row += [_range(results["intervals"].get("Cd_pairs_right_sign"), _percent), _number(pairs["r2"])]
    heads = ["pairs", "mean |error|, counts", "largest, counts", "right order", "95 % interval", "R2"]
    return _table("Change of Cd from one run to another", heads, [row])


def _runs(runs):
    first = next(iter(runs.values()))
    surface = ["pressure_l2", "pressure_l2_area", "shear_l2", "shear_l2_area"]
    fields = [*surface, "volume_pressure_l2", "velocity_l2", "velocity_l2_volume"]
    numbers = [f"{name}{kind}" for name in ("Cd", "Cl", "CmPitch") for kind in ("", "_true")] + ["Cd_stated"]
    fields, numbers = ([name for name in names if name in first] for names in (fields, numbers))
    rows = [
        [run, *(_percent(scores[name]) for name in fields), *(_number(scores.get(name)) for name in numbers)]
        for run, scores in runs.items()
    ]
    return _table("Runs", ["run", *(name.replace("l2", "L2").replace("_", " ") for name in (*fields, *numbers))], rows)


def _baseline(results, key):
    return results["baselines"][key]["summary"] if results["baselines"] else {}


def _table(caption, heads, rows):
    head = "".join(f"<th>{escape(str(cell))}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><caption>{escape(caption)}</caption><tr>{head}</tr>{body}</table></div>'


def _number(value):
    return "–" if value is None else f"{value:.4g}"


def _percent(value):
    return "–" if value is None else f"{100 * value:.2f} %"


def _range(ends, shown):
    return "–" if ends is None else f"{shown(ends[0])} … {shown(ends[1])}"
