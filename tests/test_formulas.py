"""Derivatives that are written out: torch's own for every subset of wanted gradients, and nothing kept in vain."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from core import ShardTensor, scatter_tensor, set_attention_strategy
from core.debug import trace
from core.ops import gathered
from core.ops.slots import slot_read
from core.precision import gpu_autocast

CALLS = {
    "linear": lambda x, w, b: F.linear(x, w, b),
    "linear without bias": lambda x, w, b: F.linear(x, w),
    "linear of complex numbers": lambda x, w, b: F.linear(torch.complex(x, x + 1), torch.complex(w, -2 * w)).abs(),
    "convolution": lambda x, w, b: F.conv1d(x.mT, w[..., None], b),
    "layer norm": lambda x, w, b: F.layer_norm(x, (4,), w[0], b, 1e-3),
    "layer norm, bias by name": lambda x, w, b: F.layer_norm(x, (4,), bias=b),
    "layer norm, plain": lambda x, w, b: F.layer_norm(x, (4,)),
}


def _drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def _gradients(call, tensors, again):
    """Of a cubic sum of the result, by every tensor that wants one; or of the sum of squares of these."""
    wanted = [t for t in tensors if t.requires_grad]
    found = torch.autograd.grad((call(*tensors) ** 3).sum(), wanted, create_graph=again, allow_unused=True)
    if again:
        total = sum((g**2).sum() for g in found if g is not None and g.requires_grad)
        found = torch.autograd.grad(total, wanted, allow_unused=True)
    return [g if g is None or type(g) is torch.Tensor else g.full_tensor() for g in found]


def as_torch(meshes, name):
    for wants in product((False, True), repeat=3):
        whole = [t.requires_grad_(w) for t, w in zip((_drawn(2, 7, 4), _drawn(4, 4), _drawn(4)), wants)]
        if not call_wants(name, wants):
            continue
        for sizes in ((4, 3), (7, 0)):
            x = scatter_tensor(
                whole[0].detach(), None, meshes["2"], [Shard(1)], requires_grad=wants[0], sizes={0: sizes}
            )
            for again in (False, True)[: 1 if "by name" in name else 2]:  # torch has no second derivative of that
                pair = [_gradients(CALLS[name], [t, *whole[1:]], again) for t in (whole[0], x)]
                for expected, got in zip(*pair):
                    if expected is not None:  # torch says None where we may say zero
                        torch.testing.assert_close(got, expected)
                    assert expected is not None or got is None or not got.any()


USED = {"linear": 3, "linear without bias": 2, "linear of complex numbers": 2, "convolution": 3, "layer norm": 3}


def call_wants(name, wants):
    return any(wants[: USED.get(name, 1)]) or name == "layer norm, bias by name" and wants[2]


@pytest.mark.parametrize("name", CALLS)
def test_as_torch(pool, name):
    pool.run(as_torch, name)


def kept(meshes):
    """What is kept is what torch keeps: a write into anything else is no error, and costs no memory."""
    w, b, whole = _drawn(4, 4), _drawn(4), _drawn(2, 7, 4)
    for frozen in (True, False):
        for call in (CALLS["linear"], CALLS["layer norm"]):
            packed = []
            for source in (whole.clone(), scatter_tensor(whole, None, meshes["1"], [Shard(1)])):
                x, shapes = source.requires_grad_(), []
                weight = w.clone().requires_grad_(not frozen)
                with torch.autograd.graph.saved_tensors_hooks(
                    lambda t, s=shapes: s.append(t.numel()) or t, lambda t: t
                ):
                    call(x * 1, weight, b)
                packed.append(sum(n for n in shapes if n == whole.numel()))
            assert packed[0] == packed[1], (frozen, packed)
    h = scatter_tensor(whole, None, meshes["2"], [Shard(1)], requires_grad=True) * 1
    y = F.linear(h, w, b)
    h.add_(1)  # no gradient hangs on it
    y.sum().backward()
    y = F.linear(h.detach().requires_grad_() * 1, leaf := w.clone().requires_grad_())
    with torch.no_grad():
        leaf.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation|modified inplace"):
        y.sum().backward()


def test_kept(pool):
    pool.run(kept)


def without_numbers(meshes):
    """Tensors of the device meta have shapes and dtypes, and so do their gradients, under an autocast of others too."""
    for name, on in product([*CALLS, "attention"], (False, True)):
        part = torch.empty(2, 4 - meshes["2"].get_local_rank(), 4, device="meta", requires_grad=True)
        x = ShardTensor.from_local(part, meshes["2"], [Shard(1)], "chunk", (2, 7, 4))
        w, b = (torch.empty(s, device="meta", requires_grad=True) for s in ((4, 4), 4))
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            out = F.scaled_dot_product_attention(x, x, x) if name == "attention" else CALLS[name](x, w, b)
        out.sum().backward()
        assert out.is_meta and out.dtype == torch.float32 and part.grad.shape == part.shape, name


def test_without_numbers(pool):
    pool.run(without_numbers)


CASTS = {"of the CPU": partial(torch.autocast, "cpu"), "as on a GPU": gpu_autocast}


def under_autocast(meshes, kind):
    """Torch's gradients, to rounding, of operands of either dtype; twice; and what it keeps, in the dtype it keeps."""
    cast, narrow = CASTS[kind], torch.bfloat16
    w, b = (t.float().requires_grad_() for t in (_drawn(4, 4), _drawn(4)))
    for name, dtype, again in product(CALLS, (torch.float32, narrow), (False, True)):
        if "complex" in name or "by name" in name or name == "convolution":
            continue
        whole, pair, packed = _drawn(2, 7, 4).to(dtype).requires_grad_(), [], []
        for x in (whole, scatter_tensor(whole.detach(), None, meshes["2"], [Shard(1)], requires_grad=True)):

            def call(x, *weights):
                with cast(narrow):
                    out = CALLS[name](x, *weights)  # noqa: B023
                return out.float()

            pair.append(_gradients(call, [x, w, b], again))
            packed.append([])
            with torch.autograd.graph.saved_tensors_hooks(lambda t, s=packed[-1]: s.append(t) or t, lambda t: t):
                call(x, w, b)
        for expected, got in zip(*pair):
            if expected is not None:
                torch.testing.assert_close(got, expected, rtol=0.03, atol=0.03 * expected.abs().max().item())
                assert got.dtype == expected.dtype
        with cast(narrow):  # autocast remembers nothing of what was done to shards
            CALLS[name](x, w, b)
            plain = CALLS[name](whole, w, b).float().sum()
        assert "linear" not in name or torch.autograd.grad(plain, w)[0].any()
        rows = [[t.dtype for t in kept if t.shape[-1] == 4 and t.numel() == whole.numel()] for kept in packed]
        assert rows[0] == rows[1], (name, rows)


