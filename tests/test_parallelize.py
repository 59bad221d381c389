"""A model on ddp x domain, however it is wrapped, has the gradients of one process, and its replicas stay equal."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from core import ShardingError, ShardTensor, scatter_tensor
from core.debug import trace
from core.parallelize import parallelize, param_groups, shard_spatial_params_, unwrapped, verify_replicas

ROWS, WIDTH = 7, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Model(nn.Module):
    """Tokens (batch, rows, width) with learned positions, blocks, a convolution over the rows and a tied head."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, ROWS, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.checkpointed = checkpointed

    def forward(self, x):
        x = x + self.position
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


def made(checkpointed=False):
    torch.manual_seed(0)
    return Model(checkpointed).double()


def batch(group, step=0):
    g = torch.Generator().manual_seed(10 * group + step)
    return torch.randn(2, ROWS, WIDTH, dtype=torch.float64, generator=g)


def loss_of(y):
    return y.square().mean() + y.sin().mean()


def whole(t):
    """Of a gradient or parameter, however it is held."""
    for kind in (DTensor, ShardTensor):
        t = t.full_tensor() if isinstance(t, kind) else t
    return t


def reference(groups, steps=1, optimizer=None, clip=None):
    """The model of one process and its gradients: the mean over groups, the sum over steps."""
    model = made()
    for step in range(steps):
        (sum(loss_of(model(batch(g, step))) for g in range(groups)) / groups).backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    if optimizer:
        optimizer(model.parameters()).step()
    return model


