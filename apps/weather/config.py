"""What can be chosen: sizes of model and training as presets, for the satellite and for the radar, each number a flag.

Two models share the work. The satellite model forecasts the bands of the imager from their own history; the radar model
forecasts reflectivity and lightning and is told the history of the bands too, in a forecast that of the first model. A
``joint`` one does all at once, which is enough where the grid is small.

Published values (Pathak et al. 2026 and the code that its authors released) are marked "published"; the others are
chosen here. Not published: the noise law, learning rate, batch and decay of the averages of the paper's training.
"""

from dataclasses import dataclass, fields

from apps.cli import option
from apps.loop import LoopConfig
from apps.training import OPTIMIZERS
from apps.weather.diffusion import LAWS, Diffusion
from apps.weather.model import ModelConfig
from apps.weather.policy import KINDS as POLICIES
from apps.weather.policy import Policy
from apps.weather.positions import KINDS
from core import InputError
from data.weather.channels import CHANNELS

PARTS = ("joint", "satellite", "radar")
RADAR = ("refc", "refb", "rain", "glm")  # what the radar model forecasts; what else was observed is the satellite's
MODEL = frozenset(name for name, channel in CHANNELS.items() if channel.model)  # is forecast by none of ours

SMALL = dict(
    patch=4, heads=4, fine=32, positions="waves", qk_norm=False, gaps="inputs",
    # states are changes since the last frame in units of the channel's spread, about a half wide; nothing finer than
    # 0.01 is seen, and a storm of some points still shows through 20, so that whoever starts there bears too few
    noise="lognormal", p_mean=-0.8, p_std=1.2, sigma_min=0.01, sigma_max=80.0, boundaries=(), sampler_steps=10,
)  # fmt: skip
LARGE = dict(
    history=6, patch=4, width=768, depth=16, heads=16, kernel=31, fine=64,  # published
    positions="learned", qk_norm=False, gaps="both", noise="lognormal", p_mean=-0.8, p_std=1.2,  # published: positions
    sigma_min=0.004, sigma_max=500.0, boundaries=(), sampler_steps=18,  # published: sigmas
    steps=100_000, batch=64, lr=4e-4, warmup=1000, ema=0.999, precision="bf16",  # published: batch, lr, warm-up
)  # fmt: skip
ROTARY = dict(positions="rotary", qk_norm=True, heads=6, sigma_max=800.0, boundaries=(2.544, 58.33))  # published: 3 km

PRESETS = {
    # the embedded storms, 64 x 96 points, two minutes on two cores
    "tiny": dict(SMALL, history=3, width=64, depth=4, kernel=7, steps=600, batch=4, lr=6e-3),
    # the same storms, many days of them, nine minutes on one large GPU; with --capture
    "storms": dict(
        SMALL, history=6, width=256, depth=6, heads=8, kernel=9, patch=2, fine=64, qk_norm=True,
        optimizer="muon", steps=5000, batch=64, lr=4e-3, warmup=200, ema=0.999, precision="bf16",
    ),
    # one radar channel over the country at 6 km on a laptop, or a region at 3 km
    "small": dict(SMALL, history=2, width=96, depth=4, kernel=9, steps=1000, batch=2, lr=1e-3),
    # a region of some hundred points across, on one GPU of 16 GB
    "regional": dict(
        LARGE, history=4, width=384, depth=8, heads=8, kernel=15, positions="rotary", qk_norm=True,
        sigma_min=0.01, sigma_max=80.0, steps=50_000, batch=8, lr=3e-4,
    ),
    "conus6km": LARGE,  # 512 x 896
    # 1024 x 1792; the newer published model has kernel 49: --kernel 49
    "conus3km": dict(LARGE, **ROTARY),
}  # fmt: skip
OF_PART = {  # where a part differs from its preset
    # 61 inputs of the 8 bands: what is missing is told by mask tokens alone (published), spikes need no convolutions
    ("conus3km", "satellite"): dict(gaps="tokens", fine=0),
    ("conus6km", "satellite"): dict(gaps="tokens", fine=0),
    ("conus6km", "radar"): dict(qk_norm=True),
}


