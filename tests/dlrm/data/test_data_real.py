"""The real Criteo and Avazu rows, and a table of a user's own."""

import gzip

import numpy as np
import pyarrow.parquet as pq
import pytest
from data_logs import dense_oracle, ids_oracle, read_columns, vocabulary_oracle

from dlrm.data import Categorical, Dense, Label, Limits, Loader, MalformedRow, Schema, Time, preprocess


def test_criteo_terabyte_sample(real_data, tmp_path) -> None:
    path = real_data / "criteo" / "terabyte_80k.tsv.gz"
    cache = preprocess(path, tmp_path / "c", "criteo", "vocab:2", "last:0.2")
    assert cache.rows == 80_000
    assert cache.labels.sum() == 2573
    assert cache.labels[-16_000:].sum() == 541
    assert cache.splits == {"train": range(0, 64_000), "test": range(64_000, 80_000)}
    columns, schema = read_columns(path, cache.schema), cache.schema
    for k, d in enumerate(schema.dense):
        assert np.array_equal(cache.dense[:, k], dense_oracle(columns[d.column]))
    for k, name in enumerate(schema.features):
        rows = vocabulary_oracle(columns[name], range(64_000), 2)
        assert np.array_equal(cache.ids[:, k], ids_oracle(columns[name], rows))
    assert (cache.ids[:, 0] == 1).sum() == 3265  # C1 is missing in 3,265 rows
    assert len(next(iter(Loader(cache, "train", 2048, shuffle=True)))) == 2048


def test_criteo_kaggle_and_avazu_heads(real_data, tmp_path) -> None:
    kaggle = preprocess(real_data / "criteo" / "kaggle_10k.txt", tmp_path / "k", "criteo", "vocab:1", "last:0.2")
    columns = read_columns(real_data / "criteo" / "kaggle_10k.txt", kaggle.schema)
    assert kaggle.rows == 10_000
    assert kaggle.labels.mean(dtype=np.float64) == np.mean([int(x) for x in columns["label"]])
    negative = np.array([x == "-2" or x == "-1" for x in columns["I2"]])
    assert negative.any()
    assert (kaggle.dense[negative, 1] == 0).all()
    avazu = preprocess(real_data / "avazu" / "train_10k.csv", tmp_path / "a", "avazu", "vocab:1", "random:0,0.2,0")
    assert (avazu.rows, avazu.n_dense, len(avazu.features)) == (9_999, 2, 23)
    columns = read_columns(real_data / "avazu" / "train_10k.csv", avazu.schema)
    train = np.asarray(avazu.splits["train"])
    for k, (name, base) in enumerate((("C1", 10), ("banner_pos", 10), ("site_id", 16), ("site_domain", 16))):
        seen = [columns[name][i] for i in train]
        rows = vocabulary_oracle(seen, range(len(seen)), 1, base)
        assert np.array_equal(avazu.ids[:, k], ids_oracle(columns[name], rows))
    c20 = avazu.features.index("C20")
    assert "-1" in columns["C20"]  # a decimal id may be negative: it is a value, not a missing one
    assert (avazu.ids[:, c20] != 1).all()
    assert np.allclose(avazu.dense, [0.0, 1.0])  # all of it was logged in the hour after midnight


def test_plain_text_of_the_sample_gives_the_same_bytes(real_data, tmp_path) -> None:
    packed = real_data / "criteo" / "terabyte_80k.tsv.gz"
    with gzip.open(packed) as f:
        (tmp_path / "plain.tsv").write_bytes(f.read())
    a = preprocess(packed, tmp_path / "a", "criteo", "hash:5000", limits=Limits(chunk_bytes=3_000_000))
    b = preprocess(tmp_path / "plain.tsv", tmp_path / "b", "criteo", "hash:5000")
    for name in ("dense", "ids", "labels"):
        assert (tmp_path / "a" / f"{name}.bin").read_bytes() == (tmp_path / "b" / f"{name}.bin").read_bytes()
    assert a.num_embeddings == b.num_embeddings == {f"C{i}": 5000 for i in range(1, 27)}


def test_tables_of_ones_own(real_data, tmp_path) -> None:
    taobao = Schema(
        Label("behaviour", positive=("buy", "cart", "fav")),
        (),
        (Categorical("user", "decimal"), Categorical("item", "decimal"), Categorical("category", "decimal")),
        Time("time", "unix", categorical=("hour_of_day", "weekday")),
        header=False,
        columns=("user", "item", "category", "behaviour", "time"),
    )
    source = real_data / "taobao" / "UserBehavior.csv"
    with pytest.raises(MalformedRow, match=r"line 84476: expected 5 columns, found 4"):  # the sample ends within a line
        preprocess(source, tmp_path / "t", taobao, "vocab:1", "time:1")
    whole = tmp_path / "whole.csv"
    whole.write_bytes(source.read_bytes().rsplit(b"\n", 1)[0])
    cache = preprocess(whole, tmp_path / "w", taobao, "vocab:1", "time:1")
    columns = read_columns(whole, taobao)
    assert cache.rows == 84_475
    assert cache.labels.sum() == sum(b != "pv" for b in columns["behaviour"])
    days = np.array([int(t) // 86400 for t in columns["time"]])
    assert np.array_equal(np.asarray(cache.splits["test"]), np.flatnonzero(days == days.max()))
    assert cache.num_embeddings["hour_of_day"] == 26
    movies = Schema(Label("rating", threshold=4), (Dense("rank_in_user"),),
                    (Categorical("user", "decimal"), Categorical("movie", "decimal")), Time("ts_approx"))  # fmt: skip
    source = real_data / "ml-1m" / "ml1m_full.parquet"
    cache = preprocess(source, tmp_path / "m", movies, "raw", "random:0.1,0.1,3")
    table = pq.read_table(source)
    assert cache.rows == 1_000_209
    assert np.array_equal(cache.ids[:, 0], table["user"].to_numpy())
    assert cache.labels.sum() == (table["rating"].to_numpy() >= 4).sum()
    assert np.array_equal(cache.dense[:, 0], np.log1p(table["rank_in_user"].to_numpy().astype("f8")).astype("f4"))
    assert len(cache.splits["test"]) == pytest.approx(100_021, rel=0.02)
