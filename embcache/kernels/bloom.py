"""A filter of keys that grows: "certainly absent", or "perhaps there" (wrong less than once in 200 absent keys).

A layer is a blocked Bloom filter (Putze, Sanders & Singler, "Cache-, Hash- and Space-Efficient Bloom Filters", WEA
2007): one block of 64 bytes a key, and in each of its eight words one bit. A full layer is followed by another that
doubles the whole (Almeida, Baquero, Preguiça & Hutchison, "Scalable Bloom Filters", IPL 2007), so nothing is ever
rebuilt. With 20 bits a key a full layer errs for 0.027 % of the absent keys; the first takes 16,384 keys, and up to 4
million the whole grows fourfold, so that 17 layers, 0.46 %, are enough for 10^10 keys. All tables share one filter: the
table's number goes into the hash, which has no constant in common with those of the cache's index and of the buckets.
Files depend on it: it never changes.
"""

from __future__ import annotations

import numpy as np

from .jit import I64, U64, inline, kernel
from .memory import huge_empty
from .rawmem import prefetch

__all__ = ["BITS", "BLOCK", "FIRST", "NEVER", "KeyFilter", "Layer", "filter_bytes", "hash_keys", "look", "seed_of"]

BITS = 20  # of memory for each key that a layer takes
BLOCK = 8  # words of 64 bits
FIRST = 1 << 14  # keys that the smallest layer takes
_FAST = 1 << 22  # keys up to which the whole grows fourfold
NEVER = 3  # state of a key that is certainly absent, where 0 is not yet known
_PERHAPS = 255
_AHEAD = 16
_32, _27, _33, _29, _6, _63, _1 = (np.uint64(n) for n in (32, 27, 33, 29, 6, 63, 1))
_FIRST, _SECOND, _THIRD = (np.uint64(c) for c in (0x3C79AC492BA7B653, 0x1C69B3F74AC4AE35, 0xD1342543DE82EF95))
_MASK = 2**64 - 1


@kernel
def hash_keys(keys: np.ndarray, seed: np.uint64, out: np.ndarray) -> None:
    """The hashes of one table's keys."""
    for i in range(keys.size):
        h = np.uint64(keys[i]) ^ seed
        h = (h ^ (h >> _32)) * _FIRST
        h = (h ^ (h >> _27)) * _SECOND
        out[i] = h ^ (h >> _33)


@inline
def _block(h: U64, blocks: I64) -> I64:
    """The first word of a key's block."""
    return np.int64(((h >> _32) * np.uint64(blocks)) >> _32) * BLOCK


@inline
def _bits(h: U64) -> U64:
    """Six bits for each word, from another mix of the hash."""
    g = (h ^ (h >> _29)) * _THIRD
    return g ^ (g >> _32)


@kernel
def look(words: np.ndarray, hashes: np.ndarray, seen: np.ndarray) -> None:
    """seen[i] = _PERHAPS where it is 0 and the key is in the layer."""
    blocks, base, n = words.size // BLOCK, words.ctypes.data, hashes.size
    for i in range(n):
        if i + _AHEAD < n and seen[i + _AHEAD] == 0:
            prefetch(base + 8 * _block(hashes[i + _AHEAD], blocks))
        if seen[i] != 0:
            continue
        at, g = _block(hashes[i], blocks), _bits(hashes[i])
        there = _1
        for w in range(BLOCK):
            there &= words[at + w] >> (g & _63)
            g >>= _6
        if there & _1:
            seen[i] = _PERHAPS


@kernel
def _add(words: np.ndarray, hashes: np.ndarray) -> np.int64:
    """Set the bits of each key; how many keys were not in the layer before."""
    blocks, base, n, new = words.size // BLOCK, words.ctypes.data, hashes.size, np.int64(0)
    for i in range(n):
        if i + _AHEAD < n:
            prefetch(base + 8 * _block(hashes[i + _AHEAD], blocks))
        at, g = _block(hashes[i], blocks), _bits(hashes[i])
        there = _1
        for w in range(BLOCK):
            there &= words[at + w] >> (g & _63)
            words[at + w] |= _1 << (g & _63)
            g >>= _6
        new += 1 - np.int64(there & _1)
    return new


