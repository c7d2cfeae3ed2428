"""Which ids may have a row, and which rows are over: counters of a Bloom filter, and the step and count in each row.

The filter's hash is part of what is saved: it never changes. An id has four counters in the row of its hash bucket, at
places given by the 32-bit halves of two rounds of the SplitMix64 output function (Steele, Lea & Flood, OOPSLA 2014).
"""

from __future__ import annotations

import numpy as np

from .jit import I64, U64, inline, kernel

PLACES = 4
NEVER = np.int64(-1)  # of a condition that is not asked
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_START, _GAMMA = np.uint64(0x632BE59BD9B4E019), np.uint64(0x9E3779B97F4A7C15)
_30, _27, _31, _32 = (np.uint64(n) for n in (30, 27, 31, 32))
_LOW = np.uint64(0xFFFFFFFF)


@inline
def _mixed(x: U64) -> U64:
    x = (x ^ (x >> _30)) * _FIRST
    x = (x ^ (x >> _27)) * _SECOND
    return x ^ (x >> _31)


@inline
def _places(key: I64, size: I64, out: np.ndarray) -> None:
    """The counters of an id in a row of ``size``; one that occurs again becomes -1, so that it counts once."""
    n, x = np.uint64(size), np.uint64(key) ^ _START
    for half in range(0, PLACES, 2):
        x = _mixed(x + _GAMMA)
        out[half] = np.int64(((x >> _32) * n) >> _32)
        out[half + 1] = np.int64(((x & _LOW) * n) >> _32)
    for j in range(1, PLACES):
        for i in range(j):
            if out[i] == out[j]:
                out[j] = -1
                break


@kernel
def count(cells: np.ndarray, buckets: np.ndarray, ids: np.ndarray, counts: np.ndarray, most: int) -> None:
    """Add ``counts`` to the counters of ``ids``, none beyond ``most``; ``cells`` [buckets, size]."""
    at = np.empty(PLACES, np.int64)
    for i in range(ids.shape[0]):
        row = cells[buckets[i]]
        _places(ids[i], row.shape[0], at)
        for j in range(PLACES):
            if at[j] >= 0:
                row[at[j]] = min(np.int64(row[at[j]]) + np.int64(counts[i]), most)


@kernel
def least(cells: np.ndarray, buckets: np.ndarray, ids: np.ndarray, out: np.ndarray) -> None:
    """The smallest counter of each id: at least as often as it was counted."""
    at = np.empty(PLACES, np.int64)
    for i in range(ids.shape[0]):
        row = cells[buckets[i]]
        _places(ids[i], row.shape[0], at)
        found = np.int64(row[at[0]])
        for j in range(1, PLACES):
            if at[j] >= 0:
                found = min(found, np.int64(row[at[j]]))
        out[i] = found


@inline
def _over(last: I64, updates: I64, sweep: I64, idle: I64, below: I64) -> bool:
    """Whether the sweep at step ``sweep`` takes a row."""
    if last > sweep:
        return False
    return (idle == NEVER or sweep - last > idle) and (below == NEVER or updates < below)


@kernel
def over(metas: np.ndarray, sweep: int, idle: int, below: int, out: np.ndarray) -> None:
    """bool [n]: which rows, by their int32 [n, 2] (step of the last update, number of updates), the sweep takes."""
    for i in range(metas.shape[0]):
        out[i] = _over(np.int64(metas[i, 0]), np.int64(metas[i, 1]), sweep, idle, below)


@kernel
def over_slots(metas: np.ndarray, slots: np.ndarray, sweep: int, idle: int, below: int, out: np.ndarray) -> int:
    """Those of ``slots`` that the sweep takes, to ``out``; returns their number."""
    n = 0
    for i in range(slots.shape[0]):
        s = slots[i]
        if _over(np.int64(metas[s, 0]), np.int64(metas[s, 1]), sweep, idle, below):
            out[n] = s
            n += 1
    return n


@kernel
def stamp(metas: np.ndarray, slots: np.ndarray, step: int) -> None:
    """The rows of ``slots`` are updated in ``step``, once however often they are named."""
    for i in range(slots.shape[0]):
        s = slots[i]
        if metas[s, 0] != step:
            metas[s, 0] = step
            metas[s, 1] = min(np.int64(metas[s, 1]) + 1, 2**31 - 1)
