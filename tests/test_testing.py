"""The public comparison passes what is right and catches what is wrong."""

import os
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from core import ShardingError, scatter_tensor
from core.testing import check_sharded, numerical_shard_tensor_check, run_on_ranks


def _input(mesh, rows=7):
    x = torch.randn(2, rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return scatter_tensor(x, None, mesh, [Shard(1)], requires_grad=True)


def _passes(meshes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 3)).double()
    report = check_sharded(model, [_input(meshes["2"])])
    assert {"output 0", "gradient of input 0", "gradient of 1.weight"} <= set(report.differences)
    assert report.forward.count() == 0 and report.backward.count("all_reduce") > 0
    assert "gradient of 3.bias" in str(report) and "all_reduce" in str(report)
    assert numerical_shard_tensor_check(meshes["2"], model, [_input(meshes["2"])], {}, check_grads=True)


def _by_placements(meshes):
    """Whole inputs and how to cut them; a replicated and a plain one, a dict of outputs, sizes of the user's choice."""
    for name in ("1", "2", "2x2"):
        mesh = meshes[name]
        cuts = [[Shard(1), Shard(2)][: mesh.ndim], [Replicate()] * mesh.ndim, None, None]
        x, w, b = torch.randn(2, 7, 6).double(), torch.randn(6).double(), torch.randn(7, 1).double()
        sizes = [{0: (5, 2)} if mesh.size(0) == 2 else None, None, None, None]

        def scaled(x, w, b, power):
            return {"y": x * w + b, "z": [(x**power).sum(), "text"]}

        report = check_sharded(scaled, [x, w, b, 2], cuts, mesh, sizes=sizes)
        assert len(report.differences) == 5 and max(report.differences.values()) < 1e-12


def _tf32_comes_back(meshes):
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        seen = []
        check_sharded(lambda x: seen.append(torch.backends.cuda.matmul.allow_tf32) or x * 1, [_input(meshes["2"])])
        assert seen == [False, False] and torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


class PerRank(nn.Module):
    """Wrong on purpose: normalises with the rank's own mean, as code that looks at parts would."""

    def forward(self, x):
        local = x._local_tensor if hasattr(x, "_local_tensor") else x
        return x - local.detach().mean()


class HalfGradient(nn.Module):
    """Right values, wrong gradient on shards."""

    def forward(self, x):
        return 0.5 * x + 0.5 * x.detach() if hasattr(x, "_local_tensor") else x * 1.0


class WrongSizes(nn.Module):
    """Right values on the first rank, but the record of who holds what is not true."""

    def forward(self, x):
        if hasattr(x, "_local_tensor"):
            x._spec = x._spec.with_axis(0, Shard(1), (5, 2) if x._spec.sizes == ((4, 3),) else (4, 3))
        return x.detach()


def _catches(meshes):
    x = _input(meshes["2"]).detach().full_tensor()  # first calls look at parts: not in WrongSizes
    scatter_tensor(x, None, meshes["2"], [Shard(1)], requires_grad=True, sizes={0: (5, 2)}).detach()
    for wrong in (PerRank(), HalfGradient(), WrongSizes()):
        with pytest.raises(ShardingError, match="differs from the whole"):
            check_sharded(wrong, [_input(meshes["2"])])


def _says_what_tells_rounding_from_wrong(meshes):
    for dtype, rounds in ((torch.float32, True), (torch.float64, False)):
        with pytest.raises(ShardingError) as caught:
            check_sharded(PerRank(), [_input(meshes["2"]).detach().to(dtype)], grads=False)
        assert ("in double()" in str(caught.value)) == rounds
        assert "random" not in str(caught.value)


