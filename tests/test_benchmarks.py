"""What the benchmarks measure with: a step without its messages is the same step; the largest size is the largest."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import combinations
from math import log
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launch import free_port, launch
from torch.distributed.tensor import Shard

from apps.aero.model import ModelConfig
from apps.aero.model import Transolver as Ours
from apps.cli import parse
from apps.weather.train import prepare
from benchmarks import ablations, car, frames, largest, many, scaling, scaling_model, storm_bound, stream, suites
from benchmarks.measure import forward_and_step
from benchmarks.models import Transolver, ViT
from benchmarks.wire import Tape
from core import scatter_tensor
from core.devices import FITTED, device_named
from core.gradients import gather_in_buckets
from data.aero.synthetic import synthetic_archive
from data.weather.archive import WeatherReader
from data.weather.grid import hrrr_crop
from data.weather.synthetic import Storms, build_synthetic


def with_a_tape(meshes):
    """The gradients of a step, those of two more that send nothing, and how many messages were sent again."""
    mesh = meshes["4"]
    model = ViT(32, width=24, depth=2, heads=2, classes=5)
    gather_in_buckets(model)
    _, step = forward_and_step(model, [scatter_tensor(torch.randn(2, 3, 32, 32), None, mesh, [Shard(2)])])
    tape, found = Tape(), []
    with tape.recording():
        step()
    found.append([p.grad.clone() for p in model.parameters()])
    with tape.silent():
        for _ in range(2 * (dist.get_rank() == 0)):  # alone: it would wait for ever for an answer
            step()
            found.append([p.grad.clone() for p in model.parameters()])
    tape.send_again()
    return found, len(tape._sent)


def test_a_step_without_messages_is_the_same_step(pool):
    (first, second, third), count = pool.run(with_a_tape)[0]
    assert count > 4
    for silent in (second, third):
        assert all(torch.equal(a, b) for a, b in zip(first, silent, strict=True))


@pytest.mark.parametrize("status", [0, 3])
def test_the_peer_is_a_process_that_does_not_know_of_ours(monkeypatch, tmp_path, capfd, status):
    """A Python that notes what it was asked, and may end early; what it printed counts."""
    peer, asked = tmp_path / "python", tmp_path / "asked"
    row = '{"case": "attention 64", "ms": [1.5, 4]}'
    peer.write_text(f"#!/bin/sh\necho \"$*; rank $RANK.\" > {asked}\necho hello\necho '{row}'\nexit {status}\n")
    peer.chmod(0o755)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    args = SimpleNamespace(peer_python=str(peer), repeats=3, only="attention", small=True, suite="many")
    assert scaling.peer_rows(args) == {"attention 64": [1.5, 4]}
    told = asked.read_text()
    assert "--nproc-per-node 2" in told and "peer.py --repeats 3 --suite many --only attention --small; rank ." in told
    assert ("ended with 3" in capfd.readouterr().out) == bool(status)


@pytest.mark.parametrize("bend", [0.0, 2e-6, -1e-6])
def test_the_largest_size_is_found(monkeypatch, bend):
    """Memory that grows with the number straight or bent, of which the first two sizes tell nothing."""

    def peak(n):
        return 2**20 + 5000 * n + bend * n * n * 5000

    def tried(name, ranks, numbers, args):
        fit = [n for n in numbers if peak(n) <= args.gib * 2**30]
        return [{"n": n, "shape": (n,), "peak": peak(n)} for n in fit], len(fit) < len(numbers)

    monkeypatch.setattr(largest, "tried", tried)
    args = SimpleNamespace(gib=1.0, small=False)
    found = largest.largest("Transolver", 2, args)
    assert peak(found["n"]) <= 2**30 < peak(1.02 * found["n"])


def test_a_drawn_cloud_is_the_same_by_any_ranges():
    whole = stream.Drawn(0, 9000, torch.empty(0))[:]
    assert whole.shape == (9000, 7) and whole.std() > 0.9
    part = stream.Drawn(3000, 9000, torch.empty(0))
    assert len(part) == 6000 and torch.equal(torch.cat([part[:1096], part[1096:5000], part[5000:6096]]), whole[3000:])
    assert part[6000:6000].shape == (0, 7)


# -- many GPUs --------------------------------------------------------------------------------------------------------
STRATEGY = "attention 128, heads"


def the_suite(rank, folder, gib, port, other):
    """All toy cases; then, of what a rank may hold, one that only two of them can; then those of a car."""
    torch.set_num_threads(1)
    common = ["--suite", "many", "--small", "--repeats", "1"]
    scaling.main([*common, "--out", f"{folder}/all.json", "--plot", f"{folder}/all.png"])
    os.environ["MASTER_PORT"] = port
    scaling.main([*common, "--only", STRATEGY, "--gib", str(gib), "--out", f"{folder}/tight.json"])
    os.environ["MASTER_PORT"] = other
    scaling.main(["--suite", "aero", "--small", "--repeats", "1", "--out", f"{folder}/aero.json"])


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The folder of what a run on two ranks wrote."""
    folder = tmp_path_factory.mktemp("many")
    case = next(c for c in suites.many(True) if STRATEGY in dict(c.labels()))
    one, two = (case.share(n, strategy="heads", dtype=torch.float32).peak / 2**30 for n in (1, 2))
    assert two < 0.8 * one
    ports = free_port(), free_port()
    for status, text in launch(2, the_suite, str(folder), many.MARGIN * (one + two) / 2, *ports, timeout=200):
        assert status == 0, text[-3000:]
    return folder


