"""What core.plan predicts is what a real run sends and holds: messages exactly, memory as the allocator has it."""

import json
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from apps.aero import plan as aero
from apps.aero.model import ModelConfig, Transolver
from apps.weather import plan as weather
from apps.weather.model import Denoiser
from apps.weather.model import ModelConfig as DenoiserConfig
from benchmarks import scaling_model, suites
from benchmarks.models import Attention, ConvNet, ViT
from benchmarks.scaling import cases
from benchmarks.scaling_model import GOAL, MEASURED, shares
from core import InputError, meter, neighborhood_attention, parallelize, plan, scatter_tensor
from core._torch import FakeTensorMode
from core.debug import trace
from core.devices import FITTED, device_named, workspaces
from core.gradients import gather_in_buckets
from core.meter import Meter, Work
from core.plan import fake_mesh
from core.precision import gpu_autocast, widens

MODELS = {
    "attention": (Attention, [(8, 8, 256, 64)] * 3, 2, None),
    "vit": (lambda: ViT(64, width=64, depth=2, heads=4, classes=10), [(2, 3, 64, 64)], 2, None),
    "vit, uneven": (lambda: ViT(64, width=64, depth=2, heads=4, classes=10), [(2, 3, 64, 64)], 2, (48, 16)),
    "convolutions": (lambda: ConvNet(width=16, depth=3, groups=4), [(1, 16, 64, 96)], 2, None),
    "transolver": (
        lambda: Transolver(ModelConfig(features=6, outputs=4, width=64, layers=2, heads=4, slices=16)),
        [(1, 3001, 6)], 1, None,
    ),
    "denoiser": (
        lambda: Denoiser(DenoiserConfig(2, 3, width=32, depth=2, heads=2, kernel=5)),
        [(1, 2, 48, 40), (1, 3, 48, 40), (1,)], 2, None,
    ),
}  # fmt: skip


@pytest.fixture
def on_cpus():
    """Plans of what is held against a real run on a CPU, which has no kernels of GPUs and lays rows out otherwise."""
    with patch.object(plan, "as_on_a_gpu", nullcontext):
        yield


def predicted(name, mesh_shape=(1, 2), rank=0, **options):
    make, shapes, dim, sizes = MODELS[name]
    placements = [[Shard(dim)] if len(s) > dim else None for s in shapes]
    extents = [{0: sizes} if sizes and p else None for p in placements]
    options = dict(dtype=torch.float32, input_gradients=True, sizes=extents) | options
    return plan.plan(make, shapes, placements, mesh_shape, rank=rank, **options)


def _made(name, mesh):
    """Model and inputs of a real run on this rank."""
    make, shapes, dim, sizes = MODELS[name]
    extents = {0: sizes} if sizes else None
    if mesh is None:
        return make(), [torch.randn(s, requires_grad=True) for s in shapes]
    inputs = [
        scatter_tensor(torch.randn(s), None, mesh, [Shard(dim)], requires_grad=True, sizes=extents)
        if len(s) > dim
        else torch.randn(s, requires_grad=True)
        for s in shapes
    ]
    return make(), inputs


def _sent(wire):
    return [(m.kind, m.bytes) for m in wire.messages]


def real_messages(meshes, name, ddp):
    mesh = meshes["ddp x domain"]
    model, inputs = _made(name, mesh["domain"])
    if ddp:
        model = parallelize.parallelize(model, mesh)
    else:
        gather_in_buckets(model)
    with trace() as forward:
        loss = model(*inputs).float().square().mean()
    with trace() as backward:
        loss.backward()
    return mesh.get_local_rank("domain"), _sent(forward), _sent(backward)


@pytest.mark.parametrize("name, ddp", [*[(n, False) for n in MODELS], ("vit", True), ("transolver", True)])
def test_messages_are_those_of_a_real_run(pool, on_cpus, name, ddp):
    of_rank = [predicted(name, (2, 2) if ddp else (1, 2), rank=r).cut for r in range(2)]
    for rank, *sent in pool.run(real_messages, name, ddp):
        assert [_sent(of_rank[rank].forward), _sent(of_rank[rank].backward)] == sent
        assert sent[0] and sent[1]


