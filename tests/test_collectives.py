"""Every wire operation by itself: any memory layout, any extents, both groups of a mesh at once, a rank that is late.

A backward pass is right where it is the exact transpose: over all ranks, <A x, y> = <x, A' y>.
"""

import time

import pytest
import torch
import torch.distributed as dist

from core import collectives as c

LAYOUTS = {
    "contiguous": lambda t: t,
    "column of a wider one": lambda t: torch.stack([t, -t], -1)[..., 0],
    "transposed": lambda t: t.mT.contiguous().mT,
    "channels last": lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1),
    "with an offset": lambda t: torch.cat([t[:1] * 7, t])[1:],
    "expanded": lambda t: t[:, :, :1].expand(t.shape),
}
SIZES = {2: ((3, 1), (0, 4), (2, 0)), 3: ((1, 0, 3), (7, 1, 1)), 4: ((0, 1, 3, 2), (1, 1, 1, 1), (5, 0, 0, 1))}


def _ring(x, sizes, group):
    return c.start_shift(x.reshape(-1), [n * 12 for n in sizes], 1, group)()


def _halo(x, sizes, group):
    """Two rows more on each side, from as many ranks as they lie on, around the end."""
    n, ends = sum(sizes), [sum(sizes[:r]) for r in range(len(sizes) + 1)]
    around = [
        [(n - 2, n)] * (a == 0) + [(max(a - 2, 0), min(b + 2, n))] + [(0, 2)] * (b == n) if n > 2 else [(0, n)]
        for a, b in zip(ends, ends[1:])
    ]
    return c.exchange(x, 0, sizes, around, group)


def _other_cut(x, sizes, group):
    columns = [3 if r == 0 else 0 for r in range(group.size)]
    return c.all_to_all(x, 2, 0, columns, sizes, group)


def _scattered(x, sizes, group):
    return c.reduce_scatter(c.gather(x, 0, sizes, group) * (group.rank + 1), 0, sizes, group)


# What each gives, from the parts of all ranks.
def _expected(name, parts, rank):
    whole = torch.cat(parts)
    ends = [sum(len(p) for p in parts[:r]) for r in range(len(parts) + 1)]
    a, b, n = ends[rank], ends[rank + 1], len(whole)
    return {
        "gather": lambda: whole,
        "flat, from the end": lambda: whole.reshape(-1),
        "sum": lambda: sum(parts),
        "scattered": lambda: whole[a:b] * sum(r + 1 for r in range(len(parts))),
        "other cut": lambda: whole if rank == 0 else whole[..., :0],
        "ring": lambda: parts[(rank - 1) % len(parts)].reshape(-1),
        "halo": lambda: torch.cat(
            [whole[n - 2 :]] * (a == 0) + [whole[max(a - 2, 0) : b + 2]] + [whole[:2]] * (b == n) if n > 2 else [whole]
        ),
    }[name]()


CALLS = {
    "gather": lambda x, sizes, group: c.gather(x, 0, sizes, group),
    "flat, from the end": lambda x, sizes, group: c.gather(x.reshape(-1), -1, [n * 12 for n in sizes], group),
    "sum": lambda x, sizes, group: c.all_reduce(x, group),
    "scattered": _scattered,
    "other cut": _other_cut,
    "ring": _ring,
    "halo": _halo,
}


def wire(meshes, name):
    for mesh in (meshes[m] for m in ("2", "3", "4")):
        if mesh.get_coordinate() is None:
            continue
        group, process_group = c.axis_group(mesh, 0), mesh.get_group()
        for sizes in [(2,) * group.size] if name == "sum" else SIZES[group.size]:
            for i, (layout, lay) in enumerate(LAYOUTS.items()):
                g = torch.Generator().manual_seed(100 * int(mesh.mesh[0]) + i)  # other data in the other group
                parts = [lay(torch.randn(n, 4, 3, dtype=torch.float64, generator=g)) for n in sizes]
                x = parts[group.rank].detach().requires_grad_()
                time.sleep(0.002 * (group.rank == 0))
                out = CALLS[name](x, sizes, group)
                got = out * 1  # of what has arrived
                where = f"{name} of {layout} {sizes} on rank {group.rank}"
                torch.testing.assert_close(got, _expected(name, parts, group.rank), msg=lambda m, w=where: f"{w}: {m}")
                y = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(group.rank))
                (grad,) = torch.autograd.grad(out, x, y)
                sums = torch.stack([(out.detach() * y).sum(), (x.detach() * grad).sum()])
                dist.all_reduce(sums, group=process_group)
                torch.testing.assert_close(sums[0], sums[1], msg=lambda m, w=where: f"transpose of {w}: {m}")


@pytest.mark.parametrize("name", CALLS)
def test_wire(pool, name):
    pool.run(wire, name)
