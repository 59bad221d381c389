"""Kernels over rows against torch in fp64: their sums, norms and their gradients in one pass each, rotary embeddings.

Two processes interpret them on a CPU, each a share of the cases; together they hold a model on shards against the whole
one. On a GPU (``pytest -m gpu``) the same cases are compiled, and beside them stand sums by a product, and more numbers
than 32 bits can count.
"""

import json
import os
from itertools import product
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.utils.checkpoint import checkpoint

from apps.norms import LayerNorm, RMSNorm
from core import DistributedManager, formulas, kernels, rotary_embedding, scatter_tensor
from core.formulas import LAYER_NORM, RMS_NORM
from core.kernels import column_operators as operators
from core.meter import Meter
from core.ops.norm import layer_norm_of_parts, rms_norm_of_parts
from core.testing import check_sharded, run_on_ranks

DTYPES = "float32", "bfloat16", "float16"
SUMS = 2e-6  # of the largest number; and half a last place more where that is stored in half precision
STORED = {"float32": SUMS, "bfloat16": SUMS + 2**-8, "float16": SUMS + 2**-11}
OURS_OR_TORCHS = {"norm_gradients", "column_sums", "native_layer_norm_backward", "sum"}
FORWARD = {"norm", "native_layer_norm"}
SUBSETS = list(product((False, True), repeat=2))


class Case(NamedTuple):
    """Gradients of a norm; ``weight``: its dtype, ``cut``: in 3 programs, 4 rows at a time, or as it is. ``heads``: so
    many rows lie behind one another in one of three parts of a wider row; ``centred``: a layer norm, or an RMS norm."""

    rows: int
    columns: int
    dtype: str = "float32"
    weight: str | None = "float32"
    wanted: tuple = (True, True)
    cut: bool = True
    heads: int = 0
    centred: bool = True


def rms(*sizes, wanted=(True, False), **other):
    return Case(*sizes, wanted=wanted, centred=False, **other)


WIDTHS = 1, 3, 64, 100, 256, 768, 1000
CASES = {
    **{f"{n} columns, {dtype}": Case(21, n, dtype) for n, dtype in product(WIDTHS, DTYPES)},
    **{f"{n} columns, plain": Case(21, n, d, None, (False, False)) for n, d in zip(WIDTHS, DTYPES * 3)},
    **{f"wanted {w}": Case(21, 100, "bfloat16", "bfloat16", w) for w in SUBSETS},
    **{f"no weight, wanted {w}": Case(21, 100, "float16", None, w) for w in SUBSETS},
    "narrow weight": Case(21, 64, weight="float16"),
    "one row": Case(1, 256, "bfloat16"),
    "one number": Case(1, 1),
    "one row, plain": Case(1, 3, "float16", None, (False, False)),
    "no rows": Case(0, 100),
    "no rows, plain": Case(0, 1, weight=None, wanted=(False, False)),
    "as it is": Case(21, 256, "bfloat16", cut=False),
    "as it is, narrow": Case(600, 3, cut=False),
    "as it is, wide": Case(5, operators.WIDEST_NORM - 7, cut=False),
    **{f"{h} heads": Case(24, 48, d, heads=h) for h, d in zip((1, 3, 6, 12), DTYPES * 2)},
    **{f"RMS, {n} columns, {d}": rms(21, n, d) for n, d in zip(WIDTHS, DTYPES * 3)},
    **{f"RMS, {h} heads": rms(24, 20, d, heads=h) for h, d in zip((2, 8), DTYPES)},
    "RMS, weight not wanted": rms(21, 100, "bfloat16", wanted=(False, False)),
    "RMS, no weight": rms(21, 100, "float16", weight=None, wanted=(False, False)),
    "RMS, as it is": rms(600, 48, "bfloat16", cut=False),
}


def far(got, wanted, least=1.0):
    """Largest errors, of the largest number and of ``least`` at least."""
    off = []
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        off.append(((a.double() - b).abs().max() / b.abs().max().clamp_min(least)).item() if a.numel() else 0.0)
    return off