# -- memory -----------------------------------------------------------------------------------------------------------
def _step(name, mesh):
    model, inputs = _made(name, mesh)
    if mesh is not None:
        gather_in_buckets(model)
    model(*inputs).float().square().mean().backward()


def real_peak(meshes, name, folder, cut=True):
    """Most bytes alive in a step, by a Meter on real tensors, and by what torch's profiler saw of the allocator."""
    mesh = meshes["2"] if cut else None
    _step(name, mesh)  # what is made once and kept
    with Meter() as meter:
        _step(name, mesh)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        _step(name, mesh)
    path = folder / f"{dist.get_rank() if cut else 'one'}.json"
    profiler.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["name"] == "[memory]"]
    changes = accumulate(e["args"]["Bytes"] for e in sorted(events, key=lambda e: e["ts"]))
    return (mesh.get_local_rank() if cut else 0), meter.peak, max(changes)


@pytest.mark.parametrize("name", ["attention", "vit", "vit, uneven", "convolutions", "transolver"])
def test_memory_is_that_of_a_real_run(pool, on_cpus, name, tmp_path):
    plans = [predicted(name, rank=r) for r in range(2)]
    peak, (_, metered, profiled) = plans[0].one.step_peak, real_peak(None, name, tmp_path, cut=False)
    assert peak == metered and peak == pytest.approx(profiled, rel=0.15)
    for rank, metered, profiled in pool.run(real_peak, name, tmp_path):
        peak = plans[rank].cut.step_peak
        assert peak <= metered < 1.01 * peak and peak < 1.15 * profiled  # gloo's threads let go of messages late


@pytest.mark.parametrize(
    "name, multiplies", [("attention 16384", 0), ("Transolver 75000", 1), ("slots 300000 x 128", 0)]
)
def test_memory_is_that_of_a_gpu(name, multiplies):
    """Plain modules on one H200, as measured: what shards hold may become less without a GPU at hand."""
    table, row = dict((n, case) for n, *case in cases(False)), json.loads(MEASURED.read_text())["rows"][name]
    one = shares(table[name], 1)
    assert one.step_peak + one.workspaces == pytest.approx(row["gib"][0] * 2**30, rel=GOAL / 2)
    assert bool(one.workspaces) == multiplies


def test_what_an_optimizer_and_ddp_keep():
    plain, kept = predicted("vit", optimizer=None), predicted("vit", (2, 2), optimizer="adamw", ema=True)
    weights = plain.one.gradients  # every weight has one
    assert kept.cut.optimizer == 2 * weights and kept.cut.ema == weights and kept.cut.buckets == weights
    assert kept.one.peak - plain.one.peak == 3 * weights
    assert sum(kept.cut.data_messages) == weights  # 2 (n - 1) / n of them, for two groups
    assert not plain.cut.data_messages and plain.cut.peak == plain.cut.step_peak + plain.cut.workspaces


# -- what it says -----------------------------------------------------------------------------------------------------
def test_a_small_sample_is_not_cut():
    report = predicted("convolutions")
    one, alone, cut = report.samples_per_second
    assert alone > one > cut
    assert "do not cut it" in report.verdict() and "Plain DDP" in report.verdict()


def test_a_long_sequence_is_cut():
    """Attention of 131,072 tokens is nearly twice as fast on two GPUs."""
    report = plan.plan(Attention, [(1, 16, 131072, 64)] * 3, [[Shard(2)]] * 3, input_gradients=True)
    one, _, cut = report.samples_per_second
    assert 1.8 < cut / one < 2 and "times as long as the domain" in report.verdict()
    assert report.one.step_peak == pytest.approx(3.5 * 2**30, rel=0.15)  # as measured on an H200


def test_what_does_not_fit_says_so():
    shape = [(1, 64, 8192, 8192)]
    report = plan.plan(lambda: ConvNet(depth=4), shape, [[Shard(2)]], (1, 8), device="h200")
    assert report.one.peak > report.device.memory > report.cut.peak
    assert "does not fit one GPU" in report.verdict()
    small = plan.plan(lambda: ConvNet(depth=4), shape, [[Shard(2)]], (1, 2), device="a100")
    assert "part of a rank does not fit" in small.verdict()


