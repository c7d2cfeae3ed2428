"""The filter of the base's keys: never wrong about a key that is there, whatever happens to its file."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_model import EDGES, TABLES, Model, Nothing, ordered, play, unfiltered

from embcache.config import TableConfig
from embcache.errors import CorruptStore, StorageFull
from embcache.kernels import bloom
from embcache.kernels.bloom import FIRST, NEVER, KeyFilter, filter_bytes
from embcache.planning import plan
from embcache.tiers import Ram, merge, presence
from embcache.tiers.lmdb import Lmdb
from embcache.tiers.presence import NAME, Presence

# the filter ------------------------------------------------------------------------------------------------------


def _passing(keyfilter: KeyFilter, table: int, keys: np.ndarray) -> np.ndarray:
    state = np.zeros(len(keys), np.uint8)
    passed = keyfilter.screen(table, keys, state)
    assert set(state.tolist()) <= {0, NEVER}
    assert passed == (state == 0).sum()
    return state == 0


def test_keys_of_all_tables_pass_and_few_others() -> None:
    rng = np.random.default_rng(0)
    keyfilter = KeyFilter()
    keys = [ordered(np.concatenate([rng.integers(-(2**63), 2**63 - 1, 3000), EDGES])) for _ in range(26)]
    for t, some in enumerate(keys):
        keyfilter.add(t, some)
    for t, some in enumerate(keys):
        assert _passing(keyfilter, t, some).all()
        assert _passing(keyfilter, t, keys[t - 1]).mean() < 0.01  # but for the edges
        assert not _passing(keyfilter, t, np.zeros(0, np.int64)).any()
    assert len(keyfilter.layers) > 2
    assert keyfilter.nbytes <= filter_bytes(26 * 3005)


@pytest.mark.parametrize("step", [1, -1, 4096, 2**40])
def test_wrong_for_less_than_one_absent_key_in_two_hundred(step: int) -> None:
    """Over many layers, all of them full; keys in a row, or with the same low bits."""
    n = FIRST << 6
    keys = (np.arange(n, dtype=np.uint64) * np.uint64(step % 2**64)).view(np.int64)
    keyfilter = KeyFilter()
    for part in np.split(keys, 64):
        keyfilter.add(5, part)
    assert len(keyfilter.layers) == 4
    assert keyfilter.nbytes == filter_bytes(n)
    assert sum(layer.capacity for layer in keyfilter.layers) == n
    assert n * 0.99 < len(keyfilter) <= n
    assert _passing(keyfilter, 5, keys).all()
    others = (np.arange(n, n + 400_000, dtype=np.uint64) * np.uint64(step % 2**64)).view(np.int64)
    for wrong in (_passing(keyfilter, 5, others), _passing(keyfilter, 4, keys[:400_000])):
        assert wrong.mean() < 0.005 * 4 / 17  # 17 layers hold 10^10 keys


def test_room_for_what_is_announced_is_one_layer() -> None:
    keyfilter = KeyFilter()
    keyfilter.add(0, np.arange(1000), more=50_000)
    for k in range(1, 51):
        keyfilter.add(0, np.arange(1000 * k, 1000 * k + 1000))
        keyfilter.add(0, np.arange(1000))  # again
    assert [layer.capacity for layer in keyfilter.layers] == [51_000]
    assert [len(KeyFilter(n).layers) for n in (0, 1, 10**6)] == [0, 1, 1]


def test_states_that_are_known_stay() -> None:
    keyfilter = KeyFilter()
    keyfilter.add(0, np.arange(4))
    state = np.array([0, 1, 2, 0, 0, 1], np.uint8)
    assert keyfilter.screen(0, np.array([0, 1, 2, 3, 10, 11]), state) == 2
    assert state.tolist() == [0, 1, 2, 0, NEVER, 1]


def test_the_hash_never_changes() -> None:
    """Files depend on it."""
    keyfilter = KeyFilter()
    keyfilter.add(0, np.array([0, -1]))
    keyfilter.add(25, EDGES)
    words = keyfilter.layers[0].words
    at = np.flatnonzero(words)
    assert int(np.bitwise_count(words).sum()) == 56
    assert int(np.bitwise_xor.reduce(words)) == 0xE58C05381C1B8386
    assert int(at.sum()) == 99460


def test_looking_while_keys_are_added() -> None:
    keyfilter, keys, errors = KeyFilter(), np.arange(0, 400_000, 3), []
    done = [0]

    def look() -> None:
        while done[0] < len(keys):
            upto = done[0]
            if not _passing(keyfilter, 1, keys[:upto]).all():
                errors.append(upto)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for at in range(0, len(keys), 2000):
        keyfilter.add(1, keys[at : at + 2000])
        done[0] = min(at + 2000, len(keys))
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(keyfilter.layers) > 2


# in a tier -------------------------------------------------------------------------------------------------------


def _open(path: Path, description: dict[str, Any] | None = None, tables: Any = TABLES, **options: Any) -> Lmdb:
    tier = Lmdb(path, **options)
    tier.open(tables)
    tier.restore(description)
    return tier


def _commit(tier: Lmdb, number: int, horizon: int | None = None) -> dict[str, Any]:
    description = json.loads(json.dumps(tier.freeze(number)))
    tier.sync()
    tier.sealed(number, number if horizon is None else horizon)
    return description


def _presence(tier: Lmdb) -> Presence:
    assert tier._merger is not None
    return tier._merger.presence


def _merged(tier: Lmdb, model: Model, number: int, seed: int) -> dict[str, Any]:
    play(tier, model, np.random.default_rng(seed))
    description = _commit(tier, number)
    tier.merge()
    assert unfiltered(tier) == []
    return description


def test_absent_keys_do_not_reach_the_base(tmp_path: Path) -> None:
    tables = [TableConfig(f"t{k}", None, 4) for k in range(26)]
    tier = _open(tmp_path, tables=tables)
    keys = ordered(np.concatenate([np.arange(-300, 300, 2), EDGES]))
    for t in range(26):
        tier.write(t, keys, np.full((len(keys), 16), t, np.uint8))
    description = _commit(tier, 1)
    tier.merge()
    for again in range(2):
        absent = np.setdiff1d(np.arange(-2001, 2001, dtype=np.int64), keys)
        absent = ordered(absent)
        before = tier.stats()
        for t in range(26):
            out = np.zeros((len(absent), 16), np.uint8)
            assert not tier.read(t, absent, out).any()
            tier.delete(t, absent[:50])
            out = np.zeros((len(keys), 16), np.uint8)
            assert tier.read(t, keys, out).all()
            assert (out == t).all()
        after = tier.stats()
        assert after["rows_read_base"] - before["rows_read_base"] == 26 * len(keys)
        wrong = after["rows_asked_base"] - before["rows_asked_base"] - 26 * len(keys)
        assert 0 <= wrong < 0.005 * 26 * len(absent)
        assert after["filter_bytes"] == filter_bytes(26 * len(keys)) < tier.folder.joinpath(NAME).stat().st_size
        assert 0.99 * 26 * len(keys) < tier.info()["filter_keys"] <= 26 * len(keys)
        assert tier.info()["overlay_keys"] == [0] * 26  # no tombstones of what is not there
        tier.close()
        if not again:
            tier = _open(tmp_path, description, tables=tables)


def test_an_empty_base_has_an_empty_filter(tmp_path: Path) -> None:
    tier = _open(tmp_path)
    assert tier.info()["filter_keys"] == 0
    reader = tier.reader()
    reader.open(TABLES)
    reader.restore(None)
    assert reader.info()["filter_keys"] == 0
    reader.close()
    tier.compact()
    assert tier.info()["filter_keys"] == 0
    assert not (tmp_path / NAME).exists()
    tier.close()


def _no_filter(self: Presence, _table: int, _keys: np.ndarray, state: np.ndarray) -> int:
    return int((state == 0).sum())


class _Twins:
    """A tier with a filter and one without."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.places, self.patch, self.screen = [path / "with", path / "without"], monkeypatch, Presence.screen
        self.tiers: list[Lmdb] = []
        self.told: dict[int, list[dict[str, Any]]] = {}
        self.models = {0: Model()}

    def each(self, act: Callable[[int], Any]) -> list[Any]:
        out = []
        for k, screen in enumerate((self.screen, _no_filter)):
            self.patch.setattr(Presence, "screen", screen)
            out.append(act(k))
        self.patch.setattr(Presence, "screen", self.screen)
        return out

    def open(self, number: int) -> None:
        self.tiers = self.each(lambda k: _open(self.places[k], self.told[number][k] if number else None))

    def generation(self, last: int, g: int) -> None:
        after = [self.models[last].copy() for _ in range(2)]
        self.each(lambda k: play(self.tiers[k], after[k], np.random.default_rng(g)))
        self.models[g] = after[0]
        self.told[g] = self.each(lambda k: _commit(self.tiers[k], g, horizon=max(1, last)))

    def check(self, number: int) -> None:
        assert unfiltered(self.tiers[0]) == []
        self.each(lambda k: self.models[number].check(self.tiers[k], block=100))
        infos = self.each(lambda k: self.tiers[k].info())
        for what in ("base_rows", "overlay_keys", "merged", "generation"):
            assert infos[0][what] == infos[1][what]


