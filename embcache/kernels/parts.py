"""Rows of several tables in one call: a line of numbers for each part, where the kernels find its arrays.

``parts`` is int64 [parts, FIELDS]; the columns are named below. The caller keeps alive what addresses point into.
"""

from __future__ import annotations

import numpy as np

from . import bloom, index, segments
from .jit import I64, inline, kernel
from .rawmem import i32_at, i64_at, u64_at

# a part: its number of keys, the address of the keys (int64), the address of slots (int32; 0: key i has place i) and of
# the rows by slot (0: none), bytes of a row, and how many keys the parts before it have
KEYS, KEYS_AT, SLOTS_AT, ROWS_AT, ROW_BYTES, FIRST = range(6)
# the overlay's index (address of the entries, their number), its segments (address of the first records' numbers and of
# their addresses, number of segments); the table's seed in the filter; the page of its root in the base, -1: none
INDEX_AT, CAPACITY, STARTS_AT, SEGMENTS_AT, SEGMENTS, SEED, ROOT = range(6, 13)
# for writing: the first key that is meant, their number, where their records go, their sum of checks (comes back); the
# number of the part's first record, keys that were new (comes back)
BEGIN, COUNT, RECORDS_AT, CHECK, ORDINAL, NEW = range(13, 19)
FIELDS = 19


@inline
def place(parts: np.ndarray, p: I64, i: I64) -> I64:
    """The place of a part's i-th key among its rows."""
    return np.int64(i32_at(parts[p, SLOTS_AT], parts[p, KEYS])[i]) if parts[p, SLOTS_AT] != 0 else i


@inline
def _keys(parts: np.ndarray, p: I64) -> np.ndarray:
    return i64_at(parts[p, KEYS_AT], parts[p, KEYS])


@inline
def _slots(parts: np.ndarray, p: I64) -> np.ndarray:
    return i32_at(parts[p, SLOTS_AT], parts[p, KEYS] if parts[p, SLOTS_AT] != 0 else 0)


@inline
def _entries(parts: np.ndarray, p: I64) -> np.ndarray:
    return i32_at(parts[p, INDEX_AT], parts[p, CAPACITY] * index.ENTRY)


@kernel
def look(parts: np.ndarray, ordinals: np.ndarray) -> None:
    """ordinals int32: the number of each key's newest record in its overlay, or -1."""
    for p in range(parts.shape[0]):
        first = parts[p, FIRST]
        index.get(_entries(parts, p), _keys(parts, p), ordinals[first : first + parts[p, KEYS]])


@kernel
def gather(parts: np.ndarray, ordinals: np.ndarray, state: np.ndarray) -> I64:
    """``segments.gather`` for each part; rows there in all."""
    found = 0
    for p in range(parts.shape[0]):
        first, last = parts[p, FIRST], parts[p, FIRST] + parts[p, KEYS]
        if parts[p, SEGMENTS] == 0:
            state[first:last] = 0
            continue
        found += segments.gather(
            ordinals[first:last],
            i64_at(parts[p, STARTS_AT], parts[p, SEGMENTS]),
            i64_at(parts[p, SEGMENTS_AT], parts[p, SEGMENTS]),
            parts[p, ROW_BYTES],
            parts[p, ROWS_AT],
            _slots(parts, p),
            state[first:last],
        )
    return found


@kernel
def screen(parts: np.ndarray, layers: np.ndarray, state: np.ndarray) -> I64:
    """Where the state is 0 and the key in none of the filter's layers, set it to NEVER; how many stay 0. layers: int64
    [layers, 2], address of the words, their number."""
    stay = 0
    for p in range(parts.shape[0]):
        mine = state[parts[p, FIRST] : parts[p, FIRST] + parts[p, KEYS]]
        hashes, seen = np.empty(mine.size, np.uint64), mine.copy()
        bloom.hash_keys(_keys(parts, p), np.uint64(parts[p, SEED]), hashes)
        for k in range(layers.shape[0]):
            bloom.look(u64_at(layers[k, 0], layers[k, 1]), hashes, seen)
        for i in range(mine.size):
            if seen[i] == 0:
                mine[i] = bloom.NEVER
            stay += mine[i] == 0
    return stay


@kernel
def encode(parts: np.ndarray) -> None:
    """``segments.encode`` for the keys that each line means."""
    for p in range(parts.shape[0]):
        begin, end = parts[p, BEGIN], parts[p, BEGIN] + parts[p, COUNT]
        parts[p, CHECK] = np.int64(
            segments.encode(
                _keys(parts, p)[begin:end],
                parts[p, ROWS_AT],
                _slots(parts, p)[begin:end],
                parts[p, ROW_BYTES],
                0,
                parts[p, RECORDS_AT],
            )
        )


@kernel
def put(parts: np.ndarray) -> None:
    """The keys of each part get the numbers from ORDINAL on in its overlay's index, which has room for them."""
    for p in range(parts.shape[0]):
        numbers = np.arange(parts[p, ORDINAL], parts[p, ORDINAL] + parts[p, KEYS])
        parts[p, NEW] = index.put(_entries(parts, p), _keys(parts, p), numbers)
