"""Sorting inside kernels: 64-bit keys with a payload, a byte at a time, where the bytes that all keys share cost
nothing (a least-significant-digit radix sort; Knuth, vol. 3, algorithm 5.2.5 R)."""

from __future__ import annotations

import numpy as np

from .jit import I64, inline

FEW = 24  # keys up to which insertion is faster


@inline
def sort_pairs(keys: np.ndarray, payload: np.ndarray) -> None:
    """Sort uint64 ``keys`` in place, ascending, equal ones in their order, and int64 ``payload`` along."""
    n = keys.shape[0]
    if n <= FEW:
        for i in range(1, n):
            key, value, j = keys[i], payload[i], i
            while j > 0 and keys[j - 1] > key:
                keys[j], payload[j] = keys[j - 1], payload[j - 1]
                j -= 1
            keys[j], payload[j] = key, value
        return
    differing = np.uint64(0)
    for i in range(n):
        differing |= keys[i] ^ keys[0]
    counts, moved, along = np.empty(256, np.int64), np.empty(n, np.uint64), np.empty(n, np.int64)
    source, values, target, others = keys, payload, moved, along
    for byte in range(8):
        shift = np.uint64(8 * byte)
        if (differing >> shift) & np.uint64(255) == 0:
            continue
        counts[:] = 0
        for i in range(n):
            counts[np.int64((source[i] >> shift) & np.uint64(255))] += 1
        before: I64 = 0
        for value in range(256):
            here = counts[value]
            counts[value] = before
            before += here
        for i in range(n):
            d = np.int64((source[i] >> shift) & np.uint64(255))
            target[counts[d]], others[counts[d]] = source[i], values[i]
            counts[d] += 1
        source, values, target, others = target, others, source, values
    if source.ctypes.data != keys.ctypes.data:
        keys[:] = source
        payload[:] = values