@pytest.mark.parametrize("child", [False, True])
def test_a_tier_with_a_filter_and_one_without_are_twins(
    tmp_path: Path, child: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generations, merges, going back, reopening, compaction, and a file that is lost: the same bits."""
    monkeypatch.setattr(merge, "SMALL", 0 if child else 10**9)
    twins = _Twins(tmp_path, monkeypatch)
    twins.open(0)
    last = 0
    for g in range(1, 6 if child else 14):
        twins.generation(last, g)
        before, last = last, g
        if g % 2 == 0:
            twins.each(lambda k: twins.tiers[k].merge())
        if g % 5 == 3:
            twins.each(lambda k, to=before: twins.tiers[k].restore(twins.told[to][k]))
            last = before
        if g % 6 == 5:
            twins.each(lambda k: twins.tiers[k].compact())
        if g % 4 == 3:
            twins.each(lambda k: twins.tiers[k].close())
            if g % 8 == 3:
                (twins.places[0] / NAME).unlink()
            twins.open(last)
        twins.check(last)
    twins.each(lambda k: twins.tiers[k].close())


def _altered(data: bytes, how: str) -> bytes | None:
    if how == "missing":
        return None
    if how == "longer":
        return data + b"\0"
    if how.startswith("bit"):
        at = int(how.split()[1]) % len(data)
        return data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]
    if how.startswith("torn"):
        return data[: int(how.split()[1]) % len(data)]
    return b"something else entirely" * 100


@pytest.mark.parametrize(
    "how",
    ["missing", "longer", "foreign", "torn 0", "torn 10", "torn 50", "torn 70", "torn -1"]
    + [f"bit {at}" for at in (3, 17, 21, 25, 33, 45, 52, 58, 64, 70, 5000, -1)],
)
def test_a_file_that_is_not_what_was_written_is_not_used(tmp_path: Path, how: str) -> None:
    tier, model = _open(tmp_path), Model()
    description = _merged(tier, model, 1, seed=1)
    tier.close()
    file = tmp_path / NAME
    good = file.read_bytes()
    bad = _altered(good, how)
    file.unlink() if bad is None else file.write_bytes(bad)
    reader = Lmdb(tmp_path, readonly=True)
    reader.open(TABLES)
    reader.restore(description)
    assert reader.info()["filter_keys"] is None
    model.check(reader)
    reader.close()
    assert file.exists() == (bad is not None)  # readers write nothing
    tier = _open(tmp_path, description)
    assert tier.info()["filter_keys"] is None
    assert not file.exists()
    model.check(tier)
    _merged(tier, model, 2, seed=2)
    keys = tier.info()["filter_keys"]
    assert keys >= 0.99 * sum(tier.info()["base_rows"])
    model.check(tier)
    tier.close()


def test_an_older_file_is_not_used(tmp_path: Path) -> None:
    tier, model = _open(tmp_path), Model()
    _merged(tier, model, 1, seed=1)
    old = (tmp_path / NAME).read_bytes()
    description = _merged(tier, model, 2, seed=2)
    tier.close()
    (tmp_path / NAME).write_bytes(old)
    (tmp_path / (NAME + ".77.tmp")).write_bytes(old)
    tier = _open(tmp_path, description)
    assert tier.info()["filter_keys"] is None
    assert not list(tmp_path.glob(NAME + "*"))
    model.check(tier)
    tier.compact()  # makes one
    assert unfiltered(tier) == []
    assert tier.info()["filter_keys"] > 0
    tier.close()
    tier = _open(tmp_path, description)
    assert tier.info()["filter_keys"] > 0
    model.check(tier)
    tier.close()


def test_going_back(tmp_path: Path) -> None:
    """Keys of generations that were left stay in the filter, and those of the new ones come into it."""
    tier, saved = _open(tmp_path), {}
    model = Model()
    _merged(tier, model, 1, seed=1)
    for g in (2, 3):
        play(tier, model, np.random.default_rng(g))
        saved[g] = _commit(tier, g, horizon=2), model.copy()
    tier.merge()
    tier.restore(saved[2][0])
    model = saved[2][1].copy()
    model.check(tier)
    keys = ordered(np.arange(-5000, 5000, 7))
    for g in (4, 5):
        model.write(tier, 0, keys + g, np.full((len(keys), TABLES[0].row_bytes), g, np.uint8))
        saved[g] = _commit(tier, g), model.copy()
        tier.merge()
        assert unfiltered(tier) == []
        model.check(tier)
    tier.close()
    tier = _open(tmp_path, saved[5][0])
    assert tier.info()["filter_keys"] > 0
    model.check(tier)
    tier.close()


def test_compacting_leaves_deleted_keys_out(tmp_path: Path) -> None:
    tier, model = _open(tmp_path), Model()
    size = TABLES[0].row_bytes
    for g in range(1, 5):
        keys = np.arange(g * 20_000, g * 20_000 + 20_000)
        model.write(tier, 0, keys, np.full((len(keys), size), g, np.uint8))
        _commit(tier, g)
        tier.merge()
    model.delete(tier, 0, np.arange(20_000, 80_000))
    description = _commit(tier, 5)
    tier.merge()
    assert len(_presence(tier).filter.layers) > 1  # type: ignore[union-attr]
    assert tier.info()["filter_keys"] > 79_000
    tier.compact()
    assert unfiltered(tier) == []
    assert len(_presence(tier).filter.layers) == 1  # type: ignore[union-attr]
    assert 19_900 < tier.info()["filter_keys"] <= 20_000
    model.check(tier, block=10_000)
    tier.close()
    tier = _open(tmp_path, description)
    assert 19_900 < tier.info()["filter_keys"] <= 20_000
    model.check(tier, block=10_000)
    _merged(tier, model, 6, seed=6)
    model.check(tier, block=10_000)
    tier.close()


def test_a_reader_beside_a_writer(tmp_path: Path) -> None:
    """A reader keeps to its state of the base, whatever the writer merges, deletes or scans meanwhile."""
    tier, model = _open(tmp_path), Model()
    description = _merged(tier, model, 1, seed=1)
    reader = tier.reader()
    reader.open(TABLES)
    reader.restore(description)
    assert reader.info()["filter_keys"] > 0
    then = model.copy()
    for t in range(len(TABLES)):
        model.delete(tier, t, ordered(list(model.rows[t])))
    _commit(tier, 2)
    tier.merge()
    then.check(reader)
    model.check(tier)
    # a filter scanned after the reader's snapshot lacks keys that it still sees: it must not be used
    (tmp_path / NAME).unlink()
    _presence(tier).drop()
    description = _merged(tier, model, 3, seed=3)
    held = reader._held
    assert held is not None
    later = Presence(tmp_path)
    later.load(held)
    assert later.filter is None
    then.check(reader)
    reader.restore(description)
    assert reader.info()["filter_keys"] > 0
    model.check(reader)
    assert unfiltered(reader) == []
    # the next generation is not merged: its base is the same, and the filter stays
    before = _presence(reader).filter
    play(tier, model, np.random.default_rng(4))
    reader.restore(_commit(tier, 4, horizon=3))
    assert _presence(reader).filter is before
    model.check(reader)
    reader.close()
    tier.close()


def test_reading_while_the_filter_is_made_and_grows(tmp_path: Path) -> None:
    tier, size = _open(tmp_path, overlay_bytes=1), TABLES[0].row_bytes
    fixed = np.arange(0, 60_000, 3)
    tier.write(0, fixed, np.full((len(fixed), size), 9, np.uint8))
    _commit(tier, 1)
    tier.merge()
    written, errors = [1], []

    def read() -> None:
        out = np.zeros((20_000, size), np.uint8)
        while written[0] < 30:
            upto = written[0]
            keys = ordered(np.concatenate([fixed[::7], np.arange(2, upto, 1) * 3000 + 1]))
            if not tier.read(0, keys, out[: len(keys)]).all():
                errors.append(upto)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for g in range(2, 30):
            tier.write(0, np.arange(g * 3000 + 1, g * 3000 + 3000, 3), np.full((1000, size), g, np.uint8))
            written[0] = g + 1
            _commit(tier, g)
            if g % 3 == 0:
                tier.wait()
                _presence(tier).drop()
    finally:
        written[0] = 30
    for thread in threads:
        thread.join()
    tier.wait()
    assert errors == []
    assert unfiltered(tier) == []
    tier.close()


def test_a_full_disk_while_the_filter_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, model = _open(tmp_path), Model()
    _merged(tier, model, 1, seed=1)
    before, info = (tmp_path / NAME).read_bytes(), tier.info()
    play(tier, model, np.random.default_rng(2), size=200)
    description = _commit(tier, 2)

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(presence.os, "fsync", full)
        with pytest.raises(StorageFull, match=NAME):
            tier.merge()
    assert (tmp_path / NAME).read_bytes() == before
    assert not list(tmp_path.glob(NAME + ".*"))
    now = tier.info()
    assert [now[k] for k in ("merged", "seal", "base_rows")] == [info[k] for k in ("merged", "seal", "base_rows")]
    model.check(tier)
    with pytest.warns(UserWarning, match="the last merge failed"):
        tier.sealed(2, 2)
    tier.merge()
    assert tier.info()["merged"] == 2
    assert unfiltered(tier) == []
    model.check(tier)
    tier.close()
    tier = _open(tmp_path, description)
    model.check(tier)
    tier.close()


def _killed(path: Path, where: str) -> None:
    """A child commits generation 2 and dies while it merges."""
    child = os.fork()
    if child == 0:
        try:
            tier, model = _open(path, json.loads((path / "told.json").read_text())), Model()
            play(tier, model, np.random.default_rng(2))
            (path / "told.json").write_text(json.dumps(tier.freeze(2)))
            tier.sync()

            def die(*_: Any, **__: Any) -> None:
                os.kill(os.getpid(), signal.SIGKILL)

            if where == "saved":
                merge.run_merge = die  # type: ignore[assignment]
            else:
                setattr(presence.os, where, die)
            tier.sealed(2, 2)
            tier.merge()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)


@pytest.mark.parametrize("where", ["fsync", "replace", "saved"])
@pytest.mark.parametrize("lost", [False, True])
def test_killed_between_the_filter_and_the_merge(tmp_path: Path, where: str, lost: bool) -> None:
    tier, model = _open(tmp_path), Model()
    description = _merged(tier, model, 1, seed=1)
    tier.close()
    (tmp_path / "told.json").write_text(json.dumps(description))
    _killed(tmp_path, where)
    after = model.copy()
    # play draws deletions and writes from the seed alone
    play(Nothing(), after, np.random.default_rng(2))  # type: ignore[arg-type]
    told = json.loads((tmp_path / "told.json").read_text())
    assert bool(list(tmp_path.glob(NAME + ".*.tmp"))) == (where != "saved")
    if lost:
        (tmp_path / NAME).unlink()
    tier = _open(tmp_path, told)
    assert not list(tmp_path.glob(NAME + ".*.tmp"))
    assert (tier.info()["filter_keys"] is None) == lost
    assert tier.info()["merged"] == 1
    assert unfiltered(tier) == []
    after.check(tier)
    tier.restore(description)  # and back
    model.check(tier)
    _merged(tier, model, 3, seed=3)
    model.check(tier)
    tier.close()


def test_a_writer_that_lost_the_store_leaves_the_filter_alone(tmp_path: Path) -> None:
    tier, model = _open(tmp_path), Model()
    _merged(tier, model, 1, seed=1)
    before = (tmp_path / NAME).read_bytes()
    play(tier, model, np.random.default_rng(2))
    _commit(tier, 2)
    assert tier._merger is not None
    tier._merger.base.claim()  # the next writer
    with pytest.raises(merge.MergeFailed, match="another process owns the store"):
        tier.merge()
    assert (tmp_path / NAME).read_bytes() == before
    assert not list(tmp_path.glob(NAME + ".*"))
    model.check(tier)
    tier.close()


@pytest.mark.parametrize("error", [MemoryError, CorruptStore])
def test_without_memory_for_it_there_is_no_filter(
    tmp_path: Path, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, model = _open(tmp_path), Model()
    _merged(tier, model, 1, seed=1)

    def fails(*_: Any, **__: Any) -> None:
        raise error("no")

    with monkeypatch.context() as patched:
        patched.setattr(KeyFilter, "add", fails)
        description = _merged(tier, model, 2, seed=2)
        assert tier.info()["filter_keys"] is None
        assert tier.stats()["filter_bytes"] == 0
        assert not (tmp_path / NAME).exists()
        model.check(tier)
        description = _merged(tier, model, 3, seed=3)
        tier.compact()
        model.check(tier)
    tier.close()
    tier = _open(tmp_path, description)
    model.check(tier)
    _merged(tier, model, 4, seed=4)
    assert tier.info()["filter_keys"] > 0
    model.check(tier)
    tier.close()
    assert isinstance(bloom.Layer(5), bloom.Layer)
    monkeypatch.setattr(bloom, "huge_empty", lambda _n: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(MemoryError, match="a filter of 5 keys"):
        bloom.Layer(5)


def test_what_is_planned_for_it() -> None:
    tables = [TableConfig(n, None, 4) for n in "ab"]
    planned = plan(tables, [Ram(rows=10), Lmdb("nowhere")], expected=500_000)
    assert planned.bytes(structure="filter of keys") == filter_bytes(1_000_000) == 2_621_440
    assert planned.bytes(structure="filter of keys", disk=True) == 2 * 2_621_440
    keyfilter = KeyFilter()
    for k in range(100):
        keyfilter.add(0, np.arange(k * 10_000, (k + 1) * 10_000))
    assert keyfilter.nbytes <= filter_bytes(1_000_000)
    assert plan(tables, [Ram(rows=10), Lmdb("nowhere")]).bytes(structure="filter of keys") == 0
