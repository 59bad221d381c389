"""A small training in which a rank may be killed once: torchrun ... fault_worker.py FOLDER. Leaves final.pt there."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from test_loop import Toy, options  # noqa: E402

from apps.loop import fit, start  # noqa: E402
from core import checkpoint  # noqa: E402
from core.command import command  # noqa: E402

VICTIM, STEP = 1, 6


class Mortal(Toy):
    """Rank 1 dies in the sixth step, unless it was started again."""

    def loss(self, model, samples):
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if first and dist.get_rank() == VICTIM and samples[0][1] >= (STEP - 1) * 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, samples)


def train(folder):
    """Two data groups that draw unlike dropout masks; a checkpoint every second step."""
    config = options(folder, steps=8, checkpoint_every=2, validate_every=8, log_every=8)
    mesh = start(config)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.GELU(), nn.Linear(8, 2)).double()
    torch.manual_seed(dist.get_rank())
    result = fit(model, Mortal(mesh), config, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    averages = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    state = checkpoint.load(result.checkpoint, model, optimizer, averages)
    if dist.get_rank() == 0:
        kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"], "ema": averages}
        torch.save(kept | {"losses": state["losses"], "random": torch.get_rng_state()}, Path(folder) / "final.pt")


if __name__ == "__main__":
    command(lambda argv: train(sys.argv[1]))()
