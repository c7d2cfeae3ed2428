"""Exact ranks and the metrics made of them."""

import math

import pytest
import torch

from embcache.train.ranking import RankingMetrics, target_ranks


def test_ranks_by_hand_with_ties_against_the_model():
    scores = torch.tensor([[0.1, 0.5, 0.9], [0.5, 0.5, 0.5], [0.9, 0.5, 0.1]])
    assert target_ranks(scores, torch.tensor([1, 1, 0])).tolist() == [2, 3, 1]


def test_nan_counts_against_the_model():
    scores = torch.tensor([[math.nan, 0.5, 0.9], [math.nan, 0.5, 0.9]])
    assert target_ranks(scores, torch.tensor([0, 2])).tolist() == [3, 2]


def test_excluded_items_do_not_count_and_the_target_always_does():
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.6]])
    exclude = torch.tensor([[True, True, False, True]])
    assert target_ranks(scores, torch.tensor([3]), exclude).tolist() == [2]
    assert target_ranks(scores, torch.tensor([3])).tolist() == [4]


def test_rank_equals_the_place_in_a_sorted_list():
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(50, 200, generator=generator)
    targets = torch.randint(0, 200, (50,), generator=generator)
    place = (scores.argsort(1, descending=True) == targets.unsqueeze(1)).float().argmax(1) + 1
    assert torch.equal(target_ranks(scores, targets), place)


def test_bad_targets_name_position_and_range():
    with pytest.raises(IndexError, match=r"targets\[1\] = 7, valid range \[0, 3\)"):
        target_ranks(torch.zeros(2, 3), torch.tensor([0, 7]))
    with pytest.raises(ValueError, match="scores must be"):
        target_ranks(torch.zeros(2, 3), torch.tensor([0]))
    with pytest.raises(ValueError, match="exclude must be bool"):
        target_ranks(torch.zeros(1, 3), torch.tensor([0]), torch.zeros(1, 3))


def test_metrics_by_hand():
    meter = RankingMetrics(ks=(2, 5))
    meter.update(torch.tensor([1, 2]))
    meter.update(torch.tensor([4]))
    got = meter.compute()
    assert got["hr@2"] == pytest.approx(2 / 3)
    assert got["ndcg@2"] == pytest.approx((1 + 1 / math.log2(3)) / 3)
    assert got["hr@5"] == 1.0
    assert got["ndcg@5"] == pytest.approx((1 + 1 / math.log2(3) + 1 / math.log2(5)) / 3)
    assert got["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 4) / 3)


def test_merge_and_empty():
    a, b, whole = RankingMetrics(), RankingMetrics(), RankingMetrics()
    a.update(torch.tensor([3, 60]))
    b.update(torch.tensor([11]))
    whole.update(torch.tensor([3, 60, 11]))
    a.merge(b)
    assert a.compute() == whole.compute()
    assert all(math.isnan(v) for v in RankingMetrics().compute().values())
    with pytest.raises(ValueError, match="cannot merge"):
        a.merge(RankingMetrics(ks=(1,)))
    with pytest.raises(ValueError, match="count from 1"):
        a.update(torch.tensor([0]))