def test_every_case_is_measured_in_every_size(two_ranks):
    rows = json.loads((two_ranks / "all.json").read_text())["rows"]
    assert list(rows) == [label for case in suites.many(True) for label, _ in case.labels()]
    for label, row in rows.items():
        one, two = row["curve"]
        assert [(p["domain"], p["ddp"]) for p in (one, two)] == [(1, 2), (2, 1)], label
        assert two["points"] == (2 if "a rank" in label else 1) * one["points"]
        for k, share in enumerate(one["efficiency"]):
            assert share == (None if label.startswith("inference") and k else 1.0), label
            if share:
                per_rank = one["points"] * two["ms"][k] / (two["points"] * one["ms"][k] / 2)
                assert two["efficiency"][k] == pytest.approx(1 / per_rank)
    assert rows["attention 64, ring"]["curve"][0] == rows["attention 64, heads"]["curve"][0]  # measured once
    assert (two_ranks / "all.png").read_bytes().startswith(b"\x89PNG")


def test_what_does_not_fit_is_left_out_and_the_next_size_counts(two_ranks):
    one, two = json.loads((two_ranks / "tight.json").read_text())["rows"][STRATEGY]["curve"]
    assert "ms" not in one and one["planned_gib"] > two["planned_gib"] > 0
    assert two["efficiency"] == [1.0, 1.0]


def test_the_scaling_model_is_fitted_to_many_sizes(two_ranks):
    steps = list(scaling_model.measured_steps(two_ranks / "all.json"))
    assert {(s.name, s.ranks) for s in steps} == {
        (label, n) for c in suites.many(True) if not c.inference for label, _ in c.labels() for n in (1, 2)
    }
    assert [s.groups for s in steps if s.name == "forecaster kernel 3, ddp"] == [2, 1]
    table, device = scaling_model.known_cases(small=True), device_named("h200")
    rows = [(s, table[s.name](s.ranks, s.groups)) for s in steps if "64" in s.name]

    def off(constants):
        return sum(log(1e3 * share.seconds(device, constants) / s.ms) ** 2 for s, share in rows)

    assert len(rows) > 6 and off(scaling_model.fitted(rows, device)) < 0.5 * off(FITTED)


def test_sizes_divide_the_ranks():
    assert [many.sizes(n) for n in (1, 2, 3, 6, 8)] == [[1], [1, 2], [1, 3], [1, 2, 6], [1, 2, 4, 8]]


# -- a whole car ------------------------------------------------------------------------------------------------------
PLAIN = {"stems.0": "stem", "norms.0": "head.0", "heads.0": "head.1", "attention.": "", "mlp.0": "up", "mlp.2": "down"}


def test_plain_torch_with_all_weights_written_out_gives_the_same():
    def named(name):
        for ours, plain in PLAIN.items():
            name = name.replace(ours, plain)
        return name

    ours = Ours(ModelConfig(features=6, width=16, layers=2, heads=2, slices=5, temperature=0.3)).double()
    plain = Transolver(width=16, depth=2, heads=2, slices=5).double()
    plain.load_state_dict(
        {named(k): v.reshape(plain.state_dict()[named(k)].shape) for k, v in ours.state_dict().items()}
    )
    x = torch.randn(2, 40, 6, dtype=torch.float64)
    for model in (ours, plain):
        model(x).square().sum().backward()
    torch.testing.assert_close(ours(x), plain(x))
    grads = {name: p.grad for name, p in plain.named_parameters()}
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad.flatten(), grads[named(name)].flatten(), msg=name)


