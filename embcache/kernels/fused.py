"""A stage of all tables of a batch in a few kernel calls: what ``cpu.py`` and ``keeping.py`` do for one table, in loops
over tables that are described by addresses.

``described`` int64 [all tables, TABLE]: the fields below. ``tables`` int64 [S]: which of them the batch reads. Its
distinct rows lie by table in ``segments`` int64 [S, 3] (base, first, last) of the lease's arrays; its missing rows in
``bounds`` int64 [S + 1], keys ascending as unsigned numbers. ``plan`` int64 [S, PLAN]: where the slots of the missing
rows come from, in this order: free ones, then those of rows that leave, then those of the overflow extent.
"""

from __future__ import annotations

import numpy as np

from . import keeping
from .cpu import (
    BELOW,
    COUNT,
    POOL,
    UNIQUE,
    UNSAVED,
    claim,
    enter,
    leave,
    loaded,
    locate,
    take,
)
from .index import AHEAD, CAPACITY, ENTRIES, ENTRY, HEADER, LIMIT
from .index import COUNT as KEYS
from .jit import I64, inline, kernel
from .rawmem import i32_at, i64_at, prefetch
from .sorting import sort_pairs

# of a table: addresses of the index's header, the pools and the keeper (0: none); slots of all tables before its own;
# rows of the cache
INDEX, CACHE, OVERFLOW_POOL, KEEPER, BASE, ROWS, TABLE = 0, 1, 2, 3, 4, 5, 6
# of a state, behind what ``locate`` keeps there: the range it has come to, and how far
RANGE, REACHED, STATE = 3, 4, 5
# of a plan: free slots; rows that leave; slots of the overflow extent; whether more may leave; who was proposed
TAKEN, LEAVING, EXTRA, ASKING, PROPOSED, PLAN = 0, 1, 2, 3, 4, 5


@inline
def _header(described: np.ndarray, t: I64) -> np.ndarray:
    return i64_at(described[t, INDEX], HEADER)


@inline
def _entries(header: np.ndarray) -> np.ndarray:
    return i32_at(header[ENTRIES], header[CAPACITY] * ENTRY)


@inline
def _keeper(described: np.ndarray, t: I64) -> np.ndarray:
    return i64_at(described[t, KEEPER], keeping.KEEPER)


@kernel
def locate_all(
    described: np.ndarray,
    tables: np.ndarray,
    states: np.ndarray,
    ends: np.ndarray,
    ranges: np.ndarray,
    ids: np.ndarray,
    where: np.ndarray,
    positions: np.ndarray,
    unique: np.ndarray,
    slots: np.ndarray,
    counts: np.ndarray,
    segments: np.ndarray,
) -> int:
    """``cpu.locate`` for every table: its ids are those of ``ranges`` from ``states[s, RANGE]`` to ``ends[s]``. Returns
    -1, or the number of a table whose index must grow before this is called again."""
    for s in range(tables.shape[0]):
        state, header = states[s], _header(described, tables[s])
        base, first = segments[s, 0], segments[s, 1]
        end = segments[s + 1, 1] if s + 1 < tables.shape[0] else unique.shape[0]
        state[COUNT] = header[KEYS]
        while state[RANGE] < ends[s]:
            start, stop = ranges[state[RANGE], 0], ranges[state[RANGE], 1]
            at = locate(
                _entries(header),
                state,
                header[LIMIT],
                ids[start:stop],
                state[REACHED],
                first,
                where[base:],
                positions[start:stop],
                unique[first:end],
                slots[first:end],
                counts[first:end],
            )
            header[KEYS], segments[s, 2] = state[COUNT], first + state[UNIQUE]
            if at < stop - start:
                state[REACHED] = at
                return s
            state[RANGE], state[REACHED] = state[RANGE] + 1, 0
    return -1