def drawn(case, device):
    """Cotangent, x (off zero), and weight of a case."""
    torch.manual_seed(0)
    grad, x = torch.randn(2, case.rows, case.columns, dtype=torch.float64).add_(0.3).to(getattr(torch, case.dtype))
    weight = case.weight and torch.randn(case.columns).to(device, getattr(torch, case.weight))
    x = x.to(device)
    if case.heads:
        parts = torch.stack([x, x, x]).view(3, 1, -1, case.heads, case.columns).permute(1, 2, 0, 3, 4).contiguous()
        x = parts.unbind(2)[1]
        assert not x.is_contiguous()
    return grad.to(device).view_as(x), x, weight


def cut_of(case):
    """A context in which the norm's kernels are cut as the case says."""
    from core.kernels import columns

    few = columns.Cut(programs=3, tile=4 << (case.columns - 1).bit_length())
    return patch.object(columns, "NORM", few if case.cut else columns.NORM)


def most_of(case, rounded):
    """How far a stored result may be off: the interpreter cuts numbers off where it stores bf16; a GPU rounds."""
    return STORED[case.dtype] * (1 if rounded or case.dtype != "bfloat16" else 2)


def forward_errors_of(case, device):
    """Of the norm, with a bias where there is a weight and one is wanted, and of its means, if it takes them off, and
    inverse deviations."""
    _, x, weight = drawn(case, device)
    affine = [None if weight is None else weight.to(x.dtype), None]
    if weight is not None and case.wanted[1]:
        affine[1] = torch.randn_like(affine[0])
    truth = exact(case, x.double(), *(t if t is None else t.double() for t in affine))
    with cut_of(case):
        y, mean, rstd = torch.ops.core.norm(x, *affine, 1e-5, case.centred)
    assert [t.dtype for t in (y, mean, rstd)] == [x.dtype, torch.float32, torch.float32] and y.is_contiguous()
    assert case.centred or mean.shape == (0,)
    return far([y, mean, rstd] if case.centred else [y, rstd], truth)


