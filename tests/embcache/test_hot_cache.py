"""The hot cache against a plain dict of rows: any stream, any size, errors, threads."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch
from front_twins import Failing, Ids, Twin, batch

from embcache import optim
from embcache.config import TableConfig
from embcache.errors import CacheTooSmall, StaleLookup, StorageFull, TableTooLarge
from embcache.tiers.ram import Ram

pytestmark = pytest.mark.filterwarnings("ignore:.*staged batches need")
LOW, HIGH = -(2**63), 2**63 - 1
CHAINS: dict[str, Callable[[], list[Any]]] = {
    "whole": lambda: [Ram()],
    "one row": lambda: [Ram(rows=1), Ram()],
    "seven rows": lambda: [Ram(rows=7, policy="lru"), Ram()],
    "all rows": lambda: [Ram(rows=500), Ram()],
    "named": lambda: [Ram(rows={"a": 2, "b": 9, "c": 3}), Ram()],
    "bytes": lambda: [Ram(bytes=4000), Ram()],
    "three tiers": lambda: [Ram(rows=5), Ram(rows=12, policy="lru"), Ram()],
    "four small tiers": lambda: [Ram(rows=1), Ram(rows=1), Ram(rows=2), Ram()],
}


def tables() -> list[TableConfig]:
    return [
        TableConfig("a", None, 3, optimizer=optim.Adam()),
        TableConfig("b", 400, 8, optimizer=optim.RowWiseAdagrad()),
        TableConfig("c", 60, 5, dtype=torch.bfloat16, padding_idx=None),
    ]


def hot(rows: int = 8, below: Any = None, policy: Any = "lru", table: TableConfig | None = None) -> Twin:
    return Twin([table or TableConfig("t", None, 4)], [Ram(rows=rows, policy=policy), below or Ram()])


def draw(rng: np.random.Generator, kind: str, step: int) -> list[np.ndarray]:
    if kind == "zipf":
        sizes = rng.integers(0, 40, 3)
        ids = [(rng.zipf(1.3, n) - 1) % m for n, m in zip(sizes, (10**6, 400, 60), strict=True)]
        return [ids[0] - 3, ids[1], ids[2]]
    if kind == "misses":  # none was seen before
        return [
            np.arange(step * 9, step * 9 + 9) - 50,
            np.arange(step * 4, step * 4 + 4) % 400,
            np.arange(step, step + 1),
        ]
    if kind == "hits":
        return [np.array([LOW, HIGH, 0]), np.arange(5), np.array([59, 0, 59])]
    return [rng.integers(LOW, HIGH, 50), rng.integers(0, 400, 150), rng.permutation(60)]


@pytest.mark.parametrize("kind", ["zipf", "hits", "misses", "larger than the cache"])
@pytest.mark.parametrize("name", CHAINS)
def test_any_stream_over_any_chain_equals_a_dict(name: str, kind: str) -> None:
    twin, rng = Twin(tables(), CHAINS[name]()), np.random.default_rng(len(kind))
    for step in range(25):
        ids = draw(rng, kind, step)
        twin.train(ids)
        twin.evaluate(draw(rng, "zipf", step))
        if step % 7 == 3:
            twin.front.flush()
        if step % 11 == 5:
            gone = ids[step % 3][:4]
            twin.front.delete(step % 3, torch.from_numpy(gone.copy()))
            for key in gone.tolist():
                twin.model[step % 3].pop(key, None)
        assert twin.front.pins() == 0
    twin.check_all()
    stats = twin.front.stats()
    assert stats["hits"] + stats["misses"] == stats["unique_ids"]


def test_every_int64_is_an_id() -> None:
    twin = hot(rows=3)
    keys = [0, -1, 1, LOW, HIGH, LOW + 1, HIGH - 1, 2**32, -(2**32), 2**31]
    for _ in range(3):
        for k in range(len(keys)):
            twin.train([keys[k:] + keys[: k // 2]])
    twin.check_all()
    twin.front.flush()
    twin.front.forget()
    twin.check_all()


@pytest.mark.parametrize("name", CHAINS)
def test_no_ids_at_all(name: str) -> None:
    twin = Twin(tables(), CHAINS[name]())
    empty: list[list[list[int]]] = [[[], [], []], [[], [3], []], [[7], [], []]]
    for ids in empty:
        twin.train(ids)
        twin.evaluate(ids)
    none = torch.empty(0, dtype=torch.int64)
    for t in range(3):
        assert twin.front.read_rows(t, none).shape == (0, twin.tables[t].row_bytes)
        twin.front.load_rows(t, none, torch.empty(0, twin.tables[t].row_bytes, dtype=torch.uint8))
        twin.front.delete(t, none)
    twin.check_all()


def test_features_share_tables_and_leave_ids_out() -> None:
    twin = Twin(tables(), [Ram(rows=4), Ram()])
    values = torch.tensor([5, 6, 5, 100, 7, 5, 9], dtype=torch.int32)
    features = torch.tensor([[1, 0, 0, 3, 0, 0, 0], [0, 0, 3, 1, 0, 0, 0], [1, 0, 5, 2, 0, 0, 0]])
    lease = twin.front.stage(features, values, None, True)
    slots = twin.front.slots(lease)
    assert slots[0] == slots[2] == slots[5]
    assert len(set(slots[[0, 1, 6]].tolist())) == 3
    assert twin.front.arenas[1].slot_ids[slots[[0, 1, 5, 6]].long()].tolist() == [5, 6, 5, 9]
    assert twin.front.arenas[0].slot_ids[slots[3].long()] == 100
    assert 0 <= int(slots[4]) < twin.front.arenas[0].slab.shape[0]
    assert twin.front.pins() == 4
    twin.front.release(lease)
    assert twin.front.pins() == 0


def test_reading_only_leaves_no_trace() -> None:
    below = Failing()
    twin = hot(rows=4, below=below)
    twin.train([[1, 2, 3, 4]])
    twin.front.flush()
    table, keeper = twin.front._hot[0], twin.front._hot[0].keeper
    assert keeper is not None
    before, scores, dirty = twin.resident(0), keeper.score.copy(), table.flags[:4].copy()
    below.after["write"] = 0
    for _ in range(5):
        lease = twin.stage([[1, 9, 10, 1, 11]], training=False)
        twin.check(lease, [[1, 9, 10, 1, 11]])
        twin.front.relax(lease)
        twin.check(lease, [[1, 9, 10, 1, 11]])
        twin.front.release(lease)
    twin.evaluate([[]])
    assert twin.resident(0) == before
    assert np.array_equal(keeper.score, scores)
    assert np.array_equal(table.flags[:4], dirty)
    assert table.overflow.used == 0
    assert below.count(0) == 4
    assert twin.front.count_written(0) == 4


def test_the_overflow_extent_lasts_as_long_as_its_leases() -> None:
    twin = hot(rows=4)
    first = twin.stage([range(10)])
    second = twin.stage([range(8, 12)])
    table = twin.front._hot[0]
    assert table.overflow.used == 8
    assert twin.front.stats()["overflow_peak"] == 8
    twin.front.release(first)
    twin.train([[0]])
    assert table.overflow.used == 4  # 8 to 11
    twin.front.relax(second)
    twin.train([[50]])
    twin.update(second, [range(8, 12)])
    twin.front.release(second)
    twin.train([[51]])
    assert table.overflow.used == 0
    twin.check_all()


def test_a_batch_larger_than_the_cache_is_said_once() -> None:
    twin = hot(rows=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin.evaluate([range(50, 59)])
    with pytest.warns(UserWarning, match=r"table 't': staged batches need 6 rows more than its cache of 4 has"):
        twin.train([range(10)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin.train([range(20)])


def test_rows_that_left_are_staged_again() -> None:
    twin = hot(rows=4)
    ids: Ids = [[1, 2, 3, 2]]
    lease = twin.stage(ids)
    slots = twin.front.slots(lease)
    assert twin.front.slots(lease) is slots
    assert twin.front.pins() == 3
    twin.front.relax(lease)
    twin.front.relax(lease)
    assert twin.front.pins() == 0
    for k in range(10, 30, 4):
        twin.train([[k, k + 1, k + 2, k + 3]])
    twin.train([[2]])  # it changes while the lease does not hold it
    twin.update(lease, ids)
    assert twin.front.pins() == 3
    assert twin.front.stats()["rows_restaged"] > 0
    twin.front.release(lease)
    with pytest.raises(StaleLookup, match="released"):
        twin.front.slots(lease)
    assert twin.front.pins() == 0
    twin.check_all()


def test_a_lease_with_gaps_between_its_tables_is_staged_again() -> None:
    twin = Twin(tables(), [Ram(rows=2), Ram()])
    ids = [[5, 5, 5, 6], [7, 7, 8], [9, 9]]
    for relax_first in (True, False):
        lease = twin.stage(ids)
        if relax_first:
            twin.front.relax(lease)
        for k in range(10, 20):
            twin.train([[k], [k], [k]])
        twin.update(lease, ids)
        twin.front.release(lease)
    twin.check_all()
    assert twin.front.pins() == 0


def test_too_small_a_cache_for_batches_ahead_names_both_numbers_and_changes_nothing() -> None:
    twin = Twin(tables(), [Ram(rows=6), Ram()])
    twin.train([range(6), range(6), []])
    held = twin.stage([range(4), [], []])
    before = [twin.resident(t) for t in range(3)], twin.front.pins()
    for ids in ([[10, 11, 12], [20, 21], [1]], [[1], [30, 31], list(range(7))]):
        with pytest.raises(CacheTooSmall, match=r"need 7 rows at once, the cache holds 6") as error:
            twin.stage(ids, overflow=False)
        assert (error.value.need, error.value.have) == (7, 6)
        assert ([twin.resident(t) for t in range(3)], twin.front.pins()) == before
    fits = twin.stage([[0, 1, 10, 11], [20, 21], []], overflow=False)
    twin.check(fits, [[0, 1, 10, 11], [20, 21], []])
    for lease in (held, fits):
        twin.front.release(lease)
    twin.check_all()


@pytest.mark.parametrize("call", ["read", "write"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_error_below_leaves_everything_as_it_was(call: str, after: int) -> None:
    below = Failing()
    twin = Twin(tables(), [Ram(rows=5), below])
    rng = np.random.default_rng(after)
    for step in range(6):
        twin.train(draw(rng, "zipf", step))
    wide = [np.arange(100, 120), np.arange(100, 120), np.arange(30, 50)]
    held = twin.stage([np.arange(3), [], []])
    twin.front.flush()
    twin.update(held, [np.arange(3), [], []])
    twin.train([np.arange(90, 94), np.arange(90, 95), np.arange(25, 30)])  # dirty, so that something must be written
    pins = twin.front.pins()
    below.after[call] = after

    def go_on() -> None:
        for k in range(4):
            twin.front.release(twin.stage([wide[0] + 20 * k, *wide[1:]]))
            twin.train([[], np.arange(5) + 5 * k, np.arange(5)])

    with pytest.raises(StorageFull if call == "write" else OSError):
        go_on()
    assert twin.front.pins() == pins
    twin.check(held, [np.arange(3), [], []])
    for t in range(3):
        table, resident = twin.front._hot[t], twin.resident(t)
        assert len(resident) == len(table.index) == table.cache.used + table.overflow.used
        assert all(table.slot_ids[slot] == key for key, slot in resident.items())
    below.after.clear()
    twin.check_all()
    twin.train(wide)
    twin.front.release(held)
    twin.check_all()
    assert twin.front.pins() == 0


def test_a_flush_that_fails_loses_nothing_and_may_be_tried_again() -> None:
    below = Failing()
    twin = hot(rows=50, below=below)
    twin.front._hot[0].block = 7
    twin.train([range(40)])
    below.after["write"] = 2
    with pytest.raises(StorageFull):
        twin.front.flush()
    twin.check_all()
    below.after.clear()
    twin.front.flush()
    assert below.count(0) == 40
    written = below.stats()["rows_written"]
    twin.front.flush()
    assert below.stats()["rows_written"] == written  # nothing was dirty
    twin.front.forget()
    assert twin.resident(0) == {}
    twin.check_all()


def test_forgetting_needs_every_handle_released_and_drops_what_was_not_written() -> None:
    twin = hot(rows=10)
    twin.train([range(5)])
    twin.front.flush()
    saved = {k: v.copy() for k, v in twin.model[0].items()}
    lease = twin.stage([range(8)])
    with pytest.raises(RuntimeError, match="8 rows are pinned"):
        twin.front.forget()
    twin.update(lease, [range(8)])
    twin.front.relax(lease)
    twin.front.forget()
    twin.model[0] = saved
    twin.check_all()
    twin.update(lease, [range(8)])  # a lease that was relaxed brings its rows back
    twin.front.release(lease)
    twin.check_all()


@pytest.mark.parametrize("name", CHAINS)
def test_rows_are_replaced_deleted_and_reset_by_id(name: str) -> None:
    twin, rng = Twin(tables(), CHAINS[name]()), np.random.default_rng(3)
    lease = twin.stage([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    twin.update(lease, [[1, 2, 3]] * 3)
    for t, table in enumerate(twin.tables):
        ids = np.array([2, 3, 2, 50, 9, 50])
        rows = rng.integers(0, 256, (6, table.row_bytes), dtype=np.uint8)
        twin.front.load_rows(t, torch.from_numpy(ids), torch.from_numpy(rows))
        twin.model[t].update(zip(ids.tolist(), rows, strict=True))  # the last of equal ids counts
    twin.check(lease, [[1, 2, 3]] * 3)
    twin.check_all()
    for t in range(3):
        twin.front.delete(t, torch.tensor([3, 3, 50, 7]))
        for key in (3, 50):
            del twin.model[t][key]
    twin.check(lease, [[1, 2, 3]] * 3)  # 3 is pinned, and new
    twin.check_all()
    twin.front.release(lease)
    twin.train([[3, 50], [3, 50], [3, 50]])
    twin.check_all()
    twin.front.reset(1)
    twin.model[1].clear()
    twin.check_all()
    twin.train([[1], [1], [1]])
    twin.check_all()


def test_frozen_tables_and_padding_rows_are_not_written() -> None:
    padded = TableConfig("p", 30, 4, padding_idx=2)
    twin = Twin([padded, TableConfig("q", None, 4)], [Ram(rows=3), Ram()])
    ids: Ids = [[2, 2, 3], [4, 5]]
    lease = twin.stage(ids)
    slots = twin.check(lease, ids)
    assert not twin.front.arenas[0].slab[int(slots[0][0])].view(torch.float32)[:4].any()
    twin.front.stepped([lease, lease], {1}, [1, 1])
    twin.front.release(lease)
    assert [ids.tolist() for ids, _ in twin.front.written(0, 10)] == [[3]]
    assert list(twin.front.written(1, 10)) == []
    assert twin.front.count_written(1) == 0


def test_a_released_lease_gives_its_pins_back_once_from_anywhere() -> None:
    twin = hot(rows=4)
    leases = [twin.stage([range(6)]) for _ in range(3)]
    assert twin.front.pins() == 6
    with twin.front._turn:  # what garbage collection may do at any instant
        twin.front.release(leases[0])
        twin.front.release(leases[0])
    threads = [threading.Thread(target=twin.front.release, args=(leases[1],)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert twin.front.pins() == 6
    with twin.front._stage_lock:
        twin.front.release(leases[2])
    assert twin.front.pins() == 0
    twin.front.release(leases[2])
    assert twin.front.pins() == 0
    assert (twin.front._arrays.pins == 0)[:100].all()


@pytest.mark.parametrize("policy", ["lru", "lfu", "lfu_decay", "lookahead", lambda ids, counts, last: -(ids & 3)])
def test_policies_decide_only_what_is_read_again(policy: Any) -> None:
    twin, rng = hot(rows=20, policy=policy), np.random.default_rng(5)
    batches = [(rng.zipf(1.2, 30) - 1) % 300 for _ in range(60)]
    for k, ids in enumerate(batches):
        if k + 2 < len(batches):
            twin.front.announce(*batch([batches[k + 2]]), 3)
        twin.train([ids])
    twin.check_all()
    assert twin.front.stats()["hits"] > 0


class Trainer:
    """One thread stages ahead, the other updates: what look-ahead does."""

    def __init__(self, twin: Twin, batches: list[list[np.ndarray]], depth: int) -> None:
        self.twin, self.batches = twin, batches
        self.queue: Queue[Any] = Queue(maxsize=depth)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.ahead)
        self.thread.start()

    def ahead(self) -> None:
        try:
            for ids in self.batches:
                self.queue.put((ids, self.twin.front.stage(*batch(ids), True)))
        except BaseException as error:
            self.error = error
        self.queue.put(None)

    def run(self) -> None:
        rng, front = np.random.default_rng(9), self.twin.front
        kept: list[tuple[Any, Any]] = []
        while (item := self.queue.get()) is not None:
            ids, lease = item
            self.twin.check(lease, ids)
            front.relax(lease)
            kept.append((ids, lease))
            if len(kept) > 1:  # updated one batch late, when its rows may have left
                self.step(*kept.pop(0))
            if rng.integers(8) == 0:
                front.flush()
            if rng.integers(8) == 0:
                front.read_rows(0, torch.from_numpy(ids[0]))
                next(iter(front.written(0, 5)), None)
        for rest in kept:
            self.step(*rest)
        self.thread.join()
        if self.error is not None:
            raise self.error

    def step(self, ids: list[np.ndarray], lease: Any) -> None:
        self.twin.update(lease, ids)
        if len(ids[0]) % 2:
            self.twin.front.release(lease)  # else garbage collection would: the lease has no owner any more
        else:
            self.twin.front.relax(lease)
            self.twin.front.release(lease)


@pytest.mark.parametrize("depth", [1, 8])
@pytest.mark.parametrize("name", ["one row", "seven rows", "all rows", "three tiers"])
def test_staging_ahead_on_another_thread_equals_a_dict(name: str, depth: int) -> None:
    twin, rng = Twin(tables(), CHAINS[name]()), np.random.default_rng(depth)
    batches = [draw(rng, "zipf", k) for k in range(150)]
    Trainer(twin, batches, depth).run()
    assert twin.front.pins() == 0
    twin.check_all()


def test_unbounded_tables_in_memory_grow_and_evaluation_adds_nothing() -> None:
    twin = Twin([TableConfig("t", None, 4)], [Ram()])
    rng = np.random.default_rng(0)
    for _ in range(20):
        twin.train([rng.integers(LOW, HIGH, 500)])
    count, table = twin.front.count_written(0), twin.front._hot[0]
    for _ in range(5):
        twin.evaluate([rng.integers(LOW, HIGH, 500)])
    twin.evaluate([[]])
    assert (len(table.index), count, table.overflow.used) == (10_000, 10_000, 0)
    reading = twin.stage([[1, 2]], training=False)
    twin.train([[1, 3]])  # a row that an evaluation holds is trained: it stays for good
    twin.front.release(reading)
    twin.evaluate([[]])
    assert table.overflow.used == 0
    assert len(table.index) == 10_002
    twin.check_all()


def test_a_hashed_table_that_outgrows_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin([TableConfig("t", None, 4)], [Ram()])
    twin.train([range(10)])
    monkeypatch.setattr("embcache.cache.hot.available_bytes", lambda: 1000)
    table = twin.front._hot[0]
    before = twin.resident(0)
    with pytest.raises(TableTooLarge, match=r"tables \['t'\] need [\d,]+ bytes of memory, 1,000 are available"):
        twin.stage([range(20, 20 + table.block + 100)])
    assert twin.resident(0) == before
    assert twin.front.pins() == 0
    twin.train([range(10)])
    twin.check_all()


def test_counters_add_up() -> None:
    twin = hot(rows=10)
    twin.train([[1, 1, 2]])
    twin.train([[1, 3, 3, 3]])
    stats = twin.front.stats()
    assert {k: stats[k] for k in ("stages", "ids", "unique_ids", "hits", "misses", "ids_hit", "resident")} == {
        "stages": 2, "ids": 7, "unique_ids": 4, "hits": 1, "misses": 3, "ids_hit": 1, "resident": 3,
    }  # fmt: skip
    assert set(stats["seconds"]) == {"dedup_probe", "evict_write", "miss_read", "insert"}
    twin.train([range(100, 120)])
    stats = twin.front.stats()
    assert stats["evictions"] == 10 - 7
    assert stats["rows_written_back"] == 3
    assert stats["overflow_peak"] == 10


def test_a_front_is_freed_with_its_last_reference() -> None:
    twin = hot(rows=4)
    lease = twin.stage([range(9)])
    front, slab = weakref.ref(twin.front), weakref.ref(twin.front.arenas[0].slab)
    twin.front.close()
    twin.front.release(lease)
    twin.front.close()
    del lease, twin
    gc.collect()
    assert front() is None
    assert slab() is None
