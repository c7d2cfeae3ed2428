"""Short runs on rows of the real logs: they must read, learn something where there is enough, and say so."""

import math

import scripting
from scripting import SMALL

import embcache as ec

script = scripting.script  # a fixture

DLRM = ["--bottom-mlp", "32,8", "--top-mlp", "32"]


def test_criteo_terabyte(script, real_data, tmp_path):
    data = real_data / "criteo" / "terabyte_80k.tsv.gz"
    size = ["--global-batch-size", 1024]
    flags = ["--data", data, "--split", "last:0,0.2", "--lr", 0.02, *SMALL, *size, *DLRM, "--out", tmp_path]
    _, last = script("train_criteo", *flags)
    assert last["auc"] > 0.66
    assert last["ne"] < 1.0


def test_criteo_kaggle(script, real_data, tmp_path):
    data = real_data / "criteo" / "kaggle_10k.txt"
    flags = ["--data", data, "--split", "last:0.1,0.2", "--lr", 0.02, *SMALL, *DLRM, "--out", tmp_path]
    _, last = script("train_criteo", *flags)
    assert last["auc"] > 0.6


def test_avazu(script, real_data, tmp_path):
    data = real_data / "avazu" / "train_10k.csv"
    flags = ["--data", data, "--split", "last:0.1,0.2", "--lr", 0.02, *SMALL, *DLRM, "--out", tmp_path]
    _, last = script("train_avazu", *flags)
    assert last["auc"] > 0.55
    assert math.isfinite(last["logloss"])


def test_criteo_terabyte_with_raw_ids_on_disk(script, real_data, tmp_path):
    """Unbounded tables over a cache of a twentieth of their rows end in the bits of those in memory."""
    data = real_data / "criteo" / "terabyte_80k.tsv.gz"
    flags = ["--data", data, "--columns", tmp_path / "columns", "--ids", "raw", "--split", "last:0,0.2", "--lr", 0.02]
    flags += [*SMALL, *DLRM, "--global-batch-size", 1024]
    _, plain = script("train_criteo", *flags, "--out", tmp_path / "plain")
    cache = ["--tiers", "ram,lmdb", "--cache-rows", 157_091 // 26 // 20]
    _, last = script("train_criteo", *flags, *cache, "--out", tmp_path / "cached")
    assert last == plain
    assert last["auc"] > 0.64
    with ec.EmbeddingStore.open(tmp_path / "cached" / "store", readonly=True) as store:
        assert sum(map(store.count_written, store.names)) == 157_091