def exact(case, x, weight, bias):
    """The norm, its means, if it takes them off, and inverse deviations, all as torch has them or by its formula."""
    if case.centred:
        return torch.native_layer_norm(x, [case.columns], weight, bias, 1e-5)
    return F.rms_norm(x, (case.columns,), weight, 1e-5), (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


def hold_forward(case, errors, rounded=True):
    assert len(errors) == 2 + case.centred and errors[0] < most_of(case, rounded) and max(errors[1:]) < SUMS, errors


def errors_of(case, device):
    """Of the gradient of x and of those wanted of weight and bias; the truth is what torch differentiates. Where the
    gradient of x is a difference of larger numbers, as of one column, they are what an error is measured by."""
    grad, x, weight = drawn(case, device)
    leaves = [x.double(), x.new_ones(case.columns).double() if weight is None else weight.double()]
    leaves = [t.requires_grad_() for t in (*leaves, torch.zeros_like(leaves[1]))]
    y, *mean, rstd = exact(case, *leaves)
    truth, *sums = torch.autograd.grad(y, leaves, grad.double(), allow_unused=True)
    with cut_of(case):
        mean = mean[0].detach().float() if case.centred else x.new_empty(0, dtype=torch.float32)
        call = grad, x, mean, rstd.detach().float(), weight, case.wanted
        out, found = torch.ops.core.norm_gradients(*call)
    assert out.dtype == x.dtype and found.dtype == torch.float32 and out.is_contiguous()
    terms = (grad * leaves[1] * rstd).abs().max().item() if grad.numel() else 1.0
    of_weights = far(found, [s for s, w in zip(sums, case.wanted) if w])
    return [*far([out], [truth], max(terms, 1.0)), *of_weights]


def hold(case, errors, rounded=True):
    assert len(errors) == 1 + sum(case.wanted)
    assert errors[0] < most_of(case, rounded) and all(e < SUMS for e in errors[1:]), errors


def through_formulas(device):
    """((formula, whether rows fit, wanted), (errors, names of operations)) of a linear layer, layer and RMS norms."""
    like = dict(dtype=torch.float64, device=device)
    x, matrix, bias = torch.randn(1, 90, 200, **like), torch.randn(6, 200, **like), torch.randn(6, **like)
    found = [(("linear", False, (True,) * 3), written(formulas.LINEAR, F.linear, (), (True,) * 3, x, matrix, bias))]
    affine = torch.randn(2, 200, **like)
    for fits, count in ((True, 1), (False, 1), (True, 2), (True, 3), (False, 3)):
        operands = [x, *affine][:count]
        for wanted in product((False, True), repeat=count):
            if any(wanted):
                with patch.object(operators, "WIDEST_NORM", 200 if fits else 199):
                    found.append(
                        (("norm", fits, wanted), written(LAYER_NORM, F.layer_norm, [(200,)], wanted, *operands))
                    )
    for wanted in ((True,), (True, True), (True, False), (False, True)):
        operands = [x, *affine][: len(wanted)]
        found.append((("RMS norm", True, wanted), written(RMS_NORM, F.rms_norm, [(200,)], wanted, *operands)))
    return found


def written(formula, operation, shape, wanted, x, *rest):
    """Errors of the result and the gradients by a formula in fp32; the truth is what torch differentiates in fp64."""
    operands = x, *rest
    leaves = [t.detach().requires_grad_(w) for t, w in zip(operands, wanted)]
    out = operation(leaves[0], *shape, *leaves[1:])
    cotangent = torch.randn_like(out)
    truth = out.detach(), *torch.autograd.grad(out, [t for t in leaves if t.requires_grad], cotangent)
    single = [t.detach().float() for t in operands]
    with patch.object(operators, "LEAST_ROWS", 16), Meter() as meter:
        result, *extra = formula.forward(single[0], *shape, *single[1:])
    forward = {w.name for w in meter.work} & FORWARD
    kept = formula.kept(single, wanted)
    with patch.object(operators, "LEAST_ROWS", 16), Meter() as meter:
        grads = formula.backward(cotangent.float(), extra, wanted, kept[0], *shape, *kept[1:])
    assert [g is not None for g in grads] == list(wanted)
    return far([result, *(g for g in grads if g is not None)], truth), [*forward, *(w.name for w in meter.work)]


def hold_formulas(found):
    """Right, and by one pass where x is wanted too and rows fit; elsewhere by sums, and torch's for x alone."""
    for (kind, fits, wanted), (errors, names) in found:
        assert max(errors) < SUMS, (kind, wanted, errors)
        one = fits and wanted[0] or kind == "RMS norm"
        expected = {"norm_gradients"} if one else {"column_sums"} if any(wanted[1:]) else set()
        if "norm" in kind:
            expected.add("norm" if fits else "native_layer_norm")
        if kind == "norm" and wanted[0] and not fits:
            expected.add("native_layer_norm_backward")
        assert expected == (OURS_OR_TORCHS | FORWARD) & {*names}, (kind, fits, wanted, names)


# -- interpreted ------------------------------------------------------------------------------------------------------
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(20), nn.Linear(20, 36), nn.LayerNorm(36, elementwise_affine=False))
        self.norm = nn.RMSNorm(4)

    def forward(self, x):
        return self.norm(self.layers(x).unflatten(-1, (3, 3, 4)).unbind(-3)[1])