def test_a_car_in_every_way(two_ranks):
    told = json.loads((two_ranks / "aero.json").read_text())
    assert list(told["rows"]) == [case.name for case in suites.aero(True)]
    assert all("ms" in point for row in told["rows"].values() for point in row["curve"])
    assert told["summary"] == car.summary(told["rows"])
    assert {what.split(",")[0] for what in told["summary"]} == {
        "step over plain torch's",
        "efficiency of a step",
        "step",
        "memory of a step",
        "exact inference",
    }


def test_what_one_rank_cannot_hold_is_compared_point_by_point():
    def row(points, *ms):
        return {
            "curve": [{"domain": n, "points": 6 * points} | ({"ms": [0, t]} if t else {}) for n, t in zip((1, 2), ms)]
        }

    rows = {
        "Transolver 100": row(100, 10, 8),
        "Transolver 200": row(200, 30, 20),
        "Transolver recomputed 400": row(400, 0, 40),
    }
    assert list(car.summary(rows).values()) == [10 / 16, 30 / 40, 60 / 80]


def test_a_frame_is_timed_by_both_solvers(capsys):
    """Of both networks together."""
    seconds = frames.main(["--small", "--steps", "2", "1"])
    assert list(seconds) == ["heun, 2 steps, 1 ranks", "dpm, 1 steps, 1 ranks"] and min(seconds.values()) > 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    parts = [row["seconds"] for row in rows[:-1] if row["how"].startswith("heun")]
    assert len(parts) == 2 and sum(parts) == pytest.approx(seconds["heun, 2 steps, 1 ranks"], abs=1e-3)


# -- what could be reached on the made storms -------------------------------------------------------------------------
STORMS = Storms(("refc",), days=4, frames=8, hole=False)


@pytest.mark.parametrize("number", [0, 3])  # the last one is of the other regime
def test_the_law_of_a_day_is_the_one_that_its_cells_were_drawn_from(number):
    day = storm_bound.Day(STORMS, hrrr_crop(2, slice(216, 242), slice(420, 441)), number)
    made, again = day.sky, day.cells(np.random.default_rng(0), 20_000, np.zeros(20_000))
    n = len(made.birth)
    for own, centre in ((made.x0, day.cx), (made.y0, day.cy)):
        assert np.std(own - centre[day.home]) == pytest.approx(45, rel=4 / np.sqrt(n))
    away = 1e3 * np.stack([made.x0 - made.x.mean(), made.y0 - made.y.mean()])
    rest = np.stack([made.vx, made.vy]) - np.array(day.wind)[:, None] - day.shear @ away
    assert rest.std() == pytest.approx(1.5, rel=4 / np.sqrt(n)) and abs(rest.mean()) < 6 / np.sqrt(n)
    for name in ("life", "radius", "peak", "stretch", "angle"):
        own, new = getattr(made, name), again[name]
        assert abs(own.mean() - new.mean()) < 4 * new.std() / np.sqrt(n), name


def test_what_is_known_of_the_storms_bounds_what_can_be_forecast(tmp_path):
    build_synthetic(tmp_path / "a.zarr", STORMS, hrrr_crop(2, slice(216, 242), slice(420, 441)))
    reader = WeatherReader(tmp_path / "a.zarr")
    found = storm_bound.bound(reader, reader.times[[2, 10, 18]], 2, 4)
    known, tracked = (found[kind]["crps"] for kind in storm_bound.KINDS)
    assert (known < tracked).all() and known[0] < known[1] < 1 and found["all known"]["fss"][0, 0, 1] > 0.7  # 20 dBZ
    assert (found["tracked"]["spread_skill"] - 1).abs().max() < 0.4


# -- ablations --------------------------------------------------------------------------------------------------------
def test_every_choice_changes_the_training():
    for app, base in (("weather", ["--preset", "storms"]), ("aero", ["--preset", "paper", "--slices", "64"])):
        found = ablations.choices(app, base)
        config = ablations.CONFIGS[app]
        others = [parse(config, [*base, *flags]) for flags in found.values()]
        assert found["default"] == [] and len(found) > 10 and all(a != b for a, b in combinations(others, 2))
        assert all(other.model(*[3, 4] * (app == "weather")) for other in others)
    assert "64 slices" not in found and found["points x 4"] == ["--points", "400000"]


