"""Serial kernels of the hot cache: a batch's ids to slots, pins, and the movement of rows.

Arrays by slot: ``slot_ids`` int64, ``pins`` int32, ``flags`` uint8 (bits below), ``where`` int32 (scratch). Those of
all tables lie in one array each, a table's from its ``base`` on, so that one call serves a batch. ``segments`` int64
[S, 3] lists (base, first, last): the positions of a batch's distinct rows that belong to a table.
"""

from __future__ import annotations

import numpy as np

from .index import AHEAD, ENTRY, ENTRY_BYTES, find, home, remove_entry, set_entry
from .jit import I64, inline, kernel
from .rawmem import copy_bytes, i32_at, prefetch, zero_bytes

DIRTY = np.uint8(1)  # newer than in the tier below
EXISTS = np.uint8(2)  # was written once: differs from its initial value
READY = np.uint8(4)  # the row is there: neither being loaded nor leaving
BELOW = np.uint8(8)  # the tier below has a record of it
OVERFLOW = np.uint8(16)  # in the overflow extent: stays pinned until its last lease ends
SAVING = np.uint8(32)  # a commit has copied it, and the tier below does not have it yet
UNSAVED = np.uint8(1 | 32)  # DIRTY or SAVING: the tier below lacks it, so that who leaves must be written first

COUNT, UNIQUE, MISSES = 0, 1, 2  # of the state of a pass
FRESH, LAST, HELD, BACK, POOL = 0, 1, 2, 3, 4  # of a pool: [FRESH, LAST) never given out; HELD given back, at BACK
BLOCK = 32  # keys whose memory is fetched ahead


@kernel
def locate(
    entries: np.ndarray,
    state: np.ndarray,
    limit: int,
    keys: np.ndarray,
    begin: int,
    first: int,
    where: np.ndarray,
    positions: np.ndarray,
    unique: np.ndarray,
    slots: np.ndarray,
    counts: np.ndarray,
) -> int:
    """Distinct keys of ``keys[begin:]`` and their slots; returns how far it came (short of the end: the index is full).

    ``state``: keys in the index, distinct keys so far, misses so far. The k-th distinct key is ``unique[k]``, at
    ``slots[k]`` or -1, ``counts[k]`` times; ``positions[i]`` = first + k. A miss enters the index as -(k + 1) in place
    of its slot + 1. Whether a slot was met before is asked of a sparse set: ``where[slot]`` is its k if slots[k]
    agrees.
    """
    n, capacity = keys.shape[0], entries.shape[0] // ENTRY
    base, scratch = entries.ctypes.data, where.ctypes.data
    homes, words = np.empty(2 * BLOCK, np.int64), np.empty(BLOCK, np.int64)
    count, u, missed = state[COUNT], state[UNIQUE], state[MISSES]
    for i in range(begin, min(begin + BLOCK, n)):
        homes[i % (2 * BLOCK)] = home(keys[i], capacity)
        prefetch(base + homes[i % (2 * BLOCK)] * ENTRY_BYTES)
    for left in range(begin, n, BLOCK):  # by blocks: entries of the next one and scratch of this one are on their way
        right = min(left + BLOCK, n)
        for i in range(right, min(right + BLOCK, n)):
            homes[i % (2 * BLOCK)] = home(keys[i], capacity)
            prefetch(base + homes[i % (2 * BLOCK)] * ENTRY_BYTES)
        for i in range(left, right):
            word = np.int64(entries[find(entries, capacity, keys[i], homes[i % (2 * BLOCK)]) + 2])
            words[i - left] = word
            if word > 0:
                prefetch(scratch + (word - 1) * 4)
        for i in range(left, right):
            word, key = words[i - left], keys[i]
            if word > 0:
                k = np.int64(where[word - 1])
                if k < u and slots[k] == word - 1:
                    counts[k] += 1
                    positions[i] = first + k
                    continue
                where[word - 1] = u
                slots[u] = word - 1
            else:
                e = find(entries, capacity, key, homes[i % (2 * BLOCK)])
                if entries[e + 2] != 0:  # a key of this batch that was missing before
                    k = -np.int64(entries[e + 2]) - 1
                    counts[k] += 1
                    positions[i] = first + k
                    continue
                if count >= limit:
                    state[COUNT], state[UNIQUE], state[MISSES] = count, u, missed
                    return i
                set_entry(entries, e, key, -(u + 1))
                count += 1
                missed += 1
                slots[u] = -1
            unique[u], counts[u] = key, 1
            positions[i] = first + u
            u += 1
    state[COUNT], state[UNIQUE], state[MISSES] = count, u, missed
    return n


