"""``python -m apps.weather.evaluate``: forecasts from the times of a held-out split, scored beside those of baselines.

Sums of each case and lead are kept (`apps.weather.results` has the schema), no ratio is taken before they are added.
Data groups share the cases, the ranks of a domain share each case. docs/verification.md defines every score.
"""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

from apps import metrics
from apps.agree import together
from apps.cli import check_counts, command, option, parse
from apps.weather import baselines, figures, results
from apps.weather.dataset import Frames
from apps.weather.product import provenance
from apps.weather.report import write_report
from apps.weather.rollout import load, rounds, spread
from apps.weather.verify import score_case
from core import DistributedManager, InputError, checkpoint
from data.weather.archive import WeatherReader
from data.weather.grid import HRRR_CRS
from data.weather.states import state_lines_xy

RUN = Path("runs/weather")


@dataclass
class EvaluateConfig:
    """Options of an evaluation."""

    checkpoint: str | None = option(None, f"step_... folder of a training; left out: the last one of {RUN}")
    archive: str | None = option(None, "archive with the split to score; left out: the one of the training")
    out: str = option("runs/weather/evaluation", "folder of results.json, report.html and the figures")
    split: str = option("valid", "split of the archive")
    steps: int = option(6, "steps ahead")
    members: int = option(4, "ensemble members, of the model and of STEPS")
    cases: int = option(12, "starting times, evenly spaced over the split")
    seed: int = option(0, "of the ensembles, and of the draws of the intervals")
    sampler_steps: int | None = option(None, "steps of the sampler; left out: as in training")
    churn: float = option(0.0, "share by which noise is raised before each step of the sampler; 0: deterministic")
    at_once: int = option(8, "members that the network sees together; fewer need less memory")
    domain: int = option(1, "ranks that share one case; the rest of the world takes other cases")
    baselines: tuple[str, ...] | None = option(
        None, f"of {', '.join(baselines.NAMES)}; left out: all, those of pysteps where it is installed"
    )
    draws: int = option(1000, "draws of the bootstrap over starting times")
    figures: bool = option(True, "draw figures, which the report holds")
    block_hours: float = option(0.0, "starting times in so many hours are drawn together: cases that share weather")


@command
def main(argv=None):
    config = parse(EvaluateConfig, argv, __doc__.splitlines()[0])
    DistributedManager.initialize()
    mesh = DistributedManager().initialize_mesh((-1, config.domain), ("ddp", "domain"))
    chief = dist.get_rank() == 0
    with together():
        check_counts(config, "steps", "members", "cases", "sampler_steps", "at_once", "draws")
        names = baselines.choose(config.baselines, chief)
        path = find_checkpoint(config.checkpoint)
        reader = WeatherReader(config.archive or checkpoint.read_state(path)["task"]["archive"])
    model, process, facts, state = load(path, config.sampler_steps, config.churn)
    with together():
        region = reader.split(config.split)
        frames = Frames(reader, facts, mesh["domain"], model.config.patch, region, model.head.weight.dtype)
        cases = spread(frames.starts(config.steps), config.cases)
        if not cases:
            raise InputError(
                f"no {facts.history + config.steps} successive frames",
                file=reader.path,
                variable=f"{config.split} split",
                remedy="Use fewer --steps or another --split",
            )
    sums, panels = score_all(model, process, frames, cases, config, names, mesh)
    if chief:
        about = provenance(path, state, reader, process, split=config.split, seed=config.seed)
        found = results.summarize(sums, facts, reader.times[cases], config, names, about)
        results.write(found, config.out)
        results.show(found)
        draw(found, panels, frames, config)


def find_checkpoint(path):
    """The checkpoint that was asked for, or the last one of the default run."""
    path = path or checkpoint.latest(RUN / "checkpoints")
    if path is None:
        raise InputError("holds no checkpoint", file=RUN, remedy="Run apps.weather.train, or name a --checkpoint")
    return path


def score_all(model, process, frames, cases, config, names, mesh):
    """Sums of all cases on all ranks, {"channel/source/name": fp64 (case, lead, ...)}, and the fields of one case."""
    order = [*cases[len(cases) // 2 :], *cases[: len(cases) // 2]]  # the first one is drawn: one from the middle
    sums, panels, start = {}, {}, order[0]
    for done, (index, counts) in enumerate(rounds(order, mesh)):
        case, shown = score_case(model, process, frames, index, config, names, draw=done == 0)
        panels = panels or shown
        for key, value in case.items():
            rows = sums.setdefault(key, value.new_zeros(len(cases), *value.shape))
            if counts:
                rows[cases.index(index)] = value
        if dist.get_rank() == 0:
            print(f"case {done + 1}/{-(-len(cases) // mesh['ddp'].size())}", file=sys.stderr, flush=True)
    return {key: value.cpu() for key, value in metrics.reduce(sums, mesh).items()}, (start, panels)


def draw(found, drawn, frames, config):
    """The report, with figures if they are wanted and matplotlib is installed."""
    pictures = {}
    if config.figures and find_spec("matplotlib") is None:
        print("no figures: matplotlib is not installed")
    elif config.figures:
        pictures = {channel: _figures(found, channel, drawn, frames, config) for channel in found["scores"]}
    print(f"report {write_report(Path(config.out) / 'report.html', found, pictures)}")


def _figures(found, channel, drawn, frames, config):
    """[(title, caption, path)] of one channel."""
    out, pictures = Path(config.out), []
    for name, (drawing, title, caption) in figures.CHAPTERS.items():
        if name in figures.OF_EVENTS and channel not in found["events"]:
            continue
        if name == "ranks" and not any("rank_histogram" in own for own in found["scores"][channel].values()):
            continue
        pictures.append((title, caption, drawing(out / f"{name}_{channel}.png", found, channel)))
    return pictures + [_maps(channel, drawn, frames, config)]


def _maps(channel, drawn, frames, config):
    """What was observed above what was forecast, at three leads of one case."""
    (index, panels), facts, (x, y) = drawn, frames.facts, frames.reader.axes
    start, leads = frames.reader.times[index], sorted({1, (config.steps + 1) // 2, config.steps})
    lines = state_lines_xy(SimpleNamespace(x=x, y=y)) if facts.crs == HRRR_CRS else []
    rows = {name: [fields[lead - 1] for lead in leads] for name, fields in panels[channel].items()}
    titles = [
        f"{str(start + lead * facts.step)[:16].replace('T', ' ')} UTC, +{round(lead * facts.step_minutes)} min"
        for lead in leads
    ]
    path, units = Path(config.out) / f"maps_{channel}.png", facts.units[facts.channels.index(channel)]
    caption = f"Started {str(start)[:16].replace('T', ' ')} UTC. Sand: not seen. Black: state lines. STEPS: one member."
    return "Maps", caption, figures.draw_maps(path, rows, titles, x, y, lines, channel, units)


if __name__ == "__main__":
    main()
