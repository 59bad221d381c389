"""Batch norm over the ranks that share a batch and, synchronised, over those that do not."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from core import scatter_tensor

SHAPE = (3, 4, 7, 5)


def _batch(group, rows=3, dtype=torch.float64):
    g = torch.Generator().manual_seed(7 + group)
    return 2 * torch.randn(rows, *SHAPE[1:], generator=g, dtype=torch.float64).to(dtype) + group


def _module(kind, **kwargs):
    m = kind(4, dtype=torch.float64, **kwargs)
    with torch.no_grad():
        m.weight.copy_(torch.arange(1, 5))
        m.bias.copy_(torch.arange(4) / 3)
    return m


def _steps(module, xs):
    """Results and gradients of the inputs and of the weight, for a loss that is a sum over samples."""
    outs = [module(x) for x in xs]
    sum((y.sin() * y).sum() for y in outs).backward()
    return outs


def _same_everywhere(tensor):
    """Bit by bit equal on all ranks."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor.contiguous())
    assert all(torch.equal(t, tensor) for t in gathered)


def _synchronised(meshes, over, cut):
    mesh = meshes["ddp x domain"]
    domain, me = mesh["domain"], mesh.get_local_rank("ddp")
    rows = (3, 2)  # the ranks' batches differ in size too
    process_group = {"ddp": mesh.get_group("ddp"), "world": None, "domain": mesh.get_group("domain")}[over]
    plain, synced = _module(nn.BatchNorm2d), _module(nn.SyncBatchNorm, process_group=process_group)
    samples = [_batch(i, rows[i]) for i in range(2)]
    seen = [me] if over == "domain" else [0, 1]
    whole = torch.cat([samples[i] for i in seen]).requires_grad_()
    x = scatter_tensor(samples[me], None, domain, [Shard(cut)], requires_grad=True)
    expected, got = _steps(plain, [whole, whole * 2]), _steps(synced, [x, x * 2])
    first = sum(rows[i] for i in seen if i < me)
    for a, b in zip(expected, got):
        torch.testing.assert_close(b.full_tensor(), a[first : first + rows[me]], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(x.grad.full_tensor(), whole.grad[first : first + rows[me]], atol=1e-11, rtol=1e-11)
    weights = torch.stack([synced.weight.grad, synced.bias.grad])
    if over != "domain":  # what data parallelism adds up
        dist.all_reduce(weights, group=mesh.get_group("ddp"))
    torch.testing.assert_close(weights, torch.stack([plain.weight.grad, plain.bias.grad]), atol=1e-11, rtol=1e-11)
    for a, b in zip(plain.buffers(), synced.buffers()):
        torch.testing.assert_close(b, a, atol=1e-13, rtol=1e-13)
        if over != "domain":
            _same_everywhere(b)
    torch.testing.assert_close(synced.eval()(x).full_tensor(), plain.eval()(samples[me]), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("over", ("ddp", "world", "domain"))
@pytest.mark.parametrize("cut", (0, 1, 2))
def test_synchronised(pool, over, cut):
    pool.run(_synchronised, over, cut)


def _converted(meshes):
    """``convert_sync_batchnorm`` and averages over all batches, as torch documents them."""
    mesh = meshes["ddp x domain"]
    net = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None)).double()
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net, mesh.get_group("ddp"))
    x = scatter_tensor(_batch(mesh.get_local_rank("ddp")), None, mesh["domain"], [Shard(2)])
    first = net(x).detach()
    net(3 * x)
    assert int(net[1].num_batches_tracked) == 2
    _same_everywhere(net[1].running_var)
    assert first.mean().item() != 0 and abs(first.mean().item()) < 1  # a batch alone has no mean of nought


def test_converted(pool):
    pool.run(_converted)


def _compiled(meshes):
    torch._dynamo.reset()
    mesh = meshes["ddp x domain"]
    eager, model = (_module(nn.SyncBatchNorm, process_group=mesh.get_group("ddp")) for _ in range(2))
    x = scatter_tensor(_batch(mesh.get_local_rank("ddp")), None, mesh["domain"], [Shard(2)])
    step = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    got, expected = _steps(step, [x])[0], _steps(eager, [x])[0]
    torch.testing.assert_close(got.full_tensor(), expected.full_tensor())
    torch.testing.assert_close(model.running_var, eager.running_var)
    torch.testing.assert_close(model.weight.grad, eager.weight.grad)


def test_compiled(pool):
    pool.run(_compiled)


def _own_batches(meshes):
    """Without synchronisation each domain has the statistics of its own batch."""
    mesh = meshes["ddp x domain"]
    plain, sharded, sample = _module(nn.BatchNorm2d), _module(nn.BatchNorm2d), _batch(mesh.get_local_rank("ddp"))
    y = sharded(scatter_tensor(sample, None, mesh["domain"], [Shard(2)]))
    torch.testing.assert_close(y.full_tensor(), plain(sample))
    torch.testing.assert_close(sharded.running_var, plain.running_var)


def test_own_batches(pool):
    pool.run(_own_batches)


def _far(meshes):
    """Half precision far from nought: as good as the precise result, rounded once."""
    x = (10 * _batch(0) + 1e3).bfloat16()
    cut = scatter_tensor(x, None, meshes["2"], [Shard(2)])
    for norm in (lambda t: F.batch_norm(t, None, None, training=True), F.instance_norm):
        y = norm(cut).full_tensor()
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.double(), norm(x.double()), atol=0.01, rtol=0.004)


def test_far_from_nought(pool):
    pool.run(_far)
