"""The folder format: round trip, and typed errors for what is foreign, torn, altered or newer."""

import json

import numpy as np
import pytest
from data_logs import bag_csv, small_log
from test_data_loader import numbered

from dlrm.data import CacheVersion, ColumnCache, CorruptCache, preprocess
from dlrm.data.cache import _checksum


def test_save_and_open_round_trip(tmp_path) -> None:
    cache = numbered()
    cache.info = {"note": 1}
    opened = cache.save(tmp_path / "c")
    for name in ("dense", "labels", "ids"):
        assert np.array_equal(getattr(opened, name), getattr(cache, name))
        assert isinstance(getattr(opened, name), np.memmap)
    assert opened.splits["train"] == range(0, 103)
    assert np.array_equal(opened.splits["test"], cache.splits["test"])
    assert (opened.schema, opened.num_embeddings, opened.info) == (cache.schema, cache.num_embeddings, cache.info)
    assert (opened.rows, opened.n_dense, opened.features) == (103, 2, ("u", "v", "w"))
    assert opened.tables == {"u": "u", "v": "v", "w": "w"}
    with pytest.raises(FileExistsError):
        cache.save(tmp_path / "c")


def test_save_gives_the_bytes_that_preprocessing_gives(tmp_path) -> None:
    for name, (path, schema, *_) in (("bags", bag_csv(tmp_path)), ("small", small_log(tmp_path))):
        cache = preprocess(path, tmp_path / name, schema, "vocab:2", "random:0.1,0.1,1")
        cache.save(tmp_path / f"{name}_again")
        for p in (tmp_path / name).iterdir():
            assert p.read_bytes() == (tmp_path / f"{name}_again" / p.name).read_bytes()


def test_foreign_torn_altered_and_newer(tmp_path) -> None:
    (tmp_path / "c").mkdir()
    with pytest.raises(CorruptCache, match=r"no manifest.json; not a column cache, or preprocessing did not finish"):
        ColumnCache.open(tmp_path / "c")
    with pytest.raises(CorruptCache, match="no manifest"):
        ColumnCache.open(tmp_path / "nowhere")
    manifest = tmp_path / "c" / "manifest.json"
    for text, message in (
        ("{", "not a manifest"),
        ("[]", "not a manifest"),
        ('{"format": "parquet"}', "format 'parquet'"),
        ('{"format": "dlrm-column-cache"}', "not a manifest"),
    ):
        manifest.write_text(text)
        with pytest.raises(CorruptCache, match=message):
            ColumnCache.open(tmp_path / "c")
    good = numbered().save(tmp_path / "d").path
    manifest = good / "manifest.json"
    body = json.loads(manifest.read_bytes())
    manifest.write_text(json.dumps({**body, "num_embeddings": {"u": 1}}))
    with pytest.raises(CorruptCache, match="checksum does not match"):
        ColumnCache.open(good)
    newer = {k: v for k, v in body.items() if k != "checksum"} | {"version": 2}
    manifest.write_text(json.dumps(newer | {"checksum": _checksum(newer)}))
    with pytest.raises(CacheVersion, match="format version 2, this code reads up to 1"):
        ColumnCache.open(good)
    manifest.write_text(json.dumps(body))
    data = (good / "ids.bin").read_bytes()
    (good / "ids.bin").write_bytes(data[:-4])
    with pytest.raises(CorruptCache, match=r"ids\.bin: 1232 bytes, expected 1236 bytes"):
        ColumnCache.open(good)
    (good / "ids.bin").write_bytes(data[:-1] + b"\x7f")
    ColumnCache.open(good)
    with pytest.raises(CorruptCache, match=r"ids\.bin: checksum does not match"):
        ColumnCache.open(good, verify=True)
    (good / "ids.bin").unlink()
    with pytest.raises(CorruptCache, match=r"ids\.bin: missing"):
        ColumnCache.open(good)
