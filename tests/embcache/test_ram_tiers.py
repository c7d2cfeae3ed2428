"""Descriptions of memory, the store of rows by key, and a cache in the middle of a chain."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from front_twins import Failing

from embcache import kernels, optim
from embcache.cache import open_chain
from embcache.cache.middle import Middle
from embcache.config import TableConfig
from embcache.errors import BadConfig, StorageFull, TableTooLarge
from embcache.tiers import base
from embcache.tiers.base import BackTier, Moved
from embcache.tiers.ram import Ram
from embcache.tiers.rows import RowStore

TABLES = [TableConfig("a", None, 3, optimizer=optim.Adam()), TableConfig("b", 300, 8)]


def chain(*tiers: Any) -> Any:
    return open_chain(TABLES, list(tiers), kernels.get("auto"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0}, r"rows = 0, must be an integer >= 1"),
        ({"rows": True}, r"rows = True, must be an integer >= 1"),
        ({"rows": {"a": 1.5}}, r"rows\['a'\] = 1.5, must be an integer >= 1"),
        ({"bytes": "1GiB"}, r"bytes = '1GiB', must be an integer >= 1"),
        ({"rows": 1, "bytes": 1}, r"rows= or bytes=, not both"),
        ({"policy": "lru"}, r"policy= is for a cache"),
        ({"rows": 5, "policy": "random"}, r"policy = 'random', must be one of"),
    ],
)
def test_descriptions_that_cannot_work_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        Ram(**arguments)


def test_chains_that_cannot_work_are_refused() -> None:
    for tiers, message in (
        ([], r"tiers = \[\], must have at least one tier"),
        ([Ram(rows=5)], r"for a cache over a tier below"),
        ([Ram(), Ram()], r"tiers\[0\] = Ram\(\): over another tier it needs rows= or bytes="),
        ([Ram(rows=5), Ram(rows=5)], r"tiers\[1\] = Ram\(rows=5, policy='lfu'\): rows=, bytes= and policy= are for"),
        ([RowStore()], "lookups read memory, so the first tier is Ram"),
        ([RowStore(), Ram()], "every tier but the last is a cache"),
        ([Ram(rows={"a": 5}), Ram()], r"rows = \{'a': 5\}, must name each of the tables \['a', 'b'\] and no other"),
        ([Ram(bytes=10), Ram()], "bytes = 10, the tables need at least"),
    ):
        with pytest.raises(BadConfig, match=message):
            chain(*tiers)


def test_a_description_says_what_it_is_and_serves_any_number_of_stores() -> None:
    for tier in (Ram(), Ram(rows=5, policy="lru"), Ram(rows={"a": 1, "b": 2}), Ram(bytes=10_000)):
        assert repr(tier.fresh()) == repr(tier)
    assert repr(Ram(bytes=10_000)) == "Ram(bytes=10000, policy='lfu')"
    one = Ram(rows=5)
    for _ in range(2):
        assert chain(one, Ram())._hot[0].rows == 5


def test_bytes_are_shared_and_what_small_tables_do_not_need_goes_to_the_others() -> None:
    tables = [TableConfig("large", 10**9, 8), TableConfig("small", 10, 8), TableConfig("open", None, 16)]
    wide = [t.row_bytes + 50 for t in tables]
    large, small, unbounded = Ram(bytes=1_000_000).split(tables, 50)
    assert small == 10
    rest = 1_000_000 - 10 * wide[1]
    assert large == rest // 2 // wide[0]
    assert unbounded == rest // 2 // wide[2]
    assert Ram(bytes=10**7).split(tables[1:2], 50) == [10]


def test_a_bounded_table_is_cached_whole_at_most() -> None:
    front = chain(Ram(rows=10**6), Ram())
    assert front._hot[1].rows == 300


def test_a_bounded_table_that_does_not_fit_into_memory_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [TableConfig("small", 10, 8), TableConfig("huge", 10**14, 8), TableConfig("fits", 1000, 8)]
    front = open_chain(tables, [Ram()], kernels.get("auto"))
    assert [front.direct(t) for t in range(3)] == [True, False, True]
    ids = torch.tensor([10**14 - 1])
    lease = front.stage(torch.tensor([[1, 0, 0, 1, 0, 0, 0]]), ids, None, True)
    assert front.arenas[1].slot_ids[front.slots(lease).long()].tolist() == [10**14 - 1]


LIMITED = """
import resource, torch
import embcache as ec
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (2 << 30),) * 2)
tables = [ec.TableConfig(f"t{k}", None, 16) for k in range(8)]
for tiers in ([ec.tiers.Ram(rows=100), ec.tiers.Ram()], [ec.tiers.Ram()]):
    store = ec.EmbeddingStore(tables, tiers)
    batch = ec.KeyedJaggedTensor([t.name for t in tables], torch.arange(8 * 300), lengths=torch.full((8,), 300))
    with store.stage(batch) as handle:
        assert store.lookup(handle)["t7"].shape == (1, 16)
    del handle, store
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the size of the process is read from /proc")
def test_a_limit_of_address_space_makes_what_is_reserved_smaller() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", LIMITED], check=True, timeout=120)


