"""Gradients of plain weights travel together, and whoever reads one sees the finished sum."""

import copy

import pytest
import torch
import torch.distributed as dist
from test_interior import Calls
from torch import nn
from torch.distributed.tensor import Shard

from core import gradients, scatter_tensor
from core.debug import trace


class Net(nn.Module):
    """Tied, scaled and half-precision weights beside ordinary ones."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm, self.single = nn.LayerNorm(6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(self.norm(x)).sin() * self.scale
        narrow = self.single(x.detach().float()).double()
        return (x + torch.nn.functional.linear(x, self.layers[0].weight.t() * 2)).square().mean() + narrow.sin().mean()


def make():
    torch.manual_seed(0)
    net = Net().double()
    net.single.float()
    return net


def run(net, mesh, passes=1):
    whole = torch.randn(2, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    x = whole if mesh is None else scatter_tensor(whole, None, mesh, [Shard(1), Shard(0)][: mesh.ndim])
    with trace() as wire:
        for _ in range(passes):
            (net(x) + net.scale.square().sum()).backward()  # a term that every rank has whole
    return [p.grad for p in net.parameters()], wire


def same(got, expected):
    for g, e in zip(got, expected, strict=True):
        assert type(g) is torch.Tensor
        torch.testing.assert_close(g, e, atol=1e-6 if e.dtype == torch.float32 else 1e-12, rtol=0)


def _are_those_of_one_process(meshes):
    for name in ("1", "2", "2x2", "4"):
        for together in (False, True):
            for passes in (1, 2):  # the second adds to what is there
                net = make()
                if together:
                    gradients.gather_in_buckets(net)
                same(run(net, meshes[name], passes)[0], run(make(), None, passes)[0])


def _travel_together(meshes):
    """One message an operation; one for all where the weights are marked, more when a bucket is full."""
    for limit, expected in ((2**25, 1), (1000, 2), (None, 5)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6), *(nn.Linear(6, 6) for _ in range(3))).double()
        x = scatter_tensor(torch.randn(2, 7, 6).double(), None, meshes["2"], [Shard(1)])
        kept, gradients._BUCKET = gradients._BUCKET, limit
        try:
            if limit:
                gradients.gather_in_buckets(net)
            loss = net(x).square().sum()
            with trace() as wire:
                loss.backward()
        finally:
            gradients._BUCKET = kept
        assert wire.count("all_reduce") == wire.count() == expected, (limit, wire)
        assert wire.bytes() == sum(p.numel() * 8 for p in net.parameters())


def _travel_while_the_pass_goes_on(meshes):
    """The sum of the last layer is under way while the layers before it are differentiated; nobody waits until then."""
    net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))).double()
    loss = net(scatter_tensor(torch.randn(2, 7, 6).double(), None, meshes["2"], [Shard(1)])).square().sum()
    with Calls() as calls:
        loss.backward()
    order = calls.order("all_reduce", "wait_tensor", "mm")
    last = len(order) - order[::-1].index("mm")
    assert order[:last].count("all_reduce") == 2 and order[:last].count("wait_tensor") == 0, order
    assert order[last:] == ["all_reduce", *["wait_tensor"] * 3], order


def _travel_together_whatever_was_planned_before(meshes):
    """Plans that were made for one slice of a mesh serve another; what they send goes into the same message."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4))).double()
    gradients.gather_in_buckets(net)
    one, other = (meshes["ddp x domain"]["domain"] for _ in range(2))
    assert one is not other
    for module, mesh, expected in ((net[:2], one, 1), (nn.Sequential(*net[:2], nn.Tanh(), *net[2:]), other, 1)):
        loss = module(scatter_tensor(torch.randn(3, 7, 5).double(), None, mesh, [Shard(1)])).square().sum()
        net.zero_grad()
        with trace() as wire:
            loss.backward()
        assert wire.count() == expected, wire


def _readers_see_the_sum(meshes):
    """Hooks of any kind, on one rank or all; autograd.grad; gradients that are there already."""
    expected, _ = run(make(), None)
    net, seen = make(), {}
    parameters = list(net.parameters())
    parameters[2].register_hook(lambda g: seen.__setitem__(2, g.clone()))
    if dist.get_rank() % 2 == 0:  # a hook of one rank alone must not put the messages out of step
        parameters[4].register_post_accumulate_grad_hook(lambda p: seen.__setitem__(4, p.grad.clone()))
    got, _ = run(net, meshes["2"])
    same(got, expected)
    for i, g in seen.items():
        same([g], [expected[i]])
    x = scatter_tensor(torch.randn(2, 7, 6).double(), None, meshes["2"], [Shard(1)])
    torch.manual_seed(0)
    for g in torch.autograd.grad(net(x), parameters):
        assert type(g) is torch.Tensor
    net.zero_grad()
    net(x).backward(inputs=parameters[:3])
    assert [p.grad is not None for p in parameters] == [True] * 3 + [False] * (len(parameters) - 3)
    assert all(type(p.grad) is torch.Tensor for p in parameters[:3])


def _a_broken_pass_leaves_nothing(meshes):
    net = make()
    x = scatter_tensor(torch.randn(2, 7, 6).double(), None, meshes["2"], [Shard(1)], requires_grad=True)
    x.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        net(x).backward()
    assert gradients._running is None
    assert all(p.grad is None or type(p.grad) is torch.Tensor for p in net.parameters())
    net.zero_grad()
    same(run(net, meshes["2"])[0], run(make(), None)[0])


def _passes_inside_passes(meshes):
    """A hook that runs a pass of its own, and one that fails and is caught; a Function that asks for a gradient."""
    x = scatter_tensor(torch.randn(2, 7, 6).double(), None, meshes["2"], [Shard(1)], requires_grad=True)

    def hook(g):
        inner = make()
        with torch.enable_grad():
            inner(x.detach()).backward()
            assert all(type(p.grad) is torch.Tensor for p in inner.parameters())
            y = nn.functional.linear(x.detach(), inner.scale.diag())
            y.register_hook(lambda g: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                y.sum().backward()
        return g

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            ctx.save_for_backward(t)
            return t * 2

        @staticmethod
        def backward(ctx, grad):
            w = torch.ones(6, 6, dtype=torch.float64, requires_grad=True)
            with torch.enable_grad():
                loss = nn.functional.linear(ctx.saved_tensors[0].detach(), w).square().sum()
            (asked,) = torch.autograd.grad(loss, w)
            assert type(asked) is torch.Tensor
            return grad * 2

    for together in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
        if together:
            gradients.gather_in_buckets(net)
        h = net[1](net[0](x))
        h.register_hook(hook)
        net[2](Asks.apply(h)).square().mean().backward()
        plain = copy.deepcopy(net)
        plain.zero_grad()
        plain[2](plain[1](plain[0](x.detach().full_tensor())) * 2).square().mean().backward()
        same([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])


CASES = [
    _are_those_of_one_process,
    _travel_together,
    _travel_while_the_pass_goes_on,
    _travel_together_whatever_was_planned_before,
    _readers_see_the_sum,
    _passes_inside_passes,
    _a_broken_pass_leaves_nothing,
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__.strip("_"))
def test_gradients(pool, case):
    pool.run(case)
