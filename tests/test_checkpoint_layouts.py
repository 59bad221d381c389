"""A checkpoint of any cut over any number of ranks is read into any other, bit for bit, and nobody holds the whole."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from launch import succeed
from test_checkpoint import everything, same_bits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from core import DistributedManager, checkpoint, scatter_tensor
from core.debug import trace

ROWS, WIDTH = 11, 6
LAYOUTS = {"1": (1, 1), "2": (1, 2), "3": (1, 3), "4": (1, 4), "2x2": (2, 2), "3x1": (3, 1)}
EXTENTS = {1: (11,), 2: (9, 2), 3: (4, 0, 7), 4: (1, 7, 0, 3)}  # as a user may choose them, empty parts among them


class Net(nn.Module):
    """A position embedding cut over ``domain``, weights that FSDP2 cuts over ``ddp``, plain weights, a buffer, and a
    parameter that has no gradient."""

    def __init__(self, mesh):
        super().__init__()
        torch.manual_seed(1)
        whole = torch.randn(1, ROWS, WIDTH, dtype=torch.float64)
        self.body, self.head = nn.Linear(WIDTH, 5).double(), nn.Linear(5, 3).double()
        self.late = nn.Parameter(torch.randn(4))
        self.register_buffer("seen", torch.arange(3))
        domain = mesh["domain"]
        self.pos = nn.Parameter(scatter_tensor(whole, None, domain, [Shard(1)], sizes={0: EXTENTS[domain.size()]}))
        fully_shard(self.body, mesh=mesh["ddp"])


def trained(mesh, steps):
    """Model, optimizer and EMA after some steps of gradients that every cut can compute by itself."""
    model = Net(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    ema = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(steps):
        advance(model, optimizer, ema)
    return model, optimizer, ema


def advance(model, optimizer, ema):
    for name, p in model.named_parameters():
        p.grad = p.detach() * 0.3 + 0.01 if name != "late" else None
    optimizer.step()
    with torch.no_grad():
        for name, p in model.named_parameters():
            ema[name].lerp_(p, 0.25)


# -- any number of ranks ------------------------------------------------------------------------------------------
def _mesh(layout):
    DistributedManager.initialize(backend="gloo")
    return DistributedManager().initialize_mesh(LAYOUTS[layout], ("ddp", "domain"))


def _exchanges(rank, layout, folder):
    folder, mesh = Path(folder), _mesh(layout)
    _saves(rank, mesh, folder / layout)
    for other, (groups, ranks) in LAYOUTS.items():
        source = rank if groups * ranks == dist.get_world_size() else 0
        for r in range(groups * ranks):
            _await(folder / other / f"done_{r}")
        _loads(mesh, folder / other, torch.load(folder / other / f"truth_{source}"))
    DistributedManager.cleanup()


def _saves(rank, mesh, folder):
    state = trained(mesh, 2)
    torch.manual_seed(100 + rank)
    torch.rand(3)
    with trace() as sent:
        checkpoint.save(folder, 2, *state[:2], {"sampler": {"consumed": 8}}, state[2])
    assert not sent.messages, "a rank held more than its own part"
    torch.save(everything(*state) | {"draws": torch.rand(3)}, folder / f"truth_{rank}")
    (folder / f"done_{rank}").touch()


def _loads(mesh, folder, truth):
    model, optimizer, ema = trained(mesh, 0)
    kept = model.pos, model.pos._spec
    with trace() as sent:
        state = checkpoint.load(checkpoint.latest(folder), model, optimizer, ema)
    assert not sent.messages, "a rank held more than its own part"
    assert state["sampler"] == {"consumed": 8} and state["step"] == 2
    assert torch.equal(torch.rand(3), truth.pop("draws"))
    same_bits(everything(model, optimizer, ema), truth)
    assert model.pos is kept[0] and model.pos._spec == kept[1]
    advance(model, optimizer, ema)  # and it goes on


def _await(path, seconds=60):
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"no {path}"
        time.sleep(0.05)


def test_any_layout_loads_what_any_layout_saved(tmp_path):
    with ThreadPoolExecutor() as threads:
        done = [threads.submit(succeed, a * b, _exchanges, name, str(tmp_path)) for name, (a, b) in LAYOUTS.items()]
    for run in done:
        run.result()
