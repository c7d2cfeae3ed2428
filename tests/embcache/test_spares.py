"""Files of segments that are written over: what they held before is never seen, and they are in nobody's way."""

from __future__ import annotations

import errno
import gc
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_model import TABLES, Model, play

from embcache.errors import CorruptStore, StorageFull
from embcache.tiers import spares as spares_module
from embcache.tiers.compact import ReaderLock
from embcache.tiers.lmdb import Lmdb
from embcache.tiers.segment import Segment
from embcache.tiers.spares import Spares


def _open(path: Path, description: dict[str, Any] | None = None, **options: Any) -> Lmdb:
    tier = Lmdb(path, **options)
    tier.open(TABLES)
    tier.restore(description)
    return tier


def _commit(tier: Lmdb, number: int) -> dict[str, Any]:
    description = json.loads(json.dumps(tier.freeze(number)))
    tier.sync()
    tier.sealed(number, number)
    tier.wait()
    return description


def _merged(tier: Lmdb, model: Model, number: int, size: int = 60) -> dict[str, Any]:
    play(tier, model, np.random.default_rng(number), size)
    description = _commit(tier, number)
    tier.merge()
    gc.collect()
    return description


def _inodes(folder: Path) -> set[int]:
    return {path.stat().st_ino for path in folder.iterdir()} if folder.exists() else set()


def _rows(n: int, row_bytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, row_bytes), dtype=np.uint8)


@pytest.mark.parametrize(("table", "row_bytes"), [(3, 64), (3, 16), (1, 64), (1, 12), (0, 3072)])
def test_records_behind_those_that_count_are_not_seen(tmp_path: Path, table: int, row_bytes: int) -> None:
    """Not in what runs, not after a crash before the file was cut, whatever was in it."""
    ReaderLock.make(tmp_path)
    spares = Spares(tmp_path)
    old = Segment.create(tmp_path / "old", 3, 64, 0, 500)
    old.count(500, old.append(np.arange(500), _rows(500, 64, 0)))
    old.generation = 1
    old.sync()
    size = (tmp_path / "old").stat().st_size
    spares.give([old])
    assert spares.nbytes == size
    assert spares.take(tmp_path / "early", table) == -1  # the old one can still be read
    del old
    new = Segment.create(tmp_path / "new", table, row_bytes, 0, 500, spares)
    assert spares.nbytes == 0
    assert (tmp_path / "new").stat().st_size == size
    keys, rows = np.arange(1000, 1010), _rows(10, row_bytes, 1)
    new.count(6, new.append(keys[:6], rows[:6]))
    new.append(keys[6:], rows[6:])  # never counted
    new.generation = 2
    told = new.describe()
    assert Segment.load(tmp_path, told, row_bytes, 0).keys()[0].tolist() == keys[:6].tolist()
    for more in (7, 8, 400):
        if 64 + more * new.stride > (tmp_path / "new").stat().st_size:
            continue
        with pytest.raises(CorruptStore):
            Segment.load(tmp_path, {**told, "records": more}, row_bytes, 0)
    new.sync()
    again = Segment.load(tmp_path, told, row_bytes, 0)
    assert again.keys()[0].tolist() == keys[:6].tolist()
    assert (tmp_path / "new").stat().st_size == 64 + 6 * new.stride


def test_merged_segments_are_written_over(tmp_path: Path) -> None:
    tier, model = _open(tmp_path), Model()
    _merged(tier, model, 1)
    kept = _inodes(tmp_path / "spare")
    assert len(kept) == len(TABLES)
    assert tier.stats()["spare_bytes"] == sum(path.stat().st_size for path in (tmp_path / "spare").iterdir()) > 0
    description = None
    for number in range(2, 6):
        play(tier, model, np.random.default_rng(number), size=40)
        assert _inodes(tmp_path / "segments") == kept
        assert tier.stats()["spare_bytes"] == 0
        model.check(tier)
        description = _commit(tier, number)
        model.check(tier)
        tier.merge()
        gc.collect()
        assert _inodes(tmp_path / "spare") == kept
    tier.close()
    assert not (tmp_path / "spare").exists()
    tier = _open(tmp_path, description)
    model.check(tier)
    tier.close()


def test_what_a_killed_writer_kept_is_removed(tmp_path: Path) -> None:
    tier, model = _open(tmp_path), Model()
    description = _merged(tier, model, 1)
    tier.close()
    (tmp_path / "spare").mkdir()
    (tmp_path / "spare" / "000000").write_bytes(b"x" * 100)
    reader = _open(tmp_path, description, readonly=True)
    assert reader.stats()["spare_bytes"] == 100
    reader.close()
    tier = _open(tmp_path, description)
    assert tier.stats()["spare_bytes"] == 0
    model.check(tier)
    tier.close()


