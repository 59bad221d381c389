"""The training loop gives one curve on every mesh, with DDP and FSDP2, and resumes exactly at another layout."""

import copy
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from apps import record
from apps.checkpoints import beside
from apps.loop import LoopConfig, fit, schedule, start
from apps.muon import Muon, orthogonal
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


def _run(config, poison=None, task=Toy):
    mesh = start(config)
    model = make()
    return fit(model, task(mesh, poison), config, mesh, [model[0]])


def _same_curve(meshes, folder):
    expected, trained = reference(options(folder))
    parts = dict(accumulate=2, recompute=True)
    rows = ((1, False, {}), (2, False, parts), (4, False, dict(accumulate=4)), (2, True, parts), (1, True, {}))
    rows += ((4, False, dict(compile="aot_eager")),)
    for number, (domain, fsdp, more) in enumerate(rows):
        config = options(Path(folder) / str(number), domain=domain, fsdp=fsdp, **more)
        result = _run(config)
        torch.testing.assert_close(torch.tensor(result.losses), torch.tensor(expected), atol=1e-10, rtol=1e-10)
        model = make()
        checkpoint.load(result.checkpoint, model)
        for a, b in zip(model.parameters(), trained.parameters()):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def _muon_too(meshes, folder):
    """The matrix of the block goes to Muon, all else to AdamW: as written out for one process, on each mesh, and
    resumed at another layout with the states of both."""
    config, task, losses = options(folder), Toy(), []
    model, sampler = make(), DomainSampler(COUNT, config.batch, seed=config.seed)
    matrix, *rest = model.parameters()
    common = dict(lr=config.lr, weight_decay=config.weight_decay)
    both = [Muon([matrix], **common)]
    both.append(torch.optim.AdamW(rest, betas=(0.9, 0.98), **common))
    for step in range(config.steps):
        for optimizer in both:
            optimizer.param_groups[0]["lr"] = config.lr * schedule(step, config)
            optimizer.zero_grad()
        loss = task.loss(model, sampler.next())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        for optimizer in both:
            optimizer.step()
        losses.append(loss.item())
    parts = dict(optimizer="muon", out=str(Path(folder) / "parts"))
    _halt_after(options(**parts, domain=1), 3)
    with pytest.raises(InputError, match="was trained with --optimizer muon"):
        _run(options(parts["out"], resume=True))
    runs = [_run(options(**parts, domain=2, resume=True))]
    runs += [_run(options(Path(folder) / str(n), optimizer="muon", domain=n)) for n in (1, 2, 4)]
    for result in runs:
        torch.testing.assert_close(torch.tensor(result.losses), torch.tensor(losses), atol=1e-10, rtol=1e-10)
    with pytest.raises(InputError, match="muon needs whole weight matrices, which --fsdp cuts"):
        _run(options(Path(folder) / "odd", optimizer="muon", fsdp=True))


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_muon_is_that_of_torch(kind):
    """Matrices of one shape go together, and move as torch moves each, as far as its bf16 tells; one without a gradient
    rests, and torch's state is a state of ours."""
    shapes = [(24, 8), (8, 24), (24, 8), (8, 8), (24, 8)]
    generator = torch.Generator().manual_seed(0)
    theirs, ours = (
        [nn.Parameter(torch.linspace(-1, 1, a * b, device=kind).view(a, b)) for a, b in shapes] for _ in range(2)
    )
    common = dict(lr=0.1, weight_decay=0.05)
    torchs, own = torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **common), Muon(ours, **common)
    for step in range(6):
        for p, q in zip(theirs[:-1], ours[:-1]):
            p.grad = torch.randn(p.shape, generator=generator).to(kind)
            q.grad = p.grad.clone()
        if step == 3:
            own.load_state_dict(copy.deepcopy(torchs.state_dict()))
        for optimizer in (torchs, own):
            optimizer.step()
    for p, q, rests in zip(theirs, ours, (False,) * 4 + (True,)):
        moved = (p - torch.linspace(-1, 1, p.numel(), device=kind).view(p.shape)).norm()
        assert moved == 0 and torch.equal(p, q) if rests else moved > 0.5 and (p - q).norm() < 0.03 * moved
    singular = torch.linalg.svdvals(orthogonal(torch.randn(3, 20, 7, generator=generator).to(kind)).float())
    assert singular.min() > 0.6 and singular.max() < 1.3


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
    result = _run(options(folder))
    Path(beside(result.checkpoint, "evaluation")).mkdir(exist_ok=True)  # every rank calls this
    (Path(folder) / "loss.png").touch()
    shorter = _run(options(folder, steps=3))
    assert checkpoint.latest(Path(folder) / "checkpoints") == shorter.checkpoint
    assert checkpoint.latest(Path(folder) / "previous_1" / "checkpoints").name == "step_00000006"
    for name in ("evaluation", "loss.png"):
        assert not (Path(folder) / name).exists() and (Path(folder) / "previous_1" / name).exists()


