"""The index from keys to slots against a dict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embcache.kernels import cpu
from embcache.kernels.index import ENTRY, RowIndex, home

LOW, HIGH = -(2**63), 2**63 - 1
KEYS = st.one_of(
    st.integers(-8, 8), st.sampled_from([LOW, LOW + 1, HIGH, HIGH - 1, 2**32, -(2**32), 2**31]), st.integers(LOW, HIGH)
)


def keys_of(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def check(index: RowIndex, model: dict[int, int], asked: np.ndarray) -> None:
    assert len(index) == len(model)
    assert index.get(asked).tolist() == [model.get(k, -1) for k in asked.tolist()]
    keys, values = index.items()
    assert dict(zip(keys.tolist(), values.tolist(), strict=True)) == model


@given(st.lists(st.tuples(st.booleans(), st.lists(KEYS, max_size=40)), max_size=12), st.integers(0, 2**31 - 2))
@settings(max_examples=150)
def test_any_puts_and_deletes_equal_a_dict(steps: list[tuple[bool, list[int]]], start: int) -> None:
    index, value = RowIndex(), start // 2
    model: dict[int, int] = {}
    for insert, keys in steps:
        asked = keys_of([*keys, 0, -1, LOW, HIGH])
        if insert:
            values = list(range(value, value + len(keys)))
            value += len(keys)
            index.put(keys_of(keys), np.array(values, dtype=np.int32))
            model.update(zip(keys, values, strict=True))  # a key given twice keeps its last value
        else:
            unique = list(dict.fromkeys(keys))
            assert index.delete(keys_of(unique)).tolist() == [model.pop(k, -1) for k in unique]
        check(index, model, asked)


def test_a_delete_of_a_key_given_twice_finds_it_once() -> None:
    index = RowIndex()
    index.put(keys_of([5]), np.array([3], dtype=np.int32))
    assert index.delete(keys_of([5, 5, 6])).tolist() == [3, -1, -1]
    assert len(index) == 0


def test_keys_that_share_a_first_entry_survive_deletions() -> None:
    """One long cluster that wraps around the end of the array: the hardest case of a backward shift."""
    index = RowIndex(100)
    capacity = index.capacity
    crowd = [k for k in range(200_000) if home(k, capacity) >= capacity - 3][:60]
    index.put(keys_of(crowd), np.arange(60, dtype=np.int32))
    model = dict(zip(crowd, range(60), strict=True))
    order = np.random.default_rng(0).permutation(60)
    for k in order.tolist():
        assert index.delete(keys_of([crowd[k]])).tolist() == [model.pop(crowd[k])]
        check(index, model, keys_of(crowd))


def test_growth_keeps_every_key_and_at_most_24_bytes_a_row() -> None:
    index, rng = RowIndex(), np.random.default_rng(1)
    keys = np.unique(rng.integers(LOW, HIGH, 200_000))
    values = np.arange(len(keys), dtype=np.int32)
    for start in range(0, len(keys), 777):
        index.put(keys[start : start + 777], values[start : start + 777])
        if len(index) > 1000:
            assert index.nbytes <= 24.1 * len(index) + 24 * 777
    assert np.array_equal(index.get(keys), values)
    assert np.array_equal(index.get(keys ^ 1)[:5], [-1] * 5) or np.isin(keys[:5] ^ 1, keys).any()
    index.clear()
    assert len(index) == 0
    assert (index.get(keys) == -1).all()


def test_reserved_room_does_not_grow_and_is_given_back() -> None:
    index = RowIndex(1000)
    entries = index.entries
    index.put(np.arange(1000), np.arange(1000, dtype=np.int32))
    assert index.entries is entries
    assert index.nbytes == 24 * 1000
    index.put(np.arange(1000, 50_000), np.arange(1000, 50_000, dtype=np.int32))
    index.delete(np.arange(1000, 50_000))
    index.shrink(1000)
    assert index.nbytes <= 24 * 1000
    assert np.array_equal(index.get(np.arange(2000)), np.r_[np.arange(1000), np.full(1000, -1)])


def test_no_keys_at_all() -> None:
    index, none = RowIndex(), np.empty(0, dtype=np.int64)
    index.put(none, none.astype(np.int32))
    assert index.get(none).shape == index.delete(none).shape == (0,)
    assert len(index) == 0


def test_too_many_entries_are_refused() -> None:
    with pytest.raises(MemoryError, match="2\\^32"):
        RowIndex(2**31)


def locate(index: RowIndex, where: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, ...]:
    """One whole pass; (distinct keys, slots, counts, positions)."""
    n, at = len(keys), 0
    state = np.array([index.count, 0, 0], dtype=np.int64)
    positions, unique = np.full(n, -9, dtype=np.int32), np.empty(n, dtype=np.int64)
    slots, counts = np.empty(n, dtype=np.int32), np.empty(n, dtype=np.int32)
    while at < n:
        at = cpu.locate(index.entries, state, index.limit, keys, at, 7, where, positions, unique, slots, counts)
        index.count = int(state[cpu.COUNT])
        if at < n:
            index.reserve(index.count + 1)
    u = int(state[cpu.UNIQUE])
    assert state[cpu.MISSES] == (slots[:u] < 0).sum()
    return unique[:u], slots[:u], counts[:u], positions


@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 64, 1000])
def test_a_batch_is_deduplicated_with_counts_while_the_index_grows(n: int) -> None:
    rng = np.random.default_rng(n)
    index, where = RowIndex(), np.zeros(64, dtype=np.int32)
    index.put(np.arange(-20, 20), np.arange(40, dtype=np.int32)[::-1].copy())
    for _ in range(3):  # scratch of an earlier batch does not matter
        keys = rng.integers(-60, 60, n)
        unique, slots, counts, positions = locate(index, where, keys)
        expected = list(dict.fromkeys(keys.tolist()))  # in the order of their first occurrence
        assert unique.tolist() == expected
        assert slots.tolist() == [19 - k if -20 <= k < 20 else -1 for k in expected]
        assert counts.tolist() == [(keys == k).sum() for k in expected]
        assert np.array_equal(unique[positions - 7], keys)
        missing = unique[slots < 0]
        assert len(index) == 40 + len(missing)
        index.delete(missing)
        assert len(index) == 40
        assert index.entries.shape[0] == ENTRY * index.capacity
