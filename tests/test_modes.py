"""Modes around a model: autocast, memory formats, inference, recomputation; and what code asks of any tensor."""

import gc
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from strict import check, cut, draw, same, strictly, whole
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from core import ShardTensor
from core.debug import trace

# -- autocast ---------------------------------------------------------------------------------------------------------
CASTS = {
    "linear": lambda x, w: F.linear(x, w),
    "matmul": lambda x, w: x @ w,
    "layer_norm": lambda x, w: F.layer_norm(x, (8,), w[0], w[1]),
    "group_norm": lambda x, w: F.group_norm(x, 3),
    "softmax": lambda x, w: F.softmax(x @ w, -1),
    "softmax of a cut dim": lambda x, w: F.softmax(x @ w, 2),
    "conv": lambda x, w: F.conv2d(x, w.view(2, 4, 2, 4)[:, :3], padding=1),
    "attention": lambda x, w: F.scaled_dot_product_attention(x @ w, x, x),
    "pointwise": lambda x, w: F.gelu(x @ w) + x,
    "mean": lambda x, w: (x @ w).mean((2, 3)),
    "loss": lambda x, w: F.mse_loss(x @ w, x),
    "interpolate": lambda x, w: F.interpolate(x @ w, scale_factor=2.0),
    "pow": lambda x, w: (x @ w).pow(2).sum(),
    "exp": lambda x, w: (x @ w).exp(),
    "cat": lambda x, w: torch.cat([x @ w, x], 1),
}