def test_ablations_do_what_is_missing(tmp_path, capsys):
    synthetic_archive(tmp_path / "bodies.zarr", runs=6, cells=200)
    bodies = ["--archive", str(tmp_path / "bodies.zarr"), "--points", "32", "--width", "8", "--layers", "1"]
    bodies += ["--heads", "1", "--slices", "3"]
    common = ["--app", "aero", "--steps", "2", "--gpus", "0", "--out", str(tmp_path)]
    with pytest.raises(SystemExit):  # nothing can be recorded without a GPU
        ablations.main([*common, "--only", "default", "Transolver++", "--", *bodies, "--capture"])
    assert "there is none" in capsys.readouterr().out
    path = tmp_path / "ablations.json"
    told = json.loads(path.read_text())
    assert list(told["trainings"]) == ["Transolver++"]  # which goes without
    path.write_text(json.dumps(told | {"asked": told["asked"] | {"base": bodies}}))
    assert ablations.main([*common, "--only", "Transolver++", "--", *bodies])["trainings"] == told["trainings"]
    (one,) = told["trainings"]["Transolver++"]
    assert one["changed"] == ["--plus", "--tied", "--no-capture"] and told["steps"] == 2 and one["pressure_l2"] > 0
    with pytest.raises(SystemExit):
        ablations.main([*common, "--only", "default", "--", *bodies, "--batch", "1"])
    assert "of other trainings" in capsys.readouterr().err


def test_choices_of_all_histories_are_scored_at_the_same_starts(tmp_path):
    base = ["--preset", "tiny", "--archive", str(tmp_path / "a.zarr"), "--cases", "100", "--kernel", "3"]
    only = ["--app", "weather", "--only", "default", "history 1", "history 6", "--"]
    _, same, chosen = ablations.options([*only, *base])
    build_synthetic(tmp_path / "a.zarr", Storms(("refc",), days=3, frames=9), hrrr_crop(2, slice(0, 16), slice(0, 16)))
    cases = {}
    for which in (base, same):
        configs = [parse(ablations.CONFIGS["weather"], [*which, *flags]) for flags in chosen.values()]
        cases[which is same] = [prepare(config)[0].cases for config in configs]
    assert all(of_one == cases[True][0] and of_one for of_one in cases[True])
    assert len(cases[False][1]) > len(cases[False][2]) == len(cases[True][0])
    _, alone, _ = ablations.options(["--app", "weather", "--only", "default", "no EMA", "--", *base])
    assert alone == base  # which has no reason to lose starts


def test_a_training_whose_process_died_is_told(tmp_path, monkeypatch, capsys):
    class Dead(ThreadPoolExecutor):
        def submit(self, *call):
            return super().submit(self.die)

        def die(self):
            raise BrokenProcessPool("died abruptly")

    monkeypatch.setattr(ablations, "workers", lambda args: Dead(1))
    with pytest.raises(SystemExit):
        ablations.main(["--app", "aero", "--steps", "2", "--gpus", "0", "--out", str(tmp_path), "--only", "default"])
    assert "default, seed 0, failed: BrokenProcessPool('died abruptly')" in capsys.readouterr().out


def test_all_take_the_steps_that_the_default_takes_in_time(tmp_path, monkeypatch):
    steps_in, measured = ablations.steps_in, []
    monkeypatch.setattr(ablations, "SHORT", 4)
    monkeypatch.setattr(ablations, "steps_in", lambda *told: measured.append(told[2]) or steps_in(*told))
    monkeypatch.setattr(ablations, "workers", lambda args: ThreadPoolExecutor(1))
    build_synthetic(tmp_path / "a.zarr", Storms(("refc",), days=3, frames=4), hrrr_crop(2, slice(0, 16), slice(0, 16)))
    flags = ["--archive", str(tmp_path / "a.zarr"), "--history", "1", "--width", "8", "--depth", "1", "--heads", "1"]
    flags += ["--kernel", "3", "--sampler-steps", "1"]
    common = ["--app", "weather", "--seconds", "0.1", "--gpus", "0", "--out", str(tmp_path)]
    ablations.main([*common, "--only", "default", "--", *flags])
    told = ablations.main([*common, "--only", "default", "no EMA", "--", *flags])
    assert measured == [flags] and told["steps"] >= 1 and not (tmp_path / "short").exists()
    for name, where in (("default", "default_0"), ("no EMA", "no_EMA_0")):
        last = json.loads((tmp_path / where / "training" / "log.jsonl").read_text().splitlines()[-1])
        (found,) = told["trainings"][name]
        assert last["step"] == told["steps"], name
        assert set(ablations.SHOWN["weather"]) < set(last["validation"]) < set(found), name
        assert "samples/s" in (tmp_path / where / "said.txt").read_text()
