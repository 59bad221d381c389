"""Options of the aero training: those of every training, the archive, and the model by preset and by flag."""

from dataclasses import dataclass, replace

from apps.aero.model import ModelConfig
from apps.cli import option
from apps.loop import LoopConfig
from core import InputError

PRESETS = {
    # trains in two minutes on two CPU cores
    "tiny": (ModelConfig(width=64, layers=4, heads=4, slices=32), 1024),
    # channels, blocks, heads and slices of arXiv 2402.02366 for car surfaces
    "paper": (ModelConfig(width=256, layers=8, heads=8, slices=32), 100_000),
}
EMBEDDED = "runs/aero-synthetic.zarr"


@dataclass
class TrainConfig(LoopConfig):
    """Options of python -m apps.aero.train."""

    out: str = option("runs/aero", "folder of this run: log, checkpoints, figure")
    steps: int = option(600, "optimizer steps in all")
    lr: float = option(5e-3, "peak learning rate")
    archive: str | None = option(None, f"aero archive; left out: synthetic bodies, built once as {EMBEDDED}")
    preset: str = option("tiny", "size of the model and of a sample", choices=tuple(PRESETS))
    points: int | None = option(None, "points of a training sample, drawn anew each time; of the preset where left out")
    width: int | None = option(None, "channels; of the preset where left out")
    layers: int | None = option(None, "blocks; of the preset where left out")
    heads: int | None = option(None, "attention heads; of the preset where left out")
    slices: int | None = option(None, "slices; of the preset where left out")

    def model(self):
        """ModelConfig of the preset with the flags that were given."""
        given = {name: getattr(self, name) for name in ("width", "layers", "heads", "slices")}
        model = replace(PRESETS[self.preset][0], **{name: value for name, value in given.items() if value is not None})
        if min(model.width, model.layers, model.heads, model.slices) < 1 or model.width % model.heads:
            raise InputError(
                f"{model.width} channels do not divide over {model.heads} heads",
                variable="width",
                remedy="Choose --width as a multiple of --heads, all of them positive",
            )
        return model

    def sample_points(self):
        """Points of a training sample."""
        points = self.points if self.points is not None else PRESETS[self.preset][1]
        if points < 1:
            raise InputError(f"a sample of {points} points", variable="points", remedy="Choose --points of at least 1")
        return points
