"""An index from 64-bit keys to slots: open addressing in one int32 array of (key low, key high, slot + 1) entries.

Every int64 is a key: emptiness lives in the slot field. Collisions go to the next entry, a deletion shifts the entries
behind it back (Knuth, vol. 3, algorithm 6.4 R), so there are no tombstones and a lookup ends at the first empty entry.
12 bytes an entry, filled between one half and three quarters: 16 to 24 bytes a row, growing by one half.
"""

from __future__ import annotations

import numpy as np

from .jit import I64, inline, kernel
from .memory import huge_empty
from .rawmem import prefetch

ENTRY = 3  # int32 words of an entry
ENTRY_BYTES = 4 * ENTRY
AHEAD = 16  # entries fetched ahead of their use
SMALLEST = 16
# of a header: address of the entries, their number, keys that there are, keys that fit; its length
ENTRIES, CAPACITY, COUNT, LIMIT, HEADER = 0, 1, 2, 3, 4


@inline
def home(key: I64, capacity: I64) -> I64:
    """The first entry to look at: a 64-bit mix, scaled to any capacity below 2^32 by a multiplication."""
    h = np.uint64(key)
    h ^= h >> np.uint64(32)
    h *= np.uint64(0xD6E8FEB86659FD93)
    h ^= h >> np.uint64(29)
    h *= np.uint64(0x9FB21C651E98DF25)
    return np.int64(((h >> np.uint64(32)) * np.uint64(capacity)) >> np.uint64(32))


@inline
def find(entries: np.ndarray, capacity: I64, key: I64, start: I64) -> I64:
    """Word offset of the key's entry, or of the empty entry where it belongs."""
    low, high = np.int32(key), np.int32(key >> 32)
    e = start * ENTRY
    end = capacity * ENTRY
    while entries[e + 2] != 0 and (entries[e] != low or entries[e + 1] != high):
        e += ENTRY
        if e == end:
            e = 0
    return e


@inline
def set_entry(entries: np.ndarray, e: I64, key: I64, word: I64) -> None:
    """Write an entry whole."""
    entries[e] = np.int32(key)
    entries[e + 1] = np.int32(key >> 32)
    entries[e + 2] = np.int32(word)


@inline
def key_at(entries: np.ndarray, e: I64) -> I64:
    """The key of the entry at a word offset."""
    return (np.int64(entries[e + 1]) << 32) | (np.int64(entries[e]) & 0xFFFFFFFF)


@inline
def remove_entry(entries: np.ndarray, capacity: I64, e: I64) -> None:
    """Empty the entry at a word offset and shift back what it had pushed on."""
    end = capacity * ENTRY
    hole, at = e, e
    while True:
        at += ENTRY
        if at == end:
            at = 0
        if entries[at + 2] == 0:
            break
        wanted = home(key_at(entries, at), capacity) * ENTRY
        gone = at - wanted if at >= wanted else at - wanted + end
        free = at - hole if at >= hole else at - hole + end
        if gone >= free:
            entries[hole] = entries[at]
            entries[hole + 1] = entries[at + 1]
            entries[hole + 2] = entries[at + 2]
            hole = at
    entries[hole + 2] = 0


@kernel
def get(entries: np.ndarray, keys: np.ndarray, out: np.ndarray) -> None:
    """out[i] = slot of keys[i], -1 where it is absent."""
    n, capacity = keys.shape[0], entries.shape[0] // ENTRY
    base, homes = entries.ctypes.data, np.empty(AHEAD, np.int64)
    for i in range(min(AHEAD, n)):
        homes[i] = home(keys[i], capacity)
        prefetch(base + homes[i] * ENTRY_BYTES)
    for i in range(n):
        start = homes[i % AHEAD]
        if i + AHEAD < n:
            later = home(keys[i + AHEAD], capacity)
            homes[i % AHEAD] = later
            prefetch(base + later * ENTRY_BYTES)
        out[i] = entries[find(entries, capacity, keys[i], start) + 2] - 1


@kernel
def put(entries: np.ndarray, keys: np.ndarray, slots: np.ndarray) -> int:
    """Insert or replace, in order; there must be room. Returns how many keys were new."""
    n, capacity, new = keys.shape[0], entries.shape[0] // ENTRY, 0
    base = entries.ctypes.data
    for i in range(n):
        if i + AHEAD < n:
            prefetch(base + home(keys[i + AHEAD], capacity) * ENTRY_BYTES)
        e = find(entries, capacity, keys[i], home(keys[i], capacity))
        new += entries[e + 2] == 0
        set_entry(entries, e, keys[i], np.int64(slots[i]) + 1)
    return new