def test_a_reader_and_a_scan_keep_what_they_look_at(tmp_path: Path) -> None:
    tier, model = _open(tmp_path), Model()
    play(tier, model, np.random.default_rng(1))
    description = _commit(tier, 1)
    seen = model.copy()
    scan = tier.scan(0, 7)
    first = next(scan)
    tier.merge()
    assert tier.stats()["spare_bytes"] > 0
    for number in range(2, 5):
        _merged(tier, model, number)
    blocks = [first, *scan]
    assert {k: r.tobytes() for keys, rows in blocks for k, r in zip(keys.tolist(), rows, strict=True)} == {
        k: r.tobytes() for k, r in seen.rows[0].items()
    }
    play(tier, model, np.random.default_rng(5))
    description = _commit(tier, 5)
    reader, seen = _open(tmp_path, description, readonly=True), model.copy()
    tier.merge()
    for number in range(6, 9):
        _merged(tier, model, number)
    seen.check(reader)
    model.check(tier)
    before = _inodes(tmp_path / "spare")
    _merged(tier, model, 9)
    assert _inodes(tmp_path / "spare") <= before  # nothing new was kept beside a reader
    reader.close()
    del reader
    gc.collect()
    _merged(tier, model, 10)
    assert len(_inodes(tmp_path / "spare")) >= len(TABLES)
    tier.close()


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_full_disk_gets_them_back(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, model = _open(tmp_path), Model()
    for number in (1, 2):
        play(tier, model, np.random.default_rng(number))
        _commit(tier, number)
    tier.merge()
    gc.collect()
    assert len(_inodes(tmp_path / "spare")) == 2 * len(TABLES)
    real = getattr(os, call)

    def full(*arguments: Any) -> Any:
        if _inodes(tmp_path / "spare"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    play(tier, model, np.random.default_rng(3))
    monkeypatch.setattr(os, call, full)
    play(tier, model, np.random.default_rng(4))
    description = _commit(tier, 3)
    monkeypatch.undo()
    assert tier.stats()["spare_bytes"] == 0
    model.check(tier)
    tier.close()
    tier = _open(tmp_path, description)
    model.check(tier)

    def always(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", always)
    with pytest.raises(StorageFull):
        tier.write(0, np.arange(3), np.zeros((3, TABLES[0].row_bytes), np.uint8))
    monkeypatch.undo()
    model.check(tier)
    tier.close()


def test_a_merge_without_room_gives_them_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, model = _open(tmp_path), Model()
    _merged(tier, model, 1)
    play(tier, model, np.random.default_rng(2), size=10)
    tier._spares.give([])
    (tmp_path / "spare").mkdir(exist_ok=True)
    description = _commit(tier, 2)
    kept = Segment.create(tmp_path / "segments" / "more.rows", 0, TABLES[0].row_bytes, 0, 10)
    kept.sync()
    tier._spares.give([kept])
    assert tier.stats()["spare_bytes"] > 0

    def full(*_: Any) -> Any:
        raise StorageFull(None, 0, "there")

    monkeypatch.setattr("embcache.tiers.merge.run_merge", full)
    with pytest.raises(StorageFull):
        tier.merge()
    monkeypatch.undo()
    assert tier.stats()["spare_bytes"] == 0
    tier.merge()
    model.check(tier)
    tier.restore(description)
    model.check(tier)
    tier.close()


def test_they_take_no_more_than_they_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, model = _open(tmp_path), Model()
    monkeypatch.setattr(spares_module, "LIMIT", 150_000)
    for number in range(1, 4):
        play(tier, model, np.random.default_rng(number), size=150)
        _commit(tier, number)
    tier.merge()
    assert 0 < tier.stats()["spare_bytes"] <= 150_000
    usage = type("Usage", (), {"free": 8 * 20_000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    _commit(tier, 4)
    assert tier.stats()["spare_bytes"] <= 20_000
    model.check(tier)
    tier.close()


def test_a_lock_ends_though_a_forked_process_has_its_descriptor(tmp_path: Path) -> None:
    ReaderLock.make(tmp_path)
    lock = ReaderLock(tmp_path, alone=True)
    copy = os.dup(lock._descriptor)  # as a fork in the middle of opening it leaves one
    with pytest.raises(BlockingIOError):
        ReaderLock(tmp_path, alone=True)
    lock.release()
    ReaderLock(tmp_path, alone=True).release()
    os.close(copy)
