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
    sums = metrics.event_sums(forecast, truth, truth.isfinite(), (20.0, 99.0), below=below)
    hit, miss, false = (1, 1, 1) if below else (2, 1, 1)
    assert [sums[k][0].item() for k in ("hit", "miss", "false_alarm")] == [hit, miss, false]
    got = metrics.scores(sums)
    assert got["csi"][0].item() == pytest.approx(hit / (hit + miss + false))
    assert got["pod"][0].item() == pytest.approx(hit / (hit + miss))
    assert got["far"][0].item() == pytest.approx(false / (hit + false))
    assert got["frequency_bias"][0].item() == pytest.approx(1.0)
    assert math.isnan(got["csi"][1]) or below  # nothing is above 99, everything below


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
    got = metrics.scores(metrics.fraction_sums(forecast, truth, valid, 20.0, (1, 3, 5, 9)))["fss"]
    assert got.tolist() == pytest.approx([0.0, 1 / 3, 3 / 5, 7 / 9])
    cold = metrics.scores(metrics.fraction_sums(-forecast, -truth, valid, -20.0, (1, 3, 5, 9), below=True))["fss"]
    assert cold.tolist() == pytest.approx(got.tolist())
    assert metrics.scores(metrics.fraction_sums(truth[None], truth, valid, 20.0, (1, 5)))["fss"].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="no centre"):
        metrics.fraction_sums(forecast, truth, valid, 20.0, (4,))


def test_fss_of_an_ensemble_takes_the_mean_of_the_fractions():
    """One of two members right: fractions 1/2 and 1/2 against 1: 1 - (1/4 + 1/4) / (1/4 + 1/4 + 1)."""
    valid = torch.ones(21, 21, dtype=torch.bool)
    got = metrics.scores(metrics.fraction_sums(_pixels(10, 3), _pixels(10)[0], valid, 20.0, (1,)))["fss"]
    assert got.item() == pytest.approx(1 - 0.5 / 1.5)


def test_fss_sees_nothing_under_the_mask():
    forecast, truth = _pixels(8), _pixels(10)[0]
    valid = torch.ones(21, 21, dtype=torch.bool)
    valid[:, 12:] = False
    wild = truth.clone()
    wild[:, 12:] = 1e9
    want = metrics.fraction_sums(forecast, truth, valid, 20.0, (5,))
    got = metrics.fraction_sums(forecast, wild, valid, 20.0, (5,))
    assert all(torch.equal(got[k], want[k]) for k in want)


def sharded_sums(meshes):
    """The sums of two ranks together are those of one process, fractions through halos included."""
    mesh = meshes["2"]
    torch.manual_seed(5)
    members, truth = torch.rand(3, 11, 8) * 60, torch.rand(11, 8) * 60
    valid = torch.rand(11, 8) > 0.2

    def sums(members, truth, valid):
        return (
            metrics.error_sums(members.mean(0), truth, valid)
            | metrics.event_sums(members, truth[None], valid[None], (20.0, 40.0))
            | metrics.ensemble_sums(members, truth, valid)
            | metrics.fraction_sums(members, truth, valid, 30.0, (1, 5, 9))
        )

    want = sums(members, truth, valid)
    cut = (scatter_tensor(x, None, mesh, [Shard(x.ndim - 2)], sizes={0: (7, 4)}) for x in (members, truth, valid))
    got = metrics.reduce(sums(*cut), mesh)
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=1e-6, atol=1e-6, msg=key)


def test_sums_on_shards(pool):
    pool.run(sharded_sums)
