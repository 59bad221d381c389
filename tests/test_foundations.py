"""What users wrap around a model works on ShardTensors: DDP, FSDP2, checkpointing, compile, hooks, tensor parallelism.

Every case compares values and all gradients with the same module on one process, in fp64, on a 2 x 2 mesh (two domain
groups with different data, each cut unevenly) and on a mesh of size one.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from core import ShardTensor, scatter_tensor

CHANNELS, ROWS = 6, 7


class Block(nn.Module):
    """Takes and returns a tensor (batch, rows, channels); rows are the cut dim."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, ROWS, CHANNELS))
        self.norm = nn.LayerNorm(CHANNELS)
        self.fc1 = nn.Linear(CHANNELS, 2 * CHANNELS)
        self.fc2 = nn.Linear(2 * CHANNELS, CHANNELS)

    def forward(self, x):
        x = x + self.position
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block()).double()


def data(group):
    g = torch.Generator().manual_seed(100 + group)
    return torch.randn(2, ROWS, CHANNELS, dtype=torch.float64, generator=g)


def loss_of(y):
    return (y * y).mean() + y.sin().sum()


def reference(groups=1):
    """Loss, input gradients and weight gradients of one process: the mean over the data groups."""
    model, inputs = make(), [data(g).requires_grad_() for g in range(groups)]
    losses = [loss_of(model(x)) for x in inputs]
    (sum(losses) / groups).backward()
    return [l.detach() for l in losses], [x.grad * groups for x in inputs], [p.grad for p in model.parameters()]


def shard(x, mesh, sizes=(5, 2)):
    return scatter_tensor(
        x, None, mesh, (Shard(1),), requires_grad=True, sizes={0: sizes} if mesh.size() == 2 else None
    )


def whole(t):
    t = t.full_tensor() if isinstance(t, DTensor) else t
    return t.full_tensor() if isinstance(t, ShardTensor) else t


def same(got, expected, atol=1e-10):
    assert type(got) in (torch.Tensor, nn.Parameter), type(got)
    torch.testing.assert_close(got, expected, atol=atol, rtol=1e-10)


def check(model, x, groups=1, group=0, step=lambda model, x: model(x)):
    losses, dx, dw = reference(groups)
    y = step(model, x)
    assert isinstance(y, ShardTensor)
    loss = loss_of(y)
    loss.backward()
    same(whole(loss.detach()), losses[group])
    same(whole(x.grad), dx[group])
    assert x.grad._spec.sizes == x._spec.sizes
    for p, g in zip(model.parameters(), dw):
        same(whole(p.grad), g)


# -- cases: each runs on every worker ---------------------------------------------------------------------------------
def plain(meshes, name):
    check(make(), shard(data(0), meshes[name]))


def ddp(meshes, name):
    mesh = meshes["ddp x domain"]
    group = mesh.get_local_rank("ddp")
    model = DistributedDataParallel(make(), process_group=mesh.get_group("ddp"))
    check(model, shard(data(group), mesh["domain"]), groups=2, group=group)


def fsdp(meshes, name):
    mesh = meshes["ddp x domain"]
    group = mesh.get_local_rank("ddp")
    model = make()
    for block in model:
        fully_shard(block, mesh=mesh["ddp"])
    fully_shard(model, mesh=mesh["ddp"])
    check(model, shard(data(group), mesh["domain"]), groups=2, group=group)


def checkpointed(meshes, name, reentrant):
    check(make(), shard(data(0), meshes[name]), step=lambda m, x: checkpoint(m, x, use_reentrant=reentrant))


