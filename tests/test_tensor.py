"""A ShardTensor is a tensor: what people do with one besides computing."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from core import ShardingError, ShardTensor, rng, scatter_tensor, set_fallback
from core.debug import trace


def make(mesh, requires_grad=False, rows=7):
    whole = torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cut = [Shard(0), Shard(1)][: mesh.ndim]
    return whole, scatter_tensor(whole, None, mesh, cut, requires_grad=requires_grad)


def same(a, b):
    a = a.full_tensor() if isinstance(a, ShardTensor) else a
    torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def _is_saved_and_loaded(meshes):
    for name in ("1", "2", "2x2"):
        for wants in (False, True):
            whole, x = make(meshes[name], wants)
            buffer = io.BytesIO()
            torch.save({"x": x, "twin": x}, buffer)
            buffer.seek(0)
            loaded = torch.load(buffer, weights_only=False)
            assert loaded["x"] is loaded["twin"]
            for y in (loaded["x"], pickle.loads(pickle.dumps(x)), copy.deepcopy(x), copy.copy(x)):
                assert type(y) is ShardTensor and y.requires_grad == wants and y._spec == x._spec
                same(y.detach(), whole)
            twin = copy.deepcopy(x)
            twin.detach().zero_()
            same(x.detach(), whole)
            parts = [None] * dist.get_world_size()
            dist.all_gather_object(parts, pickle.dumps(x))
            for rank, part in enumerate(parts):
                if rank != dist.get_rank() and name != "1":  # the part of another rank is not this one's
                    with pytest.raises(ShardingError, match="holds the part of"):
                        pickle.loads(part)


def _is_a_parameter(meshes):
    """Module, state_dict, deepcopy, buffer, optimiser: the parameter stays cut."""
    whole, x = make(meshes["2"])
    module = nn.Module()
    module.weight, module.twin = nn.Parameter(x), None
    module.twin = module.weight
    module.register_buffer("offset", x * 2)
    assert len(list(module.parameters())) == 1 and set(module.state_dict()) == {"weight", "twin", "offset"}
    for m in (module, copy.deepcopy(module)):
        assert isinstance(m.weight, nn.Parameter) and isinstance(m.weight, ShardTensor) and m.twin is m.weight
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.1)
        plain = whole.clone().requires_grad_()
        reference = torch.optim.AdamW([plain], lr=0.1)
        for _ in range(3):
            for w, step in ((m.weight, optimizer), (plain, reference)):
                step.zero_grad()
                (w.sin() * w).sum().backward()
                step.step()
        same(m.weight.detach(), plain.detach())
        same(m.offset, whole * 2)
    fresh = copy.deepcopy(module)
    nn.init.zeros_(fresh.weight)
    fresh.load_state_dict(module.state_dict())
    same(fresh.weight.detach(), module.weight.full_tensor().detach())


def note(seen, tensor, key):
    tensor.register_hook(lambda g: seen.__setitem__(key, g))
    if tensor.is_leaf:
        tensor.register_post_accumulate_grad_hook(lambda t: seen.__setitem__(key + " after", t.grad))


def _gradients_are_seen_alike(meshes):
    """Leaves cut, replicated and plain: hooks, retained and accumulated gradients, autograd.grad, and what is set."""
    for name in ("1", "2", "2x2"):
        whole, x = make(meshes[name], True)
        plain = whole.clone().requires_grad_()
        r = scatter_tensor(whole, None, meshes[name], [Replicate()] * meshes[name].ndim, requires_grad=True)
        w, v = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
        seen = {}
        for tag, a, b, c in (("parts", x, r, w), ("whole", plain, plain.detach().clone().requires_grad_(), v)):
            note(seen, a, f"{tag} a")
            note(seen, b, f"{tag} b")
            note(seen, c, f"{tag} c")
            h = (a * c).sin() * b
            h.retain_grad()
            note(seen, h, f"{tag} h")
            (h.sum(0) @ c).backward(retain_graph=True)
            seen[f"{tag} retained"] = h.grad
            found = torch.autograd.grad((h * h).mean(), [a, b, c, h], retain_graph=True)
            seen.update({f"{tag} found {i}": g for i, g in enumerate(found)})
            (h.mean()).backward()
            seen.update({f"{tag} accumulated {i}": t.grad for i, t in enumerate((a, b, c))})
        keys = [k.removeprefix("whole ") for k in seen if k.startswith("whole ")]
        assert len(keys) == 4 + 3 + 1 + 4 + 3
        for key in keys:
            same(seen[f"parts {key}"], seen[f"whole {key}"])
        assert type(w.grad) is torch.Tensor and x.grad._spec.sizes == x._spec.sizes
        x.grad = None
        assert x.grad is None
        x.grad = x.detach() * 2
        same(x.grad, whole * 2)
        assert type(x.data) is ShardTensor and not x.data.requires_grad
        x.data = x.data * 3
        with pytest.raises(ShardingError, match="Scatter"):
            x.data = whole
        same(x.detach(), whole * 3)
        assert not x.detach().requires_grad and x.requires_grad_(False) is x and not x.requires_grad


def _one_value(meshes):
    whole, x = make(meshes["2"])
    one = x[3:4, 1:2]
    value = whole[3, 1].item()
    assert one.item() == float(one) == value and bool(one > value - 1) and int(one * 0 + 7) == 7
    assert [0, 1, 2][(x[0, 0] * 0 + 2).long()] == 2 and f"{one.sum():.3f}" == f"{value:.3f}"
    assert x.tolist() == whole.tolist() and len(x) == 7 and x.size(0) == 7 and x.numel() == 21
    assert [row.tolist() for row in x] == whole.tolist()
    for refused in (x.item, lambda: bool(x), lambda: float(x), x.numpy, lambda: x.__array__()):
        with pytest.raises(ShardingError, match="one element|to_local"):
            refused()
    assert "Shard(0)" in repr(x) and "Shard(0)" in f"{x}" and repr(x) == str(x)


def _torchs_other_spellings(meshes):
    """numpy's names of arguments, results that are written into ``out``, and the lazy conjugate of a part."""
    whole, x = make(meshes["2"])
    same(torch.cumsum(x, axis=0), whole.cumsum(0))
    same(torch.sum(x, axis=0, keepdims=True), whole.sum(0, keepdim=True))
    same(torch.mean(input=x, axis=1), whole.mean(1))
    for call in (torch.cumsum, torch.sum, torch.mean, torch.logsumexp):
        out = torch.empty_like(call(x, 1))
        assert call(x, 1, out=out) is out
        same(out, call(whole, 1))
    z = torch.complex(whole, whole.flip(1))
    part = torch.complex(x, x.flip(1)).to_local().conj()
    y = ShardTensor.from_local(part, meshes["2"], [Shard(0)])
    for f in (lambda t: t * 2, lambda t: t + t, torch.view_as_real, lambda t: t.imag + 1, lambda t: t.sum(0)):
        same(f(y), f(z.conj().resolve_conj()))