@strictly
def autocast(meshes):
    """Every result has the dtype of one process, and so has every gradient."""
    x, w = draw(2, 3, 9, 8, dtype=torch.float32), draw(8, 8, dtype=torch.float32, seed=1) * 0.3
    for name, fn in CASTS.items():
        results = []
        for t in (x.clone().requires_grad_(), cut(x, meshes["2"], 2, requires_grad=True)):
            v = w.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                out = fn(t, v)
            out.float().square().mean().backward()
            results.append((out, t.grad, v.grad))
        for a, b in zip(*results):
            if a is None:
                assert b is None, name
                continue
            assert whole(b).dtype == a.dtype, f"{name}: {whole(b).dtype}, not {a.dtype}"
            torch.testing.assert_close(
                whole(b).detach().float(), a.detach().float(), atol=0.05, rtol=0.05, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_autocast_keeps_torchs_dtypes(pool):
    pool.run(autocast)


# -- memory formats ---------------------------------------------------------------------------------------------------
@strictly
def channels_last(meshes):
    """Kept by pointwise operations, convolutions, norms and joins, forward and backward, as on one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.BatchNorm2d(8), nn.ReLU())
    model = model.double().to(memory_format=torch.channels_last)
    x = draw(2, 3, 9, 6).contiguous(memory_format=torch.channels_last)
    shards = cut(x, meshes["2"], 2, requires_grad=True)
    seen, plain = [], x.clone().requires_grad_()
    for t in (plain, shards):
        h = [t]
        for layer in model:
            h.append(layer(h[-1]))
        h += [h[-1] + h[1], h[-1] * 2, h[-1].clone(), torch.cat([h[-1], h[-1]], 1), F.avg_pool2d(h[-1], 2)]
        h[-2].sum().backward()
        seen.append([o.is_contiguous(memory_format=torch.channels_last) for o in (*h, t.grad)])
    assert seen[0] == seen[1], seen
    same(shards.grad, plain.grad)
    assert shards.is_contiguous(memory_format=torch.channels_last) and not shards.is_contiguous()
    flat = shards.to(memory_format=torch.contiguous_format)
    assert flat.is_contiguous() and flat.contiguous(memory_format=torch.channels_last).stride() == x.stride()
    for like in (torch.zeros_like(shards), torch.zeros_like(flat, memory_format=torch.channels_last), shards.clone()):
        assert like.stride() == x.stride()
    wide = cut(draw(2, 1, 9, 6), meshes["2"], 2).expand(2, 3, 9, 6)
    assert wide.clone().add_(1).stride() == torch.zeros_like(wide).stride() == flat.stride()


def test_channels_last_is_kept(pool):
    pool.run(channels_last)


# -- without gradients ------------------------------------------------------------------------------------------------
@strictly
def without_gradients(meshes):
    model, x = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU()).double(), draw(2, 7, 6)
    shards, expected = cut(x, meshes["2"]), model(x)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            out = model(shards)
            assert not out.requires_grad and out.is_inference() == (mode is torch.inference_mode)
            same(out, expected)
            same(out.add_(1).relu_(), (expected + 1).relu())  # writes, views and sums work in there, too
            same(out[:, 1:].transpose(1, 2).mean(), (expected + 1).relu()[:, 1:].mean())
            assert torch.equal(out, out.clone())
    with torch.no_grad():
        shards = cut(x, meshes["2"], requires_grad=True)
        assert not (shards * 2).requires_grad
        with torch.enable_grad():
            assert (shards * 2).requires_grad
    with torch.set_grad_enabled(False):
        assert not model(shards).requires_grad


def test_without_gradients(pool):
    pool.run(without_gradients)


# -- recomputation ----------------------------------------------------------------------------------------------------
def conv_net():
    return nn.Sequential(nn.Conv1d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.GELU(), nn.Conv1d(6, 3, 5, padding=2))


@strictly
def recomputed(meshes, reentrant):
    """The same gradients; the forward messages are sent once more, in the backward pass."""
    counts = []
    for step in (lambda m, t: m(t), lambda m, t: checkpoint(m, t, use_reentrant=reentrant)):
        with trace() as forward:
            model, x = conv_net().double(), cut(draw(2, 3, 9), meshes["2"], 2, requires_grad=True)
            out = step(model, x)
        with trace() as backward:
            out.square().sum().backward()
        counts.append((forward.count(), backward.count()))
        check(lambda: conv_net().double(), draw(2, 3, 9), meshes["2"], 2, step)
    (plain_forward, plain_backward), (again_forward, again_backward) = counts
    assert again_forward == plain_forward > 0 and again_backward == plain_backward + plain_forward, counts


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_recomputes_once(pool, reentrant):
    pool.run(recomputed, reentrant)


def _note_memory(seen, module, args, out):
    seen.append(StorageWeakRef(out._local_tensor.untyped_storage()))


@strictly
def forgotten(meshes, reentrant):
    """What a checkpointed block computes on the way is freed when it is done, and kept without a checkpoint."""
    for checkpointed in (False, True):
        model, x = conv_net().double(), cut(draw(2, 3, 9), meshes["2"], 2, requires_grad=True)
        seen = []
        for layer in model[:-1]:
            layer.register_forward_hook(partial(_note_memory, seen))
        out = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
        gc.collect()
        assert [s.expired() for s in seen] == [checkpointed] * 3, (checkpointed, reentrant)
        out.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_frees(pool, reentrant):
    pool.run(forgotten, reentrant)


def offloaded(model, x):
    with torch.autograd.graph.save_on_cpu():
        return model(x)


@strictly
def kept_elsewhere(meshes):
    check(lambda: conv_net().double(), draw(2, 3, 9), meshes["2"], 2, offloaded)


def test_saved_tensors_kept_elsewhere(pool):
    pool.run(kept_elsewhere)


# -- a tensor among tensors -------------------------------------------------------------------------------------------
@strictly
def among_tensors(meshes):
    x, mesh = draw(2, 7, 6), meshes["2"]
    s = cut(x, mesh)
    with trace() as wire:
        assert isinstance(s, torch.Tensor) and torch.is_tensor(s)
        assert torch.numel(s) == 84 and torch.is_floating_point(s) and not torch.is_complex(s) and len(s) == 2
        assert (s.shape, s.dtype, s.ndim, s.stride(), s.nbytes) == (x.shape, x.dtype, x.ndim, x.stride(), x.nbytes)
        assert str(s.dtype) == "torch.float64" and tuple(s.size()) == (2, 7, 6) and s.size(-1) == 6 and s.itemsize == 8
        assert s.element_size() == 8 and s.storage_offset() == 0 and s.layout is torch.strided and s.get_device() == -1
        for other in (1.5, torch.ones(1, dtype=torch.float32), s.float()):
            assert torch.result_type(s, other) == torch.float64
        assert torch.can_cast(s.dtype, torch.float32) and torch.broadcast_shapes(s.shape, (1, 6)) == s.shape
        assert hash(s) == hash(s) and s in {s} and id(s) in {id(s)} and {s: 1}[s] == 1
        tree = {"a": [s, (s, 3)], "b": None}
        leaves, spec = _pytree.tree_flatten(tree)
        assert leaves[0] is s and _pytree.tree_unflatten(leaves, spec)["a"][1][0] is s
        doubled = _pytree.tree_map_only(torch.Tensor, lambda t: t * 2, tree)
        assert doubled["a"][0]._spec == s._spec
        for cast, dtype in ((s.half(), torch.float16), (s.type_as(s.int()), torch.int32), (s.to(s.bool()), torch.bool)):
            assert cast.dtype == dtype and cast._spec == s._spec
        assert s.double() is s and s.cpu() is s and s.to("cpu", torch.float64) is s and s.contiguous() is s
        assert s.float().to(s).dtype == torch.float64 and s.type(torch.FloatTensor).dtype == torch.float32
        assert torch.as_tensor(s) is s and s.to(torch.float64, copy=True) is not s
        first, second = torch.broadcast_tensors(s, s[:, :, :1])
        assert first.shape == second.shape == s.shape and second._spec.sizes == s._spec.sizes
        assert s.requires_grad_() is s and s.is_leaf and (s * 1).grad_fn is not None and s.grad is None
    assert wire.count() == 0, wire.kinds()
    same(doubled["a"][0], 2 * x)
    assert x[0, 1, 2].item() in s and 99.0 not in s
    assert [type(row) for row in s] == [ShardTensor] * 2 and len(list(s.unbind(2))) == 6
    for row, expected in zip(s, x):
        same(row, expected)
    same(sum(s), x[0] + x[1])
    same(torch.stack(list(s.detach())), x)
    assert s.detach().tolist() == x.tolist()
    assert torch.equal(s, cut(x, mesh, 2)) and torch.equal(s, x) and not torch.equal(s, x + 1)
    assert torch.allclose(s, x + 1e-12) and not torch.allclose(s, s + 1) and not torch.equal(s, s[:1])
    torch.testing.assert_close(s.full_tensor(), x.requires_grad_())
    torch.testing.assert_close(s, s.clone())
    scalar = s.detach().mean()
    assert f"{scalar:.3f}" == f"{x.mean():.3f}" and float(scalar) == scalar.item() and complex(scalar).imag == 0
    assert (
        bool(scalar != 5) and [10, 20][(scalar > 99).int()] == 10 and round(scalar.item(), 6) == round(float(scalar), 6)
    )


def test_a_tensor_among_tensors(pool):
    pool.run(among_tensors)