@pytest.mark.parametrize("kind", CASTS)
def test_under_autocast(pool, kind):
    pool.run(under_autocast, kind)


def attention_of_kept_and_returned_keys(meshes, most):
    """Keys that are too many to be kept come once more for the backward pass; parts without rows send as others do."""
    gathered._MOST_KEPT, kept = most, gathered._MOST_KEPT
    set_attention_strategy("gather")
    whole = [_drawn(2, 3, 7, 4).roll(i, 2).requires_grad_() for i in range(3)]
    for causal, wanted in product((False, True), ((0, 1, 2), (0,), (1,), (0, 2))):
        expected = F.scaled_dot_product_attention(*whole, is_causal=causal)
        expected_grads = torch.autograd.grad((expected**3).sum(), [whole[i] for i in wanted])
        for sizes in ((4, 3), (0, 7), (7, 0)):
            parts = [
                scatter_tensor(t.detach(), None, meshes["2"], [Shard(2)], requires_grad=i in wanted, sizes={0: sizes})
                for i, t in enumerate(whole)
            ]
            with trace() as wire:
                out = F.scaled_dot_product_attention(*parts, is_causal=causal)
                found = torch.autograd.grad((out**3).sum(), [parts[i] for i in wanted])
            torch.testing.assert_close(out.full_tensor(), expected)
            for a, b in zip(found, expected_grads):
                torch.testing.assert_close(a.full_tensor(), b)
            kinds = [m.kind for m in wire.messages]
            assert kinds.count("all_gather") == 1 + (most == 0), kinds
            assert kinds.count("all_to_all") == (1 if {1, 2} & {*wanted} else 0), kinds
    set_attention_strategy("auto")
    gathered._MOST_KEPT = kept


@pytest.mark.parametrize("most", (0, 2**26))
def test_attention_of_kept_and_returned_keys(pool, most):
    pool.run(attention_of_kept_and_returned_keys, most)


@torch.library.custom_op("tests::double", mutates_args=("x",))
def double(x: torch.Tensor) -> None:
    x.mul_(2)


def _without_a_rule(y):
    with torch.no_grad():
        double(y)


CHANGED = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "causal attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "slots": lambda x: slot_read(x, x[:, :, :3].detach(), x[:, :, :3].detach()),
    "product": lambda x: x.prod(2),
}


def changed_results(meshes, name):
    """What the gradient hangs on may not be changed in place, be it through a view."""
    x = scatter_tensor(_drawn(1, 2, 7, 4), None, meshes["2"], [Shard(2)], requires_grad=True)
    for change in (lambda y: y.mul_(2), lambda y: y[..., :1].add_(1), _without_a_rule):
        y = CHANGED[name](x)
        change(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation|modified inplace"):
            (y**2).sum().backward()
    y = F.linear(x, _drawn(3, 4))  # which does not need its result
    (y.mul_(2) ** 2).sum().backward()
    expected = x.detach().full_tensor().requires_grad_()
    ((F.linear(expected, _drawn(3, 4)) * 2) ** 2).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), expected.grad)


@pytest.mark.parametrize("name", CHANGED)
def test_changed_results(pool, name):
    pool.run(changed_results, name)
