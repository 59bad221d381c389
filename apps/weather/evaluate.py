"""``python -m apps.weather.evaluate``: forecasts from the times of a held-out split, scored against persistence.

Sums of all cases are added before any ratio is taken; model and baseline are scored on the same points, those that were
observed both in the history and at the valid time. Data groups share the cases, the ranks of a domain share each case.
"""

import json
import math
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from apps import metrics
from apps.agree import together
from apps.cli import check_counts, command, option, parse
from apps.report import draw_maps, draw_scores
from apps.weather.baselines import persistence
from apps.weather.config import EVENTS, WINDOWS
from apps.weather.dataset import Frames
from apps.weather.product import provenance
from apps.weather.rollout import load, rollout, rounds, spread
from core import DistributedManager, InputError
from data.weather.archive import WeatherReader
from data.weather.grid import HRRR_CRS
from data.weather.states import state_lines_xy


@dataclass
class EvaluateConfig:
    """Options of an evaluation."""

    checkpoint: str = field(metadata={"help": "step_... folder of a training"})
    archive: str = field(metadata={"help": "archive with the split to score"})
    out: str = option("runs/weather/evaluation", "folder of results.json and the figures")
    split: str = option("valid", "split of the archive")
    steps: int = option(6, "steps ahead")
    members: int = option(4, "ensemble members")
    cases: int = option(12, "starting times, evenly spaced over the split")
    seed: int = option(0, "of the ensembles")
    sampler_steps: int | None = option(None, "steps of the sampler; left out: as in training")
    churn: float = option(0.0, "share by which noise is raised before each step of the sampler; 0: deterministic")
    at_once: int = option(8, "members that the network sees together; fewer need less memory")
    domain: int = option(1, "ranks that share one case; the rest of the world takes other cases")


