"""Convolutions whose own rows are computed while halos travel: values, derivatives, messages, memory, compiled."""

from contextlib import contextmanager
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from core import ShardTensor, scatter_tensor
from core._torch import DispatchMode
from core.debug import trace
from core.dispatch import forget_plans
from core.ops import conv
from core.testing import check_sharded

I, S, V = (2, 4, 16, 6), (2, 4, 24), (1, 2, 4, 12, 3)
CASES = {  # call, shape of the input and of the weight, the dim that is cut, and how
    "3x3": (dict(padding=1), I, (3, 4, 3, 3), 2, ((9, 7), (14, 2), (0, 16), (5, 6, 5), (0, 16, 0), (5, 0, 11))),
    "last dim": (dict(padding=1), (2, 4, 6, 16), (3, 4, 3, 3), 3, ((13, 3), (5, 2, 9))),
    "wide, dilated, in groups": (
        dict(padding=(4, 3), dilation=(2, 1), groups=2), I, (4, 2, 5, 7), 2, ((8, 8), (16, 0)),
    ),
    "strided": (dict(padding=1, stride=2), I, (3, 4, 3, 3), 2, ((10, 6), (4, 0, 12), (4, 6, 6))),
    "even kernel": (dict(padding=(1, 0), stride=(2, 3)), I, (3, 4, 4, 2), 2, ((10, 6), (4, 4, 8))),
    "no output": (dict(stride=4), I, (3, 4, 4, 2), 2, ()),
    "1d": (dict(padding="same"), S, (4, 4, 7), 2, ((17, 7), (6, 9, 9))),
    "3d": (dict(padding=(0, 2, 1)), V, (3, 2, 2, 5, 3), 3, ((7, 5), (4, 4, 4))),
}  # fmt: skip
JOINED = {
    "3x3": ((15, 1), (7, 1, 8)), "strided": ((9, 7), (1, 6, 9)), "even kernel": ((13, 3),), "no output": ((13, 3),),
}  # fmt: skip


@contextmanager
def strips():
    """However small the parts are."""
    least, conv._least = conv._least, 0
    forget_plans()
    try:
        yield
    finally:
        conv._least = least
        forget_plans()


