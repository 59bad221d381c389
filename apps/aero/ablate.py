"""What each choice is worth: short trainings that differ in one flag, one table: python -m apps.aero.ablate

Every variant is a training of its own on the same archive (the embedded one, where none is given) with the same number
of steps, judged on all cells of the validation runs; the mean field and the nearest shape stand beside them. Small
differences are noise: --seeds trains each variant several times and gives the spread.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from apps.aero import evaluate, train
from apps.cli import option, parse
from core.command import command

VARIANTS = {
    "default": [],
    "loss huber": ["--loss", "huber"],
    "loss relative": ["--loss", "relative"],
    "force term": ["--force-weight", "100"],
    "temperature 0.25": ["--temperature", "0.25"],
    "temperature 1": ["--temperature", "1"],
    "temperature >= 0.5": ["--temperature-low", "0.5"],
    "normal slice init": ["--slice-init", "normal"],
    "tied": ["--tied"],
    "Transolver++": ["--plus", "--tied"],
    "weighed by area": ["--weighed"],
    "64 slices": ["--slices", "64"],
    "no EMA": ["--ema", "0"],
    "EMA 0.999": ["--ema", "0.999"],
}
SHOWN = ("pressure_l2", "shear_l2", "Cd_mae_counts", "Cd_r2", "Cl_r2")


@dataclass
class AblateConfig:
    """Options of python -m apps.aero.ablate."""

    archive: str | None = option(None, "aero archive; left out: the embedded synthetic bodies")
    out: str = option("runs/aero-ablate", "folder of the trainings and of ablation.json")
    steps: int = option(300, "optimizer steps of each training")
    seeds: int = option(1, "trainings of each variant")
    only: tuple[str] | None = option(None, "variants to train, by name; left out: all")


@command
def main(argv=None):
    """Runs the command; returns {variant: {score: [value of each seed]}}, as written to ablation.json."""
    config = parse(AblateConfig, argv, __doc__)
    found = {}
    for name, flags in VARIANTS.items():
        if config.only is None or name in config.only:
            runs = [_scores(config, name, flags, seed) for seed in range(config.seeds)]
            found[name] = {key: [run[key] for run in runs] for key in SHOWN}
            print(_line(name, found[name]), flush=True)
    folder = Path(config.out)
    baselines = json.loads(next(folder.glob("*/evaluation/results.json")).read_text())["baselines"]
    for name, told in baselines.items() if baselines else ():
        if isinstance(told, dict):
            found[name] = {key: [told["summary"].get(key)] for key in SHOWN}
    (folder / "ablation.json").write_text(json.dumps(found, indent=1) + "\n")
    print("", _line("", {key: [key] for key in SHOWN}), *(_line(*row) for row in found.items()), sep="\n", flush=True)
    return found


def _scores(config, name, flags, seed):
    """Scores on the validation runs after one training."""
    folder = Path(config.out) / f"{name.replace(' ', '_').replace('>=', 'from')}_{seed}"
    common = ["--steps", str(config.steps), "--seed", str(seed), "--validate-every", str(config.steps)]
    common += ["--archive", config.archive] if config.archive else []
    result = train.main([*common, *flags, "--checkpoint-every", str(config.steps), "--out", str(folder / "training")])
    archive = config.archive or train.EMBEDDED
    judged = ["--checkpoint", str(result.checkpoint), "--archive", archive, "--split", "valid", "--pictures", "0"]
    return evaluate.main([*judged, "--out", str(folder / "evaluation")])["summary"]


def _line(name, scores):
    cells = []
    for values in scores.values():
        numbers = [value for value in values if isinstance(value, float)]
        spread = f" +- {(max(numbers) - min(numbers)) / 2:.2g}" if len(numbers) > 1 else ""
        cells.append(f"{sum(numbers) / len(numbers):.4g}{spread}" if numbers else str(values[0] or "-"))
    return f"{name:20}" + "".join(f"{cell:>22}" for cell in cells)


if __name__ == "__main__":
    main()
