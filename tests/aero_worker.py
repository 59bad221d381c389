"""One training and one inference as the tests compare them over layouts, called on every rank.

Leaves in the folder: gradients.pt (of the first step, fp64), rank_R.json (losses, scores, bytes read for the first
step), a checkpoint after steps 5 and 10, and (of fewer than four ranks) the inference of run_1.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from apps.aero import infer
from apps.aero.config import TrainConfig
from apps.aero.train import prepare
from apps.loop import fit
from core import DistributedManager, set_fallback
from core.parallelize import parallelize, unwrapped
from data.sampler import DomainSampler


def settings(folder, archive, domain=1):
    """With AdamW: Muon rounds to bf16, so layouts would agree less closely."""
    return TrainConfig(
        out=str(folder), archive=str(archive), domain=domain, steps=10, lr=5e-3, warmup=2, points=512,
        width=32, layers=2, heads=2, slices=8, checkpoint_every=5, validate_every=10, log_every=1, optimizer="adamw",
    )  # fmt: skip


def first_gradients(config, folder):
    """Gradients of the first step in fp64, and the bytes that this rank read for it."""
    model, task, mesh = prepare(replace(config, precision="fp64"))
    model = parallelize(model, mesh)
    sampler = DomainSampler(task.count(), config.batch, mesh["ddp"].size(), mesh.get_local_rank("ddp"), config.seed)
    task.loss(model, sampler.next()).backward()
    if dist.get_rank() == 0:
        torch.save({name: p.grad for name, p in unwrapped(model).named_parameters()}, folder / "gradients.pt")
    return task.reader.bytes_read


def train_and_infer(rank, folder, archive, domain):
    set_fallback("error")
    folder = Path(folder)
    config = settings(folder, archive, domain)
    bytes_read = first_gradients(config, folder)
    model, task, mesh = prepare(config)
    result = fit(model, task, config, mesh)
    found = {"losses": result.losses, "scores": result.scores, "bytes_read": bytes_read}
    (folder / f"rank_{rank}.json").write_text(json.dumps(found))
    if dist.get_world_size() < 4:
        common = ["--checkpoint", str(result.checkpoint), "--archive", archive, "--run", "run_1", "--out", str(folder)]
        infer.main(common)
    DistributedManager.cleanup()
