"""Metric mistakes known from widely used libraries; here the right answers are pinned."""

import math

import pytest
import torch

from embcache.train.metrics import BinaryMetrics, auc, log_loss


@pytest.mark.parametrize("labels", [[1, 1, 0, 0, 0], [0, 0, 0, 1, 1], [0, 1, 0, 1, 0]])
def test_auc_of_a_constant_predictor_is_one_half_in_any_row_order(labels):
    """Elsewhere 1.0 or 0.0, by which class comes first."""
    assert auc(labels, [0.3] * 5) == 0.5
    meter = BinaryMetrics()
    meter.update(torch.full((5,), 0.3), torch.tensor(labels))
    assert meter.compute()["auc"] == 0.5


def test_log_loss_is_in_nats():
    """Elsewhere "logloss" is in bits: 1.0 for a fair coin instead of ln 2."""
    assert log_loss([0, 1], [0.0, 0.0]) == math.log(2)
    meter = BinaryMetrics()
    meter.update(torch.zeros(2), torch.tensor([0, 1]))
    assert meter.compute()["logloss"] == math.log(2)


def test_ne_has_no_unit():
    """NE is a ratio of two entropies, so it is the same in nats and bits: 1 for the base rate."""
    meter = BinaryMetrics()
    meter.update(torch.full((4,), math.log(1 / 3)), torch.tensor([1, 0, 0, 0]))
    assert meter.compute()["ne"] == pytest.approx(1.0, abs=1e-7)
