"""Metrics against sklearn, against hand-computed values and against their definitions."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss as sk_log_loss
from sklearn.metrics import roc_auc_score

from embcache.train.metrics import (
    BinaryMetrics,
    GroupAuc,
    UndefinedMetricWarning,
    auc,
    gauc,
    log_loss,
    normalized_entropy,
)


def random_case(seed: int, n: int = 5000, levels: int | None = None):
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=n).astype(np.float32)
    if levels is not None:
        scores = np.round(scores * levels) / np.float32(levels)
    labels = (rng.random(n) < 1 / (1 + np.exp(-scores + 1.5))).astype(np.float32)
    return labels, scores, rng.random(n) * 3


@pytest.mark.parametrize("levels", [None, 1, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_auc_equals_sklearn_with_ties_and_weights(levels, weighted):
    labels, scores, weights = random_case(1, levels=levels)
    w = weights if weighted else None
    expected = roc_auc_score(labels, scores, sample_weight=w)
    assert auc(labels, scores, w) == pytest.approx(expected, abs=1e-12)


def test_auc_is_the_probability_that_a_positive_wins():
    labels, scores, weights = random_case(2, n=200, levels=3)
    p, n = labels == 1, labels == 0
    wins = (scores[p, None] > scores[None, n]) + 0.5 * (scores[p, None] == scores[None, n])
    pairs = weights[p, None] * weights[None, n]
    assert auc(labels, scores, weights) == pytest.approx((wins * pairs).sum() / pairs.sum(), abs=1e-12)


def test_auc_ignores_row_order():
    labels, scores, _ = random_case(3, n=1000, levels=2)
    order = np.random.default_rng(0).permutation(1000)
    assert auc(labels, scores) == auc(labels[order], scores[order])


def test_auc_zero_signs_are_one_value_and_infinities_are_ordered():
    assert auc([1, 0], [0.0, -0.0]) == 0.5
    assert auc([1, 0, 1, 0], [math.inf, 5.0, 3.0, -math.inf]) == 0.75


def test_integer_scores_and_bool_labels():
    assert auc(torch.tensor([True, False]), torch.tensor([3, 1])) == 1.0


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_is_nan_with_a_warning(label):
    with pytest.warns(UndefinedMetricWarning, match=f"all labels are {label}"):
        assert math.isnan(auc([label] * 3, [0.1, 0.2, 0.3]))
    with pytest.warns(UndefinedMetricWarning, match="no entropy"):
        assert math.isnan(normalized_entropy([label] * 3, [0.1, 0.2, 0.3]))


def test_empty_is_nan_with_a_warning():
    for metric in (auc, log_loss, normalized_entropy):
        with pytest.warns(UndefinedMetricWarning, match="no samples"):
            assert math.isnan(metric([], []))
    with pytest.warns(UndefinedMetricWarning, match="no samples"):
        assert all(math.isnan(v) for v in BinaryMetrics().compute().values())
    with pytest.warns(UndefinedMetricWarning, match="no samples"):
        assert math.isnan(GroupAuc().compute())
    assert BinaryMetrics().calibration_bins() == []


def test_bad_input_names_the_position():
    with pytest.raises(ValueError, match=r"labels\[1\] = 2.0, expected 0 or 1"):
        auc([0, 2], [0.1, 0.2])
    with pytest.raises(ValueError, match=r"labels\[0\] = nan"):
        auc([math.nan, 1], [0.1, 0.2])
    with pytest.raises(ValueError, match=r"scores\[1\] is nan"):
        BinaryMetrics().update([0.1, math.nan], [0, 1])
    with pytest.raises(ValueError, match="2 labels but scores of shape"):
        auc([0, 1], [0.1])
    with pytest.raises(ValueError, match=r"weights\[0\] = -1.0"):
        auc([0, 1], [0.1, 0.2], [-1, 1])
    with pytest.raises(ValueError, match="2 labels but weights"):
        auc([0, 1], [0.1, 0.2], [1])
    with pytest.raises(ValueError, match="groups must be 2 integers"):
        gauc([0, 1], [0.1, 0.2], [0.5, 0.5])


def test_log_loss_equals_sklearn_in_nats():
    labels, scores, weights = random_case(4)
    p = 1 / (1 + np.exp(-scores.astype(np.float64)))
    assert log_loss(labels, scores) == pytest.approx(sk_log_loss(labels, p), abs=1e-12)
    assert log_loss(labels, scores, weights) == pytest.approx(sk_log_loss(labels, p, sample_weight=weights), abs=1e-12)


def test_log_loss_of_huge_logits_is_finite_and_of_infinite_ones_exact():
    assert log_loss([0, 1], [800.0, -800.0]) == 800.0
    assert log_loss([1, 0], [math.inf, -math.inf]) == 0.0
    assert log_loss([0], [math.inf]) == math.inf


def test_normalized_entropy_by_hand():
    labels = torch.tensor([1.0, 0.0, 0.0, 0.0])
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert normalized_entropy(labels, torch.zeros(4)) == pytest.approx(math.log(2) / entropy, abs=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
def test_streaming_equals_one_call(weighted):
    labels, scores, weights = random_case(5, n=4000, levels=8)
    w = weights if weighted else None
    meter = BinaryMetrics()
    for chunk in np.array_split(np.arange(4000), 7):
        meter.update(torch.from_numpy(scores[chunk]), torch.from_numpy(labels[chunk]), None if w is None else w[chunk])
    got = meter.compute()
    assert got["auc"] == pytest.approx(auc(labels, scores, w), abs=1e-12)
    assert got["logloss"] == pytest.approx(log_loss(labels, scores, w), abs=1e-12)
    assert got["ne"] == pytest.approx(normalized_entropy(labels, scores, w), abs=1e-12)
    assert meter.samples == 4000
    assert meter.auc_error == 0.0


def test_bf16_logits_are_accepted():
    meter = BinaryMetrics()
    meter.update(torch.tensor([1.0, -1.0], dtype=torch.bfloat16), torch.tensor([1, 0]))
    assert meter.compute()["auc"] == 1.0


def test_memory_is_bounded_and_the_error_bound_holds():
    labels, scores, _ = random_case(6, n=300_000)
    meter = BinaryMetrics(capacity=1000)
    for i in range(0, len(labels), 50_000):
        meter.update(scores[i : i + 50_000], labels[i : i + 50_000])
    entries = len(meter._histogram.sorted()[1])
    assert entries < 40_000  # bfloat16 is the floor: 16 exponents of 128 values and the two signs, not 300,000
    exact = auc(labels, scores)
    assert 0 < meter.auc_error < 1e-2
    assert abs(meter.compute()["auc"] - exact) <= meter.auc_error
    assert meter.compute()["logloss"] == pytest.approx(log_loss(labels, scores), abs=1e-12)


def test_merge_equals_the_whole_whatever_the_precision_of_the_parts():
    labels, scores, _ = random_case(7, n=200_000)
    fine, coarse = BinaryMetrics(), BinaryMetrics(capacity=500)
    fine.update(scores[:1000], labels[:1000])
    coarse.update(scores[1000:], labels[1000:])
    exact = auc(labels, scores)
    for a, b in ((fine, coarse), (coarse, fine)):
        both = BinaryMetrics()
        both.merge(a)
        both.merge(b)
        assert both.samples == 200_000
        assert abs(both.compute()["auc"] - exact) <= both.auc_error
        assert both.compute()["logloss"] == pytest.approx(log_loss(labels, scores), abs=1e-12)


def test_calibration_bins_add_up_and_are_ordered():
    labels, scores, _ = random_case(8, n=10_000)
    meter = BinaryMetrics()
    meter.update(scores, labels)
    bins = meter.calibration_bins(10)
    assert len(bins) == 10
    assert [b.predicted for b in bins] == sorted(b.predicted for b in bins)
    assert sum(b.weight for b in bins) == 10_000
    assert sum(b.weight * b.observed for b in bins) == pytest.approx(labels.sum())
    p = 1 / (1 + np.exp(-scores.astype(np.float64)))
    assert sum(b.weight * b.predicted for b in bins) == pytest.approx(p.sum(), rel=1e-6)
    assert all(900 < b.weight < 1100 for b in bins)


def test_calibration_of_a_constant_predictor_is_one_bin():
    meter = BinaryMetrics()
    meter.update([0.0] * 10, [1] * 3 + [0] * 7)
    (only,) = meter.calibration_bins()
    assert (only.weight, only.predicted, only.observed) == (10.0, pytest.approx(0.5), 0.3)


def test_calibration_is_predicted_over_observed():
    meter = BinaryMetrics()
    meter.update([0.0] * 4, [1, 0, 0, 0])
    assert meter.compute()["calibration"] == 2.0


@pytest.mark.parametrize("weighted", [False, True])
def test_gauc_equals_sklearn_by_group(weighted):
    labels, scores, weights = random_case(9, n=3000, levels=4)
    groups = np.random.default_rng(1).integers(-5, 300, 3000)
    w = weights if weighted else np.ones(3000)
    values, impressions = [], []
    for g in np.unique(groups):
        rows = groups == g
        if 0 < labels[rows].sum() < rows.sum():
            values.append(roc_auc_score(labels[rows], scores[rows], sample_weight=w[rows]))
            impressions.append(w[rows].sum())
    expected = np.average(values, weights=impressions)
    assert gauc(labels, scores, groups, w if weighted else None) == pytest.approx(expected, abs=1e-12)
    meter = GroupAuc()
    for chunk in np.array_split(np.arange(3000), 5):
        meter.update(labels[chunk], scores[chunk], groups[chunk], w[chunk])
    other = GroupAuc()
    other.merge(meter)
    assert other.compute() == pytest.approx(expected, abs=1e-12)


def test_gauc_without_a_mixed_group_is_nan():
    with pytest.warns(UndefinedMetricWarning, match="no group has both classes"):
        assert math.isnan(gauc([1, 1, 0], [0.1, 0.2, 0.3], [1, 1, 2]))


def test_too_many_groups_say_so():
    meter = GroupAuc(capacity=10)
    meter.update([0] * 20, [0.0] * 20, np.arange(20))
    with pytest.raises(ValueError, match="raise the capacity"):
        meter.compute()


@pytest.mark.parametrize("capacity", [1 << 20, 64])
def test_meters_that_travel_as_bytes_add_up_to_the_whole(capacity):
    labels, scores, weights = random_case(9)
    parts = [BinaryMetrics(capacity) for _ in range(3)]
    whole, groups = BinaryMetrics(capacity), np.arange(len(labels)) % 7
    grouped = [GroupAuc() for _ in range(4)]
    whole.update(scores, labels)
    grouped[3].update(labels, scores, groups, weights)
    for r, part in enumerate(parts):
        part.update(scores[r::3], labels[r::3])
        grouped[r].update(labels[r::3], scores[r::3], groups[r::3], weights[r::3])
    merged, *others = [BinaryMetrics.from_bytes(part.to_bytes()) for part in parts]
    for other in others:
        merged.merge(other)
    assert merged.samples == whole.samples
    assert (merged.compute()["auc"], merged.auc_error) == (whole.compute()["auc"], whole.auc_error)
    assert merged.compute() == pytest.approx(whole.compute(), rel=1e-13)
    first, *rest = [GroupAuc.from_bytes(part.to_bytes()) for part in grouped[:3]]
    for other in rest:
        first.merge(other)
    assert first.compute() == pytest.approx(grouped[3].compute(), rel=1e-13)
    empty = BinaryMetrics.from_bytes(BinaryMetrics(capacity).to_bytes())
    merged.merge(empty)
    empty.merge(whole)
    assert empty.compute() == whole.compute()
