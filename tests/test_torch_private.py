"""Names private to torch live in core/_torch.py, and each still does what core needs."""

import re
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate

from core import _torch

ROOT = Path(__file__).parents[1]


def test_private_names_stay_in_one_file():
    private = re.compile(r"torch\._(?!_)|torch\.(?:\w+\.)*_[a-z]\w*|from torch\S*\._|_c10d")
    found = []
    for path in [*ROOT.glob("core/**/*.py"), *ROOT.glob("data/**/*.py"), *ROOT.glob("apps/**/*.py")]:
        if path.name == "_torch.py":
            continue
        for n, line in enumerate(path.read_text().splitlines(), 1):
            if private.search(line) and "torch.ops.aten" not in line:
                found.append(f"{path.relative_to(ROOT)}:{n}: {line.strip()}")
    assert not found, "\n".join(found)


def test_the_tables_of_a_module_hold_all_of_it():
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    found = [id(v) for table in _torch.tables_of(module) for v in table.values()]
    assert {id(x) for x in (*module.parameters(), *module.buffers(), *module)} <= set(found)


def test_the_compiler_is_known_to_be_at_work():
    """While it reads Python and while it traces what it read; not when compiled code runs."""
    seen = []

    def backend(graph, inputs):
        seen.append(_torch.compiling())
        return graph.forward

    def read(x):
        return x + 1 if _torch.compiling() else x

    torch._dynamo.reset()
    assert torch.compile(read, backend=backend, fullgraph=True)(torch.ones(1)) == 2
    assert seen == [True] and not _torch.compiling()


class Probe(torch.Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_below_autograd_nothing_is_recorded():
    x = torch.ones(2, requires_grad=True)
    with _torch.BelowAutograd():
        y = x * 2
    assert not y.requires_grad and (x * 2).requires_grad


def test_no_torch_function_switches_the_protocol_off():
    x = torch.zeros(2).as_subclass(Probe)
    Probe.calls = 0
    with _torch.NoTorchFunction():
        torch.add(x, x)
    assert Probe.calls == 0
    torch.add(x, x)
    assert Probe.calls > 0


def test_wrapper_subclass_has_the_given_metadata():
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("metadata must not dispatch")

    w = _torch.make_wrapper_subclass(Wrapper, (3, 4), (1, 3), dtype=torch.float16, device=torch.device("cpu"))
    assert type(w) is Wrapper and w.shape == (3, 4) and w.stride() == (1, 3) and w.dtype == torch.float16


def test_without_modes_values_are_real():
    with FakeTensorMode():
        with _torch.no_modes():
            assert torch.arange(3).tolist() == [0, 1, 2]
        assert isinstance(torch.arange(3), FakeTensor)


def test_keeps_graph_tells_what_backward_was_asked():
    seen = []

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(_torch.keeps_graph())
            return grad

    y = Ask.apply(torch.ones(2, requires_grad=True)).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert seen == [True, False]


def test_a_process_lets_go_of_its_groups():
    """What a mesh still holds after ``cleanup`` would abort the process at its end, now and then."""
    code = (
        "from core import DistributedManager, _torch\n"
        "DistributedManager.initialize()\n"
        "mesh = DistributedManager().initialize_mesh((1, 1), ('ddp', 'domain'))\n"
        "mesh.get_group('domain')\n"
        "assert not hasattr(mesh, '_pg_registry') or mesh._pg_registry\n"
        "DistributedManager.cleanup()\n"
        "assert not getattr(mesh, '_pg_registry', None)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0


def _wire(meshes):
    mesh = meshes["2"]
    name, me = _torch.group_name(mesh.get_group()), mesh.get_local_rank()
    assert _torch.group_named(name) is mesh.get_group() and _torch.group_named(name).rank() == me
    value = _torch.wire.wait_tensor(_torch.wire.all_reduce(torch.full((3,), 1.0 + me), "sum", name))
    assert value.tolist() == [3.0] * 3
    gathered = _torch.wire.wait_tensor(_torch.wire.all_gather_into_tensor(torch.tensor([me]), 2, name))
    assert gathered.tolist() == [0, 1]
    part = _torch.wire.wait_tensor(_torch.wire.reduce_scatter_tensor(torch.tensor([1.0, 2.0]), "sum", 2, name))
    assert part.tolist() == [2.0 + 2.0 * me]
    splits = ([0, 3], [0, 0]) if me == 0 else ([0, 0], [3, 0])  # only rank 1 sends
    moved = _torch.wire.wait_tensor(
        _torch.wire.all_to_all_single(torch.arange(3.0) if me else torch.empty(0), *splits, name)
    )
    assert moved.tolist() == ([0.0, 1.0, 2.0] if me == 0 else [])
    d = _torch.dtensor_from_local(torch.ones(2, 2), mesh, [Replicate()], (2, 2), (2, 1))
    assert isinstance(d, DTensor) and d.shape == (2, 2)
    pending = d.redistribute(placements=[Replicate()]).to_local()
    assert type(_torch.wait(pending)) is torch.Tensor


def test_functional_collectives(pool):
    pool.run(_wire)


def test_fake_tensors_are_told_apart_and_seen_by_modes():
    seen = []

    class Watch(_torch.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((func, types))
            return func(*args, **(kwargs or {}))

    with _torch.FakeTensorMode(), Watch():
        x = torch.ones(2)
        assert isinstance(x, _torch.FakeTensor)
        x + x
    assert (torch.ops.aten.add.Tensor, [_torch.FakeTensor]) in [(f, list(t)) for f, t in seen]


def test_a_fake_world_is_as_large_as_one_says():
    _torch.join_fake_world(6, 4)
    try:
        assert (dist.get_world_size(), dist.get_rank()) == (6, 4)
        dist.all_reduce(torch.ones(1))  # nobody waits
    finally:
        dist.destroy_process_group()


def test_what_autocast_knows():
    assert _torch.autocast_knows("layer_norm") and not _torch.autocast_knows("mul.Tensor")


def test_a_scoped_library_ends():
    x = torch.ones(1)
    with _torch.scoped_library("aten", "IMPL") as library, torch.autocast("cpu", torch.bfloat16):
        library.impl("layer_norm", lambda x, *rest: x + 41, "AutocastCPU")
        assert torch.nn.functional.layer_norm(x, (1,)).item() == 42
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(torch.nn.functional.layer_norm(x, (1,)), torch.zeros(1))
