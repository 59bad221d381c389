"""``python -m apps.weather.evaluate``: forecasts from the times of a held-out split, scored beside those of baselines.

With ``--forecast`` those that were written before are scored.

Sums of each case and lead are kept (`apps.weather.results` has the schema), no ratio is taken before they are added.
Data groups share the cases, the ranks of a domain share each case. docs/verification.md defines every score.
"""

import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

from apps import metrics
from apps.agree import together
from apps.checkpoints import beside, find
from apps.cli import check_counts, option, parse
from apps.meshes import domain_of, mesh_of, rounds
from apps.weather import baselines, figures, maps, results
from apps.weather.dataset import Frames
from apps.weather.ensemble import EnsembleConfig, chosen, load_stages, policy_of
from apps.weather.hrrr import Hrrr
from apps.weather.provenance import provenance
from apps.weather.report import write_report
from apps.weather.rollout import rollout, spread
from apps.weather.stages import merged
from apps.weather.stored import Stored
from apps.weather.verify import score_case
from core import DistributedManager, InputError, checkpoint
from core.command import command
from data.weather.archive import WeatherReader
from data.weather.grid import HRRR_CRS
from data.weather.states import state_lines_xy

RUN = "runs/weather"


@dataclass(kw_only=True)
class EvaluateConfig(EnsembleConfig):
    """Options of an evaluation."""

    checkpoint: tuple[str, ...] | None = option(
        None, f"folder of a training or a step of it, or one of each expert; left out: {RUN}"
    )
    forecast: tuple[str, ...] | None = option(None, "files of apps.weather.forecast to score instead of new forecasts")
    archive: str | None = option(None, "archive with the split to score; left out: the one of the training")
    out: str | None = option(None, "folder of results.json, report.html and the figures; left out: evaluation, in the "
                             "run's folder or beside the forecasts")  # fmt: skip
    split: str = option("valid", "split of the archive")
    members: int = option(4, "ensemble members, of the model and of STEPS")
    cases: int = option(12, "starting times, evenly spaced over the split")
    seed: int = option(0, "of the ensembles, and of the draws of the intervals")
    domain: int = option(1, "ranks that share one case; the rest of the world takes other cases")
    baselines: tuple[str, ...] | None = option(
        None, f"of {', '.join(baselines.NAMES)}; left out: all, those of pysteps where it is installed"
    )
    hrrr: str | None = option(None, "folder of HRRR files (wrfsfc, wrfsubh), to be scored too where they are valid")
    hrrr_delay: float = option(60.0, "minutes after its start from which on a run of HRRR counts as available")
    draws: int = option(1000, "draws of the bootstrap over starting times")
    figures: bool = option(True, "draw figures and animations, which the report holds")
    block_hours: float = option(0.0, "starting times in so many hours are drawn together: cases that share weather")


@command
def main(argv=None):
    config = parse(EvaluateConfig, argv, __doc__.splitlines()[0])
    DistributedManager.initialize()
    chief = dist.get_rank() == 0
    with together():
        check_counts(config, "steps", "members", "cases", "sampler_steps", "at_once", "draws", "domain", "columns")
        names = baselines.choose(config.baselines, chief)
        hrrr = Hrrr(config.hrrr, config.hrrr_delay) if config.hrrr else None
    mesh, find = mesh_of(config.domain, config.columns), _stored if config.forecast else _made
    ensembles, frames, cases, about = find(config, mesh)
    sums, panels = score_all(ensembles, frames, cases, config, names, hrrr, mesh)
    if chief:
        names += ("hrrr",) if hrrr else ()
        found = results.summarize(sums, frames.facts, frames.reader.times[cases], config, names, about)
        results.write(found, config.out)
        results.show(found)
        draw(found, panels, frames, config)


def _made(config, mesh):
    """New forecasts of a checkpoint: a function of a case to its ensembles, frames, cases, and where they come from."""
    with together():
        config.checkpoint = config.checkpoint or (RUN,)
        path = find(config.checkpoint[0])
        config.out, state = config.out or beside(path, "evaluation"), checkpoint.read_state(path)
        reader = WeatherReader(config.archive or state["task"]["archive"])
    stages = load_stages(config)
    with together():
        region, last, policy = reader.split(config.split), stages[-1], policy_of(config, stages)
        frames = Frames(reader, merged(stages), domain_of(mesh), last.patch, region, last.dtype, policy)
        cases = spread(frames.starts(config.steps), config.cases)
        if not cases:
            raise InputError(
                f"no {frames.facts.history + config.steps} successive frames that can be used",
                file=reader.path,
                variable=f"{config.split} split",
                remedy="Use fewer --steps or another --split, or --missing mask",
            )

    def ensembles(index):
        members = range(config.members)
        made = rollout(stages, frames, index, range(config.steps), members, config.seed, config.at_once)
        return (frames.physical(frame.values) for frame in made)

    told = dict(split=config.split, seed=config.seed, missing_pixels=asdict(policy))
    return ensembles, frames, cases, provenance(stages, reader, **told)


