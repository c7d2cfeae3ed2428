"""Short runs on rows of the real logs: they must read, learn something where there is enough, and say so."""

import math

import scripting
from scripting import SMALL

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