def _refuses(meshes, folder):
    result = _run(options(Path(folder) / "run"))
    with pytest.raises(InputError, match="0.weight"):
        checkpoint.load(result.checkpoint, nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 2)).double())
    with pytest.raises(InputError, match="no checkpoint"):
        checkpoint.read_state(Path(folder) / "nowhere")
    with pytest.raises(InputError, match="no checkpoint.*step_"):
        checkpoint.read_state(result.checkpoint / "state.json")  # a file where a folder should be
    with pytest.raises(InputError, match="does not divide"):
        _run(options(Path(folder) / "odd", batch=3, domain=2))
    with pytest.raises(InputError, match="--domain 3 does not divide 4 processes. Start a multiple of 3"):
        _run(options(Path(folder) / "odd", domain=3))
    with pytest.raises(InputError, match="--recompute"):
        _run(options(Path(folder) / "odd", compile="eager", recompute=True))
    with pytest.raises(InputError, match="--capture goes without"):
        _run(options(Path(folder) / "odd", capture=True, recompute=True))
    with pytest.raises(InputError, match="--capture records on GPUs"):
        _run(options(Path(folder) / "odd", capture=True))
    with pytest.raises(InputError, match="--accumulate is 3"):
        _run(options(Path(folder) / "odd", domain=4, accumulate=3))
    with pytest.raises(InputError, match="seed"):
        _run(options(Path(folder) / "run", seed=1, resume=True, steps=9))


class Waning(Toy):
    """Validation losses fall once; one rank is made to see another number than the rest."""

    def validate(self, model):
        self.seen = getattr(self, "seen", 0) + 1
        return {"loss": [3.0, 2.0, 2.5, 2.4, 2.3][self.seen - 1] - (torch.distributed.get_rank() == 3) * self.seen}


def _stops(meshes, folder):
    """Two validations without a lower loss end it, on all ranks; the best checkpoint is that of the lowest loss."""
    config = options(folder, validate_every=1, checkpoint_every=100, patience=2, domain=2)
    result = _run(config, task=Waning)
    assert len(result.losses) == 4 and result.checkpoint.name == "step_00000004"
    assert [p.name for p in (Path(folder) / "best").iterdir()] == ["step_00000002"]
    state = checkpoint.read_state(Path(folder) / "best" / "step_00000002")
    assert (state["best"], state["waited"]) == (2.0, 0)


@pytest.mark.parametrize(
    "case", [_same_curve, _muon_too, _resumes, _puts_aside, _refuses, _stops], ids=lambda c: c.__name__.strip("_")
)
def test_loop(pool, case, tmp_path):
    pool.run(case, str(tmp_path))


def test_decays_of_the_learning_rate():
    for decay, want in (("cosine", (0.55, 0.1)), ("linear", (0.55, 0.1)), ("none", (1.0, 1.0))):
        config = options("unused", steps=22, warmup=2, decay=decay)
        assert [schedule(step, config) for step in (0, 1)] == [0.5, 1.0]
        assert [schedule(step, config) for step in (12, 22)] == pytest.approx(want)


def test_the_record_goes_to_tensorboard_too(tmp_path, monkeypatch):
    """The writer of torch is replaced, because TensorBoard need not be installed."""
    told = []
    writer = SimpleNamespace(add_scalar=lambda *args: told.append(args), close=lambda: told.append("closed"))
    module = SimpleNamespace(SummaryWriter=lambda folder: writer)
    monkeypatch.setattr(record, "find_spec", lambda name: name == "tensorboard")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with record.Record(tmp_path) as log:
        log.add(3, {"loss": 0.5, "validation": {"a/rmse": 2.0}})
    assert told == [("loss", 0.5, 3), ("validation/a/rmse", 2.0, 3), "closed"]
    assert json.loads((tmp_path / "log.jsonl").read_text()) == {"step": 3, "loss": 0.5, "validation": {"a/rmse": 2.0}}


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
