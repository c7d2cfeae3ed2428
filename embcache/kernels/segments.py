"""Rows as self-checking records: ``[key int64][check uint64][row, padded to 8 bytes]``.

The check is a 63-bit hash of key, row and kind; its lowest bit is the kind, 1 for a tombstone (whose row is zeros).
Multiplication and rotation over four lanes, so that it costs about as much as reading the row. It finds torn and
altered bytes; it is no defence against an adversary.
"""

from __future__ import annotations

import numpy as np

from .jit import I64, U64, inline, kernel
from .rawmem import copy_bytes, load_i64, prefetch, store_i64, zero_bytes

__all__ = ["HEAD", "decode_keys", "encode", "find_altered", "gather", "stride_of"]

HEAD = 16  # bytes before the row
ABSENT, FOUND, DEAD = 0, 1, 2  # states of a key after a look into the overlay

_P = np.uint64(0x9E3779B97F4A7C15)
_Q = np.uint64(0xC2B2AE3D27D4EB4F)
_29, _32, _35, _1 = np.uint64(29), np.uint64(32), np.uint64(35), np.uint64(1)


def stride_of(row_bytes: int) -> int:
    """Bytes of a record.

    >>> stride_of(12), stride_of(256)
    (32, 272)
    """
    return HEAD + -(-row_bytes // 8) * 8


@inline
def _turn(lane: U64, word: U64) -> U64:
    x = (lane ^ word) * _P
    return (x << _29) | (x >> _35)


@inline
def _check(record: I64, stride: I64, dead: I64) -> U64:
    """The check of the record at this address, whose row is in place."""
    key = np.uint64(load_i64(record))
    kind = np.uint64(dead)
    a = (key ^ _Q) * _P
    b = key + _P
    c = np.uint64(stride) * _Q
    d = kind + _Q
    end = record + stride
    at = record + 16
    while at + 32 <= end:
        a = _turn(a, np.uint64(load_i64(at)))
        b = _turn(b, np.uint64(load_i64(at + 8)))
        c = _turn(c, np.uint64(load_i64(at + 16)))
        d = _turn(d, np.uint64(load_i64(at + 24)))
        at += 32
    while at < end:
        a = _turn(a, np.uint64(load_i64(at)))
        at += 8
    a = _turn(_turn(_turn(a, b), c), d)
    a = (a ^ (a >> _32)) * _Q
    a = (a ^ (a >> _29)) * _P
    a = a ^ (a >> _32)
    return (a & ~_1) | kind


@kernel
def encode(keys: np.ndarray, rows: I64, slots: np.ndarray, row_bytes: I64, dead: I64, buffer: I64) -> U64:
    """Write a record for each key at ``buffer``; rows lie at address ``rows`` (ignored if dead), those of keys[i] in
    place slots[i], or i where ``slots`` is empty. Sum of the checks."""
    stride = 16 + (row_bytes + 7) // 8 * 8
    total = np.uint64(0)
    for i in range(keys.size):
        record = buffer + i * stride
        if dead:
            zero_bytes(record, stride)
        else:
            if i + 8 < slots.size:
                _ask(rows + np.int64(slots[i + 8]) * row_bytes, row_bytes)
            place = np.int64(slots[i]) if slots.size else i
            store_i64(record + stride - 8, 0)
            copy_bytes(record + 16, rows + place * row_bytes, row_bytes)
        store_i64(record, keys[i])
        check = _check(record, stride, dead)
        store_i64(record + 8, np.int64(check))
        total += check
    return total


@inline
def _ask(address: I64, count: I64) -> None:
    """Prefetch so many bytes, but for those that the processor will guess by then."""
    for line in range(0, min(count, 512), 64):
        prefetch(address + line)
    if count < 512:
        prefetch(address + count - 1)


@kernel
def gather(
    ordinals: np.ndarray,
    starts: np.ndarray,
    addresses: np.ndarray,
    row_bytes: I64,
    out: I64,
    slots: np.ndarray,
    state: np.ndarray,
) -> I64:
    """Copy the rows of records by their numbers to ``out`` (0: copy nothing), in place slots[i], or i where ``slots``
    is empty; number of rows there.

    Records are numbered through segments: ``starts`` ascending, the first record of each; ``addresses``, where it lies.
    state: uint8 [n], set to ABSENT where the ordinal is -1, FOUND, or DEAD (nothing is copied).
    """
    stride = 16 + (row_bytes + 7) // 8 * 8
    where = np.empty(ordinals.size, np.int64)
    for i in range(ordinals.size):
        n = np.int64(ordinals[i])
        where[i] = 0
        if n >= 0:
            low, high = 0, starts.size
            while high - low > 1:
                middle = (low + high) // 2
                if starts[middle] <= n:
                    low = middle
                else:
                    high = middle
            where[i] = addresses[low] + (n - starts[low]) * stride
    found = 0
    for i in range(ordinals.size):
        if i + 8 < ordinals.size and where[i + 8] != 0:
            _ask(where[i + 8], stride if out else 16)
            if slots.size:
                _ask(out + np.int64(slots[i + 8]) * row_bytes, row_bytes)
        record = where[i]
        if record == 0:
            state[i] = 0
        elif load_i64(record + 8) & 1:
            state[i] = 2
        else:
            if out:
                copy_bytes(out + (np.int64(slots[i]) if slots.size else i) * row_bytes, record + 16, row_bytes)
            state[i] = 1
            found += 1
    return found


@kernel
def find_altered(first: I64, count: I64, row_bytes: I64) -> tuple[I64, U64]:
    """(position of the first record whose check does not match, or -1; sum of the checks) of ``count`` records."""
    stride = 16 + (row_bytes + 7) // 8 * 8
    total = np.uint64(0)
    for i in range(count):
        record = first + i * stride
        check = np.uint64(load_i64(record + 8))
        if _check(record, stride, np.int64(check & _1)) != check:
            return i, total
        total += check
    return -1, total


@kernel
def decode_keys(first: I64, count: I64, row_bytes: I64, keys: np.ndarray, dead: np.ndarray) -> None:
    """keys int64 and dead uint8 (1: tombstone) of ``count`` records."""
    stride = 16 + (row_bytes + 7) // 8 * 8
    for i in range(count):
        keys[i] = load_i64(first + i * stride)
        dead[i] = load_i64(first + i * stride + 8) & 1
