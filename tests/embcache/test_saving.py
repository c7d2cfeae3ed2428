"""Commits in the background whose thread stands still at any point while training stages, evicts, changes, reads."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache_twins import (
    EDGES,
    jagged,
    learn,
    rows_of,
    same_outputs,
    same_rows,
    settled,
    stream,
    three_tables,
    train,
    written_of,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from test_cache_stateful import DiskMachine

import embcache as ec
from embcache.cache import Front, saving
from embcache.cache.saving import Saving
from embcache.checkpoint import Checkpoints
from embcache.errors import StorageFull
from embcache.kernels.cpu import SAVING
from embcache.tiers.overlay import Overlay

pytestmark = pytest.mark.filterwarnings("ignore:table .* staged batches need")  # small caches are the point


class Gate:
    """The thread of the next commit stands still at its ``at``-th pass (two for each table: before its rows are
    written, and after) until ``open``; writing the ``fails``-th table's rows finds the disk full."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.reached = threading.Event()
        self.arm(-1)
        self.close()

    def arm(self, at: int, fails: int = -1) -> None:
        self.at, self.fails = at, fails

    def close(self) -> None:
        self.passes, self.failed = 0, False
        self.event.clear()
        self.reached.clear()

    def open(self) -> None:
        self.event.set()

    def land(self, real: Any) -> Any:
        def land(overlay: Overlay, keys: np.ndarray, rows: np.ndarray) -> int:
            table = self.passes // 2
            self._pass()
            if table == self.fails:
                self.failed = True
                raise StorageFull(None, 0, "here")
            written: int = real(overlay, keys, rows)
            self._pass()
            return written

        return land

    def _pass(self) -> None:
        if self.passes == self.at:
            self.reached.set()
            assert self.event.wait(60)
        self.passes += 1