def _writes_reach_what_they_would(meshes):
    """Copies where torch copies, views where it views, and no write that is lost or that loses a gradient."""
    whole, x = make(meshes["2"])
    calls = [
        lambda t: t.t().contiguous(), lambda t: t[:, 1:].contiguous(), lambda t: t[::2].contiguous(),
        lambda t: t.t().reshape(7, 3), lambda t: t[:, :2].flatten(), lambda t: t[:, :1].reshape(7),
        lambda t: t[0:3].contiguous(), lambda t: t.t().t().contiguous(), lambda t: t.reshape(7, 1, 3),
    ]  # fmt: skip
    for i, call in enumerate(calls):
        for shown, plain in ((x.clone(), whole.clone()), (x.detach().clone().data, whole.clone())):
            call(shown).add_(1)
            call(plain).add_(1)
            assert torch.equal(shown.full_tensor(), plain), i
    leaf, plain = make(meshes["2"], True)[1], whole.clone().requires_grad_()
    for t in (leaf, plain):
        y = t * 1
        r = y.permute(1, 0).contiguous().mul_(2)
        (y.sum() + (r * r).sum()).backward()
    same(leaf.grad, plain.grad)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(ShardingError, match="copy"):
            (x + 0)[0].add_(1)
    for view in (lambda t: t[0].detach(), lambda t: t[0].data):
        with pytest.raises(ShardingError, match="copy"):
            view(x.clone()).add_(1)
    writes = [lambda t, s: t.mul_(s), lambda t, s: t.copy_(s), lambda t, s: t.__setitem__(slice(0, 7), s)]
    writes += [lambda t, s: t.masked_scatter_(s > 0, s), lambda t, s: t.masked_fill_(s > 0, 1.0)]
    writes += [lambda t, s: t.index_add_(0, torch.arange(7), s), lambda t, s: t.clamp_(min=s.detach())]
    for write in writes:  # a plain target with a gradient of its own
        found = []
        for source in (whole.clone().requires_grad_(), make(meshes["2"], True)[1]):
            base = torch.linspace(-1, 1, 21, dtype=torch.float64).view(7, 3).requires_grad_()
            target = base * 2
            write(target, source)
            target.sin().sum().backward()
            found.append((base.grad, source.grad))
        torch.testing.assert_close(found[0][0], found[1][0])
        if found[0][1] is not None:
            same(found[1][1], found[0][1])
    buffer = torch.zeros(7, 3, dtype=torch.float64)
    buffer.add_(x)
    same(buffer, whole)


