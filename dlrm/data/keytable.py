"""KeyTable: an open-addressing map from int64 keys to positive int64 values, of bounded size, filled by kernels."""

from __future__ import annotations

import numpy as np

from dlrm.data.hashing import mix64
from embcache.kernels.jit import I64, inline, kernel

SLOT_BYTES, LOAD = 16, 0.6


class TableFull(Exception):
    """More distinct keys than the bound allows."""


class KeyTable:
    """16 bytes a slot, doubling at 60 % load up to ``limit`` keys; growing holds the old and the new slots at once.

    A slot is empty while its value is 0, so every int64 may be a key.
    """

    def __init__(self, limit: int, bits: int = 12) -> None:
        self.limit, self.size, self._bits = limit, 0, bits
        self._keys, self._values = np.empty(1 << bits, np.int64), np.zeros(1 << bits, np.int64)

    def add(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Add values (>= 0) to those of the keys; a value of 0 changes nothing. :class:`TableFull` beyond the limit."""
        done = 0
        while True:
            room = min(int(LOAD * (1 << self._bits)), self.limit)
            done, self.size = _add(self._keys, self._values, self._bits, keys, values, done, self.size, room)
            if done == keys.shape[0]:
                return
            if room == self.limit:
                raise TableFull
            self._grow()

    def get(self, keys: np.ndarray) -> np.ndarray:
        """Values of keys, 0 where absent (int64)."""
        out = np.empty(keys.shape[0], np.int64)
        _get(self._keys, self._values, self._bits, keys, out)
        return out

    def at_least(self, least: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys whose value is >= ``least``, and those values, in no particular order."""
        found = np.flatnonzero(self._values >= max(least, 1))
        return self._keys[found], self._values[found]

    def _grow(self) -> None:
        keys, values, self._bits = self._keys, self._values, self._bits + 1
        self._keys, self._values = np.empty(1 << self._bits, np.int64), np.zeros(1 << self._bits, np.int64)
        _add(self._keys, self._values, self._bits, keys, values, 0, 0, 1 << self._bits)


def keys_within(memory_bytes: int) -> int:
    """How many keys a table may hold so that its slots, while growing, stay within the memory."""
    slots = max(1 << 12, int(memory_bytes) // (SLOT_BYTES * 3 // 2))
    return int(LOAD * (1 << (slots.bit_length() - 1)))


@inline
def _slot(table: np.ndarray, values: np.ndarray, bits: int, key: I64) -> I64:
    mask = (np.int64(1) << bits) - 1
    # The low bits: a pass over parts, which go by the top bits, must fill the whole table all the same.
    at = np.int64(mix64(np.uint64(key))) & mask
    while values[at] != 0 and table[at] != key:
        at = (at + 1) & mask
    return at


@kernel
def _add(
    table: np.ndarray,
    sums: np.ndarray,
    bits: int,
    keys: np.ndarray,
    values: np.ndarray,
    start: int,
    size: int,
    room: int,
) -> tuple[int, int]:
    for i in range(start, keys.shape[0]):
        if values[i] == 0:
            continue
        at = _slot(table, sums, bits, keys[i])
        if sums[at] == 0:
            if size >= room:
                return i, size
            table[at] = keys[i]
            size += 1
        sums[at] += np.int64(values[i])
    return keys.shape[0], size


@kernel
def _get(table: np.ndarray, values: np.ndarray, bits: int, keys: np.ndarray, out: np.ndarray) -> None:
    for i in range(keys.shape[0]):
        out[i] = values[_slot(table, values, bits, keys[i])]