def install(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a commit opens the gate; freezing closes it."""
    freeze, settle, wait = Saving.freeze, Front.settle, Checkpoints.wait
    monkeypatch.setattr(Overlay, "land", gate.land(Overlay.land))
    monkeypatch.setattr(Saving, "freeze", lambda self: (gate.close(), freeze(self))[1])
    monkeypatch.setattr(Front, "settle", lambda self: (gate.open(), settle(self))[1])
    monkeypatch.setattr(Checkpoints, "wait", lambda self: (gate.open(), wait(self))[1])


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    install(gate, monkeypatch)
    yield gate
    gate.open()


def on_disk(path: Path, cache: int, middle: int = 0, policy: str = "lru", **how: Any) -> ec.EmbeddingStore:
    between = [ec.tiers.Ram(rows=middle, policy=policy)] if middle else []
    return ec.EmbeddingStore(
        three_tables(**how), [ec.tiers.Ram(rows=cache, policy=policy), *between, ec.tiers.Lmdb(path, overlay_bytes=1)]
    )


def in_memory(**how: Any) -> ec.EmbeddingStore:
    return ec.EmbeddingStore(three_tables(**how), [ec.tiers.Ram()])


def everything(store: ec.EmbeddingStore) -> list[Any]:
    return [part for t in range(3) for part in written_of(store, t)]


def equal(a: list[Any], b: list[Any]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def saving_slots(store: ec.EmbeddingStore) -> int:
    hot = store.front._hot.values()
    tables = hot if len(store.front.below) == 1 else [*hot, *store.front.below[0]._tables]  # type: ignore[attr-defined]
    return sum(
        int(np.count_nonzero(table.flags[: table.reserved] & SAVING)) for table in tables if table.reserved < 1e4
    )


@pytest.mark.parametrize("at", [0, 1, 2, 5])
@pytest.mark.parametrize(
    ("cache", "middle", "kind"), [(200, 0, "zipf"), (15, 0, "drift"), (8, 30, "reuse"), (1, 0, "misses")]
)
def test_training_goes_on_while_a_commit_stands_still(
    tmp_path: Path, gate: Gate, at: int, cache: int, middle: int, kind: str
) -> None:
    plain, store = in_memory(), on_disk(tmp_path, cache, middle)
    batches = list(stream(kind, 30))
    everyone = np.arange(240)
    committed: dict[int, list[Any]] = {}
    for i in range(0, 30, 6):
        some = batches[i : i + 6]
        same_outputs(train(store, some, ahead=i % 3, first=i), train(plain, some, ahead=i % 3, first=i))
        for t in range(3):
            assert np.array_equal(rows_of(store, t, everyone), rows_of(plain, t, everyone))
        gate.arm(at)
        number = store.commit({"step": i}, wait=False)  # waits for the one before
        assert gate.reached.wait(60) or at >= gate.passes
        committed[number] = everything(plain)
        assert store.generation == number - 1
    same_rows(store, plain)
    store.checkpoints.wait()
    settled(store)
    assert equal(everything(store), committed[number])
    store.close()
    store = on_disk(tmp_path, cache, middle)
    for g in (number, number - 1):
        assert store.restore(g) == {"step": 6 * (g - 1)}
        assert equal(everything(store), committed[g])
    store.close()


def test_rows_that_leave_come_back_and_change_meanwhile(tmp_path: Path, gate: Gate) -> None:
    """The cache holds all rows of a step; those of the next push them out, and they come back, several times over."""
    plain, store = in_memory(), on_disk(tmp_path, 30)
    large, other = list(stream("large", 2, n=20, rows=60)), list(stream("large", 2, seed=9, n=20, rows=60))
    for s in (plain, store):
        train(s, large)
    gate.arm(0)
    store.commit(wait=False)
    assert gate.reached.wait(60)
    held = saving_slots(store)
    assert held > 50
    committed = everything(plain)
    written = store.front.stats()["rows_written_back"]
    for k in range(3):
        same_outputs(train(store, other, first=2 + 4 * k), train(plain, other, first=2 + 4 * k))
        same_outputs(train(store, large, first=4 + 4 * k), train(plain, large, first=4 + 4 * k))
    assert saving_slots(store) < held
    assert store.front.stats()["rows_written_back"] > written
    gate.open()
    store.checkpoints.wait()
    assert saving_slots(store) == 0
    same_rows(store, plain)
    store.close()
    store = on_disk(tmp_path, 30)
    assert equal(everything(store), committed)
    store.close()


@pytest.mark.parametrize("fails", [0, 1, 2])
@pytest.mark.parametrize(("cache", "middle"), [(200, 0), (12, 0), (8, 30)])
def test_a_full_disk_in_the_thread_loses_nothing(
    tmp_path: Path, gate: Gate, fails: int, cache: int, middle: int
) -> None:
    plain, store = in_memory(), on_disk(tmp_path, cache, middle)
    batches = list(stream("zipf", 24))

    def both(first: int) -> None:
        some = batches[first : first + 6]
        same_outputs(train(store, some, ahead=1, first=first), train(plain, some, ahead=1, first=first))

    both(0)
    store.commit({"step": 6})
    before = everything(plain)
    both(6)
    gate.arm(2 * fails, fails)
    store.commit({"step": 12}, wait=False)
    assert gate.reached.wait(60)
    both(12)
    with pytest.raises(StorageFull, match="here"):
        store.commit()
    assert gate.failed
    assert saving_slots(store) == 0
    same_rows(store, plain)
    files = sorted(p.name for p in (tmp_path / "segments").iterdir())
    chain = [s.path.name for overlay in store.durable._overlays for s in overlay.segments]  # type: ignore[union-attr]
    assert files == sorted(chain)
    reader = ec.EmbeddingStore.open(tmp_path, readonly=True)
    assert (reader.generation, equal(everything(reader), before)) == (1, True)
    reader.close()
    both(18)
    gate.arm(-1)
    assert store.commit({"step": 24}, wait=False) == 2
    store.close()
    store = on_disk(tmp_path, cache, middle)
    assert store.generation == 2
    same_rows(store, plain)
    store.close()


def test_deleting_and_loading_wait_for_the_copies(tmp_path: Path, gate: Gate) -> None:
    plain, store = in_memory(), on_disk(tmp_path, 100)
    for s in (plain, store):
        train(s, stream("zipf", 5))
    gate.arm(2)
    store.commit(wait=False)
    assert gate.reached.wait(60)
    committed = everything(plain)
    ids = torch.arange(0, 240, 2)
    some = torch.arange(20)
    for s in (plain, store):
        s.delete("a", ids)
        s.load_rows("b", some, torch.ones(20, 3))
    same_rows(store, plain)
    gate.arm(0)
    store.commit(wait=False)
    assert gate.reached.wait(60)
    for s in (plain, store):
        s.delete("c", ids)
        s.front.reset(1)
    same_rows(store, plain)
    store.close()
    store = on_disk(tmp_path, 100)
    assert store.generation == 2
    store.restore(1)
    assert equal(everything(store), committed)
    store.close()


def test_other_calls_wait_for_the_copies(tmp_path: Path, gate: Gate) -> None:
    plain, store = in_memory(), on_disk(tmp_path, 50)
    waits = [
        lambda: store.flush(),
        lambda: [store.count_written(name) for name in store.names],
        lambda: everything(store),
        lambda: store.front.purge(),
        lambda: store.stats(),
        lambda: store.restore(),
    ]
    for k, call in enumerate(waits):
        for s in (plain, store):
            train(s, stream("zipf", 3, seed=k), first=3 * k)
        gate.arm(k % 6)
        store.commit(wait=False)
        if k == len(waits) - 1:
            gate.open()
        call()
        same_rows(store, plain)
    store.close()


def test_saved_is_what_was_committed_even_if_a_flush_comes_between(tmp_path: Path, gate: Gate) -> None:
    store = on_disk(tmp_path, 50)
    train(store, stream("zipf", 2))
    gate.arm(0)
    store.commit(wait=False)
    assert gate.reached.wait(60)
    train(store, stream("zipf", 1), first=2)
    store.flush()
    store.checkpoints.wait()
    assert store.generation == 1
    assert store.unsaved
    store.commit()
    assert not store.unsaved
    store.close()


@pytest.mark.parametrize("at", [0, 1, 3])
def test_rows_expire_while_a_commit_stands_still(tmp_path: Path, gate: Gate, at: int) -> None:
    how: dict[str, Any] = {"rows": None, "expiry": ec.Expiry(idle=4, every=2), "admission": ec.Admission(2)}
    plain, store = in_memory(**how), on_disk(tmp_path, 20, **how)
    batches = list(stream("drift", 30, rows=60)) + list(stream("edge", 6))
    asked = np.concatenate([np.arange(300), EDGES])
    for i in range(0, 36, 6):
        some = batches[i : i + 6]
        same_outputs(train(store, some, ahead=1, first=i), train(plain, some, ahead=1, first=i))
        for t in range(3):
            assert np.array_equal(rows_of(store, t, asked), rows_of(plain, t, asked))
        gate.arm(at)
        store.commit({"step": i}, wait=False)
        committed = everything(plain)
    same_rows(store, plain, asked)
    store.close()
    store = on_disk(tmp_path, 20, **how)
    assert store.restore() == {"step": 30}
    assert equal(everything(store), committed)
    store.close()


@pytest.mark.parametrize("fails", [-1, 0])
def test_slots_that_others_took_meanwhile_are_left_alone(tmp_path: Path, gate: Gate, fails: int) -> None:
    """Rows that were only staged, and differ from nothing, sit where the copied ones were."""
    plain, store = in_memory(), on_disk(tmp_path, 12)
    fresh = [jagged([np.arange(k, k + 3)] * 4, np.random.default_rng(k)) for k in range(100, 160, 3)]
    for s in (plain, store):
        train(s, [jagged([np.arange(3)] * 4, np.random.default_rng(0))])
    gate.arm(0, fails)
    store.commit(wait=False)
    assert gate.reached.wait(60)
    for batch in fresh:
        store.stage(batch, training=True).release()
    assert saving_slots(store) == 0
    if fails < 0:
        store.checkpoints.wait()
    else:
        with pytest.raises(StorageFull):
            store.checkpoints.wait()
    same_rows(store, plain)
    for batch in fresh:
        store.stage(batch, training=True).release()
    same_rows(store, plain)
    for s in (plain, store):
        train(s, fresh[-4:], first=1)
    same_rows(store, plain)
    store.close()


def test_a_pinned_row_that_is_swept_while_it_is_saved_is_not_written(tmp_path: Path, gate: Gate) -> None:
    how: dict[str, Any] = {"rows": None, "expiry": ec.Expiry(idle=2, every=1)}
    plain, store = in_memory(**how), on_disk(tmp_path, 12, **how)
    old, other = (jagged([np.arange(k, k + 3)] * 4, np.random.default_rng(0)) for k in (0, 50))
    for s in (plain, store):
        train(s, [old])
    gate.arm(0)
    store.commit(wait=False)
    assert gate.reached.wait(60)
    with store.stage(old, training=True):
        for s in (plain, store):
            train(s, [other] * 4, first=1)
    for k in range(100, 160, 3):
        store.stage(jagged([np.arange(k, k + 3)] * 4, np.random.default_rng(k)), training=True).release()
    tier = store.durable
    assert tier is not None
    assert not tier.read(0, np.arange(3), np.empty((3, store.tables[0].row_bytes), np.uint8)).any()
    same_rows(store, plain, np.arange(200))
    store.close()


def test_without_memory_for_copies_the_rows_are_written_at_once(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, store = in_memory(), on_disk(tmp_path, 100)
    for s in (plain, store):
        train(s, stream("zipf", 4))
    monkeypatch.setattr(saving, "available_bytes", lambda: 4000)  # for the first table, not for the second
    gate.arm(0)
    store.commit(wait=False)
    assert saving_slots(store) == 0
    committed = everything(plain)
    for s in (plain, store):
        train(s, stream("drift", 4), first=4)
    same_rows(store, plain)
    store.close()
    assert gate.passes == 0
    store = on_disk(tmp_path, 100)
    assert equal(everything(store), committed)
    store.close()


def test_a_commit_that_cannot_begin_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, store = in_memory(), on_disk(tmp_path, 100)
    for s in (plain, store):
        train(s, stream("zipf", 4))

    def refuses(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    for owner, name in ((threading.Thread, "start"), (Overlay, "freeze")):
        monkeypatch.setattr(owner, name, refuses)
        with pytest.raises(RuntimeError, match="can't start"):
            store.commit(wait=False)
        monkeypatch.undo()
        assert saving_slots(store) == 0
        same_rows(store, plain)
    with pytest.raises(TypeError):
        store.commit({"what": object()}, wait=False)
    assert store.commit(wait=False) == 1
    store.close()
    store = on_disk(tmp_path, 100)
    same_rows(store, plain)
    store.close()


def interrupt(store: ec.EmbeddingStore, at: int, wait: bool) -> bool:
    """A commit that Ctrl-C meets at its ``at``-th point; whether there was one. Python looks for it where a function
    begins and where one in C has ended."""
    left = [at]
    files = ("checkpoint.py", "saving.py", "by_id.py", "store_disk.py", "lmdb.py", "overlay.py")

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith(files):
            left[0] -= 1
            if left[0] < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        store.commit(wait=wait)
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize(("middle", "wait", "stride"), [(0, False, 1), (30, False, 5), (0, True, 5)])
def test_a_commit_can_be_interrupted_anywhere(tmp_path: Path, middle: int, wait: bool, stride: int) -> None:
    """Nobody waits for copies that no thread will land, and the next commit has all rows."""
    plain, store = in_memory(), on_disk(tmp_path, 20, middle)
    for at in range(0, 10_000, stride):
        batches = list(stream("zipf", 1, seed=at))
        for s in (plain, store):
            train(s, batches, first=2 * at)
        met = interrupt(store, at, wait)
        if at % 3 == 0:
            for s in (plain, store):
                train(s, batches, first=2 * at + 1)
        if at % 3 == 1:
            store.front.settle()
            assert saving_slots(store) == 0
        if at % 7 == 0 or not met:
            store.checkpoints.wait()
            number = store.commit({"at": at}, wait=False)
            store.checkpoints.wait()
            assert store.generation == number
            assert saving_slots(store) == 0
            same_rows(store, plain)
            store.restore()
            same_rows(store, plain)
        if not met:
            break
    assert at > 50
    assert not [thread for thread in threading.enumerate() if thread.name == "embcache-commit"]
    store.close()
    store = on_disk(tmp_path, 20, middle)
    assert store.restore() == {"at": at}
    same_rows(store, plain)
    store.close()


def test_a_store_in_memory_beside_is_saved_at_once(tmp_path: Path) -> None:
    """Its rows are read while they are written."""
    store, beside = on_disk(tmp_path, 50), in_memory()
    for s in (store, beside):
        train(s, stream("zipf", 3))
    saved = Checkpoints(tmp_path)
    saved.save({}, [store, beside], wait=False)
    assert saved.latest is not None
    assert saved.latest.number == store.generation == 1
    store.close()


def test_rows_staged_by_another_thread_while_commits_copy_and_write(tmp_path: Path) -> None:
    plain, store = in_memory(), on_disk(tmp_path, 25)
    batches = list(stream("drift", 60))
    everyone, committed = np.arange(240), []
    with ThreadPoolExecutor(1) as pool:
        ahead = deque(pool.submit(store.stage, batch, training=True) for batch in batches[:3])
        for i, batch in enumerate(batches):
            outputs = []
            for s, handle in ((store, ahead.popleft().result()), (plain, plain.stage(batch, training=True))):
                with handle:
                    outputs.append(learn(s, handle, i))
                s.step()
            same_outputs(outputs[:1], outputs[1:])
            ahead += [pool.submit(store.stage, later, training=True) for later in batches[i + 3 : i + 4]]
            store.commit({"step": i}, wait=False)
            committed.append([rows_of(plain, t, everyone) for t in range(3)])
    store.close()
    store = on_disk(tmp_path, 25)
    for step in (59, 58):
        assert store.restore(step + 1) == {"step": step}
        assert equal([rows_of(store, t, everyone) for t in range(3)], committed[step])
    store.close()


# random operations ----------------------------------------------------------------------------------------------------

GATE = Gate()


class SavingMachine(DiskMachine):
    """Whatever does not wait for a commit goes on while its thread stands still; some commits fail there."""

    def __init__(self) -> None:
        super().__init__()
        GATE.arm(-1)
        GATE.close()
        self.before = 0, self.committed

    def written_rows_are_counted(self) -> None:
        """Counting would wait for the commit after each operation."""

    def finish(self) -> None:
        """Until the commit is done; one that failed has never been."""
        try:
            self.store.checkpoints.wait()
        except StorageFull:
            assert GATE.failed
            self.generation, self.committed = self.before
        else:
            assert not GATE.failed
        GATE.failed = False
        assert self.store.generation == self.generation

    @precondition(lambda self: not self.pending)
    @rule(wait=st.booleans(), at=st.integers(0, 4), fails=st.sampled_from([-1, -1, -1, 0, 1]))
    def commit(self, wait: bool, at: int = -1, fails: int = -1) -> None:
        if GATE.fails >= 0:
            self.finish()
        self.before = self.generation, self.committed
        GATE.arm(at, fails)
        super().commit(wait)

    @precondition(lambda self: self.generation)
    @rule()
    def rewind(self) -> None:
        self.finish()
        if self.generation:
            super().rewind()

    @rule()
    def reopen(self) -> None:
        self.finish()
        super().reopen()

    @precondition(lambda self: self.generation)
    @rule()
    def read_beside_the_writer(self) -> None:
        self.finish()
        if self.generation:
            super().read_beside_the_writer()

    @rule()
    def count(self) -> None:
        super().written_rows_are_counted()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.finish()
        super().teardown()


def test_random_operations_while_commits_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    install(GATE, monkeypatch)
    case = SavingMachine.TestCase
    case.settings = settings(
        max_examples=25,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    case().runTest()