class Calls(DispatchMode):
    """Operations of plain tensors in order, with the shape of their first result."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if ShardTensor in types:
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        self.seen.append((func.overloadpacket.__name__, first.shape if isinstance(first, torch.Tensor) else ()))
        return out

    def joined(self, dim):
        """The most rows along ``dim`` that were put together."""
        return max((shape[dim] for name, shape in self.seen if name == "cat" and len(shape) > dim), default=0)

    def order(self, *names):
        return [name for name, _ in self.seen if name in names]


def _drawn(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def _operands(name):
    call, shape, weight, dim, splits = CASES[name]
    function = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[len(shape)]
    return lambda x, w, b: function(x, w, b, **call), [_drawn(*shape), _drawn(*weight), _drawn(weight[0])], dim, splits


def as_one_process(meshes, name):
    """And no array of own and foreign rows is made where no window reaches over two borders."""
    run, operands, dim, splits = _operands(name)
    operands[0] = operands[0].contiguous(memory_format=_format(operands[0]))
    for sizes, joined in [*((s, False) for s in splits), *((s, True) for s in JOINED.get(name, ()))]:
        mesh = meshes[str(len(sizes))]
        if mesh.get_coordinate() is None:
            continue
        with strips():
            check_sharded(run, operands, [[Shard(dim)], None, None], mesh, sizes=[{0: sizes}, None, None])
            x = scatter_tensor(operands[0], None, mesh, [Shard(dim)], requires_grad=True, sizes={0: sizes})
            with Calls() as calls:
                y = run(x, *(t.requires_grad_() for t in operands[1:]))
                torch.autograd.grad(y, [x, *operands[1:]], y.detach())
        rows, (stride, dilation) = y.to_local().shape[dim], (_of(name, word) for word in ("stride", "dilation"))
        read = (rows - 1) * stride + (operands[1].shape[dim] - 1) * dilation + 1
        if rows:
            assert (calls.joined(dim) >= read) == joined, (sizes, calls.seen)


def _of(name, word):
    """An argument for the dim that is cut."""
    value = CASES[name][0].get(word, 1)
    return value if isinstance(value, int) else value[CASES[name][3] - 2]


def _format(x):
    return {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim, torch.contiguous_format)


@pytest.mark.parametrize("name", CASES)
def test_as_one_process(pool, name):
    pool.run(as_one_process, name)


def cut_twice(meshes):
    """Corners come along; parts are empty along either dim; along one of both dims rows may not line up."""
    for name, dims, sizes in (
        ("3x3", (2, 3), {0: (9, 7), 1: (2, 4)}),
        ("3x3", (3, 2), {0: (2, 4), 1: (9, 7)}),
        ("3x3", (2, 3), {0: (16, 0), 1: (6, 0)}),
        ("3x3", (2, 3), {0: (0, 16), 1: (5, 1)}),
        ("3x3", (2, 0), {0: (10, 6), 1: (2, 0)}),
        ("strided", (2, 3), {0: (10, 6), 1: (4, 2)}),
        ("even kernel", (2, 3), {0: (10, 6), 1: (3, 3)}),
        ("3d", (2, 3), {0: (3, 1), 1: (7, 5)}),
    ):
        run, operands, *_ = _operands(name)
        cuts = [[Shard(d) for d in dims], None, None]
        with strips():
            check_sharded(run, operands, cuts, meshes["2x2"], sizes=[sizes, None, None])


def some_wanted(meshes):
    """Gradients of some operands only, first and second, and what the message of a backward pass waits for."""
    run, operands, dim, _ = _operands("strided")
    for wants in product((False, True), repeat=3):
        found = []
        for mesh, sizes in ((None, None), (meshes["1"], (16,)), (meshes["2"], (10, 6))):
            x, w, b = (t.clone().requires_grad_(wanted) for t, wanted in zip(operands, wants))
            if mesh:
                x = scatter_tensor(x.detach(), None, mesh, [Shard(dim)], requires_grad=wants[0], sizes={0: sizes})
            with strips():
                leaves = [t for t in (x, w, b) if t.requires_grad]
                first = torch.autograd.grad((run(x, w, b) ** 3).sum(), leaves, create_graph=True) if leaves else ()
                twice = torch.autograd.grad(sum((g**2).sum() for g in first), leaves) if leaves else ()
            found.append([t.full_tensor() if isinstance(t, ShardTensor) else t for t in (*first, *twice)])
        for expected, *both in zip(*found, strict=True):
            for got in both:
                torch.testing.assert_close(got, expected)


def overlapped(meshes):
    """Halos are under way while own rows are computed, forward and backward; also in half precision, in which they
    travel under autocast."""
    x = scatter_tensor(_drawn(*I, dtype=torch.float32), None, meshes["2"], [Shard(2)], requires_grad=True)
    layer = nn.Conv2d(4, 4, 3, padding=1)
    names = "all_to_all_single", "wait_tensor", "convolution", "convolution_backward"
    for half in (False, True):
        with strips(), torch.autocast("cpu", torch.bfloat16, enabled=half):
            with Calls() as calls, trace() as wire:
                y = layer(x)
            assert calls.order(*names) == ["all_to_all_single", "convolution", "wait_tensor", "convolution"]
            assert y.dtype == (torch.bfloat16 if half else torch.float32)
            assert wire.bytes() == 2 * 4 * 6 * y.element_size()
            with torch.no_grad():
                torch.testing.assert_close(y.full_tensor(), layer(x.full_tensor()), atol=1e-2 if half else 1e-5, rtol=0)
        with Calls() as calls:
            y.backward(y.detach())
        strip, *rest = calls.order(*names)
        assert strip == "convolution_backward" and rest[:3] == [
            "all_to_all_single",
            "convolution_backward",
            "wait_tensor",
        ]


def compiled(meshes, backend):
    with strips():
        torch._dynamo.reset()
        model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 4, 5, padding=2)).double()
        fast = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
        found = []
        for run in (model, fast):
            x = scatter_tensor(_drawn(*I), None, meshes["2"], [Shard(2)], requires_grad=True, sizes={0: (11, 5)})
            y = run(x)
            found.append([y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])])
        whole = _drawn(*I).requires_grad_()
        y = model(whole)
        found.append([y, *torch.autograd.grad(y.square().sum(), [whole, *model.parameters()])])
    for eager, graph, expected in zip(*found):
        for got in (eager, graph):
            got = got.full_tensor() if isinstance(got, ShardTensor) else got
            torch.testing.assert_close(got, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("check", [cut_twice, some_wanted, overlapped])
def test_interior(pool, check):
    pool.run(check)


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_compiled(pool, backend):
    pool.run(compiled, backend, timeout=400)