def _says_what_ranks_do_not_share(meshes):
    """Weights and inputs of ranks that seed by their number, or not at all; on the ranks that agree, too."""
    whole, cuts = torch.randn(2, 7, 6).double(), {"2": [Shard(1)], "2x2": [Shard(1), Shard(2)]}
    for name, cut in cuts.items():
        odd = tuple(meshes[name].get_coordinate()) == (1,) * len(cut)
        for module, x, said in (
            (nn.Linear(6, 4).double(), whole + odd, "input 0"),
            (nn.BatchNorm1d(7).double(), whole, "running_mean"),
            (
                nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)]).double(),
                whole + odd,
                "input 0, 0.weight, .* and 2 more",
            ),
        ):
            with torch.no_grad():
                [t.add_(odd) for n, t in module.named_parameters() if "more" in said]
                [t.add_(odd) for n, t in module.named_buffers() if n == said]
            with pytest.raises(ShardingError, match=f"not equal on all ranks: {said}\\. .*manual_seed"):
                check_sharded(module, [x], [cut], meshes[name])
    with pytest.raises(ShardingError, match="not equal on all ranks: input 0"):
        check_sharded(torch.sin, [scatter_tensor(whole + odd, None, meshes["2x2"], [Replicate()] * 2)])
    pending = scatter_tensor(whole, None, meshes["2x2"], [Replicate()] * 2).redistribute(placements=[Partial()] * 2)
    check_sharded(torch.sin, [pending], grads=False)


def _says_that_random_numbers_differ(meshes):
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)).double()
    with pytest.raises(ShardingError, match=r"draws random numbers.*model.eval\(\)"):
        check_sharded(model, [_input(meshes["2"])])
    check_sharded(model.eval(), [_input(meshes["2"])])


@pytest.mark.parametrize("check", [_passes, _by_placements, _tf32_comes_back], ids=lambda c: c.__name__.strip("_"))
def test_right_module_passes(pool, check):
    pool.run(check)


def test_wrong_values_and_gradients_are_caught(pool):
    pool.run(_catches)


def test_difference_that_may_be_rounding_says_so(pool):
    pool.run(_says_what_tells_rounding_from_wrong)


MISTAKES = [_says_what_ranks_do_not_share, _says_that_random_numbers_differ]


@pytest.mark.parametrize("check", MISTAKES, ids=lambda c: c.__name__.strip("_"))
def test_likely_mistakes_are_told(pool, check):
    pool.run(check)


SUITE = """
import torch
from torch import nn
from torch.distributed.tensor import Shard
from core import DistributedManager
from core.testing import check_sharded, run_on_ranks

def check(wrong):
    mesh = DistributedManager().initialize_mesh((-1,), ("domain",))
    assert mesh.size() == 2
    torch.manual_seed(0)
    model = nn.Conv1d(2, 3, 3, padding=1).double()
    report = check_sharded(lambda x: model(x) * (1 + wrong * mesh.get_local_rank("domain")),
                           [torch.randn(1, 2, 9).double()], [[Shard(2)]], mesh)
    assert report.forward.kinds() == ["all_to_all"]

def test_right():
    run_on_ranks(2, check, 0.0)

def test_wrong():
    import pytest
    with pytest.raises(Exception, match="differs from the whole"):
        run_on_ranks(2, check, 1.0)
"""


@pytest.mark.parametrize("launcher", [[], ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]])
def test_in_a_suite_of_ones_own(tmp_path, launcher):
    """With plain pytest, which starts the ranks itself, and under torchrun, whose ranks are there; nothing is left
    unwaited for when they end."""
    (tmp_path / "test_own.py").write_text(SUITE)
    command = [sys.executable, "-m", *launcher, "pytest", "-q", "test_own.py"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}  # the options of this run are not its own
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
    assert "unwaited" not in (done.stdout + done.stderr).lower(), done.stderr


def _die(kill):
    if not kill:
        dist.barrier()  # or the slower one would be ended for the other's death before it can tell of its own
    elif dist.get_rank():
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("unwell " * 20_000)  # more than a pipe holds


def test_ranks_that_end_are_named():
    with pytest.raises(ShardingError) as caught:
        run_on_ranks(2, _die, True)
    said = str(caught.value)
    assert said.startswith("rank 1 ended with exit status -9") and "rank 0:\nTraceback" in said
    with pytest.raises(ShardingError, match="(?s)rank [01]:.*rank [01]:"):
        run_on_ranks(2, _die, False)