def agree(model, expected, read):
    for (name, p), q in zip(unwrapped(model).named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(whole(read(p)), read(q), atol=1e-10, rtol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


SHAPES = {"2 x 2": (2, 2), "1 x 4": (1, 4), "4 x 1": (4, 1)}
SIZES = {1: (7,), 2: (5, 2), 4: (3, 0, 3, 1)}


def wrapped(meshes, shape, fsdp, spatial, checkpointed):
    """Gradients of two accumulated steps, and the weights after clipping and AdamW, fused or foreach. A weight lies
    turned round in memory, as FSDP2 does not take it."""
    mesh = init_device_mesh("cpu", SHAPES[shape], mesh_dim_names=("ddp", "domain"))
    domain, groups, group = mesh["domain"], mesh["ddp"].size(), mesh["ddp"].get_local_rank()
    model = made(checkpointed)
    if spatial:  # cut as torch.chunk does, where the activations are cut otherwise
        shard_spatial_params_(model, domain, {"position": [Shard(1)]})
    model.conv.weight.data = model.conv.weight.data.mT.contiguous().mT
    model = parallelize(model, mesh, fsdp=fsdp, blocks=model.blocks)
    for step in range(2):
        x = scatter_tensor(batch(group, step), None, domain, [Shard(1)], sizes={0: SIZES[domain.size()]})
        loss_of(model(x)).backward()
    agree(model, reference(groups, 2), lambda p: p.grad)
    make = partial(torch.optim.AdamW, lr=0.1, **{"fused" if checkpointed else "foreach": True})
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    make(param_groups(model)).step()
    agree(model, reference(groups, 2, make, clip=0.1), lambda p: p.detach())
    verify_replicas(model, mesh)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("spatial", [False, True], ids=["", "spatial"])
@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_and_a_step(pool, shape, fsdp, spatial, checkpointed):
    pool.run(wrapped, shape, fsdp, spatial, checkpointed)


def tensor_parallel(meshes, shape):
    """Columns and rows of weights over ``tp`` meet activations over ``domain``."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "domain", "tp"))
    model = made()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
    groups, group = mesh["ddp"].size(), mesh["ddp"].get_local_rank()
    sizes = {0: SIZES[mesh["domain"].size()]}
    loss_of(model(scatter_tensor(batch(group), None, mesh["domain"], [Shard(1)], sizes=sizes))).backward()
    agree(model, reference(1) if groups == 1 else _of_group(group), lambda p: p.grad)


def _of_group(group):
    model = made()
    loss_of(model(batch(group))).backward()
    return model


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1, 2)], ids=str)
def test_tensor_parallel(pool, shape):
    pool.run(tensor_parallel, shape)


# -- optimizers, scalers, averages --------------------------------------------------------------------------------
def mixed_precision(meshes):
    """bfloat16 autocast with a scaler, Muon for matrices, and an average of the weights, which are plain, shards and
    DTensors of two meshes: as on one process."""
    results, two = [], meshes["ddp x domain"]
    for mesh, fsdp in ((None, False), (two, False), (two, True)):
        model = made().float()
        if mesh is not None:
            shard_spatial_params_(model, mesh["domain"], {"position": [Shard(1)]}, {"position": {0: (5, 2)}})
            model = parallelize(model, mesh, fsdp=fsdp)
        bare = unwrapped(model)
        matrices = [p for p in bare.parameters() if p.ndim == 2]
        others = [p for p in bare.parameters() if p.ndim != 2]
        optimizers = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]
        ema, averages = get_ema_multi_avg_fn(0.5), [p.detach().clone() for p in bare.parameters()]
        copy_of = None if fsdp else AveragedModel(bare, multi_avg_fn=ema)  # torch copies no FSDP2
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            x = batch(0, step).float()
            x = x if mesh is None else scatter_tensor(x, None, mesh["domain"], [Shard(1)], sizes={0: (5, 2)})
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model(x).float())
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            ema(averages, [p.detach() for p in bare.parameters()], None)
            if copy_of:
                copy_of.update_parameters(bare)
        copies = copy_of.module.parameters() if copy_of else ()
        results.append([whole(p.detach()) for p in (*bare.parameters(), *averages, *copies)])
    one, *others = results
    for many in others:
        for a, b in zip(many, one):  # FSDP2 has fewer
            torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


def test_mixed_precision(pool):
    pool.run(mixed_precision)


# -- replicas ------------------------------------------------------------------------------------------------------
def stay_equal(meshes, steps):
    """Many steps later every rank holds the same bits."""
    mesh = meshes["ddp x domain"]
    torch.manual_seed(torch.distributed.get_rank())  # parallelize makes them equal
    model = nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.BatchNorm1d(3), nn.GELU(), nn.Conv1d(3, 1, 1))
    model[1].running_mean += torch.distributed.get_rank()
    with pytest.raises(ShardingError, match="0.weight differs"):
        verify_replicas(model, mesh)
    model = parallelize(model, mesh)
    assert not unwrapped(model)[1].running_mean.any()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        g = torch.Generator().manual_seed(2 * step + mesh["ddp"].get_local_rank())
        x = scatter_tensor(torch.randn(1, 2, 5, generator=g), None, mesh["domain"], [Shard(2)], sizes={0: (4, 1)})
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    with trace() as wire:
        verify_replicas(unwrapped(model), mesh["domain"])
    assert wire.kinds() == ["all_gather"]
    weights = nn.ParameterList(unwrapped(model).parameters())
    verify_replicas(weights, mesh)
    with torch.no_grad():
        if torch.distributed.get_rank() == 3:
            weights[2].view(torch.int32)[1] ^= 1
    with pytest.raises(ShardingError, match="2 differs between ranks of axis ddp"):  # those that agree say so too
        verify_replicas(weights, mesh)


@pytest.mark.parametrize("steps", [60, pytest.param(1000, marks=pytest.mark.nightly)])
def test_replicas_stay_equal(pool, steps):
    pool.run(stay_equal, steps, timeout=300)


def refuses(meshes):
    mesh = meshes["ddp x domain"]
    group = mesh["ddp"].get_group()
    for wrap in (
        lambda m: DistributedDataParallel(m, process_group=group),
        lambda m: FullyShardedDataParallel(m, process_group=group, device_id=torch.device("cpu")),
        lambda m: parallelize(m, mesh, fsdp=True),
    ):
        model = wrap(made())
        with pytest.raises(ShardingError, match="wrapped already"):
            parallelize(model, mesh)
        with pytest.raises(ShardingError, match="wrapped already"):
            shard_spatial_params_(model, mesh["domain"], {"position": [Shard(1)]})
    cut = made()
    shard_spatial_params_(cut, mesh["domain"], {"position": [Shard(1)]})
    with pytest.raises(ShardingError, match="Let core.parallelize.parallelize wrap the module"):
        DistributedDataParallel(cut, process_group=group)
    with pytest.raises(ShardingError, match="There are: position, blocks.0.norm.weight"):
        shard_spatial_params_(made(), mesh["domain"], {"positions": [Shard(1)]})
    tied = made()
    tied.other = tied.position
    twin = copy.deepcopy(tied)
    shard_spatial_params_(twin, mesh["domain"], {"other": [Shard(1)]})
    assert twin.other is twin.position and isinstance(twin.position, ShardTensor)


def test_refuses(pool):
    pool.run(refuses)
