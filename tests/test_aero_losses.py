"""Losses, errors and slices of fields against their definitions, on a few numbers."""

import numpy as np
import pytest
import torch

from apps.aero import metrics
from apps.aero.losses import field_loss, force_loss
from apps.aero.slices import Slice


def test_losses_are_those_of_their_definition():
    torch.manual_seed(0)
    y, t, w = torch.randn(2, 30, 4), torch.randn(2, 30, 4), torch.ones(2, 30)
    assert field_loss("mse", y, t, w) == pytest.approx((y - t).square().mean().item())
    far = t + 100
    assert field_loss("huber", far, t, w) == pytest.approx(99.5, rel=1e-4)
    assert field_loss("relative", 1.5 * t, t, w) == pytest.approx(0.5, rel=1e-5)
    w[:, :10] = 0
    y[:, 10:] = t[:, 10:]
    assert field_loss("relative", y, t, w) < 1e-5 and field_loss("mse", y, t, w) == 0
    normal = torch.nn.functional.normalize(torch.randn(1, 8, 3), dim=-1)
    both = torch.cat([normal, -normal], dim=1)  # a constant pressure on a closed body has no force
    shift = torch.tensor([3.0, 0, 0, 0])
    level = force_loss(t[:1, :16] + shift, t[:1, :16], both, torch.ones(1, 16), torch.ones(4))
    assert level < 1e-10


def test_errors_of_the_air_count_cells_alike_and_by_volume():
    fields = {"pressure": torch.ones(2), "velocity": torch.eye(3)[:2], "volume": torch.tensor([1.0, 3.0])}
    fields = {name: values.double() for name, values in fields.items()}
    predicted = torch.cat([fields["pressure"][:, None], fields["velocity"]], dim=1)
    predicted[0, 1] += 0.5
    sums = metrics.volume_sums(predicted, fields, torch.ones(2).double(), (1.0,) * 4)
    found = metrics.volume_scores(sums, metrics.case_largest(predicted, fields, torch.ones(2)))
    assert found["velocity_l2"] == pytest.approx(8**-0.5) and found["velocity_l2_volume"] == pytest.approx(0.25)
    assert found["velocity_mae"] == 0.25 and found["velocity_mae_volume"] == 0.125 and found["velocity_largest"] == 0.5
    assert found["velocity_x_l2_volume"] == pytest.approx(0.5) and found["volume_pressure_l2_volume"] == 0


def test_a_slice_shows_the_nearest_cell_and_nothing_inside_of_the_body():
    """Around a ball of radius one in a wide domain, where the value is x: the picture is about the ball."""
    points = np.random.default_rng(0).normal(size=(40_000, 3)) * 3
    points = np.concatenate([points, points / np.linalg.norm(points, axis=1, keepdims=True) * 1.001, [[99, 0, 99]]])
    radius = np.linalg.norm(points, axis=1)
    points, sdf = points[radius > 1], radius[radius > 1] - 1
    plane = Slice(points, sdf)
    image, (left, right, low, high) = plane.image(points[:, 0]), plane.extent
    assert (left, right) == pytest.approx((-1.8, 3), abs=0.02) and (low, high) == pytest.approx((-1.2, 1.8), abs=0.02)
    x, z = (a + (np.arange(n) + 0.5) * (b - a) / n for a, b, n in zip((left, low), (right, high), image.shape[::-1]))
    away = np.hypot(x, z[:, None])
    assert np.isnan(image[away < 0.9]).all() and np.isnan(image[away > 1.1]).mean() < 0.05
    np.testing.assert_allclose(np.nan_to_num(image - x)[away > 1.1], 0, atol=0.6)
