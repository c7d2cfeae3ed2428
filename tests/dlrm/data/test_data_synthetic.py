"""The synthetic log: pure, long-tailed, learnable, and honest about the best there is."""

import gzip
import json

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from dlrm.data import Loader, SyntheticConfig, SyntheticLog, preprocess
from dlrm.data.synthetic import auc

SMALL = SyntheticConfig(rows=6000, tables=(1000, 50, 7, 1), n_dense=3, seed=4, valid=0.1)


def test_rows_are_pure_functions_of_config_and_row_number() -> None:
    one, two = SyntheticLog(SMALL), SyntheticLog(SyntheticConfig(**{**vars(SMALL), "rows": 10}))
    whole = one.block(np.arange(3000))
    mixed = np.random.default_rng(0).permutation(3000)[:500]
    for a, b in zip(two.block(mixed), whole, strict=True):
        assert np.array_equal(a, b[mixed])
    other = SyntheticLog(SyntheticConfig(**{**vars(SMALL), "seed": 5})).block(np.arange(3000))
    assert not np.array_equal(other.ids, whole.ids)


def test_text_is_the_same_for_any_number_of_threads_and_reads_back(tmp_path) -> None:
    log = SyntheticLog(SMALL)
    log.write(tmp_path / "a.tsv", threads=1)
    facts = log.write(tmp_path / "b.tsv.gz", threads=3)
    assert gzip.decompress((tmp_path / "b.tsv.gz").read_bytes()) == (tmp_path / "a.tsv").read_bytes()
    assert json.loads((tmp_path / "b.tsv.gz.json").read_text())["best"] == facts["best"]
    cache = preprocess(tmp_path / "a.tsv", tmp_path / "c", log.schema, "vocab:1", "last:0.1,0.1")
    block = log.block(np.arange(6000))
    assert np.array_equal(cache.labels, block.labels)
    straight = log.gather(np.arange(6000))
    assert np.array_equal(cache.dense, straight.dense.numpy())  # one transform for files and for the generator
    for f in range(4):
        # Text tokens and table rows are both one to one with the drawn ids.
        assert len(np.unique(block.ids[:, f])) == len(np.unique(cache.ids[:, f])) or f == 0
        direct = straight.sparse[f"C{f + 1}"].values().numpy()
        assert len(np.unique(np.stack([block.ids[:, f], direct]), axis=1).T) == len(np.unique(direct))
        assert direct.max() <= SMALL.tables[f]
    assert (block.ids[:, 2] == -1).mean() == pytest.approx(0.1, abs=0.02)


def test_ids_follow_the_power_law() -> None:
    n, alpha = 10_000, 1.05
    log = SyntheticLog(SyntheticConfig(rows=1, tables=(n,), n_dense=0, alpha=alpha, missing=0.0))
    ids = log.block(np.arange(200_000)).ids[:, 0]
    g = 1 - alpha
    for share in (0.001, 0.01, 0.1):
        want = ((share * n + 1) ** g - 1) / ((n + 1) ** g - 1)
        assert (ids < share * n).mean() == pytest.approx(want, abs=0.005)
    log = SyntheticLog(SyntheticConfig(rows=1, tables=(n,), n_dense=0, alpha=1.0, missing=0.0))
    assert (log.block(np.arange(100_000)).ids[:, 0] < 100).mean() == pytest.approx(
        np.log(101) / np.log(n + 1), abs=0.01
    )


def test_popularity_drifts() -> None:
    def hot(drift: float, start: int) -> set[int]:
        log = SyntheticLog(SyntheticConfig(rows=1, tables=(1000,), n_dense=0, drift=drift, missing=0.0))
        ids = log.block(np.arange(start, start + 20_000)).ids[:, 0]
        return set(np.argsort(-np.bincount(ids, minlength=1000))[:20].tolist())

    assert len(hot(0.0, 0) & hot(0.0, 1_000_000)) >= 18
    assert not hot(0.1, 0) & hot(0.1, 1_000_000)
    assert hot(0.1, 1_000_000) <= set(range(95, 145))


def test_click_rate_spread_and_best_metrics() -> None:
    log = SyntheticLog(SyntheticConfig(rows=60_000, click_rate=0.1, test=0.5))
    block = log.block(np.arange(60_000))
    assert block.labels.mean() == pytest.approx(0.1, abs=0.01)
    logits = np.log(block.probabilities / (1 - block.probabilities))
    assert logits.std() == pytest.approx(log.config.spread, rel=0.05)
    best, p, y = log.best("test"), block.probabilities[30_000:], block.labels[30_000:]
    assert best["auc"] == pytest.approx(roc_auc_score(y, p), abs=1e-12)
    assert best["log_loss"] == pytest.approx(log_loss(y, p), rel=1e-9)
    rate = y.mean(dtype=np.float64)
    assert best["click_rate"] == pytest.approx(rate)
    assert best["ne"] == pytest.approx(log_loss(y, p) / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)))
    # Calibrated: clicks in each tenth of the scores are as many as the probabilities say.
    for part in np.array_split(np.argsort(p), 10):
        assert y[part].sum() == pytest.approx(p[part].sum(), abs=5 * np.sqrt((p[part] * (1 - p[part])).sum()))


def test_auc_counts_ties_half_and_needs_both_classes() -> None:
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 20, 500).astype(float), rng.integers(0, 2, 500)
    assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert auc(np.zeros(10), np.arange(10) % 2) == 0.5
    assert np.isnan(auc(np.zeros(3), np.ones(3)))


def test_the_default_log_is_worth_a_model_and_needs_interactions() -> None:
    log = SyntheticLog(SyntheticConfig(rows=200_000))
    best = log.best("test")
    assert 0.75 < best["auc"] < 0.87
    block = log.block(np.arange(100_000))
    counts = np.bincount(block.ids[:, 0] + 1, minlength=100_001)
    assert (counts == 1).sum() > 5_000  # a long tail
    assert max(log.config.tables) >= 100_000
    without = log.model._replace(pair_effect=log.model.pair_effect * 0, curve=log.model.curve * 0)
    flat = SyntheticLog(log.config)
    flat.model = without
    linear = auc(flat.block(np.arange(100_000)).probabilities, block.labels)
    assert linear < best["auc"] - 0.01


def test_a_huge_declared_table_costs_nothing() -> None:
    log = SyntheticLog(SyntheticConfig(rows=10**12, tables=(10**10, 3), n_dense=1, alpha=0.9))
    batch = log.gather(np.array([0, 10**11, 10**12 - 1]))
    assert batch.sparse["C1"].values().max() > 2**31
    assert Loader(log, "train", 2048).get(3, 10**8).sparse.stride() == 2048


@pytest.mark.parametrize(
    "wrong", [{"rows": -1}, {"click_rate": 1.0}, {"tables": (0,)}, {"alpha": (1.0,)}, {"missing": 1.0}]
)
def test_wrong_configs_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match=r"expected|must be|values for"):
        SyntheticConfig(**wrong)