@kernel
def sort_out(
    segments: np.ndarray,
    unique: np.ndarray,
    slots: np.ndarray,
    counts: np.ndarray,
    at: np.ndarray,
    keys: np.ndarray,
    bounds: np.ndarray,
    hits: np.ndarray,
) -> int:
    """Positions of the missing rows to ``at``, their keys (uint64) to ``keys``, ascending; positions of the others to
    ``hits``. Returns how often the latter are used."""
    m, h, used = 0, 0, 0
    for s in range(segments.shape[0]):
        bounds[s] = m
        for k in range(segments[s, 1], segments[s, 2]):
            if slots[k] < 0:
                at[m], keys[m] = k, np.uint64(unique[k])
                m += 1
            else:
                hits[h] = k
                used += counts[k]
                h += 1
        sort_pairs(keys[bounds[s] : m], at[bounds[s] : m])
    bounds[segments.shape[0]] = m
    return used


@kernel
def take_all(
    described: np.ndarray, tables: np.ndarray, bounds: np.ndarray, plan: np.ndarray, slots: np.ndarray
) -> None:
    """Free slots of the cache, for the tables that are ``ASKING``; of those, the ones that need more go on to be."""
    for s in range(tables.shape[0]):
        if plan[s, ASKING]:
            mine = slots[bounds[s] : bounds[s + 1]]
            plan[s, TAKEN] = take(i64_at(described[tables[s], CACHE], POOL), mine)
            if plan[s, TAKEN] == mine.shape[0] or described[tables[s], KEEPER] == 0:
                plan[s, ASKING] = 0


@kernel
def propose_all(
    described: np.ndarray, tables: np.ndarray, bounds: np.ndarray, plan: np.ndarray, pins: np.ndarray, out: np.ndarray
) -> None:
    """Who might leave, at the places where its slot would go; of tables whose policy is a callable, what it chose is
    there already."""
    for s in range(tables.shape[0]):
        if plan[s, ASKING]:
            keeper = _keeper(described, tables[s])
            if keeper[keeping.CODE] != keeping.OWN:
                begin = bounds[s] + plan[s, TAKEN] + plan[s, LEAVING]
                plan[s, PROPOSED] = keeping.choose(
                    keeper, pins[described[tables[s], BASE] :], out[begin : bounds[s + 1]]
                )


@kernel
def claim_all(
    described: np.ndarray,
    tables: np.ndarray,
    bounds: np.ndarray,
    plan: np.ndarray,
    proposed: np.ndarray,
    pins: np.ndarray,
    flags: np.ndarray,
    slots: np.ndarray,
) -> bool:
    """``cpu.claim`` of those that were proposed; whether others should be, as some had been pinned meanwhile."""
    again = False
    for s in range(tables.shape[0]):
        if plan[s, ASKING]:
            base, begin, end = described[tables[s], BASE], bounds[s] + plan[s, TAKEN], bounds[s + 1]
            first = begin + plan[s, LEAVING]
            chosen = proposed[first : first + plan[s, PROPOSED]]
            n = claim(chosen, pins[base:], flags[base:], slots[begin:end], plan[s, LEAVING], end - begin)
            plan[s, ASKING] = plan[s, LEAVING] < n < end - begin
            plan[s, LEAVING] = n
            again = again or plan[s, ASKING] != 0
    return again


@kernel
def extend_all(
    described: np.ndarray, tables: np.ndarray, bounds: np.ndarray, plan: np.ndarray, slots: np.ndarray
) -> None:
    """The rest gets slots of the overflow extent, as far as there are."""
    for s in range(tables.shape[0]):
        begin = bounds[s] + plan[s, TAKEN] + plan[s, LEAVING]
        if begin < bounds[s + 1]:
            pool = i64_at(described[tables[s], OVERFLOW_POOL], POOL)
            plan[s, EXTRA] = take(pool, slots[begin : bounds[s + 1]])


@kernel
def unsaved_all(
    described: np.ndarray,
    tables: np.ndarray,
    bounds: np.ndarray,
    plan: np.ndarray,
    slots: np.ndarray,
    slot_ids: np.ndarray,
    flags: np.ndarray,
    mask: np.uint8,
    bits: np.uint8,
    keys: np.ndarray,
    chosen: np.ndarray,
    ends: np.ndarray,
) -> None:
    """Of the rows that leave, those whose flags under ``mask`` are some (``bits`` 0) or just ``bits``: their keys and
    slots, those of table s up to ``ends[s]``."""
    n, ids_at, flags_at = 0, slot_ids.ctypes.data, flags.ctypes.data
    for s in range(tables.shape[0]):
        base, begin = described[tables[s], BASE], bounds[s] + plan[s, TAKEN]
        end = begin + plan[s, LEAVING]
        for i in range(begin, end):
            if i + AHEAD < end:
                prefetch(ids_at + 8 * (base + slots[i + AHEAD]))
                prefetch(flags_at + base + slots[i + AHEAD])
            found = flags[base + slots[i]] & mask
            if found == bits if bits else found != 0:
                keys[n], chosen[n] = slot_ids[base + slots[i]], slots[i]
                n += 1
        ends[s] = n