class Own(nn.Module):
    """A user's: looks words up, ties weights, keeps a buffer."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 100, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        return self.head(self.norm(self.words(tokens).transpose(1, 2)).transpose(1, 2))


def test_a_module_of_a_user():
    tokens = torch.empty(4, 64, dtype=torch.int64, device="meta")
    report = plan.plan(Own, [tokens], [[Shard(1)]], (2, 2), step=lambda model, t: model(t).logsumexp(-1).mean())
    assert report.one.inputs == tokens.nbytes and report.cut.inputs == tokens.nbytes // 2
    assert report.cut.gradients == 2 * (100 * 16 + 16 + 16)  # bf16; the tied one counts once
    assert report.cut.forward.count() and report.cut.backward.count()
    text = str(report)
    assert f"{report.cut.backward.bytes():,}" in text and report.verdict() in text


def test_kernels_of_gpus_are_planned():
    """Attention in neighbourhoods by the kernel, which is not there on a CPU, and only inside a plan."""
    names = {w.name for w in predicted("denoiser", dtype=torch.bfloat16).cut.work}
    assert {"neighborhood_forward", "neighborhood_backward"} <= names
    slots = {(w.name, w.flops) for w in predicted("transolver", dtype=torch.bfloat16).cut.work if "slot" in w.name}
    product = 2 * 4 * 1501 * 16 * 24  # heads, this rank's points, slices, channels with the one as on a GPU
    assert {("slot_attention_sums", 2 * product), ("slot_attention_backward", 5 * product)} <= slots
    q = torch.randn(1, 8, 8, 2, 8)
    with Meter() as meter:
        neighborhood_attention(q, q, q, 3)
    assert "neighborhood_forward" not in {w.name for w in meter.work}


def test_the_meter_counts_as_the_kernels_are_cut():
    """Their tables need Triton, which a plan does without."""
    from core.kernels import neighborhood, slots

    own = neighborhood.CONFIGS[64, 2][0].own
    for dims, edge in meter._EDGES.items():
        assert neighborhood.box_of(own, (1,) * (3 - dims) + (100,) * dims)[-dims:] == (edge,) * dims
    _, sums, _, backward = slots.CONFIGS[64, 2]
    assert sums.block == backward.block == meter._BLOCK_OF_SLOTS


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(InputError, match="device"):
        predicted("vit", device="abacus")
    products = {Work("mm", 1, 1, torch.bfloat16): 1}
    assert [workspaces(products, device_named(name)) >> 20 for name in ("h100", "a100")] == [64, 16]
    with pytest.raises(InputError, match="optimizer"):
        predicted("vit", optimizer="luck")
    with fake_mesh((1, 2)), pytest.raises(InputError, match="process group"):
        predicted("vit")
    assert not dist.is_initialized()


def test_autocast_is_that_of_a_gpu():
    """Residuals and what norms and softmax keep are fp32, products bf16; the CPU's own autocast is as it was after."""
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    with gpu_autocast(torch.bfloat16):
        y = F.linear(x, w)
        wide = [F.layer_norm(y, (8,)), F.group_norm(y, 2), y.softmax(-1), F.log_softmax(y, -1), y.exp(), y**2, y.sum(1)]
        assert y.dtype == F.gelu(y).dtype == torch.bfloat16
        assert {t.dtype for t in wide} == {torch.float32}
        torch.testing.assert_close(wide[2], y.float().softmax(-1))
        with gpu_autocast(torch.float16):
            assert F.linear(x, w).dtype == torch.float16
        assert widens("cpu") and y.exp().dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert F.layer_norm(F.linear(x, w), (8,)).dtype == torch.bfloat16


def test_recomputed_blocks_keep_less_under_autocast_too():
    """What a block computes once more in the backward pass has the types that it had."""
    kept, again = (case for case in suites.aero(small=True) if case.name in ("autocast 32", "autocast recomputed 300"))
    held = [case._replace(shapes=lambda ranks: [(1, 50_000, 6)]).share(2).activations for case in (kept, again)]
    assert held[1] < 0.7 * held[0]


