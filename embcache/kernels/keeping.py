"""Scores by policy: one kernel for each thing that happens to the rows of a cache, whoever decides who leaves it.

A keeper is described by an int64 array ``f`` of the numbers and addresses below; it keeps what they point to alive and
replaces the address of what it replaces.
"""

from __future__ import annotations

import numpy as np

from . import ghosts
from .jit import inline, kernel
from .rawmem import i32_at, i64_at, u32_at, u64_at
from .score import (
    FIELDS,
    HEAD,
    NOW,
    SEEN,
    TAIL,
    announce,
    drop,
    drop_ahead,
    drop_frequent,
    forgo,
    halve,
    insert_ahead,
    insert_frequent,
    touch_ahead,
    touch_frequent,
    touch_own,
    touch_recent,
    unqueue,
    victims,
)

# fields; the addresses are those of the arrays that score.py names so
CODE, ROWS, FADES_AT, STATE, SCORE, FREQUENCY, GHOSTS, LINES = 0, 1, 2, 3, 4, 5, 6, 7
WORDS, AWAITED, AWAITING, IDS, USES, LAST = 8, 9, 10, 11, 12, 13
QUEUE, QUEUE_SCORES, CANDIDATES, SAMPLE, SAMPLES, KEEPER = 14, 15, 16, 17, 18, 19

RECENT, FREQUENT, KNOWN, OWN = 0, 1, 2, 3  # codes: lru, lfu, lookahead, a callable


@inline
def _state(f: np.ndarray) -> np.ndarray:
    return i64_at(f[STATE], FIELDS)


@inline
def _score(f: np.ndarray) -> np.ndarray:
    return i64_at(f[SCORE], f[ROWS])


@inline
def _frequency(f: np.ndarray) -> np.ndarray:
    return i64_at(f[FREQUENCY], f[ROWS])


@inline
def _ghosts(f: np.ndarray) -> np.ndarray:
    return u32_at(f[GHOSTS], f[LINES] * ghosts.WAYS).reshape((f[LINES], ghosts.WAYS))


@inline
def _words(f: np.ndarray) -> np.ndarray:
    return u64_at(f[WORDS], f[ROWS] * 2).reshape((f[ROWS], 2))


@inline
def _awaited(f: np.ndarray) -> np.ndarray:
    return u64_at(f[AWAITED], f[AWAITING] * 3).reshape((f[AWAITING], 3))


@inline
def _fade(f: np.ndarray) -> None:
    """Frequencies count half, once they are old enough."""
    if _state(f)[SEEN] >= f[FADES_AT]:
        halve(_state(f), _frequency(f))
        ghosts.fade(_ghosts(f))


@kernel
def hit(f: np.ndarray, slots: np.ndarray, counts: np.ndarray, tick: int) -> None:
    """Resident rows were used, each ``counts`` (int32) times, by batch ``tick``."""
    state, score = _state(f), _score(f)
    if f[CODE] == RECENT:
        touch_recent(state, score, slots, counts, tick)
    elif f[CODE] == OWN:
        touch_own(state, score, i32_at(f[USES], f[ROWS]), i64_at(f[LAST], f[ROWS]), slots, counts, tick)
    else:
        if f[CODE] == FREQUENT:
            touch_frequent(state, score, slots, counts)
        else:
            state[NOW] = tick
            touch_ahead(state, score, _frequency(f), _words(f), slots, counts)
        _fade(f)


@kernel
def insert(f: np.ndarray, slots: np.ndarray, ids: np.ndarray, counts: np.ndarray, tick: int) -> None:
    """Rows of ``ids`` were put into ``slots``, used ``counts`` times by batch ``tick``."""
    state, score = _state(f), _score(f)
    if f[CODE] == RECENT:
        touch_recent(state, score, slots, counts, tick)
    elif f[CODE] == OWN:
        known = i64_at(f[IDS], f[ROWS])
        for i in range(slots.shape[0]):
            if slots[i] < f[ROWS]:
                known[slots[i]] = ids[i]
        touch_own(state, score, i32_at(f[USES], f[ROWS]), i64_at(f[LAST], f[ROWS]), slots, counts, tick)
    else:
        if f[CODE] == FREQUENT:
            insert_frequent(state, score, _ghosts(f), slots, ids, counts)
        else:
            state[NOW] = tick
            insert_ahead(state, score, _frequency(f), _words(f), _ghosts(f), _awaited(f), slots, ids, counts)
        _fade(f)


@kernel
def remove(f: np.ndarray, slots: np.ndarray, ids: np.ndarray) -> None:
    """The rows of ``ids`` left ``slots``."""
    state, score = _state(f), _score(f)
    if f[CODE] == RECENT or f[CODE] == OWN:
        drop(state, score, slots)
    else:
        if f[CODE] == KNOWN:
            drop_ahead(state, score, _words(f), _awaited(f), slots, ids)
        drop_frequent(state, score, _frequency(f), _ghosts(f), slots, ids)


@kernel
def foretell(f: np.ndarray, ids: np.ndarray, slots: np.ndarray, tick: int) -> bool:
    """Batch ``tick`` will need ``ids``, resident at ``slots`` or not. False: there is no room to note them all."""
    if f[CODE] == KNOWN:
        return announce(_state(f), _score(f), _frequency(f), _words(f), _awaited(f), ids, slots, tick)
    return True


@kernel
def pick(f: np.ndarray, pins: np.ndarray, out: np.ndarray) -> int:
    """Fill ``out`` with slots that may leave, as scores are now; returns how many there are."""
    queue, scores = i32_at(f[QUEUE], f[CANDIDATES]), i64_at(f[QUEUE_SCORES], f[CANDIDATES])
    return victims(_state(f), _score(f), pins, queue, scores, i64_at(f[SAMPLE], f[SAMPLES]), out)


@kernel
def pressed(f: np.ndarray, want: int) -> bool:
    """Whether fewer than ``want`` candidates are waiting to leave."""
    state = _state(f)
    if f[CODE] == KNOWN:
        unqueue(state, i64_at(f[QUEUE_SCORES], f[CANDIDATES]))
    return state[TAIL] - state[HEAD] < want


@kernel
def choose(f: np.ndarray, pins: np.ndarray, out: np.ndarray) -> int:
    """``pick`` with scores brought up to date where that is needed; not for callables, which have to be asked."""
    need = out.shape[0]
    if pressed(f, need) and f[CODE] == KNOWN:
        forgo(_state(f), _score(f), _frequency(f), _words(f))
    found = pick(f, pins, out)
    if found < need:  # candidates of before may have passed over rows used since
        if f[CODE] == KNOWN:
            forgo(_state(f), _score(f), _frequency(f), _words(f))
        found = pick(f, pins, out)
    return found
