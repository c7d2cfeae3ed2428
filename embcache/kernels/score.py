"""Scores of cached rows and the choice of victims: serial loops over plain arrays.

Every resident slot of a cache has one int64 score >= 1, larger = keep; 0 is a slot without a row, so that arrays start
as untouched zero pages. Scores are statistics: they decide what is fetched again, never what is computed.

Victims come from a queue of candidates. A refill samples the scores, takes the quantile that gives about the wanted
number as a threshold and sweeps on from where the last sweep stopped (the hand of a clock), so that an eviction costs a
few dozen sequential reads at any cache size. A candidate whose score changed since, or which is pinned, is passed over.
"""

from __future__ import annotations

import numpy as np

from .jit import I64, U64, inline, kernel

FREE = np.int64(0)  # no row here
TOUCHED = np.int64(2**63 - 1)  # a callable has to score this row again before it may leave
NEEDED = np.int64(2**61)  # from here on: a batch of the known window needs the row
SAMPLE = 1024

# fields of the int64 state of a keeper
HEAD, TAIL, HAND, HIGH, RESIDENT = 0, 1, 2, 3, 4
FIELDS = 8


@inline
def mix(key: I64) -> U64:
    """A 64-bit mix of an id (the finaliser of MurmurHash3 behind an odd multiply)."""
    h = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xFF51AFD7ED558CCD)
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xC4CEB9FE1A85EC53)
    return h ^ (h >> np.uint64(33))


@inline
def _note(state: np.ndarray, score: np.ndarray, slot: I64) -> None:
    """A slot becomes resident."""
    if score[slot] == FREE:
        state[RESIDENT] += 1
    if slot >= state[HIGH]:
        state[HIGH] = slot + 1


@kernel
def touch_recent(state: np.ndarray, score: np.ndarray, slots: np.ndarray, counts: np.ndarray, base: int) -> None:
    """Least recently used: the score is ``base`` (the tick, shifted) plus the occurrences in this batch, capped."""
    for i in range(slots.shape[0]):
        s = np.int64(slots[i])
        if s < score.shape[0]:
            _note(state, score, s)
            score[s] = base + min(np.int64(counts[i]), np.int64(255))


@kernel
def touch_frequent(score: np.ndarray, slots: np.ndarray, counts: np.ndarray, weight: int) -> None:
    """Least frequently used: every occurrence adds ``weight``."""
    for i in range(slots.shape[0]):
        s = np.int64(slots[i])
        if s < score.shape[0] and score[s] != FREE:
            score[s] += np.int64(counts[i]) * weight


@kernel
def insert_frequent(state: np.ndarray, score: np.ndarray, slots: np.ndarray, counts: np.ndarray, weight: int) -> None:
    """New rows: their occurrences in this batch."""
    for i in range(slots.shape[0]):
        s = np.int64(slots[i])
        if s < score.shape[0]:
            _note(state, score, s)
            score[s] = np.int64(counts[i]) * weight


@kernel
def drop(state: np.ndarray, score: np.ndarray, slots: np.ndarray) -> None:
    """The rows of these slots are gone; nothing of them stays in the slot."""
    for i in range(slots.shape[0]):
        s = np.int64(slots[i])
        if s < score.shape[0] and score[s] != FREE:
            score[s] = FREE
            state[RESIDENT] -= 1


@kernel
def halve(state: np.ndarray, score: np.ndarray, shift: int) -> None:
    """Every score divided by ``2 ** shift``."""
    for s in range(state[HIGH]):
        if FREE < score[s] < NEEDED:
            score[s] = max(score[s] >> shift, 1)


@inline
def _threshold(state: np.ndarray, score: np.ndarray, pins: np.ndarray, want: I64, sample: np.ndarray) -> I64:
    """A score which about ``want`` of the slots that may leave do not exceed; TOUCHED where none may."""
    high, n = state[HIGH], 0
    step = max(high // sample.shape[0], 1)
    s = state[HAND] % step
    while s < high and n < sample.shape[0]:
        if FREE < score[s] < TOUCHED and pins[s] == 0:
            sample[n] = score[s]
            n += 1
        s += step
    if n == 0:
        return TOUCHED
    chosen = np.sort(sample[:n])
    return chosen[min(n - 1, want * n // max(state[RESIDENT], 1))]


@inline
def _sweep(
    state: np.ndarray, score: np.ndarray, pins: np.ndarray, queue: np.ndarray, seen: np.ndarray, limit: I64
) -> I64:
    """Collect candidates of at most ``limit`` from the hand on; returns the least score that was above it."""
    high, n, least = state[HIGH], 0, TOUCHED
    s = state[HAND] if state[HAND] < high else 0
    for _ in range(high):
        value = score[s]
        if FREE < value < TOUCHED and pins[s] == 0:
            if value <= limit:
                queue[n], seen[n] = s, value
                n += 1
                if n == queue.shape[0]:
                    break
            elif value < least:
                least = value
        s += 1
        if s == high:
            s = 0
    order = np.argsort(seen[:n])
    queue[:n], seen[:n] = queue[:n][order], seen[:n][order]
    state[HEAD], state[TAIL], state[HAND] = 0, n, s + 1
    return least


@inline
def _refill(
    state: np.ndarray, score: np.ndarray, pins: np.ndarray, queue: np.ndarray, seen: np.ndarray, sample: np.ndarray
) -> bool:
    """Fill the queue; False where no slot may leave."""
    limit = _threshold(state, score, pins, queue.shape[0], sample)
    least = _sweep(state, score, pins, queue, seen, limit if limit < TOUCHED else FREE)
    if state[TAIL] == 0 and least < TOUCHED:  # the sample missed them all
        _sweep(state, score, pins, queue, seen, least)
    return state[TAIL] > 0


@kernel
def victims(
    state: np.ndarray,
    score: np.ndarray,
    pins: np.ndarray,
    queue: np.ndarray,
    seen: np.ndarray,
    sample: np.ndarray,
    out: np.ndarray,
) -> int:
    """Fill ``out`` with distinct unpinned slots of low score; returns how many there are. Scores stay as they are."""
    n, want = 0, out.shape[0]
    kept = np.empty(want, np.int64)
    while n < want:
        if state[HEAD] == state[TAIL] and not _refill(state, score, pins, queue, seen, sample):
            break
        while n < want and state[HEAD] < state[TAIL]:
            s = np.int64(queue[state[HEAD]])
            if score[s] == seen[state[HEAD]] and pins[s] == 0:
                out[n], kept[n] = s, score[s]
                score[s] = FREE  # a refill of this call must not find it again
                n += 1
            state[HEAD] += 1
    for i in range(n):
        score[out[i]] = kept[i]
    return n