@kernel
def pin(segments: np.ndarray, slots: np.ndarray, pins: np.ndarray) -> None:
    """One pin more for each slot that is not -1."""
    pins_at = pins.ctypes.data
    for s in range(segments.shape[0]):
        base, last = segments[s, 0], segments[s, 2]
        for k in range(segments[s, 1], last):
            if k + AHEAD < last:
                prefetch(pins_at + 4 * (base + slots[k + AHEAD]))
            if slots[k] >= 0:
                pins[base + slots[k]] += 1


@kernel
def unpin(segments: np.ndarray, slots: np.ndarray, pins: np.ndarray, flags: np.ndarray, what: int) -> None:
    """One pin less for each slot that is not -1: of all rows (``what`` 0), those in the cache (1) or overflow (2)."""
    pins_at, flags_at = pins.ctypes.data, flags.ctypes.data
    for s in range(segments.shape[0]):
        base, last = segments[s, 0], segments[s, 2]
        for k in range(segments[s, 1], last):
            if k + AHEAD < last:
                later = base + slots[k + AHEAD]
                prefetch(pins_at + 4 * later)
                prefetch(flags_at + later)
            if slots[k] >= 0:
                g = base + slots[k]
                if what == 0 or (what == 2) == ((flags[g] & OVERFLOW) != 0):
                    pins[g] -= 1


@kernel
def repin(
    segments: np.ndarray,
    slots: np.ndarray,
    unique: np.ndarray,
    slot_ids: np.ndarray,
    pins: np.ndarray,
    flags: np.ndarray,
    overflow_held: bool,
) -> bool:
    """Pin rows that may have left since; False, and nothing pinned, where one is no longer in its slot."""
    ids_at, pins_at, flags_at = slot_ids.ctypes.data, pins.ctypes.data, flags.ctypes.data
    for s in range(segments.shape[0]):
        base, last = segments[s, 0], segments[s, 2]
        for k in range(segments[s, 1], last):
            if k + AHEAD < last:
                later = base + slots[k + AHEAD]
                prefetch(ids_at + 8 * later)
                prefetch(pins_at + 4 * later)
                prefetch(flags_at + later)
            g = base + slots[k]
            if slot_ids[g] != unique[k] or (flags[g] & READY) == 0:
                _undo(segments, slots, pins, flags, overflow_held, s, k)
                return False
            if not (overflow_held and (flags[g] & OVERFLOW) != 0):
                pins[g] += 1
    return True


@inline
def _undo(
    segments: np.ndarray, slots: np.ndarray, pins: np.ndarray, flags: np.ndarray, held: bool, stop: I64, end: I64
) -> None:
    """Take back the pins of ``repin`` before row ``end`` of segment ``stop``."""
    for s in range(stop + 1):
        base = segments[s, 0]
        for k in range(segments[s, 1], end if s == stop else segments[s, 2]):
            g = base + slots[k]
            if not (held and (flags[g] & OVERFLOW) != 0):
                pins[g] -= 1


@kernel
def spread(ranges: np.ndarray, positions: np.ndarray, slots: np.ndarray, out: np.ndarray) -> None:
    """out[i] = slots[positions[i]] for i in each [start, stop) of ``ranges`` int64 [R, 2]."""
    for r in range(ranges.shape[0]):
        for i in range(ranges[r, 0], ranges[r, 1]):
            out[i] = slots[positions[i]]