def _stored(config, mesh):
    """As `_made`, for forecasts in files: their own members, leads and starting times count."""
    with together():
        files = [Stored(path) for path in config.forecast]
        first, config.out = files[0], config.out or beside(config.forecast[0], "evaluation")
        for file in files:
            same = ("channels", "steps", "members", "history", "policy")
            if any(getattr(file, name) != getattr(first, name) for name in same):
                raise InputError(f"is not like {first.path}", file=file.path, variable=", ".join(same),
                                 remedy="Score forecasts of one kind together")  # fmt: skip
        reader = WeatherReader(config.archive or first.data.attrs["archive"])
        frames = Frames(reader, first.facts(reader), domain_of(mesh), 1, dtype=torch.float64)
        policy = chosen(config, first.policy)
        config.steps, config.members, config.split = first.steps, first.members, "as forecast"
        by_case = {}
        for file in files:
            file.facts(reader)
            at = np.flatnonzero(reader.times == file.start)
            if len(at) == 0 or int(at[0]) not in frames.starts(config.steps):
                raise InputError(f"the archive lacks frames from {file.start} to the last lead", file=file.path,
                                 variable="time", remedy="Give the --archive that holds what was observed")  # fmt: skip
            if _taken(policy, frames, range(int(at[0]) - first.history + 1, int(at[0]) + config.steps + 1)):
                by_case[int(at[0])] = file
        if not by_case:
            raise InputError("no forecast is left of which enough was observed", file=reader.path, variable="coverage",
                             remedy="Lower --least, or use --missing mask")  # fmt: skip
    about = {"forecasts": [str(by_case[index].path) for index in sorted(by_case)],
             "forecast": dict(first.data.attrs), "missing_pixels": asdict(policy)}  # fmt: skip
    return lambda index: by_case[index].ensembles(frames, config.steps), frames, sorted(by_case), about


def _taken(policy, frames, wanted):
    """Whether the policy takes the ``wanted`` frames; where it refuses it raises."""
    if policy.missing == "refuse":
        policy.demand(frames.reader, frames.facts.channels, wanted)
    return not policy.poor(frames.reader, frames.facts.channels)[wanted].any()


def score_all(ensembles, frames, cases, config, names, hrrr, mesh):
    """Sums of all cases on all ranks, {"channel/source/name": fp64 (case, lead, ...)}, and the fields of one case."""
    order = [*cases[len(cases) // 2 :], *cases[: len(cases) // 2]]  # the first one is drawn: one from the middle
    sums, panels, start = {}, {}, order[0]
    for done, (index, counts) in enumerate(rounds(order, mesh)):
        case, shown = score_case(ensembles(index), frames, index, config, names, hrrr, draw=done == 0)
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
    return pictures + _pictures(found, channel, drawn, frames, config)


def _pictures(found, channel, drawn, frames, config):
    """Maps of what was observed above what was forecast, at three leads of one case, and the same as an animation."""
    (index, panels), facts, (x, y) = drawn, frames.facts, frames.reader.axes
    start, leads = frames.reader.times[index], sorted({1, (config.steps + 1) // 2, config.steps})
    lines = state_lines_xy(SimpleNamespace(x=x, y=y)) if facts.crs == HRRR_CRS else []
    titles = [
        f"{str(start + lead * facts.step)[:16].replace('T', ' ')} UTC, +{round(lead * facts.step_minutes)} min"
        for lead in range(1, config.steps + 1)
    ]
    rows = {name: [fields[lead - 1] for lead in leads] for name, fields in panels[channel].items()}
    label = found["long_names"][channel] + figures.in_units(found["units"][channel])
    out, what = Path(config.out), (x, y, lines, channel, label)
    some = [titles[lead - 1] for lead in leads]
    still = maps.draw_maps(out / f"maps_{channel}.png", rows, some, *what)
    told = f"Started {str(start)[:16].replace('T', ' ')} UTC. Sand: not seen. Black: state lines. STEPS: one member."
    told += " In colours: below 235 K, tops of storms." if channel in maps.COLD else ""
    moving = maps.animate(out / f"loop_{channel}.gif", panels[channel], titles, *what)
    return [
        ("Maps", told, still),
        ("Animation", f"{told} All leads, one after another.", moving),
    ]


if __name__ == "__main__":
    main()
