"""The public comparison passes what is right and catches what is wrong."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from core import ShardingError, scatter_tensor
from core.testing import check_sharded, numerical_shard_tensor_check


def _input(mesh, rows=7):
    x = torch.randn(2, rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return scatter_tensor(x, None, mesh, [Shard(1)], requires_grad=True)


def _passes(meshes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 3)).double()
    report = check_sharded(model, [_input(meshes["2"])])
    assert {"output 0", "gradient of input 0", "gradient of 1.weight"} <= set(report)
    assert numerical_shard_tensor_check(meshes["2"], model, [_input(meshes["2"])], {}, check_grads=True)


class PerRank(nn.Module):
    """Wrong on purpose: normalises with the rank's own mean, as code that looks at parts would."""

    def forward(self, x):
        local = x._local_tensor if hasattr(x, "_local_tensor") else x
        return x - local.detach().mean()


class HalfGradient(nn.Module):
    """Right values, wrong gradient on shards."""

    def forward(self, x):
        return 0.5 * x + 0.5 * x.detach() if hasattr(x, "_local_tensor") else x * 1.0


def _catches(meshes):
    for wrong in (PerRank(), HalfGradient()):
        with pytest.raises(ShardingError, match="differs from the whole"):
            check_sharded(wrong, [_input(meshes["2"])])


def test_right_module_passes(pool):
    pool.run(_passes)


def test_wrong_values_and_gradients_are_caught(pool):
    pool.run(_catches)
