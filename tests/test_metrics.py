"""Scores against closed forms, under masks, and on shards."""

import math

import pytest
import torch
from torch.distributed.tensor.placement_types import Shard

from apps import metrics
from core import scatter_tensor

NAN = math.nan


def test_errors_of_valid_points_only():
    truth = torch.tensor([1.0, 2.0, NAN, 4.0])
    forecast = torch.tensor([2.0, 0.0, 7.0, NAN])
    valid = torch.tensor([True, True, False, False])
    got = metrics.scores(metrics.error_sums(forecast, truth, valid))
    assert got["rmse"].item() == pytest.approx(math.sqrt((1 + 4) / 2))
    assert got["mae"].item() == pytest.approx(1.5)
    assert got["bias"].item() == pytest.approx(-0.5)
    assert got["relative_l2"].item() == pytest.approx(1.0)


def test_dims_that_stay():
    forecast, truth = torch.arange(6.0).view(2, 3), torch.zeros(2, 3)
    got = metrics.scores(metrics.error_sums(forecast, truth, torch.ones(2, 3, dtype=torch.bool), dims=1))
    assert got["mae"].tolist() == pytest.approx([1.0, 4.0])


def test_sums_of_parts_are_the_sum_of_the_whole_and_not_a_mean_of_scores():
    torch.manual_seed(0)
    forecast, truth = torch.randn(2, 30)
    valid = torch.rand(30) > 0.2
    whole = metrics.error_sums(forecast, truth, valid)
    total = {}
    for part in (slice(0, 3), slice(3, 30)):
        total = metrics.add(total, metrics.error_sums(forecast[part], truth[part], valid[part]))
    assert metrics.scores(total)["rmse"].item() == pytest.approx(metrics.scores(whole)["rmse"].item(), rel=1e-12)


@pytest.mark.parametrize("below", [False, True])
def test_events(below):
    truth = torch.tensor([10.0, 30.0, 30.0, 10.0, 30.0, NAN])
    forecast = torch.tensor([10.0, 30.0, 10.0, 30.0, 30.0, 30.0])
    sums = metrics.event_sums(forecast[None], truth, truth.isfinite(), (20.0, 99.0), below=below)
    hit, miss, false = (1, 1, 1) if below else (2, 1, 1)
    assert sums["happened"][0].tolist() == [miss, hit] and sums["absent"][0].tolist() == [5 - hit - miss - false, false]
    got = metrics.scores(sums)
    assert got["csi"][0].item() == pytest.approx(hit / (hit + miss + false))
    assert got["pod"][0].item() == pytest.approx(hit / (hit + miss))
    assert got["far"][0].item() == pytest.approx(false / (hit + false))
    assert got["frequency_bias"][0].item() == pytest.approx(1.0)
    assert got["brier"][0].item() == pytest.approx((miss + false) / 5)
    assert math.isnan(got["csi"][1]) or below  # nothing is above 99, everything below


def test_probabilities_of_events():
    """Six points, two members; by hand."""
    members = torch.tensor([[1.0, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 1]])  # chances 1, 1, 1/2, 0, 0, 1/2
    truth = torch.tensor([1.0, 0, 1, 0, 0, 1])
    sums = metrics.event_sums(members, truth, torch.ones(6, dtype=torch.bool), (0.5,))
    got = {name: value[0] for name, value in metrics.scores(sums).items()}
    assert got["brier"].item() == pytest.approx((1 + 2 / 4) / 6)
    assert got["brier_fair"].item() == pytest.approx((1 + 2 / 4) / 6 - (2 * 1 / (4 * 1)) / 6)
    assert got["brier_skill"].item() == pytest.approx(1 - (1.5 / 6) / 0.25)
    assert got["reliability"].tolist() == [0.0, 1.0, 0.5]
    assert got["forecasts"].tolist() == pytest.approx([1 / 3] * 3)
    assert got["roc_pod"].tolist() == pytest.approx([0, 1 / 3, 1, 1])
    assert got["roc_pofd"].tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1])
    assert got["roc_area"].item() == pytest.approx(1 / 3 * 1 / 6 + 2 / 3)
    assert got["csi"].item() == pytest.approx(4 / (4 + 2 + 2))  # 12 forecasts: 4 hits, 2 misses, 2 false alarms