@kernel
def saved_all(
    described: np.ndarray,
    tables: np.ndarray,
    ends: np.ndarray,
    slots: np.ndarray,
    written: np.ndarray,
    flags: np.ndarray,
) -> None:
    """The rows that were ``written`` are clean, and below."""
    begin = 0
    for s in range(tables.shape[0]):
        base = described[tables[s], BASE]
        for i in range(begin, ends[s]):
            if written[i]:
                flags[base + slots[i]] = (flags[base + slots[i]] & ~UNSAVED) | BELOW
        begin = ends[s]


@kernel
def exchange_all(
    described: np.ndarray,
    tables: np.ndarray,
    bounds: np.ndarray,
    plan: np.ndarray,
    at: np.ndarray,
    keys: np.ndarray,
    slots: np.ndarray,
    slot_ids: np.ndarray,
    pins: np.ndarray,
    flags: np.ndarray,
    lease_slots: np.ndarray,
) -> None:
    """Who was to leave has left; the missing rows have their slots, pinned once, not ready."""
    ids = np.empty(keys.shape[0], np.int64)
    for s in range(tables.shape[0]):
        begin, end, base, rows = bounds[s], bounds[s + 1], described[tables[s], BASE], described[tables[s], ROWS]
        if begin == end:
            continue
        header = _header(described, tables[s])
        entries, n = _entries(header), plan[s, LEAVING]
        if n:
            leaving, gone = slots[begin + plan[s, TAKEN] : begin + plan[s, TAKEN] + n], ids[:n]
            header[KEYS] -= leave(entries, leaving, slot_ids[base:], flags[base:], gone)
            keeping.remove(_keeper(described, tables[s]), leaving, gone)
        mine = slots[begin:end]
        header[KEYS] += enter(entries, keys[begin:end], mine, slot_ids[base:], pins[base:], flags[base:], rows)
        for i in range(begin, end):
            lease_slots[at[i]] = slots[i]


@kernel
def finish_all(
    described: np.ndarray,
    tables: np.ndarray,
    bounds: np.ndarray,
    at: np.ndarray,
    keys: np.ndarray,
    slots: np.ndarray,
    found: np.ndarray,
    flags: np.ndarray,
    counts: np.ndarray,
    ticks: np.ndarray,
) -> None:
    """The missing rows are there, and known to the keepers as used by batch ``ticks`` (empty: they are only read)."""
    used = np.empty(at.shape[0], np.int32)
    for i in range(at.shape[0]):
        used[i] = counts[at[i]]
    for s in range(tables.shape[0]):
        begin, end, t = bounds[s], bounds[s + 1], tables[s]
        if begin < end:
            loaded(slots[begin:end], found[begin:end], flags[described[t, BASE] :])
            if ticks.shape[0] and described[t, KEEPER]:
                keeping.insert(_keeper(described, t), slots[begin:end], keys[begin:end], used[begin:end], ticks[s])


@kernel
def hit_all(
    described: np.ndarray,
    tables: np.ndarray,
    segments: np.ndarray,
    hits: np.ndarray,
    slots: np.ndarray,
    counts: np.ndarray,
    ticks: np.ndarray,
) -> None:
    """The rows at ``hits``, positions by table, were used by batch ``ticks``."""
    n = hits.shape[0]
    mine, used = np.empty(n, np.int32), np.empty(n, np.int32)
    for i in range(n):
        mine[i], used[i] = slots[hits[i]], counts[hits[i]]
    end = 0
    for s in range(tables.shape[0]):
        begin = end
        while end < n and hits[end] < segments[s, 2]:
            end += 1
        if begin < end and described[tables[s], KEEPER]:
            keeping.hit(_keeper(described, tables[s]), mine[begin:end], used[begin:end], ticks[s])