# rows by key -------------------------------------------------------------------------------------------------------


def rows_of(keys: list[int], version: int, width: int) -> np.ndarray:
    rng = np.random.default_rng(abs(version))
    return rng.integers(0, 256, (len(keys), width), dtype=np.uint8)


def sorted_keys(rng: np.random.Generator, n: int) -> np.ndarray:
    keys = np.unique(rng.choice([rng.integers(-(2**63), 2**63 - 1), -(2**63), 2**63 - 1, *range(-60, 60)], n))
    return np.sort(keys.view(np.uint64)).view(np.int64)


def stores() -> dict[str, BackTier]:
    inner = RowStore()
    inner.open(TABLES)
    tiny, wide = RowStore(), RowStore()
    tiny.open(TABLES)
    wide.open(TABLES)
    middle = Middle([4, 300], "lru", wide)
    middle.open(TABLES)
    return {
        "rows": RowStore(),
        "cache of 5": Middle([5, 5], "lfu", inner),
        "cache of 1 over 4": Middle([1, 1], "lru", middle),
        "cache of all": Middle([1000, 300], "lfu", tiny),
    }


@pytest.mark.parametrize("name", list(stores()))
def test_a_store_of_rows_equals_a_dict(name: str) -> None:
    tier, rng = stores()[name], np.random.default_rng(len(name))
    tier.open(TABLES)
    model: dict[int, np.ndarray] = {}
    width = TABLES[0].row_bytes
    for step in range(120):
        keys = sorted_keys(rng, int(rng.integers(0, 30)))
        rows = rows_of(keys.tolist(), step, width)
        action = rng.integers(6)
        if action < 2:
            tier.write(0, keys, rows)
            model.update(zip(keys.tolist(), rows, strict=True))
        elif action == 2:
            tier.delete(0, keys)
            for key in keys.tolist():
                model.pop(key, None)
        elif action == 3:  # clean rows, which are there already
            known = np.array([k in model for k in keys.tolist()], dtype=np.bool_)
            tier.offer(0, keys[known], np.array([model[k] for k in keys[known].tolist()], np.uint8).reshape(-1, width))
        elif action == 4 and hasattr(tier, "flush"):
            tier.flush()
        asked = sorted_keys(rng, 40)
        out = np.full((len(asked), width), 77, dtype=np.uint8)
        found = tier.read(0, asked, out)
        assert found.tolist() == [k in model for k in asked.tolist()]
        for k, key in enumerate(asked.tolist()):
            assert np.array_equal(out[k], model.get(key, np.full(width, 77, dtype=np.uint8)))
        assert tier.count(0) == len(model)
        assert tier.count(1) == 0
    everything = np.array(list(model), dtype=np.int64).view(np.uint64)
    for block in (1, 7, 1000):
        blocks = list(tier.scan(0, block))
        keys = np.concatenate([k for k, _ in blocks])
        assert np.array_equal(keys, np.sort(everything).view(np.int64))
        assert all(len(k) <= block for k, _ in blocks)
        for found_keys, found_rows in blocks:
            assert np.array_equal(found_rows, [model[key] for key in found_keys.tolist()])
    assert tier.stats()["rows_read"] >= tier.stats()["rows_found"] > 0
    tier.close()


def moved(rng: np.random.Generator, table: int, keys: np.ndarray, seed: int) -> tuple[Moved, np.ndarray]:
    """Rows of ``keys`` in shuffled slots of a slab, and what lies in all its slots."""
    width = TABLES[table].row_bytes
    slab = rows_of(list(range(200)), seed, width)
    slots = rng.permutation(200)[: len(keys)].astype(np.int32)
    return Moved(table, keys, slab, slots, np.zeros(len(keys), np.bool_)), slab.copy()


@pytest.mark.parametrize("name", list(stores()))
def test_rows_of_several_tables_move_between_slots_and_a_tier(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "PIECE", 7 * TABLES[0].row_bytes)
    tier, rng = stores()[name], np.random.default_rng(len(name))
    tier.open(TABLES)
    model: list[dict[int, np.ndarray]] = [{}, {}]
    for step in range(30):
        written = [moved(rng, t, rng.permutation(sorted_keys(rng, 40)), 2 * step + t) for t in (1, 0)]
        tier.write_from([part for part, _ in written])
        for part, before in written:
            assert part.found.all()
            assert np.array_equal(part.slab, before)
            model[part.table].update(zip(part.keys.tolist(), before[part.slots], strict=True))
        read = [moved(rng, t, sorted_keys(rng, 60), 1000 + t) for t in (0, 1)]
        tier.read_into([part for part, _ in read])
        for part, before in read:
            here = model[part.table]
            assert part.found.tolist() == [k in here for k in part.keys.tolist()]
            for key, slot in zip(part.keys.tolist(), part.slots.tolist(), strict=True):
                before[slot] = here.get(key, before[slot])
            assert np.array_equal(part.slab, before)
    tier.close()


