"""Memory, messages and time of a training of the Transolver, predicted: python -m apps.aero.plan --domain 2

Takes the flags of apps.aero.train; no GPU and no archive are needed.
"""

from dataclasses import dataclass

from torch.distributed.tensor import Shard

from apps.aero.config import TrainConfig
from apps.aero.model import Transolver
from apps.cli import command, parse
from apps.planned import Mesh, planned


@dataclass
class PlanConfig(Mesh, TrainConfig):
    """Options of python -m apps.aero.plan."""


def loss(model, features, targets, weight):
    """As the training has it: the mean over the points that count."""
    square = (model(features) - targets).square().mean(-1)
    return ((weight * square).sum(1) / weight.sum(1).clamp(min=1)).mean()


@command
def main(argv=None):
    config = parse(PlanConfig, argv, __doc__.splitlines()[0])
    model, points = config.model(), config.sample_points()
    inputs = [((points, model.features), None), ((points, model.outputs), None), ((points,), None)]
    report = planned(config, lambda: Transolver(model), inputs, lambda ndim: [Shard(1)], loss)
    print(report)
    return report


if __name__ == "__main__":
    main()
