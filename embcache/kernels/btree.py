"""Reading LMDB 0.9's B+tree (integer keys of 8 bytes, values of one size) from its mapped data file, without LMDB.

LMDB's own calls hold the interpreter for most of a lookup; these kernels do not. They read pages of a snapshot that a
read transaction keeps from being reused. Layout (mdb.c, 64-bit, little-endian): a page has a head of 16 bytes (number
u64, pad u16, flags u16, lower u16, upper u16) and 16-bit offsets of its nodes; a node is (low u16, high u16, flags u16,
key size u16, key, data). In a branch, low, high and flags make up a page number, and the first key counts as minus
infinity; in a leaf, low and high make up the size of the value, which lies in an overflow page if flags say so.

Keys are compared as unsigned numbers: signed ones, with the highest bit turned.
"""

from __future__ import annotations

import numpy as np

from .jit import I64, inline, kernel
from .rawmem import copy_bytes, load_i64, load_u16, prefetch

__all__ = ["BROKEN", "MEMBER", "WRONG_SIZE", "locate", "locate_few", "pull", "walk"]

BROKEN, WRONG_SIZE = -1, -2  # pages that cannot be; values of another size
MEMBER = 1  # state that locate gives to keys that are there

_BRANCH, _LEAF, _OVERFLOW, _BIG = 1, 2, 4, 1
_HEAD = 16
_DEPTH = 64
_GROUP = 16
_TURN = np.int64(-(2**63))
_LAST = np.int64(2**63 - 1)


@inline
def _flags(page: I64) -> I64:
    return load_u16(page + 10)


@inline
def _count(page: I64) -> I64:
    return (load_u16(page + 12) - _HEAD) >> 1


@inline
def _node(page: I64, i: I64) -> I64:
    return page + load_u16(page + _HEAD + 2 * i)


@inline
def _key(page: I64, i: I64) -> I64:
    return load_i64(_node(page, i) + 8) ^ _TURN


@inline
def _child(page: I64, i: I64) -> I64:
    node = _node(page, i)
    return load_u16(node) | (load_u16(node + 2) << 16) | (load_u16(node + 4) << 32)


@inline
def _lower_bound(page: I64, low: I64, count: I64, key: I64) -> I64:
    """First node from ``low`` on whose key is not below ``key``. Without branches: each would be guessed wrong half the
    time, and the next key's search could not begin meanwhile."""
    size = count - low
    if size <= 0:
        return low
    while size > 1:
        half = size >> 1
        low += half * np.int64(_key(page, low + half - 1) < key)
        size -= half
    return low + np.int64(_key(page, low) < key)


@inline
def _value(page: I64, i: I64, row_bytes: I64, base: I64, page_size: I64, pages: I64) -> I64:
    """Address of the value of a leaf's node, or an error."""
    node = _node(page, i)
    if (load_u16(node) | (load_u16(node + 2) << 16)) != row_bytes or load_u16(node + 6) != 8:
        return WRONG_SIZE
    if load_u16(node + 4) & _BIG:
        number = load_i64(node + 16)
        if number < 0 or number >= pages or not _flags(base + number * page_size) & _OVERFLOW:
            return BROKEN
        return base + number * page_size + _HEAD
    return node + 16


@kernel
def locate(
    keys: np.ndarray, state: np.ndarray, base: I64, page_size: I64, pages: I64, root: I64, leaves: np.ndarray
) -> I64:
    """leaves[i] = address of the leaf where keys[i] would be, for keys with state 0 (the others: 0).

    keys: int64, ascending as unsigned numbers. Returns 0, or BROKEN.
    """
    page = np.empty(_DEPTH, np.int64)
    end = np.empty(_DEPTH, np.int64)  # the last key that a subtree may hold
    page[0], end[0] = base + root * page_size, _LAST
    depth = 0
    for i in range(keys.size):
        leaves[i] = 0
        if state[i] != 0:
            continue
        key = keys[i] ^ _TURN
        while key > end[depth]:
            depth -= 1
        while True:
            at = page[depth]
            if _flags(at) & _LEAF:
                break
            count = _count(at)
            if not _flags(at) & _BRANCH or count < 1 or depth + 1 == _DEPTH:
                return BROKEN
            j = _lower_bound(at, 1, count, key)
            if j == count or _key(at, j) > key:
                j -= 1
            number = _child(at, j)
            if number >= pages:
                return BROKEN
            end[depth + 1] = _key(at, j + 1) - 1 if j + 1 < count else end[depth]
            depth += 1
            page[depth] = base + number * page_size
        leaves[i] = page[depth]
    return 0


