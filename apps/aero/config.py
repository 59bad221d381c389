"""Options of the aero training: those of every training, the archive, and the model by preset and by flag."""

from dataclasses import dataclass, replace

from apps.aero.dataset import KINDS
from apps.aero.losses import LOSSES
from apps.aero.model import ModelConfig
from apps.cli import option
from apps.loop import LoopConfig
from apps.training import OPTIMIZERS
from core import InputError

PRESETS = {
    # trains in two minutes on two CPU cores
    "tiny": (ModelConfig(width=64, layers=4, heads=4, slices=32), 1024),
    # what is published for whole car surfaces: arXiv 2402.02366's blocks with 512 slices
    "paper": (ModelConfig(width=256, layers=8, heads=8, slices=512), 100_000),
    # many blocks of few slices, as arXiv 2602.04940 for whole cars
    "large": (ModelConfig(width=256, layers=24, heads=8, slices=64), 200_000),
}
FIELDS = {"surface": ("surface",), "volume": ("volume",), "joint": ("surface", "volume")}
EMBEDDED, EMBEDDED_VOLUME = "runs/aero-synthetic.zarr", "runs/aero-synthetic-volume.zarr"


@dataclass
class TrainConfig(LoopConfig):
    """Options of python -m apps.aero.train."""

    out: str = option("runs/aero", "folder of this run: log, checkpoints, figure")
    steps: int = option(600, "optimizer steps in all")
    lr: float = option(5e-3, "peak learning rate")
    optimizer: str = option("muon", "muon: for matrices in the blocks, AdamW for the rest; adamw", choices=OPTIMIZERS)
    archive: str | None = option(None, f"aero archive; left out: synthetic bodies, built once as {EMBEDDED}")
    preset: str = option("tiny", "size of the model and of a sample", choices=tuple(PRESETS))
    points: int | None = option(None, "points of a training sample, drawn anew each time; of the preset where left out")
    width: int | None = option(None, "channels; of the preset where left out")
    layers: int | None = option(None, "blocks; of the preset where left out")
    heads: int | None = option(None, "attention heads; of the preset where left out")
    slices: int | None = option(None, "slices; of the preset where left out")
    fields: str = option("surface", "what is learned; joint: both, by shared slices", choices=tuple(FIELDS))
    loss: str = option("mse", "of standardised fields; relative: L2 error over L2 of the fields", choices=LOSSES)
    force_weight: float = option(0.0, "weight of the squared error of the sample's force coefficients; 0: no such term")
    temperature: float = option(0.25, "of slices, at the start; lower is sharper")
    temperature_low: float = option(0.01, "lower bound of the temperature")
    temperature_high: float = option(5.0, "upper bound of the temperature")
    slice_init: str = option("orthogonal", "start of the slice projection", choices=("orthogonal", "normal"))
    tied: bool = option(False, "one projection for place and value, as in Transolver++")
    plus: bool = option(False, "Transolver++: a temperature of every point, and noise while training")

    weighed: bool = option(False, "weigh the points of a surface in the slices by area, whatever the mesh")

    def kinds(self):
        """Clouds of points that are learned, in the order of the model's."""
        return FIELDS[self.fields]

    def model(self):
        """ModelConfig of the preset with the flags that were given."""
        if self.weighed and self.kinds()[0] != "surface":
            raise InputError("a volume has no areas", variable="weighed", remedy="Leave it out, or --fields joint")
        if not 0 < self.temperature_low <= self.temperature <= self.temperature_high:
            raise InputError(
                f"{self.temperature} is not within {self.temperature_low} ... {self.temperature_high}",
                variable="temperature",
                remedy="Choose 0 < --temperature-low <= --temperature <= --temperature-high",
            )
        given = {name: getattr(self, name) for name in ("width", "layers", "heads", "slices")}
        model = replace(PRESETS[self.preset][0], **{name: value for name, value in given.items() if value is not None})
        if min(model.width, model.layers, model.heads, model.slices) < 1 or model.width % model.heads:
            raise InputError(
                f"{model.width} channels do not divide over {model.heads} heads",
                variable="width",
                remedy="Choose --width as a multiple of --heads, all of them positive",
            )
        options = {name: getattr(self, name) for name in ("temperature", "slice_init", "tied", "plus", "weighed")}
        sizes = [KINDS[kind].features for kind in self.kinds()]
        options |= {"features": sizes[0] + self.weighed, "volume": (sizes[1], 4) if len(sizes) > 1 else None}
        return replace(model, low=self.temperature_low, high=self.temperature_high, **options)

    def sample_points(self):
        """Points of a training sample."""
        points = self.points if self.points is not None else PRESETS[self.preset][1]
        if points < 1:
            raise InputError(f"a sample of {points} points", variable="points", remedy="Choose --points of at least 1")
        return points
