"""Walking LMDB's pages gives what LMDB gives."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_model import EDGES, ordered

from embcache.errors import CorruptStore, FormatVersion, SchemaMismatch
from embcache.tiers import basefile, merge_rows
from embcache.tiers.basefile import BaseFile, Snapshot


def _put(base: BaseFile, table: int, keys: np.ndarray, rows: np.ndarray | None) -> None:
    """Write rows, or delete (None)."""
    dead = np.full(len(keys), rows is None)
    if rows is None:
        rows = np.zeros((len(keys), base.row_bytes[table]), np.uint8)
    with base.writing() as txn:
        merge_rows.put(txn, base.tables[table], keys.view(np.uint64), rows, dead)


def _fill(snapshot: Snapshot, keys: np.ndarray, row_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    out, state = np.zeros((len(keys), row_bytes), np.uint8), np.zeros(len(keys), np.uint8)
    snapshot.fill(0, keys, state, out)
    return state, out


def _check(base: BaseFile, model: dict[int, np.ndarray], rng: np.random.Generator, row_bytes: int) -> None:
    with base.snapshot() as snapshot:
        assert snapshot.count(0) == len(model)
        keys = ordered(np.concatenate([list(model) or [1], EDGES, rng.integers(-(2**63), 2**63 - 1, 100)]))
        state, out = _fill(snapshot, keys, row_bytes)
        assert state.tolist() == [int(k in model) for k in keys.tolist()]
        assert all(np.array_equal(out[i], model[k]) for i, k in enumerate(keys.tolist()) if k in model)
        want, got, first = ordered(list(model)), [], 0
        while True:
            block, rows = np.empty(61, np.int64), np.empty((61, row_bytes), np.uint8)
            n = snapshot.walk(0, first, block, rows)
            got.extend(block[:n].tolist())
            assert all(np.array_equal(rows[i], model[k]) for i, k in enumerate(block[:n].tolist()))
            if n < 61 or block[60] == -1:  # the last key there is
                break
            first = int(block[n - 1 :].view(np.uint64)[0]) + 1
        assert got == want.tolist()


@pytest.mark.parametrize("walking", [True, False, "few"])
@pytest.mark.parametrize("row_bytes", [12, 64, 1002, 1024, 2022, 2030, 2048, 3072, 9000])
def test_random_data_with_deletions(
    tmp_path: Path, row_bytes: int, walking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = BaseFile.open(tmp_path, [row_bytes], create=True)
    assert base.walking
    base.walking = bool(walking)
    monkeypatch.setattr(basefile, "_FEW", 0 if walking == "few" else 10**9)
    rng, model = np.random.default_rng(row_bytes), dict[int, np.ndarray]()
    size = 1500 if row_bytes < 2000 and walking else 200
    _check(base, model, rng, row_bytes)
    for turn in range(6):
        keys = ordered(np.concatenate([rng.integers(-(2**63), 2**63 - 1, size), rng.integers(-500, 500, 100), EDGES]))
        rows = rng.integers(0, 256, (len(keys), row_bytes), dtype=np.uint8)
        _put(base, 0, keys, rows)
        model.update(zip(keys.tolist(), rows, strict=True))
        gone = ordered(rng.choice(list(model), len(model) * (2 if turn == 4 else 1) // 3, replace=False))
        _put(base, 0, gone, None)
        for key in gone.tolist():
            del model[key]
        _check(base, model, rng, row_bytes)
    gone = ordered(list(model))
    _put(base, 0, gone, None)
    _check(base, {}, rng, row_bytes)
    base.close()


def test_a_deep_tree(tmp_path: Path) -> None:
    base = BaseFile.open(tmp_path, [2000, 4], create=True)
    keys = np.arange(0, 54_000, 3, dtype=np.int64)
    rows = np.repeat(keys.view(np.uint8).reshape(-1, 8), 250, 1)
    with base.writing() as txn:  # descending, so that pages split in the middle: many of them
        for key, row in zip(keys[::-1], rows[::-1], strict=True):
            txn.put(key.tobytes(), row.tobytes(), db=base.tables[0])
    with base.env.begin() as txn:
        assert txn.stat(base.tables[0])["depth"] == 3
    with base.snapshot() as snapshot:
        asked = np.arange(54_000, dtype=np.int64)
        state, out = _fill(snapshot, asked, 2000)
        assert np.array_equal(state, asked % 3 == 0)
        assert np.array_equal(out[::3], rows)
        assert snapshot.count(1) == 0
    base.close()


def test_a_snapshot_does_not_move(tmp_path: Path) -> None:
    base = BaseFile.open(tmp_path, [64], create=True)
    keys = np.arange(2000)
    _put(base, 0, keys, np.zeros((2000, 64), np.uint8))
    held = base.snapshot()
    for turn in range(1, 8):
        _put(base, 0, keys, np.full((2000, 64), turn, np.uint8))
        more = np.arange(2000 * turn, 2000 * turn + 2000)
        _put(base, 0, more, np.full((2000, 64), turn, np.uint8))
    state, out = _fill(held, np.arange(4000), 64)
    assert state.tolist() == [1] * 2000 + [0] * 2000
    assert not out.any()
    held.close()
    with base.snapshot() as now:
        assert (_fill(now, keys, 64)[1] == 7).all()
        assert now.count(0) == 16_000
    base.close()


def test_damaged_pages_are_an_error_not_a_crash(tmp_path: Path) -> None:
    base = BaseFile.open(tmp_path, [64], create=True)
    keys = np.arange(20_000)
    _put(base, 0, keys, np.zeros((20_000, 64), np.uint8))
    with base.env.begin() as txn:
        root = struct.unpack("<IHHQQQQQ", txn.get(b"rows-0"))[7]
    base.close()
    data = bytearray((tmp_path / "data.mdb").read_bytes())
    data[root * 4096 + 16 + 2 * 5 + 400 :] = b"\xff" * (4096 - 426) + bytes(data[(root + 1) * 4096 :])
    (tmp_path / "data.mdb").write_bytes(data)
    base = BaseFile.open(tmp_path, [64], create=False)
    with base.snapshot() as snapshot, pytest.raises(CorruptStore, match="pages that LMDB does not write"):
        _fill(snapshot, keys, 64)
    base.close()


def test_foreign_truncated_and_newer_files(tmp_path: Path) -> None:
    base = BaseFile.open(tmp_path, [64], create=True)
    _put(base, 0, np.arange(20_000), np.zeros((20_000, 64), np.uint8))
    base.close()
    path = tmp_path / "data.mdb"
    good = path.read_bytes()
    for bad, error, what in (
        (good[:100], CorruptStore, "has 100 bytes"),
        (good[: len(good) // 2], CorruptStore, "truncated"),
        (b"x" * len(good), CorruptStore, "not an LMDB file"),
        (good[:20] + b"\x02" + good[21:], FormatVersion, "version 2"),
    ):
        path.write_bytes(bad)
        with pytest.raises(error, match=what):
            BaseFile.open(tmp_path, [64], create=True)
        assert path.read_bytes() == bad
    path.write_bytes(good)
    with pytest.raises(SchemaMismatch, match=r"saved '64', declared '128'"):
        BaseFile.open(tmp_path, [128], create=False)
    path.unlink()
    with pytest.raises(CorruptStore, match="is missing"):
        BaseFile.open(tmp_path, [64], create=False)


def test_an_lmdb_of_somebody_else(tmp_path: Path) -> None:
    import lmdb

    with lmdb.open(str(tmp_path), lib_version=0) as env, env.begin(write=True) as txn:
        txn.put(b"hello", b"world")
    with pytest.raises(CorruptStore, match="not a store of rows"):
        BaseFile.open(tmp_path, [64], create=True)


def test_a_process_opens_a_file_once(tmp_path: Path) -> None:
    a = BaseFile.open(tmp_path, [64], create=True)
    b = BaseFile.open(tmp_path, [64], create=False)
    assert a is b
    a.close()
    _put(b, 0, np.arange(3), np.zeros((3, 64), np.uint8))
    b.close()
    assert b.closed
    c = BaseFile.open(tmp_path, [64], create=False)
    assert c is not a
    c.close()