@dataclass
class TrainConfig(LoopConfig):
    """Options of the training; those without a default take the preset's."""

    out: str = option("runs/weather", "folder of this run: log, checkpoints, figure")
    archive: str | None = option(None, "archive of data.weather.build; left out: made storms, built once in runs/")
    preset: str = option("tiny", "sizes of model and training", choices=tuple(PRESETS))
    part: str = option("joint", "what is forecast: satellite bands; radar and lightning, told the bands; or all",
                       choices=PARTS)  # fmt: skip
    channels: tuple[str, ...] | None = option(None, "channels to learn and forecast; left out: those of --part")
    told: tuple[str, ...] | None = option(None, "channels to be told of only; left out: for radar the bands, else none")
    background: tuple[str, ...] | None = option(None, "fields of a weather model to be told of, as far as they were "
                                                "known; left out: all of the archive; none: none")  # fmt: skip
    ages: int = option(5, "steps for which such fields may have been known in a sample, drawn for each from 0 on; "
                       "forecasts go as many steps on what was known at their start")  # fmt: skip
    columns: int = option(1, "of the --domain ranks, how many stand side by side: the grid is then cut both ways")
    missing: str = option("mask", "frames with little observed: masked, samples with them rejected, or all refused",
                          choices=POLICIES)  # fmt: skip
    least: float = option(0.5, "share of a frame that must be observed in every channel, for --missing reject, refuse")
    channel_weights: tuple[float, ...] | None = option(None, "weights of the channels' losses; left out: all alike")
    history: int | None = option(None, "frames that the model sees (preset)")
    patch: int | None = option(None, "edge of a patch in grid cells (preset)")
    width: int | None = option(None, "channels of a token (preset)")
    depth: int | None = option(None, "transformer blocks (preset)")
    heads: int | None = option(None, "attention heads (preset)")
    kernel: int | None = option(None, "edge of the attention's neighbourhood in patches, odd (preset)")
    fine: int | None = option(None, "channels of the convolutions after the head; 0: none (preset)")
    positions: str | None = option(None, "how tokens know their place (preset)", choices=KINDS)
    qk_norm: bool | None = option(None, "scale queries and keys to unit mean square (preset)")
    gaps: str | None = option(None, "how the model is told what is missing: by inputs, mask tokens, or both (preset)",
                              choices=("inputs", "tokens", "both"))  # fmt: skip
    noise: str | None = option(None, "law of the training noise (preset)", choices=LAWS)
    p_mean: float | None = option(None, "mean of ln(sigma) of the log-normal law (preset)")
    p_std: float | None = option(None, "standard deviation of ln(sigma) of the log-normal law (preset)")
    sigma_min: float | None = option(None, "least noise of the sampler and of the log-uniform law (preset)")
    sigma_max: float | None = option(None, "most noise of the sampler and of the log-uniform law (preset)")
    boundaries: tuple[float, ...] | None = option(None, "noise levels between experts, rising (preset)")
    expert: int | None = option(None, "which expert to train, 0 for the least noise; left out: one model for all noise")
    start_from: str | None = option(None, "folder of a training, or a step of it, whose averaged weights are the start")
    steps: int | None = option(None, "optimizer steps in all (preset)")
    batch: int | None = option(None, "global batch size, cut over the data groups (preset)")
    lr: float | None = option(None, "peak learning rate (preset)")
    warmup: int | None = option(None, "steps of linear warm-up (preset, or 20)")
    optimizer: str | None = option(None, "adamw; muon: Muon for matrices in the blocks of the model (preset, or adamw)",
                                   choices=OPTIMIZERS)  # fmt: skip
    ema: float | None = option(None, "decay of the averaged weights; 0: none (preset, or 0.99)")
    precision: str | None = option(None, "arithmetic of the forward pass (preset, or fp32)",
                                   choices=("fp32", "bf16", "fp64"))  # fmt: skip
    sampler_steps: int | None = option(None, "steps of the sampler in validation and, later, forecasts (preset)")
    cases: int = option(8, "validation samples")
    cases_after: int = option(1, "frames of history that lie before each, at least: the longest of those compared")
    members: int = option(4, "ensemble members in validation")
    validate_every: int = option(300, "steps between validations; the last step always validates")
    checkpoint_every: int = option(300, "steps between checkpoints; the last step always saves")

    def __post_init__(self):
        preset = dict(warmup=20, ema=0.99, precision="fp32", optimizer="adamw") | PRESETS[self.preset]
        for name, value in (preset | OF_PART.get((self.preset, self.part), {})).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.ages < 0:
            raise InputError(f"--ages is {self.ages}", remedy="Give 0 or more")
        if self.expert is not None and not 0 <= self.expert <= len(self.boundaries):
            raise InputError(f"--expert is {self.expert}", remedy=f"Choose 0 to {len(self.boundaries)}, one more than "
                             "there are --boundaries")  # fmt: skip

    def names(self, available):
        """Channels that are told only, and channels that are forecast, of those of an archive.

        Raises:
            InputError: no channel to forecast, or one that is told and forecast.
        """
        seen = [c for c in available if c not in MODEL]
        radar, bands = ([c for c in seen if (c in RADAR) == kind] for kind in (True, False))
        state = self.channels or {"joint": seen, "satellite": bands, "radar": radar}[self.part]
        told = self.told if self.told is not None else bands if self.part == "radar" else ()
        told = tuple(c for c in told if self.told is not None or c not in state)
        if not state or set(told) & set(state) or MODEL & {*told, *state}:
            raise InputError(f"--part {self.part} forecasts {', '.join(state) or 'nothing'} of {', '.join(available)}",
                             remedy="Name others with --channels and --told")  # fmt: skip
        return told, tuple(state)

    def model_fields(self, available):
        """Fields of a weather model that condition the forecast, of the channels of an archive."""
        if self.background is None:
            return tuple(c for c in available if c in MODEL)
        wanted = tuple(c for c in self.background if c != "none")
        if not MODEL.issuperset(wanted):
            raise InputError(f"--background {' '.join(wanted)} names no fields of a weather model",
                             remedy=f"Choose of {', '.join(sorted(MODEL))}")  # fmt: skip
        return wanted

    def model(self, channels, conditions, seen=0, shape=(0, 0)):
        """Sizes of the denoiser of so many channels; seen: channels of a frame of its history; shape: of the grid."""
        own = {f.name: getattr(self, f.name) for f in fields(ModelConfig) if hasattr(self, f.name)}
        tokens = tuple(-(-n // self.patch) for n in shape) if self.positions == "learned" else None
        own |= {"channels": channels, "conditions": conditions, "window": (self.history, seen), "grid": tokens}
        return ModelConfig(**own)

    def policy(self):
        """What is done about frames of which little was observed."""
        return Policy(self.missing, self.least)

    def diffusion(self):
        """The process, or of an expert its part of it."""
        names = ("p_mean", "p_std", "sigma_min", "sigma_max")
        ends = (0.0, *self.boundaries, None)
        low, high = ends[self.expert : self.expert + 2] if self.expert is not None else (0.0, None)
        own = {name: getattr(self, name) for name in names} | {"law": self.noise, "low": low, "high": high}
        return Diffusion(sigma_data=0.5, steps=self.sampler_steps, **own)