@kernel
def locate_few(
    keys: np.ndarray, state: np.ndarray, base: I64, page_size: I64, pages: I64, root: I64, leaves: np.ndarray
) -> I64:
    """The same as ``locate``, for keys far apart: sixteen go down together, so that their cache misses overlap."""
    who, page = np.empty(_GROUP, np.int64), np.empty(_GROUP, np.int64)
    low, size, node = np.empty(_GROUP, np.int64), np.empty(_GROUP, np.int64), np.empty(_GROUP, np.int64)
    i = 0
    while i < keys.size:
        n = 0
        while i < keys.size and n < _GROUP:
            leaves[i] = 0
            if state[i] == 0:
                who[n], page[n] = i, base + root * page_size
                n += 1
            i += 1
        for depth in range(_DEPTH):
            if n == 0 or _flags(page[0]) & _LEAF:
                break
            if depth + 1 == _DEPTH:
                return BROKEN
            longest = 0
            for g in range(n):
                count = _count(page[g])
                if not _flags(page[g]) & _BRANCH or count < 1:
                    return BROKEN
                low[g], size[g] = 1, count - 1
                prefetch(page[g] + _HEAD + 2 * (1 + (size[g] >> 1)))
                longest = max(longest, size[g])
            while longest > 0:
                longest = 0
                for g in range(n):
                    if size[g] > 0:
                        node[g] = _node(page[g], low[g] + (size[g] >> 1))
                        prefetch(node[g] + 8)
                for g in range(n):
                    if size[g] > 0:
                        half = size[g] >> 1
                        after = np.int64((load_i64(node[g] + 8) ^ _TURN) <= (keys[who[g]] ^ _TURN))
                        low[g] += after * (half + 1)
                        size[g] = half - after * (1 - (size[g] & 1))
                        prefetch(page[g] + _HEAD + 2 * (low[g] + (size[g] >> 1)))
                        longest = max(longest, size[g])
            for g in range(n):
                node[g] = _node(page[g], low[g] - 1)
                prefetch(node[g])
            for g in range(n):
                number = _child(page[g], low[g] - 1)
                if number >= pages:
                    return BROKEN
                page[g] = base + number * page_size
                prefetch(page[g])
        for g in range(n):
            if not _flags(page[g]) & _LEAF:
                return BROKEN
            leaves[who[g]] = page[g]
    return 0


@kernel
def pull(
    keys: np.ndarray,
    state: np.ndarray,
    leaves: np.ndarray,
    base: I64,
    page_size: I64,
    pages: I64,
    row_bytes: I64,
    out: I64,
) -> I64:
    """Look into the leaves for the keys with state 0 and copy their values to ``out`` (0: copy nothing), setting state
    MEMBER. Returns the number found, or an error. ``leaves`` is overwritten."""
    n = keys.size
    found = 0
    for i in range(n):
        if i + 16 < n and leaves[i + 16] != 0:
            prefetch(leaves[i + 16])
        if i + 8 < n and leaves[i + 8] != 0:
            later = leaves[i + 8]
            prefetch(later + 2 * _HEAD)
            middle = _count(later) >> 1
            prefetch(later + load_u16(later + _HEAD + 2 * middle) if middle else later)
        leaf = leaves[i]
        leaves[i] = 0
        if leaf == 0:
            continue
        key = keys[i] ^ _TURN
        count = _count(leaf)
        j = _lower_bound(leaf, 0, count, key)
        if j < count and _key(leaf, j) == key:
            value = _value(leaf, j, row_bytes, base, page_size, pages)
            if value < 0:
                return value
            leaves[i] = value
            state[i] = 1
            found += 1
    if out != 0:
        for i in range(n):
            if i + 8 < n and leaves[i + 8] != 0:
                for line in range(0, min(row_bytes, 512), 64):
                    prefetch(leaves[i + 8] + line)
            if leaves[i] != 0:
                copy_bytes(out + i * row_bytes, leaves[i], row_bytes)
    return found


@inline
def _descend(depth: I64, key: I64, page: np.ndarray, index: np.ndarray, base: I64, page_size: I64, pages: I64) -> I64:
    """From page[depth] down to the first node not below ``key``; depth of the leaf, or BROKEN."""
    while _flags(page[depth]) & _BRANCH:
        at = page[depth]
        count = _count(at)
        if count < 1 or depth + 1 == _DEPTH:
            return BROKEN
        j = _lower_bound(at, 1, count, key)
        if j == count or _key(at, j) > key:
            j -= 1
        index[depth] = j
        number = _child(at, j)
        if number >= pages:
            return BROKEN
        depth += 1
        page[depth] = base + number * page_size
    if not _flags(page[depth]) & _LEAF:
        return BROKEN
    index[depth] = _lower_bound(page[depth], 0, _count(page[depth]), key)
    return depth


@kernel
def walk(
    first: I64,
    keys: np.ndarray,
    base: I64,
    page_size: I64,
    pages: I64,
    root: I64,
    row_bytes: I64,
    out: I64,
) -> I64:
    """The rows from key ``first`` on, ascending as unsigned numbers: as many as ``keys`` has room for. Returns how many
    (fewer: there are no more), or an error. ``out``: where the rows go, 0: keys only."""
    page = np.empty(_DEPTH, np.int64)
    index = np.empty(_DEPTH, np.int64)
    page[0] = base + root * page_size
    depth = _descend(0, first ^ _TURN, page, index, base, page_size, pages)
    if depth < 0:
        return depth
    n = 0
    while n < keys.size:
        leaf = page[depth]
        if index[depth] < _count(leaf):
            j = index[depth]
            keys[n] = _key(leaf, j) ^ _TURN
            if out != 0:
                value = _value(leaf, j, row_bytes, base, page_size, pages)
                if value < 0:
                    return value
                copy_bytes(out + n * row_bytes, value, row_bytes)
            index[depth] = j + 1
            n += 1
            continue
        depth -= 1
        while depth >= 0 and index[depth] + 1 >= _count(page[depth]):
            depth -= 1
        if depth < 0:
            return n
        index[depth] += 1
        number = _child(page[depth], index[depth])
        if number >= pages:
            return BROKEN
        page[depth + 1] = base + number * page_size
        depth = _descend(depth + 1, _TURN, page, index, base, page_size, pages)
        if depth < 0:
            return depth
    return n
