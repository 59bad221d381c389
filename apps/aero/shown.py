"""The chief scores in words and units, for a person at the end of a command; all the others lie in results.json."""

ROWS = {  # label: key, factor, unit
    "loss, of standardised fields": ("loss", 1, "-"),
    "surface pressure, relative L2": ("pressure_l2", 100, "%"),
    "wall shear, relative L2": ("shear_l2", 100, "%"),
    "pressure in the air, relative L2": ("volume_pressure_l2", 100, "%"),
    "velocity in the air, relative L2": ("velocity_l2", 100, "%"),
    "Cd, mean error": ("Cd_mae", 1000, "counts"),
    "Cl, mean error": ("Cl_mae", 1000, "counts"),
    "Cd, R2": ("Cd_r2", 1, "-"),
    "Cd, rank correlation": ("Cd_spearman", 1, "-"),
}


def table(title, columns):
    """Lines of a table of {column: scores}; rows that no column knows are left out, a count is 0.001."""
    lines = [f"{title:34}" + "".join(f"{name:>16}" for name in columns) + "  unit"]
    for label, (key, factor, unit) in ROWS.items():
        values = [scores.get(key) for scores in columns.values()]
        if any(value is not None for value in values):
            cells = ("-" if value is None else f"{factor * value:.4g}" for value in values)
            lines.append(f"{label:34}" + "".join(f"{cell:>16}" for cell in cells) + f"  {unit}")
    return "\n".join(lines)
