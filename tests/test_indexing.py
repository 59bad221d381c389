"""Indexing beyond the table of cases: faults that only values show, bytes on the wire, memory written in place."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from core import scatter_tensor
from core.debug import trace

X = (2, 7, 6)


def draw(shape=X, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cut(tensor, mesh, dim, **kwargs):
    return scatter_tensor(tensor, None, mesh, [Shard(dim)], **kwargs)


FAULTS = {
    "subscript": lambda x, bad, rows, mesh: x[:, bad],
    "index_select": lambda x, bad, rows, mesh: x.index_select(1, bad),
    "known to all": lambda x, bad, rows, mesh: x[:, torch.tensor([0, 9])],
    "negative": lambda x, bad, rows, mesh: x[:, cut(torch.tensor([0, 1, -8, 2]), mesh, 0)],
    "take": lambda x, bad, rows, mesh: x.take(torch.tensor([84])),
    "gather": lambda x, bad, rows, mesh: x.gather(1, cut(torch.full((2, 3, 6), 7), mesh, 1)),
    "embedding": lambda x, bad, rows, mesh: F.embedding(bad, cut(draw((7, 6)), mesh, 0)),
    "index_add": lambda x, bad, rows, mesh: x.index_add(1, bad, rows),
    "index_put": lambda x, bad, rows, mesh: x.index_put((torch.tensor([[0], [1]]), bad), rows),
    "scatter_add": lambda x, bad, rows, mesh: x.scatter_add(1, cut(torch.full((2, 4, 6), -1), mesh, 1), rows),
    "assignment": lambda x, bad, rows, mesh: x.__setitem__((slice(None), bad), rows),
}


def fault(meshes, name):
    """One bad index on the first rank: every rank raises, and the mesh is as good as before."""
    mesh = meshes["4"]
    x, rows = cut(draw(), mesh, 1), cut(draw((2, 4, 6)), mesh, 1)
    bad = cut(torch.tensor([9, 1, 0, 2]), mesh, 0)
    with pytest.raises(IndexError):
        FAULTS[name](x, bad, rows, mesh)
    assert torch.equal(x.full_tensor(), draw())


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_index_raises_on_every_rank(pool, name):
    pool.run(fault, name)


CALLS = {
    "subscript": lambda x, i, rows: x[:, i],
    "gather": lambda x, i, rows: x.gather(1, i.view(1, 6, 1).expand(2, 6, 6)),
    "index_add": lambda x, i, rows: x.index_add(1, i, rows),
    "mask": lambda x, i, rows: x[:, x.detach()[0, :, 0] > 0],
    "windows": lambda x, i, rows: x.unfold(1, 3, 1),
    "assignment": lambda x, i, rows: (x * 1).__setitem__((slice(None), 5), x[:, :1].sum()),
}


def bytes_moved(meshes):
    """Wanted rows, their numbers and two words a pair of ranks; nothing grows with the source."""
    mesh, moved = meshes["2"], {}
    for rows in (64, 640):
        x = cut(draw((2, rows, 6)), mesh, 1, requires_grad=True)
        i = cut(torch.tensor([0, rows - 1, rows // 2, 1, 2, rows // 2 + 1]), mesh, 0)
        for name, call in CALLS.items():
            with trace() as wire:
                call(x, i, cut(draw((2, 6, 6)), mesh, 1))
            moved.setdefault(name, []).append(wire.bytes())
            assert name == "mask" or wire.count("all_gather") == 0, (name, wire.kinds())
        with trace() as wire:
            x[:, i].sum().backward()
        assert wire.count("all_gather") == 0 and wire.count("reduce_scatter") == 0, wire.kinds()
    for name, (few, many) in moved.items():
        assert few == many < 1200, (name, few, many)


def test_only_wanted_rows_travel(pool):
    pool.run(bytes_moved)


def written_in_place(meshes):
    """Without a gradient to keep, a write touches the rows it names and no other memory."""
    x, expected = cut(draw(), meshes["2"], 1), draw()
    memory = x.to_local().data_ptr()
    i = torch.tensor([0, 6, 3])
    with trace() as wire:
        for t in (x, expected):
            t[:, 2], t[:, i], t[1, 4, 5] = 1, 2, 3
            t[:, 5] = draw((2, 6), seed=1)
            t.index_add_(1, i, draw((2, 3, 6), seed=2))
            t[t > 1.5] = 0
            t.tril_(2)
    assert wire.count() == 0 and x.to_local().data_ptr() == memory
    assert torch.equal(x.full_tensor(), expected)


def test_writes_stay_with_their_owners(pool):
    pool.run(written_in_place)


def second_derivatives(meshes):
    i = torch.tensor([3, 0, 6, 6, 2])

    def assigned(x):
        y = x * x
        y[:, 2] = x[:, 3] ** 2
        y[:, [4, 5]] = x[:, [0, 1]] ** 3
        return y

    for fn in (
        lambda x: x[:, i],
        lambda x: x.gather(1, i.view(1, 5, 1).expand(2, 5, 6)),
        lambda x: x[x.detach() > 0],
        lambda x: x.index_put((torch.tensor([[0]]), i[:2]), x[:1, :2] ** 2),
        lambda x: x.unfold(1, 3, 2),
        assigned,
    ):
        found = []
        for x in (draw().requires_grad_(), cut(draw(), meshes["3"], 1, requires_grad=True)):
            (g,) = torch.autograd.grad((fn(x) ** 3).sum(), x, create_graph=True)
            found += torch.autograd.grad((g**2).sum(), x)
        torch.testing.assert_close(found[1].full_tensor(), found[0], atol=1e-10, rtol=1e-10)


def on_three_ranks(meshes):
    if meshes["3"].get_coordinate() is not None:
        second_derivatives(meshes)


def test_second_derivatives(pool):
    pool.run(on_three_ranks)
