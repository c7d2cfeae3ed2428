"""How often ids were used that are not in the cache: what a row was worth when it left, found again when it returns.

A set-associative table of fingerprints, 16 entries of 4 bytes in a cache line: the low half of an entry is a tag of the
id, the high half its worth; the most recent entry stands first, and where a line is full the least worth leaves, the
oldest among equals. Remembering the frequency of absent items is the idea of TinyLFU (Einziger, Friedman & Manes,
"TinyLFU: A Highly Efficient Cache Admission Policy", 2017); tags instead of shared counters keep rare ids from lifting
each other. Statistics only: a wrong tag costs a fetch, never a result.
"""

from __future__ import annotations

import numpy as np

from .jit import I64, U64, inline, kernel

WAYS = 16
LINE = 4 * WAYS
MOST = 65535  # worth an entry can hold
_HALF, _TAG = np.uint32(16), np.uint32(0xFFFF)


@inline
def mix(key: I64) -> U64:
    """A 64-bit mix of an id (the finaliser of MurmurHash3 behind an odd multiply)."""
    h = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xFF51AFD7ED558CCD)
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xC4CEB9FE1A85EC53)
    return h ^ (h >> np.uint64(33))


def lines(entries: int) -> np.ndarray:
    """uint32 [lines, 16], empty: a power of two of lines with room for at least ``entries``."""
    count = 1
    while count * WAYS < entries:
        count *= 2
    block = np.zeros((count + 1) * WAYS, dtype=np.uint32)
    first = -block.ctypes.data % LINE // 4  # so that an id's entries are one line of the processor's cache
    return block[first : first + count * WAYS].reshape(count, WAYS)


@inline
def _place(table: np.ndarray, key: I64) -> tuple[U64, np.uint32]:
    h = mix(key)
    return (h >> np.uint64(32)) & np.uint64(table.shape[0] - 1), np.uint32((h & np.uint64(_TAG)) | np.uint64(1))


@inline
def line_at(table: np.ndarray, key: I64) -> I64:
    """The address of what may be remembered of an id."""
    return table.ctypes.data + np.int64(_place(table, key)[0]) * LINE


@inline
def take(table: np.ndarray, key: I64) -> I64:
    """What is remembered of an id, which is forgotten here; 0: nothing."""
    line, tag = _place(table, key)
    for j in range(WAYS):
        entry = table[line, j]
        if entry & _TAG == tag:
            table[line, j] = 0
            return np.int64(entry >> _HALF)
    return np.int64(0)


@inline
def put(table: np.ndarray, key: I64, worth: I64) -> None:
    """Remember an id."""
    line, tag = _place(table, key)
    least = np.uint32(0xFFFFFFFF)
    for j in range(WAYS):  # without branches; the id's own entry comes before the least worth, of equals the last
        entry = table[line, j]
        rank = ((entry >> _HALF) + np.uint32(1)) * np.uint32(WAYS) + np.uint32(WAYS - 1 - j)
        least = min(least, np.uint32(j) if entry & _TAG == tag else rank)
    at = np.int64(least) if least < WAYS else WAYS - 1 - np.int64(least % WAYS)
    for j in range(WAYS - 1, 0, -1):
        table[line, j] = table[line, j - 1] if j <= at else table[line, j]
    table[line, 0] = np.uint32((np.uint64(min(worth, MOST)) << np.uint64(_HALF)) | np.uint64(tag))


@kernel
def fade(table: np.ndarray) -> None:
    """Halve the worth of every entry."""
    for line in range(table.shape[0]):
        for j in range(WAYS):
            entry = table[line, j]
            table[line, j] = (entry >> np.uint32(17) << _HALF) | (entry & _TAG)
