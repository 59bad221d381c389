"""``python -m apps.weather.forecast``: an ensemble from one time of an archive, step by step, to Zarr or NetCDF.

A radar model that was told the satellite's bands needs ``--satellite``, the model that forecasts them: it goes first at
each step. Under torchrun data groups share the members and the ``--domain`` ranks of a group share the grid; members
are the same however ranks are arranged. A forecast that was killed goes on with ``--resume``.
"""

import json
import sys
from dataclasses import asdict, dataclass, field

import numpy as np
import torch.distributed as dist

from apps.agree import together
from apps.cli import check_counts, option, parse
from apps.meshes import domain_of, mesh_of, share
from apps.weather.dataset import Frames
from apps.weather.ensemble import EnsembleConfig, load_stages, policy_of
from apps.weather.policy import MASK
from apps.weather.product import Product, check_path
from apps.weather.provenance import provenance
from apps.weather.rollout import rollout
from apps.weather.stages import merged
from core import DistributedManager, InputError
from core.command import command
from data.weather.archive import WeatherReader


@dataclass(kw_only=True)
class ForecastConfig(EnsembleConfig):
    """Options of a forecast."""

    checkpoint: tuple[str, ...] = field(metadata={"help": "folder of a training, or a step of it; one of each expert"})
    archive: str = field(metadata={"help": "archive that holds the frames up to --init"})
    out: str = field(metadata={"help": "file to write, .zarr or .nc"})
    init: str = option("latest", "time of the last frame of the history, such as 2021-06-21T20:00")
    domain: int | None = option(None, "ranks that share the grid; left out: all")
    products: bool = option(True, "also means, probabilities and rain rates")
    resume: bool = option(False, "go on with a forecast that was broken off")
    overwrite: bool = option(False, "replace an existing output")


@command
def main(argv=None):
    config = parse(ForecastConfig, argv, __doc__.splitlines()[0])
    DistributedManager.initialize()
    with together():
        check_path(config.out, config.overwrite)
        check_counts(config, "steps", "members", "sampler_steps", "at_once", "domain", "columns")
        reader = WeatherReader(config.archive)
    mesh, stages = mesh_of(config.domain, config.columns), load_stages(config)
    with together():
        last, policy = stages[-1], policy_of(config, stages)
        frames = Frames(reader, merged(stages), domain_of(mesh), last.patch, dtype=last.dtype, policy=policy)
        index = find_start(reader, frames.facts, config.init, policy)
        frames.history(index)
        for lead in range(config.steps):  # read here once, where a rank that cannot ends all
            frames.background(index, lead)
    chief, members = dist.get_rank() == 0, share(config.members, mesh)
    start = reader.times[index]
    told = dict(init=str(start), seed=config.seed, config=_told(config), missing_pixels=json.dumps(asdict(policy)))
    about = provenance(stages, reader, **told) if chief else {}
    size = config.steps, config.members
    with Product(config.out, frames, start, *size, about, config.resume, config.products) as product:
        done, past = product.past(members)
        if chief and done:
            print(f"going on after step {done}", file=sys.stderr, flush=True)
        leads = range(done, config.steps)
        for lead, ensemble in zip(
            leads, rollout(stages, frames, index, leads, members, config.seed, config.at_once, past)
        ):
            product.write(lead, members, ensemble)
            if chief:
                print(f"step {lead + 1}/{config.steps}", file=sys.stderr, flush=True)
    if chief:
        print(f"forecast {config.out}")


def _told(config):
    """What the forecast depends on, as text: how ranks were arranged and where it is written do not count."""
    arranged = ("domain", "columns", "at_once", "capture", "out", "resume", "overwrite")
    return json.dumps({name: value for name, value in asdict(config).items() if name not in arranged})


def find_start(reader, facts, text, policy=MASK):
    """Index of the frame at a time given as text, which must have its history before it; "latest" is the last such,
    where the policy rejects the last one whose history was observed.

    Raises:
        InputError: text that is no time, a time that is not in the archive, a gap before it, or a frame of its history
            that the policy does not take.
    """
    say, h = dict(file=reader.path, variable="time"), facts.history
    poor = policy.poor(reader, facts.channels).any(1) & (policy.missing == "reject")
    if text == "latest":
        ends = range(len(reader.times) - 1, h - 2, -1)
        index = next((i for i in ends if _even(reader, facts, i) and not poor[i - h + 1 : i + 1].any()), None)
        if index is None:
            wanted = "enough was observed" if poor.any() else "none is missing"
            raise InputError(f"has no {h} successive frames of which {wanted}", remedy="Build a longer archive", **say)
        policy.demand(reader, facts.channels, range(index - h + 1, index + 1))
        return index
    try:
        time = np.datetime64(text, "s")
    except ValueError:
        raise InputError(f"{text!r} is no time", remedy="Write --init as 2021-06-21T20:00, or latest") from None
    found = np.flatnonzero(reader.times == time)
    if len(found) == 0:
        near = reader.times[np.abs(reader.times - time).argmin()]
        raise InputError(f"holds no frame at {time}", remedy=f"The nearest is at {near}", **say)
    index = int(found[0])
    if not _even(reader, facts, index):
        raise InputError(f"lacks some of the {h} frames up to {time}", remedy="Choose a later --init", **say)
    policy.demand(reader, facts.channels, range(index - h + 1, index + 1))
    return index


def _even(reader, facts, index):
    """Whether the history up to a frame is in the archive without a gap."""
    first = index - facts.history + 1
    return first >= 0 and bool((np.diff(reader.times[first : index + 1]) == facts.step).all())


if __name__ == "__main__":
    main()
