"""A batch is staged for all its tables together: tables of several kinds and sizes, and what is undone on errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from front_twins import Failing, Ids, Twin, batch

from embcache.cache.policy import POLICIES
from embcache.cache.slots import SlotPool
from embcache.config import TableConfig
from embcache.errors import TableTooLarge
from embcache.tiers.ram import Ram

pytestmark = pytest.mark.filterwarnings("ignore:table .* staged batches need")
DIMS = (1, 64, 3, 17)


def widths() -> list[TableConfig]:
    return [TableConfig(f"t{k}", None, dim) for k, dim in enumerate(DIMS)]


def state(twin: Twin) -> list[Any]:
    """What an error has to leave as it was."""
    out: list[Any] = [twin.front.pins()]
    for t, table in twin.front._hot.items():
        used = slice(0, table.rows)
        known = table.keeper is not None and not table.keeper.asks  # a callable may have been asked
        scores = table.keeper.score.tolist() if known else None
        out.append((twin.resident(t), table.cache.used, table.overflow.used, scores, table.tick))
        out.append((table.slot_ids[used].tolist(), table.pins[used].tolist(), (table.flags[used] & 4).tolist()))
    return out


def often(ids: np.ndarray, counts: np.ndarray, last: np.ndarray) -> np.ndarray:
    return counts.astype(np.int64) * 1000 + last


@pytest.mark.parametrize("policy", [*POLICIES, often])
def test_tables_of_several_row_sizes_under_every_policy(policy: Any) -> None:
    twin = Twin(widths(), [Ram(rows={"t0": 3, "t1": 40, "t2": 1, "t3": 9}, policy=policy), Failing()])
    rng = np.random.default_rng(1)
    for step in range(30):
        ids = [rng.integers(0, 60, rng.integers(0, 25)) * (-1) ** k for k in range(4)]
        if step % 5 == 4:
            ids[step % 4] = np.empty(0, dtype=np.int64)
        twin.train(ids)
        twin.evaluate(ids[::-1])
    twin.check_all()
    stats = twin.front.stats()
    assert stats["hits"] + stats["misses"] == stats["unique_ids"]
    assert stats["evictions"] > 0
    assert stats["rows_written_back"] > 0
    assert twin.front.pins() == 0


def test_whole_and_growing_tables_in_one_batch() -> None:
    tables = [TableConfig("a", 50, 4), TableConfig("b", None, 8), TableConfig("c", 20, 1), TableConfig("d", None, 2)]
    twin, rng = Twin(tables, [Ram()]), np.random.default_rng(2)
    assert [twin.front.direct(t) for t in range(4)] == [True, False, True, False]
    for step in range(12):  # the indexes of b and d grow in the middle of a batch
        wide = rng.integers(-(2**63), 2**63 - 1, 40 * (step % 3))
        twin.train([rng.integers(0, 50, 9), wide, rng.integers(0, 20, 5), rng.integers(0, 90, 30)])
        twin.evaluate([[1, 2], [3, 4], [5], [6, 7]])
    twin.check_all()


def test_rows_pinned_between_their_choice_and_their_leaving_are_passed_over() -> None:
    twin = Twin(widths(), [Ram(rows=8, policy="lru"), Ram()])
    full: Ids = [np.arange(8)] * 4
    twin.train(full)
    table, turn, meddled = twin.front._hot[1], twin.front._turn, []
    enter = type(turn).__enter__

    def meddle(self: Any) -> None:
        enter(self)
        if len(meddled) == 1:  # the first turn pins the batch, the second claims who leaves
            table.pins[:3] += 1
        meddled.append(1)

    type(turn).__enter__ = meddle  # type: ignore[method-assign]
    try:
        lease = twin.stage([[], [20, 21, 22, 23], [30], []])
    finally:
        type(turn).__enter__ = enter  # type: ignore[method-assign]
    assert {0, 1, 2} <= set(twin.resident(1).values())
    assert all(twin.resident(1)[int(table.slot_ids[slot])] == slot for slot in range(3))
    twin.check(lease, [[], [20, 21, 22, 23], [30], []])
    table.pins[:3] -= 1
    twin.front.release(lease)
    twin.check_all()
    assert twin.front.pins() == 0


def test_a_callable_that_fails_for_one_table_leaves_the_others() -> None:
    broken = [10**9]

    def scorer(ids: np.ndarray, counts: np.ndarray, last: np.ndarray) -> np.ndarray:
        broken[0] -= 1
        if broken[0] < 0:
            raise ArithmeticError("no score today")
        return counts.astype(np.int64)

    twin = Twin(widths(), [Ram(rows=6, policy=scorer), Ram()])
    twin.train([np.arange(4)] * 4)
    for after in range(3):
        before = state(twin)
        broken[0] = after
        with pytest.raises(ArithmeticError):
            twin.stage([np.arange(100, 105)] * 4)
        broken[0] = 10**9
        assert state(twin) == before
    twin.train([np.arange(100, 105)] * 4)
    twin.check_all()


@pytest.mark.parametrize("call", ["read", "write"])
@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("middle", [False, True])
def test_an_error_for_one_table_leaves_all_as_they_were(call: str, after: int, middle: bool) -> None:
    below = Failing()
    twin = Twin(widths(), [Ram(rows=5), *([Ram(rows=6)] * middle), below])
    for first in (0, 5, 10):
        twin.train([np.arange(first, first + 5)] * 4)
    before = state(twin)
    below.after[call] = after
    with pytest.raises(OSError):  # StorageFull is one
        twin.stage([np.arange(50, 57)] * 4)
    below.after.clear()
    after_it = state(twin)
    if call == "write":
        assert after_it == before
    else:  # who left before the read does not come back for it
        assert after_it[0] == before[0]
    twin.check_all()
    twin.train([np.arange(50, 57)] * 4)
    twin.check_all()
    assert twin.front.pins() == 0


def test_a_full_overflow_extent_is_said_and_undone() -> None:
    twin = Twin(widths(), [Ram(rows=4), Ram()])
    twin.train([np.arange(4)] * 4)
    table = twin.front._hot[2]
    table.overflow = SlotPool(table.rows, table.rows + 3)
    table.described[2] = twin.front._described[2, 2] = table.overflow.state.ctypes.data
    before = state(twin)
    with pytest.raises(TableTooLarge, match="t2"):
        twin.stage([np.arange(20, 30)] * 4)
    with pytest.raises(TableTooLarge, match="t2"):
        twin.stage([np.arange(20, 30)] * 4, training=False)
    assert state(twin) == before
    twin.train([np.arange(20, 27)] * 4)
    twin.check_all()


def test_features_of_a_table_that_lie_apart_are_one_segment() -> None:
    twin = Twin(widths(), [Ram(rows=4), Ram()])
    features, values, offsets = batch([[1, 2, 1], [7], [2, 3], [9, 9]])
    features[:, 0] = features[[0, 1, 0, 1], 0]
    lease = twin.front.stage(features, values, offsets, True)
    slots = twin.front.slots(lease)
    assert slots[0] == slots[2]
    assert slots[1] == slots[4]
    assert slots[6] == slots[7] != slots[3]
    assert lease.tables.tolist() == [0, 1]
    assert twin.front.stats()["unique_ids"] == 5
    twin.front.release(lease)
    assert twin.front.pins() == 0