class Layer:
    """``words`` uint64 [8 a block], ``keys``: how many were put in, of ``capacity``."""

    def __init__(self, capacity: int, keys: int = 0) -> None:
        self.capacity, self.keys = capacity, keys
        try:
            self.words = huge_empty(8 * BLOCK * _blocks(capacity)).numpy().view(np.uint64)
        except OSError as error:
            raise MemoryError(f"a filter of {capacity} keys: {error}") from error


class KeyFilter:
    """Keys of tables; int64 arrays, best in order. One thread may add while any number looks: bits are only ever set,
    and a new layer is in ``layers`` before its first key. Who looks may miss what is being added, and nothing else.

    MemoryError where a layer finds no room; the keys added until then stay.

    >>> keys = KeyFilter()
    >>> keys.add(3, np.array([7, -1]))
    >>> state = np.zeros(3, np.uint8)
    >>> keys.screen(3, np.array([7, 8, -1]), state), state.tolist(), len(keys)
    (2, [0, 3, 0], 2)
    """

    def __init__(self, expected: int = 0, layers: tuple[Layer, ...] = ()) -> None:
        self.layers = layers
        if expected:
            self._grow(expected)

    def __len__(self) -> int:
        """Keys put in, but for those that passed already: a little too small."""
        return sum(layer.keys for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.words.nbytes for layer in self.layers)

    def screen(self, table: int, keys: np.ndarray, state: np.ndarray) -> int:
        """Where the state (uint8 [n]) is 0 and the key was certainly never added, set it to NEVER; how many stay 0."""
        layers, seen = self.layers, state.copy()
        hashes = _hashed(table, keys)
        for layer in reversed(layers):  # half of the keys are in the newest
            look(layer.words, hashes, seen)
        state[seen == 0] = NEVER
        return int(np.count_nonzero(seen == _PERHAPS))

    def add(self, table: int, keys: np.ndarray, more: int = 0) -> None:
        """Add keys; ``more``: so many others will follow, for which a new layer leaves room."""
        seen = np.zeros(len(keys), np.uint8)
        hashes = _hashed(table, keys)
        for layer in self.layers:
            look(layer.words, hashes, seen)
        hashes = hashes[seen == 0]
        at = 0
        while at < len(hashes):
            if not self.layers or self.layers[-1].keys >= self.layers[-1].capacity:
                self._grow(len(hashes) - at + more)
            last = self.layers[-1]
            part = hashes[at : at + last.capacity - last.keys]
            last.keys += int(_add(last.words, part))
            at += len(part)

    def _grow(self, expected: int) -> None:
        total = sum(layer.capacity for layer in self.layers)
        self.layers = (*self.layers, Layer(max(_grown(total) - total, expected)))


def _hashed(table: int, keys: np.ndarray) -> np.ndarray:
    out = np.empty(len(keys), np.uint64)
    hash_keys(np.ascontiguousarray(keys, np.int64), np.uint64(seed_of(table)), out)
    return out


def seed_of(table: int) -> int:
    """A number for each table; tables never share a seed (both steps can be undone)."""
    h = (table + 1) * int(_THIRD) & _MASK
    return (h ^ (h >> 32)) * int(_FIRST) & _MASK


def _grown(total: int) -> int:
    """Keys that a filter for ``total`` takes when it has grown once."""
    return max(FIRST, total * (4 if 4 * total <= _FAST else 2))


def _blocks(capacity: int) -> int:
    return -(-capacity * BITS // (64 * BLOCK))


def filter_bytes(keys: int) -> int:
    """Bytes of a filter that has grown to so many keys, one after another: 2.5 to 5 a key, or 10 MiB.

    >>> [filter_bytes(n) for n in (0, 1, 16_384, 16_385, 1 << 22, 1 << 24)]
    [0, 40960, 40960, 163840, 10485760, 41943040]
    """
    capacity = 0
    while capacity < keys:
        capacity = _grown(capacity)
    return capacity * BITS // 8
