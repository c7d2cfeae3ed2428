"""Rows on disk against a dictionary: generations, merges, readers, and everything that can go wrong with files."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import multiprocessing
import os
import pickle
import resource
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_model import TABLES, Model, moved, ordered, play

from embcache.errors import BadConfig, CorruptStore, ForkError, FormatVersion, NotSupported, StorageFull, StoreLocked
from embcache.lock import FolderLock
from embcache.tiers import merge, merge_rows, moving, overlay, segment
from embcache.tiers.lmdb import Lmdb, StaleDescription


def _open(path: Path, description: dict[str, Any] | None = None, **options: Any) -> Lmdb:
    tier = Lmdb(path, **options)
    tier.open(TABLES)
    try:
        tier.restore(description)
    except BaseException:
        tier.close()
        raise
    return tier


def _commit(tier: Lmdb, number: int, horizon: int | None = None) -> dict[str, Any]:
    description = json.loads(json.dumps(tier.freeze(number)))
    tier.sync()
    tier.sealed(number, number if horizon is None else horizon)
    return description


@pytest.mark.parametrize("child", [False, True])
def test_generations_come_back_bit_for_bit(tmp_path: Path, child: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "SMALL", 0 if child else 10**9)
    rng, model = np.random.default_rng(0), Model()
    tier = _open(tmp_path)
    model.check(tier)
    saved: dict[int, tuple[dict[str, Any], Model]] = {}
    for g in range(1, 8 if child else 22):
        play(tier, model, rng)
        model.check(tier)
        saved[g] = _commit(tier, g, horizon=max(1, g - 2)), model.copy()
        if g % 4 == 0:
            tier.merge()
            assert tier.info()["merged"] == g - 2
            model.check(tier)
        if g % 5 == 0:  # back two generations and forward again
            play(tier, model, rng)
            tier.restore(saved[g - 2][0])
            saved[g - 2][1].check(tier)
            tier.restore(saved[g][0])
            model = saved[g][1].copy()
            model.check(tier)
        if g % 3 == 0:  # what was written after the last generation is gone after reopening
            play(tier, Model(), rng)
            tier.close()
            tier = _open(tmp_path, saved[g][0])
            saved = {g: saved[g]}
            model.check(tier)
            tier.sealed(g, g)
            saved.update({g - 1: saved[g], g - 2: saved[g]})
    assert list(tier.verify()) == []
    tier.close()


def test_a_full_disk_in_the_middle_of_several_tables_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "_BUFFER", 4096)
    monkeypatch.setattr(segment, "_LARGEST", 1 << 14)  # so that rows go to several files, and their records in pieces
    monkeypatch.setattr(overlay, "_PART", 16)
    rng, model = np.random.default_rng(3), Model()
    tier = _open(tmp_path)
    play(tier, model, rng)
    parts = [moved(t, rng.permutation(400)[:150] - 100, rng) for t in range(len(TABLES))]
    real = os.pwrite
    for last in itertools.count(0, 7):
        calls = itertools.count()
        files = {path: path.stat().st_size for path in (tmp_path / "segments").iterdir()}

        def full(descriptor: int, data: memoryview, offset: int, last: int = last, calls: Any = calls) -> int:
            if next(calls) >= last:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(descriptor, data, offset)

        monkeypatch.setattr(os, "pwrite", full)
        try:
            tier.write_from(parts)
            break
        except StorageFull:
            assert not any(part.found.any() for part in parts)
        finally:
            monkeypatch.setattr(os, "pwrite", real)
        assert {path: path.stat().st_size for path in (tmp_path / "segments").iterdir()} == files
        model.check(tier)
    assert last > 100
    assert all(part.found.all() for part in parts)
    for part in parts:
        model.rows[part.table].update(zip(part.keys.tolist(), part.slab[part.slots], strict=True))
    model.check(tier)
    description = _commit(tier, 1, horizon=0)
    tier.close()
    tier = _open(tmp_path, description)
    model.check(tier)
    tier.close()


def test_a_description_outlives_merges_and_files_go(tmp_path: Path) -> None:
    rng, model = np.random.default_rng(1), Model()
    tier = _open(tmp_path)
    merged: list[int] = []
    tier.on_merged = lambda: merged.append(len(list((tmp_path / "segments").iterdir())))
    descriptions = []
    for g in range(1, 4):
        play(tier, model, rng)
        descriptions.append(_commit(tier, g, horizon=1))
    tier.sealed(3, 3)
    assert len(list((tmp_path / "segments").iterdir())) == 12
    tier.merge()
    assert merged == [12]  # called while the files are still there
    assert list((tmp_path / "segments").iterdir()) == []
    short = tier.trimmed(descriptions[2])
    assert (short["segments"], short["merged"]) == ([], 3)
    for description in (descriptions[2], short):
        tier.restore(description)
        model.check(tier)
    with pytest.raises(CorruptStore, match="generation 2 is asked for, but rows up to generation 3"):
        tier.restore(descriptions[1])
    model.check(tier)
    with pytest.raises(CorruptStore, match="generation 0 is asked for"):
        tier.restore(None)
    tier.close()


def test_a_generation_that_was_left_stays_until_nothing_names_it(tmp_path: Path) -> None:
    """Best at 2, latest at 4; going back to 2 and on to 5 keeps 4 readable until the horizon passes it."""
    rng, model = np.random.default_rng(2), Model()
    tier = _open(tmp_path)
    saved = {}
    for g in range(1, 5):
        play(tier, model, rng)
        saved[g] = _commit(tier, g, horizon=2), model.copy()
    tier.restore(saved[2][0])
    model = saved[2][1].copy()
    play(tier, model, rng)
    saved[5] = _commit(tier, 5, horizon=2), model.copy()
    tier.merge()
    tier.close()
    tier = Lmdb(tmp_path)
    tier.open(TABLES)
    tier.restore(saved[5][0], keep=[saved[2][0], saved[4][0]])
    for g in (5, 4, 2, 5):
        tier.restore(saved[g][0])
        saved[g][1].check(tier)
    tier.sealed(5, 5)
    tier.merge()
    saved[5][1].check(tier)
    with pytest.raises(CorruptStore):
        tier.restore(saved[4][0])
    assert list((tmp_path / "segments").iterdir()) == []
    tier.close()


@pytest.mark.parametrize("reopened", [False, True])
def test_a_best_generation_kept_for_long_does_not_fill_the_disk(tmp_path: Path, reopened: bool) -> None:
    rng, model = np.random.default_rng(20), Model()
    tier = _open(tmp_path, overlay_bytes=1)
    saved: dict[int, tuple[dict[str, Any], Model]] = {}
    for g in range(1, 36):
        play(tier, model, rng)
        saved[g] = json.loads(json.dumps(tier.freeze(g))), model.copy()
        tier.sync()
        kept = [2, g - 1, g] if g > 3 else list(range(1, g + 1))
        tier.sealed(g, kept[0], kept)
        if g % 2:
            tier.wait()
        if g % 7 == 0:
            if reopened:
                tier.close()
                tier = Lmdb(tmp_path, overlay_bytes=1)
                tier.open(TABLES)
                tier.restore(saved[g][0], keep=[saved[k][0] for k in kept[:-1]])
            model.check(tier)
            for k in kept:  # the descriptions are those of then, not rewritten after the folds
                tier.restore(saved[k][0] if g % 3 else tier.trimmed(saved[k][0]))
                saved[k][1].check(tier)
            changed = tier.changed_since(0, kept[1])
            assert changed is not None
            assert len(changed) > 100
            tier.sealed(g, kept[0], kept)
    tier.wait()
    assert reopened or tier.stats()["folds"] >= 4
    assert tier.info()["merged"] == 2
    live = sum(len(rows) * (16 + t.row_bytes) for rows, t in zip(model.rows, TABLES, strict=True))
    assert tier.stats()["overlay_bytes"] < 8 * live
    assert len(list((tmp_path / "segments").glob("*.rows"))) < 40
    tier.sealed(35, 35, [35])
    tier.merge()
    model.check(tier)
    assert not list((tmp_path / "segments").glob("*.rows"))
    tier.close()
    tier = _open(tmp_path, saved[35][0])
    model.check(tier)
    assert not list((tmp_path / "segments").iterdir())
    tier.close()


def test_freezing_again_after_a_commit_that_failed(tmp_path: Path) -> None:
    rng, model = np.random.default_rng(3), Model()
    tier = _open(tmp_path)
    play(tier, model, rng)
    tier.freeze(1)  # and then the disk was full
    play(tier, model, rng)
    description = _commit(tier, 1)
    tier.close()
    tier = _open(tmp_path, description)
    model.check(tier)
    tier.close()


def test_merging_beside_readers_and_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "SMALL", 200)
    tier = _open(tmp_path, overlay_bytes=1)  # every commit merges
    errors: list[BaseException] = []
    stop = threading.Event()
    keys, fixed = np.arange(0, 4000, 2), np.arange(1, 4000, 2)
    size = TABLES[0].row_bytes
    tier.write(0, fixed, np.full((len(fixed), size), 77, np.uint8))
    tier.write(0, keys, np.zeros((len(keys), size), np.uint8))

    def look() -> None:
        try:
            out = np.empty((4000, size), np.uint8)
            newest = 0
            while not stop.is_set():
                assert tier.read(0, np.arange(4000), out).all()
                assert (out[1::2] == 77).all()
                assert (out == out[:, :1]).all()
                assert out[:: len(out) // 2].min() >= newest  # never older than what was seen before
                newest = int(out[0::2].min())
                seen = sum(len(k) for k, _ in tier.scan(0, 999))
                assert seen == 4000 == tier.count(0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for g in range(1, 25):
        tier.write(0, keys, np.full((len(keys), size), g, np.uint8))
        _commit(tier, g)
        if g % 8 == 0:
            tier.wait()
    tier.wait()
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert tier.stats()["merges"] >= 3
    assert tier.stats()["merges_failed"] == 0
    tier.close()


def test_a_reader_sees_its_generation_and_no_other(tmp_path: Path) -> None:
    rng, model = np.random.default_rng(4), Model()
    tier = _open(tmp_path)
    play(tier, model, rng)
    first, then = _commit(tier, 1), model.copy()
    reader = tier.reader()
    reader.open(TABLES)
    reader.restore(first)
    for g in range(2, 5):
        play(tier, model, rng)
        last = _commit(tier, g)
        tier.merge()
        then.check(reader)
    with pytest.raises(NotSupported, match="readonly=True"):
        reader.write(0, np.arange(1), np.zeros((1, 64), np.uint8))
    with pytest.raises(NotSupported, match="while this process reads it"):
        tier.compact()
    with pytest.raises(StaleDescription):
        reader.restore(first)
    reader.restore(last)
    model.check(reader)
    tier.close()
    model.check(reader)
    assert list(reader.verify()) == []
    reader.close()


def test_a_reader_alone_writes_nothing(tmp_path: Path) -> None:
    rng, model = np.random.default_rng(5), Model()
    tier = _open(tmp_path)
    play(tier, model, rng)
    _commit(tier, 1)
    tier.merge()
    play(tier, model, rng)
    description = _commit(tier, 2)
    tier.close()
    names = ("data.mdb", "lock", "readers")
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for n in names if (p := tmp_path / n).exists()}
    reader = _open(tmp_path, description, readonly=True)
    model.check(reader)
    reader.close()
    assert before == {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in before}


def test_compacting(tmp_path: Path) -> None:
    rng, model = np.random.default_rng(6), Model()
    tier = _open(tmp_path)
    for g in range(1, 12):
        play(tier, model, rng, size=200)
        description = _commit(tier, g)
        tier.merge()
    before = (tmp_path / "data.mdb").stat().st_size
    tier.compact()
    assert (tmp_path / "data.mdb").stat().st_size < 0.8 * before
    model.check(tier)
    play(tier, model, rng)
    description = _commit(tier, 12)
    tier.merge()
    tier.close()
    tier = _open(tmp_path, description)
    model.check(tier)
    tier.close()


@pytest.mark.parametrize("merging", [False, True])
def test_keys_changed_since_a_generation(tmp_path: Path, merging: bool) -> None:
    rng = np.random.default_rng(7)
    tier = _open(tmp_path)
    changed: dict[int, set[int]] = {}
    for g in range(1, 9):
        keys = ordered(rng.integers(-50, 50, 12))
        if g != 4:
            tier.write(0, keys, np.zeros((len(keys), 64), np.uint8))
            tier.delete(0, keys[:3])
            changed[g] = set(keys.tolist())
        description = _commit(tier, g)
        if merging and g in (2, 5, 6):
            tier.merge()
    for _ in range(2):
        for since in range(9):
            got = tier.changed_since(0, since)
            assert got is not None
            want = set().union(*(changed.get(g, set()) for g in range(since + 1, 9)))
            assert np.array_equal(got, ordered(list(want)))
            assert tier.changed_since(1, since) is not None
        assert tier.changed_since(0, 9) is None
        tier.close()
        tier = _open(tmp_path, description)
    tier.close()


def test_lists_of_changed_keys_are_bounded(tmp_path: Path) -> None:
    tier = _open(tmp_path, changes_bytes=20_000)
    for g in range(1, 9):
        tier.write(0, np.arange(1000), np.zeros((1000, 64), np.uint8))
        _commit(tier, g)
        tier.merge()
    assert sum(p.stat().st_size for p in (tmp_path / "changes").iterdir()) <= 20_000
    assert tier.changed_since(0, 1) is None
    got = tier.changed_since(0, 6)
    assert got is not None
    assert len(got) == 1000
    tier.close()


def _run(function: Callable[..., None], queue: Any, arguments: tuple[Any, ...]) -> None:
    try:
        function(*arguments)
        queue.put("")
    except BaseException:
        queue.put(traceback.format_exc())


def _in_a_fork(function: Callable[..., None], *arguments: Any) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_run, args=(function, queue, arguments))
    child.start()
    trouble = queue.get(timeout=120)
    child.join()
    assert trouble == ""
    assert child.exitcode == 0


def test_the_second_writer_is_refused_by_name(tmp_path: Path) -> None:
    tier = _open(tmp_path)
    tier.close()

    def refused() -> None:
        with pytest.raises(StoreLocked, match=f"process {os.getppid()}"):
            _open(tmp_path)

    held = FolderLock.take(tmp_path)
    _in_a_fork(refused)
    del held
    tier = _open(tmp_path)
    with pytest.raises(StoreLocked, match=f"process {os.getpid()}"):  # nor twice in a process
        _open(tmp_path)
    tier.close()
    _open(tmp_path).close()


def test_a_forked_process_gets_an_error_and_does_no_harm(tmp_path: Path) -> None:
    rng, model = np.random.default_rng(8), Model()
    tier = _open(tmp_path)
    play(tier, model, rng)
    description = _commit(tier, 1)
    tier.merge()
    reader = tier.reader()
    reader.open(TABLES)
    reader.restore(description)
    then = model.copy()

    def use() -> None:
        for mine in (tier, reader):
            with pytest.raises(ForkError, match=f"opened by process {os.getppid()}.*readonly=True"):
                mine.read(0, np.arange(3), np.zeros((3, 64), np.uint8))
            mine.close()
        gc.collect()
        with pytest.raises(ForkError, match="spawn"):
            _open(tmp_path, description, readonly=True)

    _in_a_fork(use)
    for g in (2, 3, 4):  # the reader's pages are not reused although the child has let go of its copy
        play(tier, model, rng)
        _commit(tier, g)
        tier.merge()
        then.check(reader)
        model.check(tier)
    reader.close()
    tier.close()


def test_damaged_files_are_found_before_anything_changes(tmp_path: Path) -> None:
    rng, model = np.random.default_rng(9), Model()
    tier = _open(tmp_path)
    play(tier, model, rng)
    _commit(tier, 1)
    tier.merge()
    play(tier, model, rng)
    description = _commit(tier, 2)
    tier.close()
    segment = tmp_path / "segments" / description["segments"][2]["file"]
    good = segment.read_bytes()
    for bad in (good[:-1], good[:200] + bytes([good[200] ^ 1]) + good[201:], b"PAR1" + good[4:]):
        segment.write_bytes(bad)
        with pytest.raises(CorruptStore, match=segment.name):
            _open(tmp_path, description)
        assert segment.read_bytes() == bad
    segment.unlink()
    with pytest.raises(CorruptStore, match=f"{segment.name} is missing"):
        _open(tmp_path, description)
    segment.write_bytes(good)
    for wrong, error in (
        ({"format": "something"}, CorruptStore),
        ({**description, "version": 99}, FormatVersion),
        ({**description, "segments": [{"file": "../lock"}]}, CorruptStore),
        ({**description, "merged": 2}, CorruptStore),
        ({**description, "segments": [{**description["segments"][0], "table": 9}]}, CorruptStore),
        ({**description, "segments": [{**description["segments"][0], "file": "../x"}]}, CorruptStore),
    ):
        with pytest.raises(error):
            _open(tmp_path, wrong)
    tier = _open(tmp_path, description)
    model.check(tier)
    tier.close()
    (tmp_path / "data.mdb").unlink()
    with pytest.raises(CorruptStore, match=r"data.mdb holds generation 0, the manifest expects 1"):
        _open(tmp_path, description)


def test_verify_names_what_is_damaged(tmp_path: Path) -> None:
    rng, model = np.random.default_rng(10), Model()
    tier = _open(tmp_path)
    play(tier, model, rng)
    description = _commit(tier, 1)
    assert list(tier.verify()) == []
    path = tmp_path / "segments" / description["segments"][0]["file"]
    with path.open("r+b") as file:
        file.seek(100)
        byte = file.read(1)
        file.seek(100)
        file.write(bytes([byte[0] ^ 4]))
    assert [path.name in line for line in tier.verify()] == [True]
    tier.close()


def _write_and_sync(tier: Lmdb) -> None:
    tier.write(3, np.arange(5), np.zeros((5, 256), np.uint8))
    tier.freeze(1)
    tier.sync()


def test_a_full_disk_while_rows_are_written_and_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, model = np.random.default_rng(11), Model()
    tier = _open(tmp_path)
    play(tier, model, rng)

    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("pwrite", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuse)
            with pytest.raises(StorageFull):
                _write_and_sync(tier)
        if name == "fsync":
            for k in range(5):
                model.rows[3][k] = np.zeros(256, np.uint8)
        model.check(tier)
    description = _commit(tier, 1)
    tier.close()
    tier = _open(tmp_path, description)
    model.check(tier)
    tier.close()


def _fill_up(path: Path, small: int) -> None:
    merge.SMALL = small
    tier, rng, model = _open(path), np.random.default_rng(0), Model()
    play(tier, model, rng)
    _commit(tier, 1)
    tier.merge()
    play(tier, model, rng, size=400)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((path / "data.mdb").stat().st_size + 8192, limit[1]))
    _commit(tier, 2)
    with pytest.raises(StorageFull, match=r"data\.mdb"):
        tier.merge()
    model.check(tier)
    play(tier, model, rng)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    tier.merge()
    model.check(tier)
    description = _commit(tier, 3)
    tier.close()
    tier = _open(path, description)
    model.check(tier)
    assert list(tier.verify()) == []
    tier.close()


@pytest.mark.parametrize("small", [0, 10**9])
def test_a_full_disk_while_merging(tmp_path: Path, small: int) -> None:
    _in_a_fork(_fill_up, tmp_path, small)


def _limit(path: Path) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for more, works in ((32 << 30, True), (1 << 30, False)):
        resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))
        if works:
            tier, model = _open(path), Model()
            play(tier, model, np.random.default_rng(0))
            _commit(tier, 1)
            tier.merge()
            model.check(tier)
            tier.close()
        else:
            with pytest.raises(BadConfig, match=rf"RLIMIT_AS, ulimit -v\) is {used + more:,} bytes"):
                _open(path / "other")


def test_limited_address_space_is_named(tmp_path: Path) -> None:
    _in_a_fork(_limit, tmp_path)


def test_a_writer_that_lost_the_store_merges_no_more(tmp_path: Path) -> None:
    """A child that outlives its parent for a moment must not write over what the next writer has merged."""
    rng, model = np.random.default_rng(12), Model()
    tier = _open(tmp_path)
    play(tier, model, rng)
    _commit(tier, 1)
    merger = tier._merger
    assert merger is not None
    merger.base.claim()
    with pytest.raises(merge.MergeFailed, match="another process owns the store"):
        tier.merge()
    with pytest.warns(UserWarning, match="the last merge failed"):
        tier.sealed(1, 1)
    model.check(tier)
    tier.close()


def test_a_failed_merge_leaves_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, model = np.random.default_rng(13), Model()
    tier = _open(tmp_path)
    play(tier, model, rng)
    description = _commit(tier, 1)
    real, calls = merge_rows.put, []

    def fails_on_the_third(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise merge_rows.lmdb.MapFullError("mdb_put: MDB_MAP_FULL: Environment mapsize limit reached")
        real(*arguments)

    monkeypatch.setattr(merge_rows, "put", fails_on_the_third)
    with pytest.raises(StorageFull):
        tier.merge()
    model.check(tier)
    tier.close()
    tier = _open(tmp_path, description)  # a merge that ended in the middle is repeated whole
    model.check(tier)
    tier.sealed(1, 1)
    tier.merge()
    assert tier.info()["merged"] == 1
    model.check(tier)
    tier.close()


def test_small_things(tmp_path: Path) -> None:
    for bad in ({"overlay_bytes": 0}, {"changes_bytes": 1.5}):
        with pytest.raises(BadConfig):
            Lmdb(tmp_path, **bad)  # type: ignore[arg-type]
    tier = _open(tmp_path / "s", overlay_bytes=12345)
    assert (tier.fresh().overlay_bytes, tier.fresh().folder, tier.reader().readonly) == (12345, tier.folder, True)
    copied = pickle.loads(pickle.dumps(tier))
    assert (copied.folder, copied.overlay_bytes, copied.readonly) == (tier.folder, 12345, False)
    with pytest.raises(BadConfig, match="already serves"):
        tier.open(TABLES)
    none = np.zeros(0, np.int64)
    assert tier.read(0, none, np.zeros((0, 64), np.uint8)).tolist() == []
    tier.write(0, none, np.zeros((0, 64), np.uint8))
    tier.delete(0, none)
    tier.offer(0, none, np.zeros((0, 64), np.uint8))
    tier.delete(0, np.arange(5))
    assert tier.info()["overlay_keys"][0] == 0
    assert list(tier.scan(0, 10)) == []
    tier.close()
    tier.close()
    with pytest.raises(RuntimeError, match="is closed"):
        tier.count(0)
