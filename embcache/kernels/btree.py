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
from .parts import FIRST, KEYS, KEYS_AT, ROOT, ROW_BYTES, ROWS_AT, place
from .rawmem import copy_bytes, load_i64, load_u16, prefetch

__all__ = ["BROKEN", "MEMBER", "WRONG_SIZE", "fetch", "locate", "pull", "walk"]

BROKEN, WRONG_SIZE = -1, -2  # pages that cannot be; values of another size
MEMBER = 1  # state that locate gives to keys that are there

_BRANCH, _LEAF, _OVERFLOW, _BIG = 1, 2, 4, 1
_HEAD = 16
_DEPTH = 64
_NODE = 16  # bytes of a branch's node
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


@inline
def _guess(page: I64, count: I64, key: I64, low: I64, high: I64) -> I64:
    """Where ``key`` would be among a page's nodes if its keys, all between ``low`` and ``high``, lay evenly. Keys that
    are numbered, and hashed ones, do."""
    first, last = 0, count
    if low == _TURN and count > 1:
        low, first = _key(page, 1), 1
    if high == _LAST:
        high, last = _key(page, count - 1), count - 1
    if key <= low:
        return 0
    if key >= high:
        return count - 1
    part = np.float64(np.uint64(key - low)) / np.float64(np.uint64(high - low))
    return min(first + np.int64(part * (last - first)), count - 1)


@inline
def _near(page: I64, count: I64, key: I64, at: I64) -> I64:
    """The last node whose key is not above ``key``, or 0: looked for around ``at``, with growing steps."""
    step, end = 1, count
    if at == 0 or _key(page, at) <= key:
        while at + step < count and _key(page, at + step) <= key:
            at += step
            step <<= 1
        end = min(at + step, count)
    else:
        while at > 0 and _key(page, at) > key:
            end = at
            at = max(at - step, 0)
            step <<= 1
    while end - at > 1:
        middle = (at + end) >> 1
        if _key(page, middle) <= key:
            at = middle
        else:
            end = middle
    return at


@kernel
def fetch(parts: np.ndarray, state: np.ndarray, base: I64, page_size: I64, pages: I64) -> I64:
    """Copy the rows of keys with state 0 to their places and set their state to MEMBER; how many, or an error.

    ``parts``: see ``kernels/parts.py``. For keys far apart: a group goes down together, so that cache misses overlap.
    """
    part, who, keys = np.empty(_GROUP, np.int64), np.empty(_GROUP, np.int64), np.empty(_GROUP, np.int64)
    page, near = np.empty(_GROUP, np.int64), np.empty(_GROUP, np.int64)
    low, high = np.empty(_GROUP, np.int64), np.empty(_GROUP, np.int64)  # what a subtree may hold
    found, p, i = 0, 0, 0
    while True:
        n = 0
        while n < _GROUP and p < parts.shape[0]:
            if i == parts[p, KEYS] or parts[p, ROOT] < 0:
                p, i = p + 1, 0
                continue
            if state[parts[p, FIRST] + i] == 0:
                part[n], who[n], keys[n] = p, i, load_i64(parts[p, KEYS_AT] + 8 * i) ^ _TURN
                page[n], low[n], high[n] = base + parts[p, ROOT] * page_size, _TURN, _LAST
                n += 1
            i += 1
        if n == 0:
            return found
        if not _to_leaves(n, keys, page, low, high, near, base, page_size, pages):
            return BROKEN
        for g in range(n):
            near[g] = _guess(page[g], _count(page[g]), keys[g], low[g], high[g]) if _count(page[g]) > 0 else -1
            if near[g] >= 0:
                node, size = _node(page[g], near[g]), parts[part[g], ROW_BYTES]
                for line in range(0, min(size, 512) + 16, 64):
                    prefetch(node + line)
                if parts[part[g], ROWS_AT] != 0:
                    target = parts[part[g], ROWS_AT] + place(parts, part[g], who[g]) * size
                    for line in range(0, min(size, 512), 64):
                        prefetch(target + line)
        for g in range(n):
            if near[g] < 0:
                continue
            j = _near(page[g], _count(page[g]), keys[g], near[g])
            if _key(page[g], j) != keys[g]:
                continue
            p_g, size = part[g], parts[part[g], ROW_BYTES]
            value = _value(page[g], j, size, base, page_size, pages)
            if value < 0:
                return value
            if parts[p_g, ROWS_AT] != 0:
                copy_bytes(parts[p_g, ROWS_AT] + place(parts, p_g, who[g]) * size, value, size)
            state[parts[p_g, FIRST] + who[g]] = MEMBER
            found += 1


@inline
def _to_leaves(
    n: I64,
    keys: np.ndarray,
    page: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    near: np.ndarray,
    base: I64,
    page_size: I64,
    pages: I64,
) -> I64:
    """``page``: from the roots to the leaves where ``keys`` would be, all in step; ``low`` and ``high`` become the
    bounds that the branches set. Not so, where there are pages that cannot be: 0."""
    for depth in range(_DEPTH):
        inner = 0
        for g in range(n):
            at = page[g]
            near[g] = -1
            if not _flags(at) & _LEAF:
                count = _count(at)
                if not _flags(at) & _BRANCH or count < 1:
                    return 0
                near[g], inner = 0, inner + 1
                if depth > 0:  # a root is in the processor's cache, and neighbours mostly go the same way from there
                    j = near[g] = _guess(at, count, keys[g], low[g], high[g])
                    prefetch(at + _HEAD + 2 * j)
                    prefetch(at + page_size - _NODE * (j + 1))  # where it is if keys came in order
        if inner == 0:
            return 1
        before = np.int64(0)
        for g in range(n):
            at, key = page[g], keys[g]
            if near[g] < 0:
                before = np.int64(0)
                continue
            if at == before and key >= low[g - 1] and key < high[g - 1]:
                page[g], low[g], high[g] = page[g - 1], low[g - 1], high[g - 1]
                continue
            before, count = at, _count(at)
            j = _near(at, count, key, near[g] if depth > 0 else _guess(at, count, key, low[g], high[g]))
            if j > 0:
                low[g] = _key(at, j)
            if j + 1 < count:
                high[g] = _key(at, j + 1)
            number = _child(at, j)
            if number >= pages:
                return 0
            page[g] = base + number * page_size
            prefetch(page[g])
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