class Scale(torch.autograd.Function):
    """A user's own: knows nothing of shards."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w.exp()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w.exp(), (g * x * w.exp()).sum((0, 1))


def own_function(meshes, name):
    w = torch.linspace(-1, 1, CHANNELS, dtype=torch.float64)
    w0, x0 = w.clone().requires_grad_(), data(0).requires_grad_()
    loss_of(Scale.apply(x0, w0)).backward()
    w1, x1 = w.clone().requires_grad_(), shard(data(0), meshes[name])
    loss_of(Scale.apply(x1, w1)).backward()
    same(whole(x1.grad), x0.grad)
    same(whole(w1.grad), w0.grad)


def hooks(meshes, name):
    losses, dx, dw = reference()
    model, x, seen = make(), shard(data(0), meshes[name]), {}
    weight = model[0].fc1.weight
    weight.register_hook(lambda g: seen.__setitem__("pre", g.clone()))
    weight.register_post_accumulate_grad_hook(lambda p: seen.__setitem__("post", p.grad.clone()))
    x.register_hook(lambda g: seen.__setitem__("input", g))
    h = model[0](x)
    h.retain_grad()
    h.register_hook(lambda g: seen.__setitem__("middle", g))
    loss_of(model[1](h)).backward()
    index = [n for n, _ in model.named_parameters()].index("0.fc1.weight")
    same(seen["pre"], dw[index])
    same(seen["post"], dw[index])
    same(whole(seen["input"]), dx[0])
    same(whole(seen["middle"]), whole(h.grad))


def grad_of_weights(meshes, name):
    losses, dx, dw = reference()
    model, x = make(), shard(data(0), meshes[name])
    grads = torch.autograd.grad(loss_of(model(x)), [x, *model.parameters()])
    same(whole(grads[0]), dx[0])
    for got, expected in zip(grads[1:], dw):
        same(got, expected)


def compiled(meshes, name, backend):
    torch._dynamo.reset()
    model = make()
    step = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    check(model, shard(data(0), meshes[name]), step=lambda m, x: step(x))
    if meshes[name].size() == 2:  # another split of the same tensor is another graph
        model.zero_grad()
        check(model, shard(data(0), meshes[name], sizes=(3, 4)), step=lambda m, x: step(x))


def tensor_parallel(meshes, name):
    mesh, model = meshes["domain x tp"], make()
    for block in model:
        parallelize_module(block, mesh["tp"], {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
    check(model, shard(data(0), mesh["domain"]))


def mean_on_replicated(meshes, name):
    """A replicated activation gets a finished gradient too."""
    x = scatter_tensor(data(0), None, meshes[name], (Replicate(),), requires_grad=True)
    expected = data(0).requires_grad_()
    loss_of(make()(expected)).backward()
    loss_of(make()(x)).backward()
    same(whole(x.grad), expected.grad)


def backward_twice(meshes, name):
    losses, dx, dw = reference()
    model, x = make(), shard(data(0), meshes[name])
    loss = loss_of(model(x))
    loss.backward(retain_graph=True)
    loss.backward()
    same(whole(x.grad), 2 * dx[0])
    same(model[0].fc1.weight.grad, 2 * dw[list(dict(model.named_parameters())).index("0.fc1.weight")])


def second_derivative(meshes, name):
    """A penalty on the gradient: through products, a norm, a softmax, means and sums, with their plain weights."""
    results = []
    for cut in (False, True):
        x = shard(data(0), meshes[name]) if cut else data(0).requires_grad_()
        first, second = (nn.Linear(CHANNELS, CHANNELS, dtype=torch.float64) for _ in range(2))
        weights = [*first.parameters(), *second.parameters()]
        for i, w in enumerate(weights):
            nn.init.normal_(w, generator=torch.Generator().manual_seed(i))
        h = F.layer_norm(first(x).sin(), (CHANNELS,))
        h = torch.softmax(h @ h.transpose(1, 2), -1) @ second(h)
        loss = h.pow(2).mean() + (x * h.sum(1, keepdim=True)).sum()
        grads = torch.autograd.grad(loss, [x, *weights], create_graph=True)
        penalty = sum(g.pow(2).sum() for g in grads)
        penalty.backward()
        results.append([penalty.detach(), *grads, x.grad, *(w.grad for w in weights)])
        assert not cut or all(type(w.grad) is torch.Tensor for w in weights)
    for expected, got in zip(*results):
        same(whole(got), expected)


CASES = [
    *[(plain, n) for n in ("1", "2")],
    (ddp, "2"),
    (fsdp, "2"),
    *[(checkpointed, n, r) for n in ("1", "2") for r in (True, False)],
    *[(own_function, n) for n in ("1", "2")],
    *[(hooks, n) for n in ("1", "2")],
    *[(grad_of_weights, n) for n in ("1", "2")],
    *[(compiled, n, "aot_eager") for n in ("1", "2")],
    (compiled, "2", "inductor"),
    (tensor_parallel, "2"),
    *[(mean_on_replicated, n) for n in ("1", "2")],
    *[(backward_twice, n) for n in ("1", "2")],
    *[(second_derivative, n) for n in ("1", "2")],
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join([c[0].__name__, *map(str, c[1:])]))
def test_foundation(pool, case):
    pool.run(*case)


def test_domain_groups_are_separate(pool):
    """The two domain groups of the 2 x 2 mesh hold different data; nothing leaks between them."""
    values = pool.run(_group_value)
    assert values[0] == values[1] and values[2] == values[3] and values[0] != values[2]


def _group_value(meshes):
    mesh = meshes["ddp x domain"]
    return shard(data(mesh.get_local_rank("ddp")), mesh["domain"]).sum().item() + 0 * dist.get_rank()
