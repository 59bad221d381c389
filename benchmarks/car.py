"""What the rows of ``--suite aero`` say of a whole car: ratios and seconds, by name, of what was measured so far."""


def summary(rows):
    """{what: number} of rows of :func:`benchmarks.many.run`."""
    alone = {label: row["curve"][0] for label, row in rows.items() if "ms" in row["curve"][0]}
    cut = {label: row["curve"][-1] for label, row in rows.items() if "ms" in row["curve"][-1]}
    cut = {label: point for label, point in cut.items() if point["domain"] > 1}
    return beside_plain(alone) | efficiencies(alone, cut) | seconds(alone) | seconds(cut)


def beside_plain(alone):
    """Time and memory of a training step over those of plain torch."""
    found = {}
    for label, plain in alone.items():
        ours = alone.get(label.replace("plain ", ""))
        if ours and ours is not plain:
            found[f"step over plain torch's, {points(label)}"] = ours["ms"][1] / plain["ms"][1]
            if plain["gib"]:
                found[f"memory over plain torch's, {points(label)}"] = ours["gib"] / plain["gib"]
    return found


def efficiencies(alone, cut):
    """Points a second and rank over those of one rank; of more points than that holds, of the most that it holds."""
    trained = [label for label in alone if label.startswith("Transolver")]
    most = max(trained, key=lambda label: alone[label]["points"], default=None)
    found = {}
    for label, point in cut.items():
        base = alone.get(label, alone.get(most))
        if label.startswith("Transolver") and base:
            found[f"efficiency of a step, {points(label)}, {point['domain']} ranks"] = rate(point) / rate(base)
    return found


def seconds(measured):
    """Of a training step on all cells of a car, with the memory of a rank, and of answers for them, the fastest way."""
    found = {}
    for label, point in measured.items():
        where = f"{points(label)}, {point['domain']} rank{'s' * (point['domain'] > 1)}"
        if label.startswith("autocast recomputed"):
            found |= {f"step, s, {where}": point["ms"][1] / 1e3, f"memory of a step, GiB, {where}": point["gib"]}
        if label.startswith("inference"):
            name = f"exact inference, s, {where}"
            found[name] = min(found.get(name, float("inf")), point["ms"][0] / 1e3)
    return found


def rate(point):
    return point["points"] / (point["domain"] * point["ms"][1])


def points(label):
    return f"{int(label.split()[-1]):,} points"