def test_a_call_that_fails_says_which_rows_were_written() -> None:
    store, rng = Failing(), np.random.default_rng(0)
    store.open(TABLES)
    parts = [moved(rng, t, sorted_keys(rng, 40), t)[0] for t in (0, 1)]
    parts[1].found[:] = True
    store.after["write"] = 1
    with pytest.raises(StorageFull):
        store.write_from(parts)
    assert parts[0].found.all()
    assert not parts[1].found.any()
    assert (store.count(0), store.count(1)) == (len(parts[0].keys), 0)


def test_writers_and_readers_on_two_threads_see_whole_rows() -> None:
    store = RowStore()
    store.open(TABLES)
    width, keys, wrong = TABLES[0].row_bytes, np.arange(2000), []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            out = np.zeros((len(keys), width), dtype=np.uint8)
            found = store.read(0, keys, out)
            if (out != out[:, :1]).any() or (out[~found] != 0).any():
                wrong.append(True)

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(200):
        part = keys[step % 7 :: 3]
        store.write(0, part, np.full((len(part), width), step % 250 + 1, dtype=np.uint8))
        if step % 10 == 9:
            store.delete(0, part[::2])
    stop.set()
    reader.join()
    assert not wrong


def test_memory_that_is_full_is_said_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    store = RowStore()
    store.open(TABLES)
    width = TABLES[0].row_bytes
    store.write(0, np.arange(5), np.ones((5, width), dtype=np.uint8))
    monkeypatch.setattr("embcache.tiers.rows.available_bytes", lambda: 10)
    with pytest.raises(TableTooLarge, match=r"tables \['a'\] need"):
        store.write(0, np.arange(3_000_000), np.zeros((3_000_000, width), dtype=np.uint8))
    out = np.zeros((6, width), dtype=np.uint8)
    assert store.read(0, np.arange(6), out).tolist() == [True] * 5 + [False]
    assert out[:5].all()
    assert store.count(0) == 5


# a cache in the middle ---------------------------------------------------------------------------------------------


def middle_over_failing(rows: int) -> tuple[Middle, Failing, int]:
    below = Failing()
    below.open(TABLES)
    middle = Middle([rows, rows], "lru", below)
    middle.open(TABLES)
    return middle, below, TABLES[0].row_bytes


def test_a_victim_cache_writes_below_only_what_it_pushes_out() -> None:
    middle, below, width = middle_over_failing(10)
    middle.write(0, np.arange(10), np.full((10, width), 1, dtype=np.uint8))
    middle.write(0, np.arange(10), np.full((10, width), 2, dtype=np.uint8))
    assert below.count(0) == 0
    middle.write(0, np.arange(20, 24), np.full((4, width), 3, dtype=np.uint8))
    assert below.count(0) == 4
    assert middle.count(0) == 14
    out = np.zeros((10, width), dtype=np.uint8)
    assert middle.read(0, np.arange(10), out).all()
    assert (out == 2).all()
    middle.flush()
    assert below.count(0) == 14
    middle.forget()
    assert middle.count(0) == 14
    assert middle.stats()["resident"] == 0


def test_clean_rows_are_kept_without_being_written_again() -> None:
    middle, below, width = middle_over_failing(4)
    below.write(0, np.arange(8), np.full((8, width), 5, dtype=np.uint8))
    below.after["write"] = 0
    middle.offer(0, np.arange(8), np.full((8, width), 5, dtype=np.uint8))
    assert middle.stats()["resident"] == 4
    below.after["read"] = 0
    out = np.zeros((4, width), dtype=np.uint8)
    table = middle._tables[0]
    assert middle.read(0, np.sort(table.slot_ids[:4].copy()), out).all()
    assert (out == 5).all()
    middle.offer(0, np.arange(4, 8), np.full((4, width), 5, dtype=np.uint8))  # pushes out clean rows only
    middle.flush()


def test_a_full_disk_below_a_middle_cache_loses_nothing() -> None:
    middle, below, width = middle_over_failing(6)
    model = {}
    for k in range(6):
        middle.write(0, np.array([k]), np.full((1, width), k, dtype=np.uint8))
        model[k] = k
    below.after["write"] = 0
    with pytest.raises(StorageFull):
        middle.write(0, np.arange(3, 12), np.full((9, width), 99, dtype=np.uint8))
    middle.offer(0, np.arange(50, 53), np.full((3, width), 7, dtype=np.uint8))  # no place, no matter
    below.after.clear()
    out = np.zeros((60, width), dtype=np.uint8)
    found = middle.read(0, np.arange(60), out)
    assert np.flatnonzero(found).tolist() == list(model)
    assert out[:6, 0].tolist() == list(range(6))
    below.after["write"] = 1  # the victims go, the rest does not
    with pytest.raises(StorageFull):
        middle.write(0, np.arange(100, 120), np.full((20, width), 99, dtype=np.uint8))
    below.after.clear()
    assert middle.count(0) == 6
    middle.write(0, np.arange(100, 120), np.full((20, width), 99, dtype=np.uint8))
    assert middle.count(0) == 26