@kernel
def mark(segments: np.ndarray, slots: np.ndarray, flags: np.ndarray, bits: np.uint8) -> None:
    """Set bits of the flags of each slot."""
    for s in range(segments.shape[0]):
        base = segments[s, 0]
        for k in range(segments[s, 1], segments[s, 2]):
            flags[base + slots[k]] |= bits


@kernel
def take(pool: np.ndarray, out: np.ndarray) -> int:
    """Free slots of a pool (``cache/slots.py``), those given back first, as far as ``out`` holds them; returns their
    number."""
    again = min(out.shape[0], pool[HELD])
    fresh = min(out.shape[0] - again, pool[LAST] - pool[FRESH])
    pool[HELD] -= again
    back = i32_at(pool[BACK], pool[HELD] + again)
    for i in range(again):
        out[i] = back[pool[HELD] + i]
    for i in range(fresh):
        out[again + i] = pool[FRESH] + i
    pool[FRESH] += fresh
    return again + fresh


@kernel
def claim(slots: np.ndarray, pins: np.ndarray, flags: np.ndarray, out: np.ndarray, n: int, most: int) -> int:
    """Of one table's ``slots``, those that may leave (ready, no pin) are marked as leaving, pinned so that nobody
    chooses them again, and appended to ``out`` from ``n`` on, until it holds ``most``; returns how many it holds."""
    for i in range(slots.shape[0]):
        if n == most:
            break
        s = slots[i]
        if pins[s] == 0 and (flags[s] & READY) != 0:
            flags[s] &= ~READY
            pins[s] = 1
            out[n] = s
            n += 1
    return n


@kernel
def idle(first: int, last: int, pins: np.ndarray, flags: np.ndarray, out: np.ndarray) -> int:
    """Slots of [first, last) that are ready and not pinned are marked as leaving; returns their number."""
    n = 0
    for s in range(first, last):
        if pins[s] == 0 and (flags[s] & READY) != 0:
            flags[s] &= ~READY
            out[n] = s
            n += 1
    return n


@kernel
def missing(slots: np.ndarray, first: int, last: int, out: np.ndarray) -> int:
    """Positions of [first, last) whose slot is -1; returns their number."""
    n = 0
    for k in range(first, last):
        if slots[k] < 0:
            out[n] = k
            n += 1
    return n


@kernel
def enter(
    entries: np.ndarray,
    keys: np.ndarray,
    slots: np.ndarray,
    slot_ids: np.ndarray,
    pins: np.ndarray,
    flags: np.ndarray,
    rows: int,
) -> int:
    """One table's ``keys`` get their ``slots`` in the index, pinned once, not ready, OVERFLOW from slot ``rows`` on;
    returns how many were new to the index, which has room."""
    n, capacity, new = keys.shape[0], entries.shape[0] // ENTRY, 0
    base, ids_at, pins_at, flags_at = entries.ctypes.data, slot_ids.ctypes.data, pins.ctypes.data, flags.ctypes.data
    for i in range(n):
        if i + AHEAD < n:
            later = np.int64(slots[i + AHEAD])
            prefetch(base + home(keys[i + AHEAD], capacity) * ENTRY_BYTES)
            prefetch(ids_at + 8 * later)
            prefetch(pins_at + 4 * later)
            prefetch(flags_at + later)
        key, slot = keys[i], np.int64(slots[i])
        e = find(entries, capacity, key, home(key, capacity))
        new += entries[e + 2] == 0
        set_entry(entries, e, key, slot + 1)
        slot_ids[slot], pins[slot] = key, 1
        flags[slot] = OVERFLOW if slot >= rows else np.uint8(0)
    return new