def test_ranks_share_the_places_of_equal_values():
    """0 < 1 < 2: third of three places; a truth that equals both members falls on all three in equal parts."""
    members, truth = torch.tensor([[0.0, 5, 0, 1], [1, 5, 2, 3]]), torch.tensor([2.0, 5, 0, 9])
    sums = metrics.rank_sums(members, truth, torch.tensor([True, True, True, False]))
    assert sums["ranks"].tolist() == pytest.approx([1 / 3 + 1 / 2, 1 / 3 + 1 / 2, 1 + 1 / 3])
    assert metrics.scores(sums)["rank_histogram"].sum().item() == pytest.approx(1)


def _gaussian_crps(y):
    """CRPS of N(0, 1), Gneiting et al. 2005, Eq. 5."""
    cdf, pdf = 0.5 * (1 + math.erf(y / math.sqrt(2))), math.exp(-y * y / 2) / math.sqrt(2 * math.pi)
    return y * (2 * cdf - 1) + 2 * pdf - 1 / math.sqrt(math.pi)


def test_crps_by_pairs_and_of_one_member():
    torch.manual_seed(1)
    members, truth = torch.randn(5, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    valid = torch.tensor([True] * 6 + [False])
    near = (members - truth).abs().mean(0)
    pairs = (members[:, None] - members[None]).abs().sum((0, 1))
    got = metrics.scores(metrics.ensemble_sums(members, truth, valid))
    assert got["crps"].item() == pytest.approx((near - pairs / 50)[:6].mean().item(), rel=1e-12)
    assert got["crps_fair"].item() == pytest.approx((near - pairs / 40)[:6].mean().item(), rel=1e-12)
    one = metrics.scores(metrics.ensemble_sums(members[:1], truth, valid))
    assert one["crps"].item() == pytest.approx((members[0] - truth).abs()[:6].mean().item(), rel=1e-12)


def test_crps_of_a_large_and_of_many_small_ensembles_is_that_of_the_gaussian():
    yes = torch.ones(1, dtype=torch.bool)
    quantiles = torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(4000.0, dtype=torch.float64) + 0.5) / 4000)
    for y in (-1.0, 0.0, 2.5):
        got = metrics.scores(metrics.ensemble_sums(quantiles[:, None], torch.tensor([y], dtype=torch.float64), yes))
        assert got["crps"].item() == pytest.approx(_gaussian_crps(y), abs=2e-3)
    torch.manual_seed(2)
    small, truth = torch.randn(3, 200_000), torch.full((200_000,), 0.7)
    got = metrics.scores(metrics.ensemble_sums(small, truth, truth > 0))
    assert got["crps_fair"].item() == pytest.approx(_gaussian_crps(0.7), abs=5e-3)
    assert got["crps"].item() > got["crps_fair"].item() + 0.1


def test_spread_of_a_calibrated_ensemble_is_its_skill():
    torch.manual_seed(3)
    members, truth = torch.randn(4, 100_000), torch.randn(100_000)
    got = metrics.scores(metrics.ensemble_sums(members, truth, truth < 99))
    assert got["spread_skill"].item() == pytest.approx(1.0, abs=0.01)


def _pixels(*columns):
    """Rain of 50 in one cell of a dry 21 x 21 field, one field a column."""
    fields = torch.zeros(len(columns), 21, 21)
    for field, column in zip(fields, columns):
        field[10, column] = 50.0
    return fields


def test_fss_of_displaced_cells():
    """A cell displaced by d cells scores (n - d) / n in a window of n > d."""
    forecast, truth = _pixels(8)[:1], _pixels(10)[0]
    valid = torch.ones(21, 21, dtype=torch.bool)
    got = metrics.scores(metrics.fraction_sums(forecast, truth, valid, (20.0,), (1, 3, 5, 9)))["fss"]
    assert got[0].tolist() == pytest.approx([0.0, 1 / 3, 3 / 5, 7 / 9])
    cold = metrics.scores(metrics.fraction_sums(-forecast, -truth, valid, (-20.0,), (1, 3, 5, 9), below=True))["fss"]
    assert cold[0].tolist() == pytest.approx(got[0].tolist())
    assert metrics.scores(metrics.fraction_sums(truth[None], truth, valid, (20.0,), (1, 5)))["fss"].tolist() == [
        [1.0, 1.0]
    ]
    with pytest.raises(ValueError, match="no centre"):
        metrics.fraction_sums(forecast, truth, valid, (20.0,), (4,))