# -- what is counted --------------------------------------------------------------------------------------------------
def test_the_meter_counts_work_and_forgets_what_is_gone():
    a, b = torch.randn(32, 64), torch.randn(64, 16)
    with Meter() as meter:
        product = a @ b
        product.view(-1)[:100].add_(1)
        assert meter.now == 32 * 16 * 4
        del product
        assert meter.now == 0 and meter.peak == 32 * 16 * 4
    of_product = next(w for w in meter.work if w.name == "mm")
    assert of_product.flops == 2 * 32 * 64 * 16
    assert of_product.nbytes == 4 * (32 * 64 + 64 * 16 + 32 * 16)
    assert {w.name for w in meter.work} == {"mm", "add_"}  # views are free


@pytest.mark.parametrize("name, products", [("read", (2, 2)), ("sums", (2, 3))])
def test_slots_beyond_one_block_are_computed_more_often(name, products):
    flops = []
    for slots in (128, 256):
        with FakeTensorMode(), Meter() as meter:
            q, k, values = torch.empty(1, 2, 50, 16), torch.empty(1, 2, slots, 16), torch.empty(1, 2, slots, 16)
            getattr(torch.ops.core, f"slot_attention_{name}")(q, k, q if name == "sums" else values)
        flops += [w.flops for w in meter.work if w.flops]
    assert flops == [n * 2 * 2 * 50 * slots * 16 for n, slots in zip(products, (128, 256))]


def test_fitting_finds_the_constants_that_times_were_made_with():
    shares = [predicted("vit").one, predicted("transolver", dtype=torch.bfloat16).one, predicted("vit").cut]
    truth = replace(FITTED, operation=2 * FITTED.operation, wrapped=FITTED.wrapped / 2)
    device = device_named("h200")
    found = scaling_model.fitted(
        [(scaling_model.Step("", 1, 1e3 * s.seconds(device, truth)), s) for s in shares], device
    )
    for s in shares:
        assert s.seconds(device, found) == pytest.approx(s.seconds(device, truth), rel=0.05)


def test_a_projection_is_printed_as_one(monkeypatch, tmp_path, capsys):
    """From the file of measured steps that the other benchmark writes."""
    small = {n: case for n, *case in scaling_model.cases(True)}
    monkeypatch.setattr(scaling_model, "cases", lambda small_ones: [(n, *case) for n, case in small.items()])
    monkeypatch.setattr(scaling_model, "PROJECTED", ("attention 64",))
    monkeypatch.setattr(scaling_model, "MESHES", ((1, 4), (2, 4)))
    row = {"plain": [0.3, 1.0], "all": [0.6, 2.0], "gib": [None, 0.001]}
    file = {"ranks": 2, "how": "eager", "rows": {"attention 64": row, "a volume": {"all": [None, 9.0]}}}
    (tmp_path / "m.json").write_text(json.dumps(file))
    scaling_model.main(["--measured", str(tmp_path / "m.json")])
    fitted, measured, projected = capsys.readouterr().out.split("\n\n")
    assert "wrapped" in fitted and "refit" in measured and len(measured.splitlines()) == 6
    assert "of 2 within 15%" in measured and "of 1 within" in measured
    assert "PROJECTED" in projected and ["2 x 4" in line for line in projected.splitlines()] == [False, False, True]
    (tmp_path / "m.json").write_text(json.dumps(file | {"how": "compiled"}))
    with pytest.raises(InputError, match="eager"):
        scaling_model.main(["--measured", str(tmp_path / "m.json")])


# -- commands ---------------------------------------------------------------------------------------------------------
def test_the_command_takes_any_model(capsys):
    arguments = [
        "benchmarks.models:ConvNet",
        "--arguments",
        "8",
        "2",
        "4",
        "--input",
        "1x8x32x32@2",
        "--mesh",
        "1",
        "2",
    ]
    plan.main(arguments)
    assert "bytes sent" in capsys.readouterr().out


def test_the_commands_of_the_applications():
    report = weather.main(["--grid", "50", "96", "--domain", "2", "--ddp", "2", "--batch", "4"])
    assert report.mesh_shape == (2, 2) and report.cut.forward.count() > 0
    report = aero.main(["--points", "1000", "--domain", "2", "--layers", "1", "--batch", "1"])
    assert report.mesh_shape == (1, 2) and report.cut.inputs == pytest.approx(500 * (6 + 4 + 1) * 4, rel=0.05)
    for flags in (["--ddp", "3"], ["--fsdp"]):
        with pytest.raises(SystemExit):
            aero.main(flags)
