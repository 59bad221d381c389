"""Memory, messages and time of a training of the Transolver, predicted: python -m apps.aero.plan --domain 2

Takes the flags of apps.aero.train; no GPU and no archive are needed.
"""

from dataclasses import dataclass

from torch.distributed.tensor import Shard

from apps.aero.config import TrainConfig
from apps.aero.losses import field_loss
from apps.aero.model import Transolver
from apps.cli import parse
from apps.planned import Mesh, planned
from core.command import command


@dataclass
class PlanConfig(Mesh, TrainConfig):
    """Options of python -m apps.aero.plan."""


def loss(model, *tensors):
    """As the training has it: the mean over the points that count; features, targets, weight of every cloud."""
    clouds = [tensors[k : k + 3] for k in range(0, len(tensors), 3)]
    outputs = model(*(features for features, _, _ in clouds))
    outputs = outputs if len(clouds) > 1 else (outputs,)
    return sum(field_loss("mse", output, *cloud[1:]) for output, cloud in zip(outputs, clouds))


@command
def main(argv=None):
    config = parse(PlanConfig, argv, __doc__.splitlines()[0])
    model, points = config.model(), config.sample_points()
    clouds = [(model.features, model.outputs), *([model.volume] if model.volume else [])]
    inputs = [((points, *rest), None) for features, outputs in clouds for rest in ((features,), (outputs,), ())]
    report = planned(config, lambda: Transolver(model), inputs, lambda ndim: [Shard(1)], loss)
    print(report)
    return report


if __name__ == "__main__":
    main()