@command
def main(argv=None):
    config = parse(EvaluateConfig, argv, __doc__.splitlines()[0])
    DistributedManager.initialize()
    mesh = DistributedManager().initialize_mesh((-1, config.domain), ("ddp", "domain"))
    with together():
        check_counts(config, "steps", "members", "cases", "sampler_steps", "at_once")
        reader = WeatherReader(config.archive)
    model, process, facts, state = load(config.checkpoint, config.sampler_steps, config.churn)
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
    cases = [*cases[len(cases) // 2 :], *cases[: len(cases) // 2]]  # the first one is drawn: one from the middle
    total, chief = {}, dist.get_rank() == 0
    for done, (index, counts) in enumerate(rounds(cases, mesh)):
        sums, panels = score_case(model, process, frames, index, config, draw=done == 0)
        total = metrics.add(total, {key: value * counts for key, value in sums.items()})
        if chief:
            print(f"case {done + 1}/{-(-len(cases) // mesh['ddp'].size())}", file=sys.stderr, flush=True)
            if panels:
                write_maps(panels, frames, reader.times[index], config)
    total = metrics.reduce(total, mesh)
    if chief:
        about = provenance(config.checkpoint, state, reader, process, split=config.split, seed=config.seed)
        write_results(total, facts, reader.times[sorted(cases)], config, about)


def score_case(model, process, frames, index, config, draw=False):
    """Sums of one case, {"lead/source/channel/name": fp64}; with ``draw`` also whole fields for the maps.

    Fields: {lead: {"observed" | "member 1" | "ensemble mean" | "persistence": (channel, y, x) with NaN}}.
    """
    with together():
        now = persistence(frames.history(index))
        truths = [frames.observed(index + lead) for lead in range(1, config.steps + 1)]
    before, sums, panels = frames.physical(now.values), {}, {}
    ensemble = rollout(model, process, frames, index, config.steps, config.members, config.seed, config.at_once)
    for lead, (members, truth) in enumerate(zip(ensemble, truths), 1):
        valid = (truth.valid & now.valid)[0]
        members, truth = frames.physical(members.values), frames.physical(truth.values)[0]
        for source, values in (("model", members), ("persistence", before)):
            for key, value in score_fields(values, truth, valid, frames.facts.channels).items():
                sums[f"{lead}/{source}/{key}"] = value
        if draw:
            fields = {
                "observed": truth,
                "member 1": members[0],
                "ensemble mean": members.mean(0),
                "persistence": before[0],
            }
            masks = {"observed": truths[lead - 1].valid[0]}
            panels[lead] = {n: _whole(v, masks.get(n, now.valid[0])) for n, v in fields.items()}
    return sums, panels


def score_fields(members, truth, valid, channels):
    """Sums {"channel/name": ...} of an ensemble (member, channel, y, x) against (channel, y, x).

    Errors are those of the ensemble mean, events those of all members, each counted as a forecast of its own.
    """
    out = {}
    for c, channel in enumerate(channels):
        said, seen, mask = members[:, c], truth[c], valid[c]
        sums = metrics.error_sums(said.mean(0), seen, mask) | metrics.ensemble_sums(said, seen, mask)
        if channel in EVENTS:
            levels, below = EVENTS[channel].thresholds, EVENTS[channel].below
            sums |= metrics.event_sums(said, seen[None], mask[None], levels, below)
            rows = [metrics.fraction_sums(said, seen, mask, level, WINDOWS, below) for level in levels]
            sums |= {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        out |= {f"{channel}/{key}": value for key, value in sums.items()}
    return out


def _whole(values, valid):
    return torch.where(valid, values, math.nan).full_tensor().cpu().numpy()


def table(total, leads):
    """Scores by channel, source and name, each a list over leads (and thresholds, and windows)."""
    out = {}
    for channel, source in dict.fromkeys(tuple(key.split("/")[2:0:-1]) for key in total):
        rows = []
        for lead in range(1, leads + 1):
            head = f"{lead}/{source}/{channel}/"
            rows.append(metrics.scores({k.removeprefix(head): v for k, v in total.items() if k.startswith(head)}))
        out.setdefault(channel, {})[source] = {
            name: torch.stack([row[name] for row in rows]).tolist() for name in rows[0]
        }
    return out


def write_results(total, facts, times, config, about):
    """results.json (scores, sums and where they come from) and the figure of scores against lead."""
    folder = Path(config.out)
    results = {
        "lead_minutes": [facts.step_minutes * lead for lead in range(1, config.steps + 1)],
        "members": config.members,
        "cases": [str(t) for t in times],
        "events": {c: asdict(EVENTS[c]) for c in facts.channels if c in EVENTS},
        "windows": WINDOWS,
        "units": dict(zip(facts.channels, facts.units)),
        "scores": table(total, config.steps),
        "sums": {key: value.tolist() for key, value in total.items()},
        "provenance": about,
    }
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / ".results.json.partial"
    part.write_text(json.dumps(_finite(results), indent=1))
    os.replace(part, folder / "results.json")
    for channel, by_source in results["scores"].items():
        for source, scores in by_source.items():
            values = "  ".join(f"{v:8.3f}" for v in scores["crps"])
            print(f"{channel} CRPS, {source:12} {values}  ({facts.units[facts.channels.index(channel)]})")
    print(f"results {folder / 'results.json'}")
    print(f"figure {draw_scores(folder / 'scores.png', results)}")


def _finite(value):
    """NaN as null: JSON has no NaN."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_maps(panels, frames, start, config):
    """One figure a channel: what was observed above what was forecast, at three leads."""
    facts, (x, y) = frames.facts, frames.reader.axes
    leads = sorted({1, (config.steps + 1) // 2, config.steps})
    lines = state_lines_xy(SimpleNamespace(x=x, y=y)) if facts.crs == HRRR_CRS else []
    for c, (channel, units) in enumerate(zip(facts.channels, facts.units)):
        rows = {name: [panels[lead][name][c] for lead in leads] for name in panels[1]}
        titles = [
            f"{str(start + lead * facts.step)[:16].replace('T', ' ')} UTC, +{round(lead * facts.step_minutes)} min"
            for lead in leads
        ]
        path = Path(config.out) / f"maps_{channel}.png"
        print(f"figure {draw_maps(path, rows, titles, x, y, lines, channel, units)}")


if __name__ == "__main__":
    main()
