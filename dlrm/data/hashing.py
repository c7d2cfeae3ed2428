"""The integer hashes of the data path, the same on every platform (unsigned 64-bit arithmetic only).

* :func:`mix64` is the finaliser of SplitMix64 (Steele, Lea, Flood 2014), a bijection of 64-bit integers.
* A string id becomes ``mix64(fnv1a64(bytes))`` (Fowler/Noll/Vo, 1991), read as a signed 64-bit integer.
* Hashing an id ``key`` to a table of ``size`` rows: row 0 is "missing", a value gets
  ``1 + mix64(key + 0x9E3779B97F4A7C15) mod (size - 1)``.
* :func:`feistel` permutes ``range(n)`` without storing anything: an unbalanced Feistel network of
  six rounds on the next power of two, walked until it lands inside (Black, Rogaway 2002).
"""

from __future__ import annotations

import numpy as np

from embcache.kernels.jit import I64, U64, inline, kernel

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_C1 = np.uint64(0xBF58476D1CE4E5B9)
_C2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)
_ONE = np.uint64(1)

FNV_OFFSET = np.uint64(0xCBF29CE484222325)
FNV_PRIME = np.uint64(0x100000001B3)
FEISTEL_ROUNDS = 6


@inline
def mix64(z: U64) -> U64:
    """SplitMix64's finaliser: uint64 -> uint64, a bijection with ``mix64(0) == 0``."""
    z = (z ^ (z >> _S30)) * _C1
    z = (z ^ (z >> _S27)) * _C2
    return z ^ (z >> _S31)


@inline
def hashed_row(key: I64, size: I64) -> I64:
    """Row in ``[1, size)`` of an int64 key; row 0 is kept for "missing"."""
    return np.int64(mix64(np.uint64(key) + GOLDEN) % np.uint64(size - 1)) + 1


@inline
def feistel(x: U64, n: U64, bits: I64, key: U64) -> U64:
    """Image of ``x`` under permutation number ``key`` of ``range(n)``; ``2**bits >= n``, ``bits >= 2``."""
    low_bits, high_bits = np.uint64(bits // 2), np.uint64(bits - bits // 2)
    low_mask, high_mask = (_ONE << low_bits) - _ONE, (_ONE << high_bits) - _ONE
    while True:
        low, high = x & low_mask, x >> low_bits
        for r in range(0, FEISTEL_ROUNDS, 2):
            low = (low ^ mix64(high + key + np.uint64(r) * GOLDEN)) & low_mask
            high = (high ^ mix64(low + key + np.uint64(r + 1) * GOLDEN)) & high_mask
        x = (high << low_bits) | low
        if x < n:
            return x


@inline
def bits_for(n: I64) -> I64:
    """Smallest ``b >= 2`` with ``2**b >= n``."""
    b = 2
    while (_ONE << np.uint64(b)) < np.uint64(n):
        b += 1
    return b


def mix_python(*words: int) -> int:
    """Fold integers into one 64-bit key: ``h = mix64(h + word + golden)`` from ``h = 0`` (plain Python, any size)."""
    mask, h = (1 << 64) - 1, 0
    for word in words:
        h = (h + word + int(GOLDEN)) & mask
        h = ((h ^ (h >> 30)) * int(_C1)) & mask
        h = ((h ^ (h >> 27)) * int(_C2)) & mask
        h ^= h >> 31
    return h


@kernel
def permute_range(start: int, out: np.ndarray, n: int, key: U64) -> None:
    """``out[i] = perm(start + i)`` (int64) for permutation ``key`` of ``range(n)``."""
    bits = bits_for(n)
    for i in range(out.shape[0]):
        out[i] = np.int64(feistel(np.uint64(start + i), np.uint64(n), bits, key))
