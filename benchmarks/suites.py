"""What is measured on many GPUs: attention, vision transformers, the forecaster, the Transolver, exact inference."""

from functools import partial
from typing import NamedTuple

import torch
from torch.distributed.tensor import Replicate, Shard

from apps.aero.config import TrainConfig as AeroConfig
from apps.aero.infer import CHUNK
from apps.aero.model import Transolver
from apps.training import recompute
from apps.weather.config import TrainConfig as WeatherConfig
from apps.weather.model import Denoiser
from benchmarks import models
from core import set_attention_strategy
from core.plan import share

STRATEGIES = ("ring", "heads", "gather")
CLOUDS = 200_000, 1_200_000, 2_400_000, 8_800_000, 9_600_000  # points; 8.8 million are the surface of a car
BANDS = 8  # of the published satellite model
SKY = 5  # conditions beside the history: the sun, the place, topography and coverage


class Case(NamedTuple):
    """A model and its input on a domain of n ranks.

    Attributes:
        kind: which cases are alike, and share a part of the figure.
        make: makes the plain module.
        shapes: n -> global shapes of the inputs.
        cuts: for each input the dim that is cut, None for what every rank has alike.
        strategies: of attention, each of which is measured; None for that of ``--strategy``.
        autocast: weights are fp32 and products bf16, as in training; else all is bf16.
        ddp: gradients are averaged over the data groups, which otherwise do not know of each other.
        recomputed: the model computes its blocks once more in the backward pass, and is not recorded.
        inference: the answer for the points of the first input, as ``apps.aero.infer`` has it; no training.
        chunk: of inference, points at a time; None for all in one pass.
    """

    name: str
    kind: str
    make: callable
    shapes: callable
    cuts: tuple
    strategies: tuple = (None,)
    autocast: bool = False
    ddp: bool = False
    recomputed: bool = False
    inference: bool = False
    chunk: int | None = None

    def labels(self):
        """What is measured: (label, strategy)."""
        return [(f"{self.name}, {s}" if s else self.name, s) for s in self.strategies]

    def share(self, ranks, ddp=1, strategy="auto", dtype=torch.bfloat16):
        """The :class:`core.planned.Share` of a rank in a training step; plain torch on a domain of one."""
        set_attention_strategy(strategy)
        how = dict(input_gradients=True, dtype=torch.float32 if self.autocast else dtype)
        how["autocast"] = torch.bfloat16 if self.autocast else None
        cuts = [[Replicate() if dim is None else Shard(dim)] for dim in self.cuts]
        planned = share(self.make, self.shapes(ranks), cuts, (ddp if ranks > 1 and self.ddp else 1, ranks), **how)
        planned.mesh_shape = (ddp if self.ddp else 1, ranks)
        return planned


def many(small):
    """The cases for as many GPUs as there are; small: toy sizes for a CPU."""
    for name, make, shapes, dim in models.many(small):
        strategies = STRATEGIES if name.startswith("attention") else (None,)
        yield Case(name, name.split()[0], make, _always(shapes), (dim,) * len(shapes), strategies)
    yield from _forecaster(small)
    yield from _transolver(small)


def _forecaster(small):
    preset = dict(preset="tiny", depth=1) if small else dict(preset="conus3km")
    config = partial(WeatherConfig, part="satellite", **preset)
    rows, columns = (64, 32) if small else (1024, 1792)
    for kernel in (3, 5) if small else (31, 49):
        conditions = 2 * config().history * BANDS + SKY
        sizes = config(kernel=kernel).model(BANDS, conditions, BANDS, (rows, columns))
        shapes = [(1, BANDS, rows, columns), (1, conditions, rows, columns), (1,)]
        for ddp in (False, True):
            name = f"forecaster kernel {kernel}" + ", ddp" * ddp
            make = partial(Denoiser, sizes)
            yield Case(name, "forecaster", make, _always(shapes), (2, 2, None), autocast=True, ddp=ddp)


def _transolver(small):
    sizes = (AeroConfig(preset="tiny", layers=2) if small else AeroConfig(preset="paper")).model()

    def cloud(points):
        return [(1, points, sizes.features)]

    each, together = (64, 512) if small else (1_200_000, 9_600_000)
    make = partial(Transolver, sizes)
    yield Case(f"Transolver {each} a rank", "Transolver", make, lambda ranks: cloud(ranks * each), (1,))
    again = partial(_recomputed, make)
    yield Case(f"Transolver {together}", "Transolver", again, _always(cloud(together)), (1,), recomputed=True)
    for points in (300, 1000) if small else (8_800_000, 140_000_000):
        yield Case(f"inference {points}", "inference", make, _always(cloud(points)), (1,), inference=True, chunk=CHUNK)


def aero(small):
    """The cases that tell what the Transolver costs on whole cars, those that need the most memory last: a training
    step beside one of plain torch with all weights written out, answers for a car, more points than a GPU trains."""
    sizes = (AeroConfig(preset="tiny", layers=2) if small else AeroConfig(preset="paper")).model()
    own = dict(width=sizes.width, depth=sizes.layers, heads=sizes.heads, slices=sizes.slices, features=sizes.features)
    some, each, twice, car, most = (32, 64, 128, 300, 512) if small else CLOUDS
    make = partial(Transolver, sizes)
    half, again = partial(_halved, make), partial(_recomputed, make)

    def case(name, made, points, **options):
        return Case(f"{name} {points}", name.split()[0], made, _always([(1, points, sizes.features)]), (1,), **options)

    yield case("autocast plain", partial(models.Transolver, **own), some, autocast=True)
    yield case("autocast", make, some, autocast=True)
    yield case("inference by chunks", half, car, inference=True, chunk=100 if small else 4 * CHUNK)
    yield case("Transolver", make, each)
    yield case("Transolver", make, twice)
    yield case("autocast recomputed", again, car, autocast=True, recomputed=True)
    yield case("inference", half, car, inference=True)
    yield case("Transolver recomputed", again, most, recomputed=True)


def _halved(make):
    return make().bfloat16()


def _always(shapes):
    return lambda ranks: shapes


def _recomputed(make):
    """Keeps no activations within blocks, on any number of ranks alike, for one GPU could not hold them."""
    model = make()
    recompute(model.blocks)
    return model


SUITES = {"many": many, "aero": aero}
