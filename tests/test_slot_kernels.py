"""The kernels of slots in Triton's interpreter: held against torch's attention in fp64, values and every gradient.

As in ``test_kernels.py`` one process of its own, this file, computes all cases and prints how far they are off; on a
GPU ``benchmarks/slots.py`` does so with the compiled kernels.
"""

import json
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from launch import interpreted

TOLERANCE = {"float32": 2e-6, "float16": 4e-3}


class Case(NamedTuple):
    """(batch, heads, points), slots, channels and values; ``cut`` are tile and block, those of the kernels where None;
    ``k`` and ``w``, the values that are read, may serve all of a batch and of the heads."""

    points: tuple
    slots: int
    channels: int
    values: int
    cut: tuple = None
    k: tuple = None
    w: tuple = None
    dtype: str = "float32"


CASES = {
    "all slots in a block": Case((2, 3, 17), 32, 17, 17, (16, 32)),
    "chunks": Case((1, 1, 200), 3, 8, 8, (16, 16)),
    "one point": Case((1, 2, 1), 3, 33, 33),
    "a block too many": Case((1, 2, 20), 130, 40, 40, (32, 64)),
    "many slots": Case((1, 1, 9), 512, 8, 8, (16, 256)),
    "shared slots": Case((2, 2, 18), 20, 40, 40, (32, 32), k=(1, 1), w=(1, 2)),
    "shared slots, blocks, other values": Case((2, 2, 18), 20, 17, 33, (32, 16), k=(1, 2), w=(2, 1)),
    "half": Case((1, 2, 40), 128, 40, 40, dtype="float16"),
    "half, blocks": Case((1, 1, 40), 40, 33, 8, (32, 32), dtype="float16"),
}
WAYS = ("strided", "autocast", "compiled")


@pytest.fixture(scope="module")
def errors():
    """case -> relative errors of sums, their gradients of q, k and v, and the same of reading."""
    return interpreted(__file__)


@pytest.mark.parametrize("name", CASES)
def test_against_torch(errors, name):
    assert len(errors[name]) == 8 and max(errors[name]) < TOLERANCE[CASES[name].dtype], errors[name]


@pytest.mark.parametrize("name", WAYS)
def test_ways_to_call_them(errors, name):
    assert len(errors[name]) == 8 and max(errors[name]) < TOLERANCE["float16" if name == "autocast" else "float32"]


def test_what_they_leave_to_torch_and_how_they_lie(errors):
    assert errors["kernels of doubles, of no points"] == [False, False]
    assert errors["points first"] == [True] * 3 and errors["same bits"]


def test_zeros_that_align_rows_change_nothing():
    from apps.aero import model
    from core.ops.slots import with_one

    assert [with_one(n, torch.device("cuda")) for n in (32, 15, 17)] == [40, 16, 24]
    torch.manual_seed(0)
    layer, x = model.SliceAttention(12, 3, 5).double(), torch.randn(2, 20, 12, dtype=torch.float64)
    wanted = layer(x)
    with patch.object(model, "with_one", lambda channels, device: with_one(channels, torch.device("cuda"))):
        assert layer.places(x).q.shape[-1] == 8
        torch.testing.assert_close(layer(x), wanted)


# -- the process that interprets --------------------------------------------------------------------------------------
def _drawn(case):
    """q, k, v and w"""
    torch.manual_seed(0)
    batch, heads, points = case.points
    q, v = (torch.randn(batch, points, heads, n).transpose(1, 2) for n in (case.channels, case.values))
    k = torch.randn(*(case.k or (batch, heads)), case.slots, case.channels) * case.channels**-0.5
    w = torch.randn(*(case.w or (batch, heads)), case.slots, case.values)
    return [t.to(getattr(torch, case.dtype)) for t in (q, k, v, w)]


def _run(function, tensors, dtype):
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    out = function(*leaves)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, leaves, cotangent)


def _far(q, k, v, w, wrap=lambda function: function):
    from core.ops.slots import slot_read, slot_sums

    far = []
    for function, tensors in ((slot_sums, (q, k, v)), (slot_read, (q, k, w))):
        wanted, got = _run(function, tensors, torch.float64), _run(wrap(function), tensors, q.dtype)
        far += [((a.double() - b).abs().max() / b.abs().max().clamp_min(1)).item() for a, b in zip(got, wanted)]
    return far


def _interpreted():
    from core.kernels import slot_operators, slots

    table, far = slots.CONFIGS, {}
    for name, case in CASES.items():
        cut = case.cut and {key: [slots.Config(*case.cut, 4, 1)] * 4 for key in table}
        with patch.object(slots, "CONFIGS", cut or table):
            far[name] = _far(*_drawn(case))

    q, k, v, w = tensors = _drawn(Case((1, 2, 9), 5, 8, 8))
    far["strided"] = _far(*(t.mT.contiguous().mT for t in tensors))
    with torch.autocast("cpu", torch.float16):
        far["autocast"] = _far(*tensors)
    far["compiled"] = _far(*tensors, lambda f: torch.compile(lambda *t: f(*t), fullgraph=True, backend="aot_eager"))

    far["kernels of doubles, of no points"] = [
        slot_operators.has_slot_kernel(q.double(), k.double(), v.double()),
        slot_operators.has_slot_kernel(q[:, :, :0], k, v[:, :, :0]),
    ]
    calls = [_run(slot_operators.SlotSums.apply, (q, k, v), torch.float32) for _ in range(2)]
    read = slot_operators.SlotRead.apply(q, k, w)
    far["points first"] = [t.transpose(1, 2).is_contiguous() for t in (read, calls[0][1], calls[0][3])]
    far["same bits"] = all(map(torch.equal, *calls))
    return far


if __name__ == "__main__":
    print(json.dumps(_interpreted()))
