"""The training loop gives one curve on every mesh, with DDP and FSDP2, and resumes exactly at another layout."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from apps.loop import LoopConfig, fit, schedule, start
from core import InputError, checkpoint, scatter_tensor
from data.sampler import DomainSampler

COUNT, ROWS = 5, 7


def make():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).double()


def sample(i):
    g = torch.Generator().manual_seed(i)
    return torch.randn(ROWS, 4, dtype=torch.float64, generator=g), torch.randn(
        ROWS, 2, dtype=torch.float64, generator=g
    )


class Toy:
    kind = "toy"

    def __init__(self, mesh=None, poison=None):
        self.mesh, self.poison = mesh, poison

    def count(self):
        return COUNT

    def loss(self, model, samples):
        if self.poison is not None and any(p >= self.poison for _, p in samples):
            return model(self._cut(sample(0)[0])[None]).mean() * math.nan
        pairs = [sample(i) for i, _ in samples]
        x, y = (self._cut(torch.stack(t)) for t in zip(*pairs))
        return ((model(x) - y) ** 2).mean()

    def _cut(self, t):
        if self.mesh is None:
            return t
        return scatter_tensor(t, None, self.mesh["domain"], [Shard(t.ndim - 2)])

    def validate(self, model):
        x, y = (self._cut(t) for t in sample(99))
        return {"loss": ((model(x) - y) ** 2).mean().item()}

    def state(self):
        return {"rows": ROWS}


def options(out, **kwargs):
    base = dict(steps=6, batch=4, lr=1e-2, warmup=2, log_every=2, validate_every=3, checkpoint_every=3)
    return LoopConfig(out=str(out), **(base | kwargs))


def reference(config):
    """The same training written out for one process and plain tensors."""
    model, task, losses = make(), Toy(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay, betas=(0.9, 0.98))
    sampler = DomainSampler(COUNT, config.batch, seed=config.seed)
    for step in range(config.steps):
        optimizer.param_groups[0]["lr"] = config.lr * schedule(step, config)
        optimizer.zero_grad()
        loss = task.loss(model, sampler.next())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def _run(config, poison=None):
    mesh = start(config)
    return fit(make(), Toy(mesh, poison), config, mesh)


def _same_curve(meshes, folder):
    expected, trained = reference(options(folder))
    for domain, fsdp in ((1, False), (2, False), (4, False), (2, True), (1, True)):
        config = options(Path(folder) / f"{domain}-{fsdp}", domain=domain, fsdp=fsdp)
        result = _run(config)
        torch.testing.assert_close(torch.tensor(result.losses), torch.tensor(expected), atol=1e-10, rtol=1e-10)
        model = make()
        checkpoint.load(result.checkpoint, model)
        for a, b in zip(model.parameters(), trained.parameters()):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def _resumes(meshes, folder):
    """Three steps, then three more from the checkpoint at another layout, are six steps."""
    whole = _run(options(Path(folder) / "whole", domain=2))
    parts = Path(folder) / "parts"
    _halt_after(options(parts, domain=2), 3)
    # what a killed save leaves behind is ignored
    (parts / "checkpoints" / "step_00000005.part").mkdir(exist_ok=True)
    resumed = _run(options(parts, domain=4, resume=True))
    torch.testing.assert_close(torch.tensor(resumed.losses), torch.tensor(whole.losses), atol=1e-10, rtol=1e-10)
    a, b = make(), make()
    checkpoint.load(whole.checkpoint, a, averaged=True)
    checkpoint.load(resumed.checkpoint, b, averaged=True)
    for p, q in zip(a.parameters(), b.parameters()):
        torch.testing.assert_close(p, q, atol=1e-9, rtol=1e-9)


def _halt_after(config, steps):
    """Trains until the checkpoint of ``steps`` is written, then stops with the error of a poisoned sample."""
    with pytest.raises(InputError, match="loss is nan at step 4"):
        _run(config, poison=steps * config.batch)


def _puts_aside(meshes, folder):
    """A new run in the folder of a longer one does not pick up its checkpoints, and loses nothing."""
    _run(options(folder))
    shorter = _run(options(folder, steps=3))
    assert checkpoint.latest(Path(folder) / "checkpoints") == shorter.checkpoint
    assert checkpoint.latest(Path(folder) / "previous_1" / "checkpoints").name == "step_00000006"


def _refuses(meshes, folder):
    result = _run(options(Path(folder) / "run"))
    with pytest.raises(InputError, match="0.weight"):
        checkpoint.load(result.checkpoint, nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 2)).double())
    with pytest.raises(InputError, match="no checkpoint"):
        checkpoint.read_state(Path(folder) / "nowhere")
    with pytest.raises(InputError, match="does not divide"):
        _run(options(Path(folder) / "odd", batch=3, domain=2))
    with pytest.raises(InputError, match="does not fit"):
        _run(options(Path(folder) / "odd", domain=3))
    with pytest.raises(InputError, match="seed"):
        _run(options(Path(folder) / "run", seed=1, resume=True, steps=9))


@pytest.mark.parametrize("case", [_same_curve, _resumes, _puts_aside, _refuses], ids=lambda c: c.__name__.strip("_"))
def test_loop(pool, case, tmp_path):
    pool.run(case, str(tmp_path))


def test_log_is_json(pool, tmp_path):
    pool.run(_logs, str(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if "loss" in r] == [2, 4, 6] and any("validation" in r for r in rows)


def _logs(meshes, folder):
    _run(options(folder))


# -- sampler ----------------------------------------------------------------------------------------------------------
def _ids(groups, batches, batch=4, consumed=0):
    samplers = [DomainSampler(11, batch, groups, g, seed=3, consumed=consumed) for g in range(groups)]
    return [[pair for s in samplers for pair in s.next()] for _ in range(batches)]


def test_every_sample_once_an_epoch_whatever_the_groups():
    stream = [i for batch in _ids(1, 11) for i, _ in batch]
    for epoch in range(4):
        assert sorted(stream[11 * epoch : 11 * (epoch + 1)]) == list(range(11))
    assert stream[:11] != stream[11:22]
    for groups in (2, 4):
        assert _ids(groups, 11) == _ids(1, 11)


def test_resume_at_another_number_of_groups():
    assert _ids(2, 3, consumed=8) == _ids(1, 5)[2:]


def test_wrong_samplers_are_refused():
    with pytest.raises(InputError, match="no samples"):
        DomainSampler(0, 1)
    with pytest.raises(InputError, match="does not divide"):
        DomainSampler(5, 3, groups=2)
