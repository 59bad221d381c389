"""What can be chosen: three sizes of model as presets, each number a flag."""

from dataclasses import dataclass, fields

from apps.cli import option
from apps.loop import LoopConfig
from apps.weather.diffusion import Diffusion
from apps.weather.model import ModelConfig

PRESETS = {
    # the embedded storms, 64 x 96 points, two minutes on two cores
    "tiny": dict(
        history=3, patch=4, width=64, depth=4, heads=4, kernel=7, steps=600, batch=4, lr=3e-3, sampler_steps=10
    ),
    # one radar channel over the country at 6 km on a laptop, or a region at 3 km
    "small": dict(
        history=2, patch=4, width=96, depth=4, heads=4, kernel=9, steps=1000, batch=2, lr=1e-3, sampler_steps=10
    ),
    # the 6 km, 10 minute forecaster of the size of StormScope's: GPUs
    "regional": dict(
        history=6, patch=4, width=768, depth=16, heads=16, kernel=31, steps=100_000, batch=8, lr=2e-4, sampler_steps=18
    ),
}


@dataclass
class TrainConfig(LoopConfig):
    """Options of the training; those without a default take the preset's."""

    out: str = option("runs/weather", "folder of this run: log, checkpoints, figure")
    archive: str | None = option(None, "archive of data.weather.build; left out: made storms, built once in runs/")
    preset: str = option("tiny", "sizes of model and training", choices=tuple(PRESETS))
    channels: tuple[str, ...] | None = option(None, "channels to learn and forecast; left out: all of the archive")
    history: int | None = option(None, "frames that the model sees (preset)")
    patch: int | None = option(None, "edge of a patch in grid cells (preset)")
    width: int | None = option(None, "channels of a token (preset)")
    depth: int | None = option(None, "transformer blocks (preset)")
    heads: int | None = option(None, "attention heads (preset)")
    kernel: int | None = option(None, "edge of the attention's neighbourhood in patches, odd (preset)")
    steps: int | None = option(None, "optimizer steps in all (preset)")
    batch: int | None = option(None, "global batch size, cut over the data groups (preset)")
    lr: float | None = option(None, "peak learning rate (preset)")
    sampler_steps: int | None = option(None, "steps of the sampler in validation and, later, forecasts (preset)")
    cases: int = option(8, "validation samples")
    members: int = option(4, "ensemble members in validation")
    validate_every: int = option(300, "steps between validations; the last step always validates")
    checkpoint_every: int = option(300, "steps between checkpoints; the last step always saves")

    def __post_init__(self):
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def model(self, channels, conditions):
        """Sizes of the denoiser for so many channels."""
        own = {f.name: getattr(self, f.name) for f in fields(ModelConfig) if hasattr(self, f.name)}
        return ModelConfig(**{**own, "channels": channels, "conditions": conditions})

    def diffusion(self):
        """States are changes since the last frame in units of the channel's spread, about a half wide. Under the
        conditions nothing wider than 20 is left to guess, nothing finer than 0.01 to see."""
        return Diffusion(sigma_data=0.5, p_mean=-0.8, sigma_min=0.01, sigma_max=20.0, steps=self.sampler_steps)
