"""Scores equal those of `scores` and `pysteps` on the same arrays; baselines move what moves; results follow sums."""

import json
from types import SimpleNamespace

import numpy as np
import pysteps.verification as peers
import pytest
import scores
import torch
import xarray
from pysteps.postprocessing.probmatching import nonparam_match_empirical_cdf
from pysteps.utils.spectral import rapsd

from apps import metrics
from apps.weather import baselines, nowcasts, products, results
from core import InputError

NAN = float("nan")


@pytest.fixture
def fields():
    """Five smooth members, a truth like them, and a mask: fp64 (5, 32, 32), (32, 32) and bool."""
    noise = torch.randn(6, 40, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.avg_pool2d(noise[:, None], 9, 1)[:, 0] * 120 + 15
    valid = torch.rand(32, 32, generator=torch.Generator().manual_seed(1)) > 0.2
    return smooth[:5], smooth[5], valid


def _of(sums):
    return {name: value.numpy() for name, value in metrics.scores(sums).items()}


def test_errors_and_crps_are_those_of_scores(fields):
    members, truth, valid = fields
    got = _of(metrics.error_sums(members.mean(0), truth, valid) | metrics.ensemble_sums(members, truth, valid))
    said = xarray.DataArray(members.numpy(), dims=("member", "y", "x"))
    seen = xarray.DataArray(torch.where(valid, truth, NAN).numpy(), dims=("y", "x"))
    mean = said.mean("member")
    assert got["rmse"] == pytest.approx(float(scores.continuous.rmse(mean, seen)))
    assert got["mae"] == pytest.approx(float(scores.continuous.mae(mean, seen)))
    assert got["bias"] == pytest.approx(float(scores.continuous.additive_bias(mean, seen)))
    for name, method in (("crps", "ecdf"), ("crps_fair", "fair")):
        want = scores.probability.crps_for_ensemble(said, seen, "member", method=method)
        assert got[name] == pytest.approx(float(want))


def test_brier_scores_are_those_of_scores(fields):
    members, truth, valid = fields
    got = _of(metrics.event_sums(members, truth, valid, (12.0, 20.0)))
    said = xarray.DataArray(members.numpy(), dims=("member", "y", "x"))
    seen = xarray.DataArray(torch.where(valid, truth, NAN).numpy(), dims=("y", "x"))
    for name, fair in (("brier", False), ("brier_fair", True)):
        want = scores.probability.brier_score_for_ensemble(said, seen, "member", [12.0, 20.0], fair_correction=fair)
        assert got[name] == pytest.approx(want.values)


def test_contingencies_are_those_of_pysteps(fields):
    members, truth, valid = fields
    got = _of(metrics.event_sums(members[:1], truth, valid, (12.0, 20.0)))
    said, seen = members[0, valid].numpy(), truth[valid].numpy()
    for i, threshold in enumerate((12.0, 20.0)):
        want = peers.detcatscores.det_cat_fct(said, seen, threshold - 1e-9, ["POD", "FAR", "CSI", "BIAS"])
        found = [got[name][i] for name in ("pod", "far", "csi", "frequency_bias")]
        assert found == pytest.approx([want[name] for name in ("POD", "FAR", "CSI", "BIAS")])


def test_reliability_and_roc_are_those_of_pysteps(fields):
    members, truth, valid = fields
    got = _of(metrics.event_sums(members, truth, valid, (15.0,)))
    chance, seen = (members >= 15).double().mean(0)[valid].numpy(), truth[valid].numpy()
    table = peers.probscores.reldiag_init(15.0, n_bins=6, min_count=1)
    peers.probscores.reldiag_accum(table, chance, seen)
    _, observed = peers.probscores.reldiag_compute(table)
    assert got["reliability"][0] == pytest.approx(np.array(observed))
    curve = peers.probscores.ROC_curve_init(15.0, n_prob_thrs=6)
    peers.probscores.ROC_curve_accum(curve, chance + 1e-9, seen)
    pofd, pod, area = peers.probscores.ROC_curve_compute(curve, compute_area=True)
    assert got["roc_pod"][0, 1:] == pytest.approx(np.array(pod)[::-1])
    assert got["roc_pofd"][0, 1:] == pytest.approx(np.array(pofd)[::-1])
    assert got["roc_area"][0] == pytest.approx(area, abs=0.02)  # it leaves out the corner at the origin


def test_rank_histograms_are_those_of_pysteps(fields):
    members, truth, valid = fields
    got = _of(metrics.rank_sums(members, truth, valid))["rank_histogram"]
    table = peers.ensscores.rankhist_init(5)
    peers.ensscores.rankhist_accum(table, members[:, valid].numpy(), truth[valid].numpy())
    assert got == pytest.approx(peers.ensscores.rankhist_compute(table))


def test_fractions_are_those_of_pysteps(fields):
    members, truth, _ = fields
    everywhere = torch.ones(32, 32, dtype=torch.bool)
    got = _of(metrics.fraction_sums(members[:1], truth, everywhere, (12.0, 20.0), (1, 5, 9)))["fss"]
    want = [[peers.spatialscores.fss(members[0].numpy(), truth.numpy(), t, w) for w in (1, 5, 9)] for t in (12.0, 20.0)]
    assert got == pytest.approx(np.array(want))


def test_fractions_of_the_matched_mean_are_those_of_pysteps(fields):
    members, truth, _ = fields
    everywhere = torch.ones(32, 32, dtype=torch.bool)
    sums = metrics.matched_fraction_sums(members, truth, everywhere, everywhere, (12.0, 20.0), (1, 5, 9))
    matched = products.matched_mean(members.numpy())
    want = [[peers.spatialscores.fss(matched, truth.numpy(), t, w) for w in (1, 5, 9)] for t in (12.0, 20.0)]
    assert _of(sums)["fss_matched_mean"] == pytest.approx(np.array(want))
    # the same field by pysteps' own matching, which takes as many target values as the field has
    order = np.sort(members.numpy().ravel())[2::5].reshape(32, 32)
    assert matched == pytest.approx(nonparam_match_empirical_cdf(members.numpy().mean(0), order))


def test_spectra_are_those_of_pysteps(fields):
    field, everywhere = fields[0][:1], torch.ones(32, 32, dtype=torch.bool)
    sums = metrics.spectrum_sums(field, everywhere, range(1, 17), taper=False)
    want = rapsd(field[0].numpy(), fft_method=np.fft)
    assert _of(sums)["power"] == pytest.approx(want[1:])


# -- baselines ------------------------------------------------------------------------------------------------------
def _storm(x, y=30):
    """A storm of 50 dBZ with an edge that can be followed, (64, 80), at column x."""
    rows, columns = np.mgrid[:64, :80]
    bumps = [(0, 0, 6, 50), (9, 8, 3, 40), (-8, 12, 4, 45)]
    parts = [h * np.exp(-(((rows - y - b) / r) ** 2 + ((columns - x - a) / r) ** 2)) for a, b, r, h in bumps]
    field = np.max(parts, axis=0)
    return np.where(field < 5, -10.0, field)


def test_motion_is_found_and_carried_on():
    past = [_storm(x) for x in (20, 23, 26)]
    velocity = nowcasts.motion(past)
    assert velocity[:, 25:35, 20:32].mean((1, 2)) == pytest.approx([3, 0], abs=0.3)
    ahead = nowcasts.extrapolate(past[-1], velocity, 4)
    truth = _storm(38)
    still, carried = np.abs(past[-1] - truth)[:, 20:].mean(), np.nanmean(np.abs(ahead[3] - truth)[:, 20:])
    assert carried < 0.25 * still and np.isnan(ahead[3][:, 0]).all()  # nothing is known of what flows in


@pytest.mark.parametrize("gap", [0, 1, 2])
def test_a_scan_that_never_came_is_bridged(gap):
    past = [_storm(x) for x in (20, 23, 26)]
    past[gap] = np.full_like(past[gap], NAN)
    velocity = nowcasts.motion(past)
    assert velocity[0, 25:35, 20:32].mean() == pytest.approx(3, abs=0.4)
    filled = nowcasts.complete(past, velocity)
    assert len(filled) == (2 if gap == 0 else 3)
    assert np.nanmean(np.abs(filled[-1] - _storm(26))[:, 10:]) < 1.0


def test_steps_is_an_ensemble_of_its_seed():
    past = [_storm(x) for x in (20, 23, 26)]
    velocity = nowcasts.motion(past)
    first, again, other = (nowcasts.steps_ensemble(past, velocity, 2, 3, 6.0, 10, seed) for seed in (1, 1, 2))
    assert first.shape == (3, 2, 64, 80) and np.array_equal(first, again, equal_nan=True)
    assert np.nanmax(first.std(0)) > 1 and not np.array_equal(first, other, equal_nan=True)
    dry = [np.full_like(field, -10.0) for field in past]
    assert nowcasts.steps_ensemble(dry, velocity, 2, 3, 6.0, 10, 1) is None


def test_fields_that_were_never_seen_move_nowhere():
    blank = [np.full((20, 20), NAN)] * 3
    assert (nowcasts.motion(blank) == 0).all() and nowcasts.complete(blank, None) == []


def test_baselines_that_are_not_installed_are_left_out_in_one_line(monkeypatch, capsys):
    assert baselines.choose(None) == ("persistence", "extrapolation", "steps")
    assert baselines.choose(("steps", "persistence")) == ("persistence", "steps")
    monkeypatch.setattr(nowcasts, "find_spec", lambda name: None)
    assert baselines.choose(None) == baselines.choose(("persistence",)) == ("persistence",)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "pip install pysteps opencv-python-headless" in said
    with pytest.raises(InputError, match="lacks pysteps.*pip install"):
        baselines.choose(("steps",))
    with pytest.raises(InputError, match="knows no optical.*Choose of persistence"):
        baselines.choose(("optical",))


# -- results --------------------------------------------------------------------------------------------------------
def _summary(times, **options):
    """Results of a model that is off by 1 and a baseline that is off by 2, two leads a case."""
    config = SimpleNamespace(
        **({"draws": 200, "block_hours": 0.0, "seed": 0, "steps": 2, "members": 1} | options), split="test"
    )
    facts = SimpleNamespace(shape=(8, 8), km=1.0, channels=("rain",), units=("mm",), step_minutes=10.0)
    edges, ones = metrics.bands((8, 8)), torch.ones(8, 8, dtype=torch.bool)
    sums = {}
    for source, off in (("model", 1.0), ("persistence", 2.0)):
        wrong = torch.zeros(8, 8) + off
        rows = metrics.error_sums(wrong, torch.zeros(8, 8), ones) | metrics.ensemble_sums(wrong[None], wrong * 0, ones)
        rows |= metrics.spectrum_sums(wrong[None], ones, edges)
        sums |= {f"rain/{source}/{name}": v.expand(len(times), 2, *v.shape) for name, v in rows.items()}
    sums |= {f"rain/observed/{name}": sums[f"rain/model/{name}"] for name in ("power", "waves")}
    return results.summarize(sums, facts, times, config, ("persistence",), {})


def test_results_hold_scores_intervals_differences_and_the_sums_behind_them(tmp_path):
    found = _summary(np.datetime64("2021-06-01T00:00", "s") + np.arange(5) * np.timedelta64(3, "h"))
    results.write(found, tmp_path)
    stored = json.loads((tmp_path / "results.json").read_text())
    assert stored == json.loads(json.dumps(found)) and stored["schema"] == results.SCHEMA
    assert stored["scores"]["rain"]["model"]["crps"] == [1.0, 1.0]
    assert stored["differences"]["rain"]["persistence"]["rmse"] == {
        "mean": [-1.0] * 2,
        "low": [-1.0] * 2,
        "high": [-1.0] * 2,
    }
    assert stored["scores"]["rain"]["persistence"]["power_ratio"][0] == pytest.approx([4.0] * 3)
    sums = {name: torch.tensor(v).sum(0) for name, v in stored["sums"]["rain"]["persistence"].items()}
    assert metrics.scores(sums)["mae"].tolist() == stored["scores"]["rain"]["persistence"]["mae"]
    assert results.better(stored, "rain", "persistence", "rmse") == ["+", "+"]
    assert results.better(stored, "rain", "persistence", "rmse", lower=False) == ["-", "-"]


def test_blocks_of_starting_times_are_counted_and_few_say_nothing():
    times = np.datetime64("2021-06-01T00:00", "s") + np.array([0, 3, 6, 30]) * np.timedelta64(1, "h")
    assert _summary(times)["bootstrap"]["blocks"] == 4
    assert _summary(times, block_hours=24.0)["bootstrap"]["blocks"] == 2
    alone = _summary(times)
    assert alone["intervals"]["rain"] == {} and results.better(alone, "rain", "persistence", "crps") == [" ", " "]