def test_fss_of_an_ensemble_takes_the_mean_of_the_fractions():
    """One of two members right: fractions 1/2 and 1/2 against 1: 1 - (1/4 + 1/4) / (1/4 + 1/4 + 1)."""
    valid = torch.ones(21, 21, dtype=torch.bool)
    got = metrics.scores(metrics.fraction_sums(_pixels(10, 3), _pixels(10)[0], valid, (20.0,), (1,)))["fss"]
    assert got.item() == pytest.approx(1 - 0.5 / 1.5)


def test_fss_sees_nothing_under_the_mask():
    forecast, truth = _pixels(8), _pixels(10)[0]
    valid = torch.ones(21, 21, dtype=torch.bool)
    valid[:, 12:] = False
    wild = truth.clone()
    wild[:, 12:] = 1e9
    want = metrics.fraction_sums(forecast, truth, valid, (20.0,), (5,))
    got = metrics.fraction_sums(forecast, wild, valid, (20.0,), (5,))
    assert all(torch.equal(got[k], want[k]) for k in want)


def test_fss_of_the_matched_mean_is_that_of_one_field():
    """Two members that put the cell apart, and a faint echo where the mean is then highest: it rains there."""
    members, truth = _pixels(10, 3), _pixels(10)[0]
    members[1, 10, 10] = 10.0
    valid = torch.ones(21, 21, dtype=torch.bool)
    got = metrics.scores(metrics.matched_fraction_sums(members, truth, valid, valid, (20.0,), (1, 5)))
    assert got["fss_matched_mean"].tolist() == [[1.0, 1.0]]
    alone = metrics.matched_fraction_sums(members[:1], truth, valid, valid, (20.0,), (1, 5))
    want = metrics.fraction_sums(members[:1], truth, valid, (20.0,), (1, 5))
    assert all(torch.equal(alone[f"matched_{k}"], want[k]) for k in want)


def test_the_matched_mean_takes_values_where_there_is_a_forecast_and_none_where_there_is_not():
    members, truth = torch.rand(4, 21, 21) * 60, torch.rand(21, 21) * 60
    known, valid = torch.ones(2, 21, 21, dtype=torch.bool)
    known[:, :4], valid[:, :9] = False, False  # no forecast there; a forecast, but nothing was seen
    want = metrics.matched_fraction_sums(members, truth, valid, known, (20.0,), (1, 5))
    wild, other = members.clone(), members.clone()
    wild[:, :, :4], other[:, :, 4:9] = NAN, 25.0
    got = metrics.matched_fraction_sums(wild, truth, valid, known, (20.0,), (1, 5))
    assert all(torch.equal(got[k], want[k]) for k in want)
    less = metrics.matched_fraction_sums(other, truth, valid, known, (20.0,), (1, 5))
    assert all((less[k] != want[k]).all() for k in want)  # the mean is matched before what was seen is known


def test_the_spectrum_of_a_wave_lies_in_its_band():
    """Four waves along x, no window: half the square of the amplitude, spread over two coefficients, times the size."""
    x = torch.arange(32.0) / 32
    field = (3 * torch.cos(2 * math.pi * 4 * x)).expand(1, 32, 32) + 7.0
    edges = range(1, 17)
    sums = metrics.spectrum_sums(field, torch.ones(32, 32, dtype=torch.bool), edges, zero=7.0, taper=False)
    assert sums["power"].sum().item() == pytest.approx(32 * 32 * 9 / 2)
    assert sums["power"][3].item() == pytest.approx(sums["power"].sum().item())


def test_the_spectrum_of_noise_is_flat_under_the_window_and_waves_along_both_sides_are_alike():
    torch.manual_seed(0)
    noise = 2 * torch.randn(50, 48, 96, dtype=torch.float64)
    valid = torch.ones(48, 96, dtype=torch.bool)
    power = metrics.scores(metrics.spectrum_sums(noise, valid, metrics.bands((48, 96))))["power"]
    assert power.tolist() == pytest.approx([4.0] * len(power), rel=0.25)
    x, y = torch.arange(96.0) / 96, torch.arange(48.0) / 48
    along = torch.sin(2 * math.pi * 8 * x).expand(1, 48, 96), torch.sin(2 * math.pi * 4 * y)[:, None].expand(1, 48, 96)
    bands = [metrics.spectrum_sums(f, valid, range(1, 40), taper=False)["power"].argmax().item() for f in along]
    assert bands == [7, 7]  # the fourth wave of half the length is as long as the eighth