def alone():
    """Errors of the operations of plain tensors that have a formula: results, first derivatives, the same on the way to
    second ones, and those; the truth is fp64, which has no kernel. Operands are leaves, the same one twice, or made of
    one another."""
    x, weight, bias, angle = (torch.randn(n, dtype=torch.float64) for n in ((40, 3, 20), (20,), (20,), (3, 1, 10)))
    wide = x.unflatten(-1, (5, 4)).repeat(1, 1, 1, 5)  # (40, 3, 5, 20)
    rms = rms_norm_of_parts
    for operands, called in (
        ((x, weight, bias), lambda x, w, b: layer_norm_of_parts(x[:, 1:], (20,), w, b)),
        ((x, weight), lambda x, w: rms(x[:, 1:], (20,), w)),
        ((x,), lambda x: rms(x[:, 1:], (20,))),
        ((x, weight), lambda x, w: rms(rms(x, (20,), w), (20,), w)),
        ((x,), lambda x: layer_norm_of_parts(x, (20,), x.mean((0, 1)), x.sum((0, 1)))),
        ((wide, angle), lambda x, a: rotary_embedding(x, a, a)),
        ((wide, angle), lambda x, a: rotary_embedding(x, a.detach().cos(), a.detach().sin()) + a.sum()),
        ((x, weight), lambda x, w: checkpoint(lambda x: rms(x, (20,), w) + rms(x, (20,)), x, use_reentrant=False)),
    ):  # fmt: skip
        found = []
        for dtype in (torch.float32, torch.float64):
            leaves = [t.to(dtype).requires_grad_() for t in operands]
            with patch.object(operators, "LEAST_ROWS", 16), Meter() as meter:
                y = called(*leaves)
                grads = torch.autograd.grad(y.sin().sum(), leaves, retain_graph=True)
                names = {w.name for w in meter.work} & {"norm", "norm_gradients", "rotary"}
                twice = torch.autograd.grad(called(*leaves).sin().sum(), leaves, create_graph=True)
                again = torch.autograd.grad(sum(g.square().sum() for g in twice), leaves)
            found.append([y, *grads, *twice, *again])
            assert bool(names) == (dtype == torch.float32)
        yield far(*found)


def interpreted(folder):
    """A share of the cases on each of two ranks, and on both a model whose rows are cut, one part less than many."""
    rank, found = dist.get_rank(), {}
    for name in list(CASES)[rank::2]:
        found[name] = errors_of(CASES[name], "cpu"), forward_errors_of(CASES[name], "cpu")
    if rank == 0:
        found["alone"], found["turns"] = list(alone()), list(turns("cpu"))
        found["formulas"] = through_formulas("cpu")
        grad, x = torch.randn(2, 301, 200, dtype=torch.float64)
        mean, rstd = x.mean(1), x.std(1) ** -1
        truth = grad.sum(0), (grad * (x - mean[:, None]) * rstd[:, None]).sum(0)
        found["sums"] = far(torch.ops.core.column_sums(*(t.float() for t in (grad, x, mean, rstd))), truth)
    mesh = DistributedManager().initialize_mesh((2,), ("domain",))
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 60, 20)
    with patch.object(operators, "LEAST_ROWS", 16), Meter() as meter:
        for sizes in ((37, 23), (53, 7), (0, 60)):
            check_sharded(model, [x], [[Shard(1)]], mesh, sizes=[{0: sizes}])
        cut = scatter_tensor(x, None, mesh, [Shard(1)])
        with torch.no_grad(), Meter() as forward:
            model(cut)
        for sizes in ((37, 23), (0, 60)):  # a rank without rows refuses as the other
            part = scatter_tensor(x, None, mesh, [Shard(1)], sizes={0: sizes}).requires_grad_()
            for mode in (torch.no_grad, torch.enable_grad):
                with mode(), pytest.raises(RuntimeError, match="normalized_shape"):
                    F.layer_norm(part, (20,), torch.ones(12), torch.ones(20))
        for norm in (LayerNorm(20), RMSNorm(20)):  # DTensors have torch's own norms
            whole = norm(x.detach())
            other = distribute_module(norm, mesh)(distribute_tensor(x.detach(), mesh, [Shard(1)]))
            torch.testing.assert_close(other.full_tensor(), whole)
    assert {"norm", "column_sums", "norm_gradients"} <= {w.name for w in meter.work}
    assert [w.name for w in forward.work if "norm" in w.name] == ["norm"] * 3
    with open(f"{folder}/{rank}", "w") as file:
        json.dump(found, file)