@kernel
def leave(entries: np.ndarray, slots: np.ndarray, slot_ids: np.ndarray, flags: np.ndarray, ids: np.ndarray) -> int:
    """The rows in one table's ``slots`` leave index and flags; ``ids`` becomes their keys. Returns their number."""
    n, capacity, gone = slots.shape[0], entries.shape[0] // ENTRY, 0
    base, ids_at, flags_at = entries.ctypes.data, slot_ids.ctypes.data, flags.ctypes.data
    for i in range(n):
        if i + AHEAD < n:
            prefetch(ids_at + 8 * np.int64(slots[i + AHEAD]))
            prefetch(flags_at + np.int64(slots[i + AHEAD]))
        ids[i] = slot_ids[slots[i]]
    for i in range(n):
        if i + AHEAD < n:
            prefetch(base + home(ids[i + AHEAD], capacity) * ENTRY_BYTES)
        e = find(entries, capacity, ids[i], home(ids[i], capacity))
        if entries[e + 2] != 0:
            remove_entry(entries, capacity, e)
            gone += 1
        flags[slots[i]] = 0
    return gone


@kernel
def loaded(slots: np.ndarray, found: np.ndarray, flags: np.ndarray) -> None:
    """The rows in one table's ``slots`` are ready; those found below exist."""
    for i in range(slots.shape[0]):
        flags[slots[i]] |= READY | EXISTS | BELOW if found[i] else READY


@kernel
def begin_saving(slots: np.ndarray, flags: np.ndarray) -> None:
    """The rows in one table's ``slots`` have been copied: SAVING instead of DIRTY."""
    for i in range(slots.shape[0]):
        flags[slots[i]] = (flags[slots[i]] & ~DIRTY) | SAVING


@kernel
def end_saving(slots: np.ndarray, ids: np.ndarray, slot_ids: np.ndarray, flags: np.ndarray, bit: np.uint8) -> None:
    """Where one table's ``slots`` still hold the rows of ``ids`` that are SAVING: ``bit`` instead."""
    for i in range(slots.shape[0]):
        s = slots[i]
        if slot_ids[s] == ids[i] and (flags[s] & SAVING) != 0:
            flags[s] = (flags[s] & ~SAVING) | bit


@kernel
def flagged(first: int, last: int, flags: np.ndarray, mask: np.uint8, bits: np.uint8, out: np.ndarray) -> int:
    """Slots of [first, last) whose flags under ``mask`` equal ``bits``, as far as ``out`` holds them; returns their
    number."""
    n = 0
    for s in range(first, last):
        if flags[s] & mask == bits:
            if n < out.shape[0]:
                out[n] = s
            n += 1
    return n


@kernel
def gather(slab: np.ndarray, row_bytes: int, slots: np.ndarray, out: np.ndarray) -> None:
    """Rows of ``slots`` from a one-dimensional uint8 slab to ``out``."""
    base, target, n = slab.ctypes.data, out.ctypes.data, slots.shape[0]
    for i in range(n):
        if i + AHEAD < n:
            prefetch(base + np.int64(slots[i + AHEAD]) * row_bytes)
        copy_bytes(target + i * row_bytes, base + np.int64(slots[i]) * row_bytes, row_bytes)


@kernel
def scatter(rows: np.ndarray, chosen: np.ndarray, slots: np.ndarray, row_bytes: int, slab: np.ndarray) -> None:
    """Rows ``chosen`` (their numbers in the one-dimensional ``rows``) to the slots ``slots[chosen]`` of the slab."""
    base, source = slab.ctypes.data, rows.ctypes.data
    for i in range(chosen.shape[0]):
        k = np.int64(chosen[i])
        copy_bytes(base + np.int64(slots[k]) * row_bytes, source + k * row_bytes, row_bytes)


@kernel
def clear(slots: np.ndarray, row_bytes: int, slab: np.ndarray) -> None:
    """Zero the rows of ``slots``."""
    base = slab.ctypes.data
    for i in range(slots.shape[0]):
        zero_bytes(base + np.int64(slots[i]) * row_bytes, row_bytes)
