"""Records that check themselves, the files they are in, and the overlay that finds them."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from embcache.errors import CorruptStore, FormatVersion, StorageFull
from embcache.kernels import segments
from embcache.tiers import overlay as overlay_module
from embcache.tiers import segment as segment_module
from embcache.tiers.overlay import Overlay
from embcache.tiers.segment import FIRST, Segment


def _rows(n: int, row_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, row_bytes), dtype=np.uint8)


def _written(path: Path, keys: np.ndarray, rows: np.ndarray, table: int = 3) -> Segment:
    new = Segment.create(path, table, rows.shape[1], 0, len(keys))
    new.count(len(keys), new.append(keys, rows))
    new.generation = 1
    new.sync()
    return new


def _overlay(folder: Path, row_bytes: int = 24) -> Overlay:
    numbers = itertools.count()
    return Overlay(0, row_bytes, lambda: folder / f"{next(numbers)}.rows")


def _read(overlay: Overlay, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ordinals, view = overlay.look(keys)
    out = np.zeros((len(keys), overlay.row_bytes), np.uint8)
    state, _ = overlay.fill(ordinals, view, out)
    return state, out


@pytest.mark.parametrize("row_bytes", [1, 4, 12, 64, 100, 256, 3072])
def test_records_give_back_what_was_written(tmp_path: Path, row_bytes: int) -> None:
    keys = np.array([5, -(2**63), 2**63 - 1, 0], dtype=np.int64)
    rows = _rows(4, row_bytes)
    new = _written(tmp_path / "s", keys, rows)
    again = Segment.load(tmp_path, new.describe(), row_bytes, 0)
    found, dead = again.keys()
    assert np.array_equal(found, keys)
    assert not dead.any()
    out, state = np.zeros((4, row_bytes), np.uint8), np.zeros(4, np.uint8)
    starts, addresses = np.zeros(1, np.int64), np.array([again.first])
    order = np.array([2, -1, 0, 3], np.int32)
    assert segments.gather(order, starts, addresses, row_bytes, out.ctypes.data, np.empty(0, np.int32), state) == 3
    assert state.tolist() == [1, 0, 1, 1]
    assert np.array_equal(out[[0, 2, 3]], rows[[2, 0, 3]])
    assert not out[1].any()


@pytest.mark.parametrize("row_bytes", [12, 64, 100])
def test_every_altered_byte_is_found(tmp_path: Path, row_bytes: int) -> None:
    path = tmp_path / "s"
    new = _written(path, np.arange(3), _rows(3, row_bytes))
    good = path.read_bytes()
    description = new.describe()
    for at in range(FIRST, len(good)):
        for bit in (0, 7):
            bad = bytearray(good)
            bad[at] ^= 1 << bit
            path.write_bytes(bad)
            with pytest.raises(CorruptStore, match="torn or altered"):
                Segment.load(tmp_path, description, row_bytes, 0)
    path.write_bytes(good)
    Segment.load(tmp_path, description, row_bytes, 0)


def test_swapped_records_of_another_generation_are_found(tmp_path: Path) -> None:
    a, b = (_written(tmp_path / n, np.arange(3), _rows(3, 16, seed)) for seed, n in enumerate("ab"))
    (tmp_path / "a").write_bytes((tmp_path / "b").read_bytes())
    with pytest.raises(CorruptStore, match="other records"):
        Segment.load(tmp_path, a.describe(), 16, 0)
    Segment.load(tmp_path, b.describe(), 16, 0)


def test_foreign_torn_and_newer_files(tmp_path: Path) -> None:
    path = tmp_path / "s"
    told = _written(path, np.arange(5), _rows(5, 16)).describe()
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    with pytest.raises(CorruptStore, match="has 223 bytes, 224 were written"):
        Segment.load(tmp_path, told, 16, 0)
    path.write_bytes(b"PAR1" + good[4:])
    with pytest.raises(CorruptStore, match="is not a segment"):
        Segment.load(tmp_path, told, 16, 0)
    path.write_bytes(good[:16] + b"\x09" + good[17:])
    with pytest.raises(FormatVersion, match="version 9"):
        Segment.load(tmp_path, told, 16, 0)
    path.write_bytes(good)
    with pytest.raises(CorruptStore, match="rows of 16 bytes of table 3, expected rows of 24 bytes"):
        Segment.load(tmp_path, told, 24, 0)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        Segment.load(tmp_path, told, 16, 0)


def test_what_a_crash_left_behind_the_described_records_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "s"
    told = _written(path, np.arange(5), _rows(5, 16)).describe()
    with path.open("ab") as file:
        file.write(b"half a rec")
    assert Segment.load(tmp_path, told, 16, 0).keys()[0].tolist() == [0, 1, 2, 3, 4]


def test_a_full_disk_leaves_the_segment_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overlay = _overlay(tmp_path)
    overlay.append(np.arange(10), _rows(10, 24))
    size = (tmp_path / "0.rows").stat().st_size
    real, calls = os.pwrite, itertools.count()

    def half_then_full(descriptor: int, data: memoryview, offset: int) -> int:
        if next(calls):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[: len(data) // 2], offset)

    monkeypatch.setattr(os, "pwrite", half_then_full)
    with pytest.raises(StorageFull, match=r"no room for \d+ bytes at .*0.rows"):
        overlay.append(np.arange(5, 15), _rows(10, 24, seed=1))
    monkeypatch.undo()
    assert (tmp_path / "0.rows").stat().st_size == size
    state, out = _read(overlay, np.arange(15))
    assert state.tolist() == [1] * 10 + [0] * 5
    assert np.array_equal(out[:10], _rows(10, 24))
    overlay.append(np.arange(5, 15), _rows(10, 24, seed=1))
    assert np.array_equal(_read(overlay, np.arange(5, 15))[1], _rows(10, 24, seed=1))


def test_one_write_over_several_files_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_module, "_LARGEST", 8192)
    monkeypatch.setattr(overlay_module, "_PART", 100)
    overlay = _overlay(tmp_path)
    overlay.append(np.arange(30), _rows(30, 24))
    rows = _rows(1000, 24, seed=1)
    real = Segment.append

    def fails_late(self: Segment, keys: np.ndarray, part: np.ndarray | None) -> int:
        if len(overlay.segments) > 2:
            raise StorageFull(None, 0, "here")
        return real(self, keys, part)

    monkeypatch.setattr(Segment, "append", fails_late)
    with pytest.raises(StorageFull):
        overlay.append(np.arange(1000), rows)
    monkeypatch.setattr(Segment, "append", real)
    assert len(overlay) == 30
    assert [p.name for p in tmp_path.iterdir()] == ["0.rows"]
    overlay.append(np.arange(1000), rows)
    assert len(overlay.segments) > 3
    state, out = _read(overlay, np.arange(1000))
    assert state.all()
    assert np.array_equal(out, rows)


def test_numbers_of_records_start_again_before_they_run_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlay_module, "_MOST", (1 << 26) + 200)
    monkeypatch.setattr(overlay_module, "_PART", 100)
    monkeypatch.setattr(segment_module, "_LARGEST", 4096)  # so that a segment is full after about a hundred records
    overlay = _overlay(tmp_path)
    expected: dict[int, np.ndarray] = {}
    for generation in range(1, 30):
        keys, rows = np.arange(generation, generation + 50), _rows(50, 24, seed=generation)
        overlay.append(keys, rows)
        expected.update(zip(keys.tolist(), rows, strict=True))
        overlay.freeze(generation)
        for gone in overlay.forget(generation - 1):
            for key in gone.keys()[0].tolist():
                if key <= generation - 1:
                    expected.pop(key, None)
        expected = {k: r for k, r in expected.items() if k >= generation}
        asked = np.array(sorted(expected))
        state, out = _read(overlay, asked)
        assert state.all()
        assert np.array_equal(out, np.stack([expected[k] for k in asked.tolist()]))
    assert overlay.segments[0].start < 400


def test_too_many_uncommitted_rows_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlay_module, "_MOST", (1 << 26) + 100)
    overlay = _overlay(tmp_path)
    overlay.append(np.arange(90), _rows(90, 24))
    overlay.freeze(1)
    with pytest.raises(StorageFull, match="2\\^31 rows wait"):
        overlay.append(np.arange(90), _rows(90, 24))


def test_tombstones_and_replacing(tmp_path: Path) -> None:
    overlay = _overlay(tmp_path)
    overlay.append(np.arange(10), _rows(10, 24))
    overlay.append(np.array([3, 4]), None)
    overlay.freeze(1)
    overlay.append(np.array([4, 20]), _rows(2, 24, seed=1))
    state, out = _read(overlay, np.array([2, 3, 4, 20, 21]))
    assert state.tolist() == [1, 2, 1, 1, 0]
    assert np.array_equal(out[2:4], _rows(2, 24, seed=1))
    frozen = [s for s in overlay.segments if s.generation]
    for segment in frozen:
        segment.sync()
    other = _overlay(tmp_path)
    other.replace([Segment.load(tmp_path, s.describe(), 24, 0) for s in frozen])
    state, out = _read(other, np.array([2, 3, 4, 20]))
    assert state.tolist() == [1, 2, 2, 0]
    keys, _, _ = other.entries()
    assert keys.tolist() == list(range(10))


@pytest.mark.parametrize("renumbers", [False, True])
def test_late_rows_are_older_than_what_was_written_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renumbers: bool
) -> None:
    """Writes, tombstones, merges and new numbers between a freeze and the landing of the generation's last rows."""
    monkeypatch.setattr(overlay_module, "_PART", 100)
    monkeypatch.setattr(overlay_module, "_TURN", 33)
    monkeypatch.setattr(segment_module, "_LARGEST", 4096)
    if renumbers:
        monkeypatch.setattr(overlay_module, "_MOST", (1 << 26) + 1500)
    overlay = _overlay(tmp_path)
    log: list[tuple[int, dict[int, np.ndarray | None]]] = []  # (generation, key -> row), in the order that counts
    rng = np.random.default_rng(1)

    def keys(n: int) -> np.ndarray:
        return rng.permutation(300)[:n]

    def write(generation: int) -> None:
        some, rows, gone = keys(40), _rows(40, 24, len(log)), keys(5)
        overlay.append(some, rows)
        overlay.append(gone, None)
        log.append((generation, {**dict(zip(some.tolist(), rows, strict=True)), **dict.fromkeys(gone.tolist())}))

    for generation in range(1, 25):
        write(generation)
        late = keys(int(rng.integers(1, 250)))
        rows = _rows(len(late), 24, 1000 + generation)
        overlay.freeze(generation, len(late))
        at = len(log)
        if generation % 3:
            write(generation + 1)
        if generation % 2:
            overlay.forget(generation - 2)
            at -= sum(g <= generation - 2 for g, _ in log[:at])
            log = [(g, part) for g, part in log if g > generation - 2]
        if generation % 5 == 0:
            overlay.abandon()
        else:
            assert overlay.land(late, rows) == len(late) * (24 + segments.HEAD)
            log.insert(at, (generation, dict(zip(late.tolist(), rows, strict=True))))
        expected = {key: row for _, part in log for key, row in part.items()}
        state, out = _read(overlay, np.arange(300))
        for key in range(300):
            assert state[key] == (0 if key not in expected else 2 if expected[key] is None else 1)
            assert state[key] != 1 or np.array_equal(out[key], expected[key])
        assert len(overlay) == len(expected)
        starts, ages = ([getattr(s, name) for s in overlay.segments] for name in ("start", "generation"))
        assert starts == sorted(set(starts))
        assert ages == sorted(ages, key=lambda age: age or 10**6)
    assert (overlay.segments[-1].start < 2000) == renumbers


def test_late_rows_that_find_no_room_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlay_module, "_PART", 100)
    monkeypatch.setattr(segment_module, "_LARGEST", 4096)
    overlay, rows = _overlay(tmp_path), _rows(500, 24)
    overlay.append(np.arange(30), rows[:30])
    overlay.freeze(1, 500)
    overlay.append(np.arange(20), rows[20:40])
    real, calls = Segment.append, itertools.count()

    def fails_late(self: Segment, keys: np.ndarray, part: np.ndarray | None) -> int:
        if next(calls) == 2:
            raise StorageFull(None, 0, "here")
        return real(self, keys, part)

    monkeypatch.setattr(Segment, "append", fails_late)
    with pytest.raises(StorageFull):
        overlay.land(np.arange(500), rows)
    monkeypatch.setattr(Segment, "append", real)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.rows", "1.rows"]
    assert len(overlay) == 30
    overlay.freeze(1, 500)
    overlay.land(np.arange(500), rows)
    state, out = _read(overlay, np.arange(500))
    assert state.all()
    assert np.array_equal(out, rows)
    assert {s.generation for s in overlay.segments} == {1}
