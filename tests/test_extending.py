"""What a user adds and what a user meets without adding: the worked example of docs/extending.md, and the fallback."""

import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.overrides import handle_torch_function, has_torch_function_unary

from core import MissingShardPatch, Plan, ShardingError, collectives, fallback, op, scatter_tensor, set_fallback
from core.dispatch import HANDLERS
from core.ops.halo import fetch
from core.testing import check_sharded

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


def _worked_example(meshes):
    handlers, names = set(HANDLERS), {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S):
        exec(block, names)
    for mesh in ("1", "2", "4"):
        names["check"](meshes[mesh])
        check_sharded(torch.trace, [torch.randn(7, 7).double()], [[Shard(0)]], meshes[mesh])
    assert HANDLERS.keys() - handlers == {torch.trace}


def test_collectives_of_the_page_are_those_of_core():
    """All that a local computation may call, with their arguments."""
    section = PAGE.read_text().split("may send\n")[1].split("\n## ")[0]
    told = dict(re.findall(r"^\| `(?:collectives\.)?(\w+)\((.*?)\)`", section, flags=re.M))
    named = {name: getattr(collectives, name, fetch) for name in told}
    assert len(told) == 7
    assert told == {name: ", ".join(inspect.signature(f).parameters) for name, f in named.items()}


# -- operators without a rule -----------------------------------------------------------------------------------------
@torch.library.custom_op("tests::centred", mutates_args=())
def centred(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x - x.mean()) * scale


centred.register_autograd(
    lambda ctx, grad: ((grad - grad.mean()) * ctx.scale, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "scale", inputs[1]),
)


@torch.library.custom_op("tests::sort_rows_", mutates_args=("x",))
def sort_rows_(x: torch.Tensor) -> None:
    x.copy_(x.sort(0).values)


@torch.library.custom_op("tests::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


def _cut(mesh, rows=7):
    x = torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x, scatter_tensor(x, None, mesh, [Shard(0), Shard(1)][: mesh.ndim], requires_grad=True)


def _gathers_and_is_right(meshes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("1", "2", "3", "2x2"):
            if meshes[name].get_coordinate() is None:
                continue
            x, _ = _cut(meshes[name])
            cut = [Shard(0), Shard(1)][: meshes[name].ndim]
            check_sharded(lambda t: centred(t.sin(), 2.0), [x], [cut], meshes[name])
            y = scatter_tensor(x, None, meshes[name], cut)
            sort_rows_(y)
            assert torch.equal(y.full_tensor(), x.sort(0).values)


def _warns_once_a_call_site(meshes):
    _, x = _cut(meshes["2"])
    x = x.detach()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            centred(x, 2.0)
        centred(x, 2.0)
    texts = [str(w.message) for w in caught]
    assert len(texts) == 2 and all("gathers 224 bytes" in t and "test_extending.py" in t for t in texts), texts


def _is_limited(meshes):
    _, x = _cut(meshes["2"])
    x = x.detach()
    try:
        set_fallback("silent", limit=224)
        centred(x, 2.0)
        set_fallback("silent", limit=223)
        with pytest.raises(MissingShardPatch, match="224 bytes exceed 223"):
            centred(x, 2.0)
        set_fallback("error")
        with pytest.raises(MissingShardPatch, match="tests.centred"):
            centred(x, 2.0)
    finally:
        set_fallback("warn")
    with pytest.raises(MissingShardPatch, match="random"):
        noise(x)


def _limit_is_agreed(meshes):
    """Half of what is free on the rank that has least: all refuse, though the others could."""
    _, x = _cut(meshes["2"])
    unquestioned, free = fallback._UNQUESTIONED, fallback._free_memory
    rank = meshes["2"].get_local_rank("domain")
    fallback._UNQUESTIONED, fallback._free_memory = 0, lambda: 100 if rank else 2**40
    try:
        with pytest.raises(MissingShardPatch, match="224 bytes exceed 50"):
            centred(x.detach(), 2.0)
    finally:
        fallback._UNQUESTIONED, fallback._free_memory = unquestioned, free


def _mistaken_rules(meshes):
    """A rule that does not fit its operation is named at the first call."""
    x = _cut(meshes["2"])[1]
    for rule, said in (
        (lambda func, spec: None, "returned None"),
        (lambda func, spec: Plan((), spec), "0 inputs for 1 tensors"),
        (lambda func, spec: Plan((spec,), spec), "promised a part"),
    ):

        def first_rows(t):
            return handle_torch_function(first_rows, (t,), t) if has_torch_function_unary(t) else t[:, :2]

        op(first_rows)(rule)
        with pytest.raises(ShardingError, match=said):
            first_rows(x)


CASES = [
    _worked_example,
    _mistaken_rules,
    _gathers_and_is_right,
    _warns_once_a_call_site,
    _is_limited,
    _limit_is_agreed,
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__.strip("_"))
def test_extending(pool, case):
    pool.run(case)