@kernel
def put_newer(entries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> int:
    """``put``, but a key that has a larger value keeps it. Returns how many keys were new."""
    n, capacity, new = keys.shape[0], entries.shape[0] // ENTRY, 0
    base = entries.ctypes.data
    for i in range(n):
        if i + AHEAD < n:
            prefetch(base + home(keys[i + AHEAD], capacity) * ENTRY_BYTES)
        e = find(entries, capacity, keys[i], home(keys[i], capacity))
        new += entries[e + 2] == 0
        if entries[e + 2] <= values[i]:
            set_entry(entries, e, keys[i], np.int64(values[i]) + 1)
    return new


@kernel
def delete(entries: np.ndarray, keys: np.ndarray, out: np.ndarray) -> int:
    """Remove keys; out[i] = the slot it had, -1 where it was absent. Returns how many were there."""
    n, capacity, gone = keys.shape[0], entries.shape[0] // ENTRY, 0
    base = entries.ctypes.data
    for i in range(n):
        if i + AHEAD < n:
            prefetch(base + home(keys[i + AHEAD], capacity) * ENTRY_BYTES)
        e = find(entries, capacity, keys[i], home(keys[i], capacity))
        out[i] = entries[e + 2] - 1
        if entries[e + 2] != 0:
            remove_entry(entries, capacity, e)
            gone += 1
    return gone


@kernel
def items(entries: np.ndarray, keys: np.ndarray, slots: np.ndarray) -> int:
    """All keys and their slots, in no order; returns their number."""
    n = 0
    for e in range(0, entries.shape[0], ENTRY):
        if entries[e + 2] != 0:
            keys[n], slots[n] = key_at(entries, e), entries[e + 2] - 1
            n += 1
    return n


@kernel
def rehash(entries: np.ndarray, bigger: np.ndarray) -> None:
    """Move every entry to an empty array of another capacity."""
    capacity = bigger.shape[0] // ENTRY
    for e in range(0, entries.shape[0], ENTRY):
        if entries[e + 2] != 0:
            key = key_at(entries, e)
            to = find(bigger, capacity, key, home(key, capacity))
            bigger[to], bigger[to + 1], bigger[to + 2] = entries[e], entries[e + 1], entries[e + 2]


class RowIndex:
    """Keys int64 → values int32 in ``[0, 2^31 - 1)``. Not thread-safe: callers hold a lock.

    ``entries`` is the array that fused kernels read; it is replaced when the index grows. A key given twice to ``put``
    keeps its last value.

    >>> index = RowIndex()
    >>> index.put(np.array([7, -1, 7]), np.array([0, 1, 2], dtype=np.int32))
    >>> len(index), index.get(np.array([-1, 0, 7])).tolist(), index.delete(np.array([7])).tolist(), len(index)
    (2, [1, -1, 2], [2], 1)
    """

    def __init__(self, expected: int = 0) -> None:
        self.header = np.zeros(HEADER, dtype=np.int64)  # what kernels over several indexes are told of this one
        self._use(_empty(max(SMALLEST, 2 * expected)))

    def _use(self, entries: np.ndarray) -> None:
        self.entries = entries
        self.header[ENTRIES], self.header[CAPACITY] = entries.ctypes.data, self.capacity
        self.header[LIMIT] = self.limit

    @property
    def count(self) -> int:
        """Keys."""
        return int(self.header[COUNT])

    @count.setter
    def count(self, n: int) -> None:
        self.header[COUNT] = n

    def __len__(self) -> int:
        return self.count

    @property
    def capacity(self) -> int:
        """Entries, filled or not."""
        return len(self.entries) // ENTRY

    @property
    def limit(self) -> int:
        """Keys that fit before the array grows."""
        return self.capacity * 3 // 4

    @property
    def nbytes(self) -> int:
        """Bytes of the entries; while growing, the old ones are there besides."""
        return self.entries.nbytes

    def get(self, keys: np.ndarray) -> np.ndarray:
        """int32 [n]: the values of ``keys``, -1 where they are absent."""
        out = np.empty(len(keys), dtype=np.int32)
        get(self.entries, keys, out)
        return out

    def put(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Insert or replace, in order."""
        self.reserve(self.count + len(keys))
        self.count += put(self.entries, keys, values)

    def put_newer(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Insert, or replace smaller values."""
        self.reserve(self.count + len(keys))
        self.count += put_newer(self.entries, keys, values)

    def delete(self, keys: np.ndarray) -> np.ndarray:
        """Remove keys; int32 [n]: the values they had, -1 where they were absent."""
        out = np.empty(len(keys), dtype=np.int32)
        self.count -= delete(self.entries, keys, out)
        return out

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """(keys int64 [n], values int32 [n]), in no order."""
        keys, values = np.empty(self.count, dtype=np.int64), np.empty(self.count, dtype=np.int32)
        items(self.entries, keys, values)
        return keys, values

    def reserve(self, n: int) -> None:
        """Make room for ``n`` keys in all."""
        if n <= self.limit:
            return
        capacity = self.capacity
        while capacity * 3 // 4 < n:
            capacity = capacity * 3 // 2
        self._resize(capacity)

    def shrink(self, rows: int) -> None:
        """Give memory back where much more than 24 bytes for each of ``rows`` (or of the keys, if more) are held."""
        wanted = max(SMALLEST, 2 * max(rows, self.count))
        if self.capacity >= 4 * wanted:
            self._resize(wanted)

    def clear(self) -> None:
        """Remove every key; the memory stays, and what was never used is not touched."""
        if self.count:
            self.entries[:] = 0
        self.count = 0

    def _resize(self, capacity: int) -> None:
        bigger = _empty(capacity)
        rehash(self.entries, bigger)
        self._use(bigger)


def _empty(capacity: int) -> np.ndarray:
    if capacity >= 2**32:
        raise MemoryError(f"an index of {capacity} entries: the limit is 2^32 - 1")
    return huge_empty(4 * ENTRY * capacity).numpy().view(np.int32)