def _inference_mode(meshes):
    """Views of a tensor made outside, and operations made of others, which arrive whole there."""
    whole, x = make(meshes["2"])
    calls = [
        lambda t: t[3], lambda t: t[1:5, 1], lambda t: t.T, lambda t: t.mT, lambda t: t.unsqueeze(0).expand(2, 7, 3),
        lambda t: t.chunk(2, 1)[1], lambda t: t.movedim(0, 1), lambda t: t.flatten(), lambda t: t.narrow(0, 1, 4),
        lambda t: t.unbind(1)[0], lambda t: t.softmax(0), lambda t: torch.where(t > 0, t, 0), lambda t: t.std(0),
        lambda t: torch.hstack([t, t]), lambda t: t.sort(0).values, lambda t: t.detach() + 1,
    ]  # fmt: skip
    set_fallback("error")
    try:
        with torch.inference_mode():
            for i, call in enumerate(calls):
                for t in (x, x + 0):
                    got = call(t).full_tensor()
                    assert torch.allclose(got, call(whole), atol=1e-12), i
    finally:
        set_fallback("warn")


def _more_than_two_to_the_31(meshes):
    """Offsets are 64-bit: parts that are expanded from one element stand for 2^31 + 8 rows."""
    mesh, n = meshes["2"], 2**31 + 8
    rank = mesh.get_local_rank("domain")
    local = torch.full((1,), rank + 1, dtype=torch.int8).expand(5 if rank else n - 5)
    x = ShardTensor.from_local(local, mesh, [Shard(0)], {0: (n - 5, 5)})
    assert x.numel() == len(x) == n and x._spec.local_range(0) == ((n - 5, n) if rank else (0, n - 5))
    assert [x[i].item() for i in (0, n - 6, n - 5, -1)] == [1, 1, 2, 2]
    assert x[n - 7 : n - 2].full_tensor().tolist() == [1, 1, 2, 2, 2]
    assert x[torch.tensor([n - 1, n - 6, n - 5, 0])].full_tensor().tolist() == [2, 1, 2, 1]
    assert x.unsqueeze(1).expand(n, 3).flatten()[3 * (n - 5) - 1 : 3 * (n - 5) + 1].full_tensor().tolist() == [1, 2]
    again = x[n - 8 :].redistribute(placements=[Shard(0)], sizes={0: (3, 5)})
    assert again.full_tensor().tolist() == [1, 1, 1, 2, 2, 2, 2, 2]
    tail, end = rng.bits(5, (n,), [(n - 5, n)]), rng.bits(5, (n,), [(n - 8, n)])
    low = rng.bits(5, (n,), [(0, 20)])
    assert torch.equal(tail, end[3:]) and not any((end == low[i : i + 1]).any() for i in range(20))


def _an_unused_result_is_harmless(meshes):
    """Every collective is waited for where it is sent, so nothing is under way when a result is thrown away."""
    whole, x = make(meshes["2"], True)
    with trace() as wire:
        x.sum()
        x.softmax(0)
        x.redistribute(placements=[Shard(1)])
        x.full_tensor()
    assert wire.count() >= 4 and all(len(m.marks) == 3 for m in wire.messages)
    assert "hidden" in str(wire) and 0 <= wire.overlap() <= 1 and str(wire).count("test_tensor.py") == 4


CASES = [
    _is_saved_and_loaded, _is_a_parameter, _gradients_are_seen_alike, _one_value, _torchs_other_spellings,
    _writes_reach_what_they_would, _inference_mode, _more_than_two_to_the_31, _an_unused_result_is_harmless,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__.strip("_"))
def test_tensor(pool, case):
    pool.run(case)