def turns(device):
    """Errors of rotary embeddings and of their gradients, in units of what storing costs; the truth is fp64. Heads in
    wider rows, batches, angles of the grid alone, channels that are no power of two."""
    for (*grid, heads, channels), dtype in product(((2, 5, 3, 2, 8), (1, 7, 4, 3, 20), (3, 9, 1, 2)), DTYPES):
        like = dict(dtype=torch.float64, device=device)
        parts, angle = torch.randn(*grid, 3, heads, channels, **like), torch.randn(*grid[1:], 1, channels // 2, **like)
        angles, grad = (angle.cos(), angle.sin()), torch.randn(*grid, heads, channels, **like)
        found = []
        for kind in (torch.float64, getattr(torch, dtype)):
            *leaves, cotangent = (t.to(getattr(torch, dtype)).to(kind) for t in (parts, *angles, grad))
            leaves = [t.requires_grad_() for t in leaves]
            with patch.object(operators, "LEAST_ROWS", 1), Meter() as meter:
                y = rotary_embedding(leaves[0].unbind(-3)[1], *leaves[1:])
                found.append([y, *torch.autograd.grad(y, leaves[:1], cotangent, retain_graph=True)])
            assert {w.name for w in meter.work} & {"rotary", "cat"} == {"cat" if kind == torch.float64 else "rotary"}
            found[-1] += torch.autograd.grad(y, leaves[1:], cotangent)
        errors = far(found[1], found[0])
        yield [e / STORED[dtype] for e in errors[:2]] + [e / (8 * STORED[dtype]) for e in errors[2:]]  # sums by torch


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("found")
    with patch.dict(os.environ, TRITON_INTERPRET="1"):
        run_on_ranks(2, interpreted, str(folder))
    return {name: value for rank in "01" for name, value in json.loads((folder / rank).read_text()).items()}


@pytest.mark.parametrize("name", CASES)
def test_norm(found, name):
    gradients, forward = found[name]
    hold(CASES[name], gradients, rounded=False)
    hold_forward(CASES[name], forward, rounded=False)


def test_of_plain_tensors(found):
    assert len(found["alone"]) == 8 and max(map(max, found["alone"])) < 1e-5


def test_turns(found):
    """The interpreter cuts numbers off where it stores bf16."""
    assert len(found["turns"]) == 9 and max(map(max, found["turns"])) < 2, found["turns"]


def test_sums(found):
    assert len(found["sums"]) == 2 and max(found["sums"]) < SUMS


def test_through_formulas(found):
    assert len(found["formulas"]) == 1 + 1 + 1 + 3 + 7 + 7 + 4
    hold_formulas(found["formulas"])


def test_wrong_shapes_are_refused_as_torch_does():
    """Before any kernel reads past the end of a row or a weight, with gradients and without."""
    x, short = torch.randn(50, 64), torch.randn(32)
    wrong = [(x, (32,)), (x, (32,), short), (x, (32,), None, short), (x, (64,), short), (x, (64,), None, short)]
    wrong += [(x, (64,), torch.randn(64), short), (torch.tensor(1.0), (1,))]
    with patch.object(operators, "LEAST_ROWS", 1), patch.object(kernels, "_INTERPRETED", True):
        assert operators.has_column_kernel(x)
        for call in wrong:
            with pytest.raises(RuntimeError, match="normalized_shape"):
                formulas.LAYER_NORM.forward(*call)
            for mode in (torch.no_grad, torch.enable_grad):
                with mode(), pytest.raises(RuntimeError, match="normalized_shape"):
                    layer_norm_of_parts(*call)
                if len(call) < 4:
                    with mode(), pytest.raises((RuntimeError, ValueError), match="normalized_shape|at least 1 dim"):
                        rms_norm_of_parts(*call)


# -- which are taken --------------------------------------------------------------------------------------------------
def test_which_have_a_kernel(monkeypatch):
    """Contiguous ones of many rows only, and none without columns."""
    monkeypatch.setattr(kernels, "_INTERPRETED", True)
    many = torch.zeros(2, operators.LEAST_ROWS // 2, 3)
    assert operators.has_column_kernel(many, many)
    for other in (many[:1], many[..., :0], many[..., :2], many.double()):
        assert not operators.has_column_kernel(many, other)
    wide = torch.zeros(operators.LEAST_ROWS // 4, 3, 4, 6)
    good = many, wide[:, 1], wide.movedim(1, 0)[2, ..., :3], wide[:, :1, 0].expand(-1, 4, -1)
    bad = wide[..., ::2], wide[:, :2], many.mT, many.double(), many[..., :0], wide[:4, 1]
    assert [operators.has_norm_kernel(t) for t in (*good, *bad)] == [True] * len(good) + [False] * len(bad)


def test_which_sums_are_products():
    """On a GPU those of few columns in half precision that cuBLAS adds in fp32, and they are handed out in fp32."""
    half, most = (torch.bfloat16, torch.float16), operators.WIDEST_PRODUCT
    for dtype in half:
        assert operators.by_product("cuda", dtype, 4096, most)
        assert not operators.by_product("cuda", dtype, 4096, most + 1)
        assert not operators.by_product("cpu", dtype, 4096, most)
        assert not operators.by_product("cuda", dtype, 2**31, 1)
        found = operators.product_with_ones(torch.empty(7, 5, dtype=dtype, device="meta"))
        assert found.shape == (1, 5) and found.dtype == torch.float32
    assert not operators.by_product("cuda", torch.float32, 4096, 8)
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        assert [operators.by_product("cuda", dtype, 4096, 8) for dtype in half] == [True, False]
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = False


# -- compiled ---------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_compiled(name):
    hold(CASES[name], errors_of(CASES[name], "cuda"))
    hold_forward(CASES[name], forward_errors_of(CASES[name], "cuda"))


@pytest.mark.gpu
def test_compiled_through_formulas():
    hold_formulas(through_formulas("cuda"))


@pytest.mark.gpu
def test_compiled_turns():
    errors = list(turns("cuda"))
    assert len(errors) == 9 and max(map(max, errors)) < 1, errors


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_sums_by_a_product(dtype):
    """Of numbers of one sign, as far as adding in fp32 without rounding up may be off; autocast changes no bit."""
    grad = 1 + torch.randn(37_501, 300, device="cuda").to(getattr(torch, dtype)) / 8
    assert operators.by_product("cuda", grad.dtype, *grad.shape)
    found = torch.ops.core.column_sums(grad, None, None, None)
    assert found.dtype == torch.float32 and far(found, grad.double().sum(0, True))[0] < 2**-12
    for other in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", other):
            assert torch.equal(found, torch.ops.core.column_sums(grad, None, None, None))


@pytest.mark.gpu
def test_more_numbers_than_32_bits_count():
    """The last rows of 2.15e9 numbers, and sums over all of them; twice the same bits."""
    from core.kernels import columns

    rows, width, last = 2**23 + 4099, 256, 67
    grad, x = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(width, device="cuda")
    _, mean, rstd = torch.native_layer_norm(x, [width], weight.to(x), None, 1e-5)
    call = grad, x, mean.float(), rstd.float()
    out, sums = torch.ops.core.norm_gradients(*call, weight, (True, True))
    assert x.numel() > 2**31 and torch.equal(sums, torch.ops.core.norm_gradients(*call, weight, (True, True))[1])
    total, times = torch.zeros(2, width, device="cuda", dtype=torch.float64)
    for g, y, m, r in zip(*(t.split(2**20) for t in call)):
        total += g.double().sum(0)
        times += (g.double() * ((y.double() - m.double()) * r.double())).sum(0)
    assert max(far(sums, (times, total))) < 1e-5 and max(far(columns.sums(*call), (total, times))) < 1e-5
    apart = torch.empty(4100 * (2**19 + 8), device="cuda", dtype=torch.bfloat16).as_strided((4100, 8), (2**19 + 8, 1))
    apart.copy_(x[:4100, :8])  # rows so far apart that 32 bits do not count the way to the last
    close = torch.ops.core.norm(x[:4100, :8].contiguous(), None, None, 1e-5, True)
    assert all(map(torch.equal, torch.ops.core.norm(apart, None, None, 1e-5, True), close))
    ends = [t[-last:].double() for t in call]
    truth = torch.ops.aten.native_layer_norm_backward(
        ends[0], ends[1], [width], *ends[2:], weight.double(), None, [True, False, False]
    )[0]
    assert far([out[-last:]], [truth])[0] < STORED["bfloat16"]