def test_bands_are_thirds_of_octaves_of_whole_wavenumbers():
    assert metrics.bands((64, 96)) == [1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20, 25, 32, 40, 48]
    assert metrics.bands((26, 21)) == [1, 2, 3, 4, 5, 6, 8, 10, 13]


def test_nothing_under_the_mask_has_power():
    torch.manual_seed(0)
    field, valid = torch.randn(1, 16, 16), torch.rand(16, 16) > 0.3
    wild = torch.where(valid, field, NAN)
    want, got = (metrics.spectrum_sums(f, valid, range(1, 9)) for f in (field, wild))
    assert torch.equal(got["power"], want["power"]) and want["power"].min() > 0


def test_intervals_hold_the_truth_as_often_as_they_say():
    """The mean of 40 draws from N(0, 1): its interval is about 2 x 1.96 / sqrt(40) wide and holds 0 in most of 100."""
    torch.manual_seed(0)
    widths, inside = [], 0
    for seed in range(100):
        sums = {"n": torch.ones(40, 1).double(), "square": torch.zeros(40, 1).double()}
        sums |= {"error": torch.randn(40, 1).double(), "absolute": sums["square"], "truth_square": sums["n"]}
        again = metrics.scores(metrics.drawn(sums, metrics.draws(40, 400, seed)))
        low, high = metrics.limits(again["bias"])[:, 0].tolist()
        widths.append(high - low)
        inside += low < 0 < high
    assert sum(widths) / 100 == pytest.approx(2 * 1.96 / math.sqrt(40), rel=0.1)
    assert 85 <= inside <= 100


def test_cases_of_a_block_are_drawn_together():
    weights = metrics.draws(5, 50, seed=1, blocks=torch.tensor([0, 0, 1, 1, 2]))
    assert torch.equal(weights[:, 0], weights[:, 1]) and torch.equal(weights[:, 2], weights[:, 3])
    assert (weights[:, [0, 2, 4]].sum(1) == 3).all() and len(weights.unique(dim=0)) > 5
    assert torch.isnan(metrics.limits(torch.full((50, 2), NAN))).all()


def sharded_sums(meshes, name):
    """The sums of all ranks together are those of one process, fractions through halos and spectra included."""
    mesh = meshes[name]
    torch.manual_seed(5)
    members, truth = torch.rand(3, 11, 8) * 60, torch.rand(11, 8) * 60
    known = torch.rand(11, 8) > 0.1
    valid = known & (torch.rand(11, 8) > 0.1)
    members[:, 2:5], truth[2:5] = 10.0, 10.0  # ties

    def sums(members, truth, valid, known):
        return (
            metrics.error_sums(members.mean(0), truth, valid)
            | metrics.event_sums(members, truth, valid, (20.0, 40.0))
            | metrics.ensemble_sums(members, truth, valid)
            | metrics.rank_sums(members, truth, valid)
            | metrics.fraction_sums(members, truth, valid, (20.0, 30.0), (1, 5, 9))
            | metrics.matched_fraction_sums(members, truth, valid, known, (20.0, 30.0), (1, 5, 9))
            | metrics.spectrum_sums(members, valid, metrics.bands((11, 8)))
        )

    want = sums(members, truth, valid, known)
    rows = {"1": (11,), "2": (7, 4), "4": (2, 1, 5, 3), "2x2": (7, 4)}[name]

    def cut(x):
        placements = [Shard(x.ndim - 2), Shard(x.ndim - 1)][: mesh.ndim]
        return scatter_tensor(x, None, mesh, placements, sizes={0: rows})

    got = metrics.reduce(sums(*map(cut, (members, truth, valid, known))), mesh)
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=1e-6, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", ["1", "2", "4", "2x2"])
def test_sums_on_shards(pool, name):
    pool.run(sharded_sums, name)
