"""Scores of cached rows and the choice of victims: serial loops over plain arrays.

Every resident slot of a cache has one int64 score >= 1, larger = keep; 0 is a slot without a row, so that arrays start
as untouched zero pages. Scores are statistics: they decide what is fetched again, never what is computed. Slots beyond
``score`` (the overflow extent of a cache) are passed over by all.

Victims come from a queue of candidates. A refill samples the scores, takes the quantile that gives about the wanted
number as a threshold and sweeps on from where the last sweep stopped (the hand of a clock), so that an eviction costs a
few dozen sequential reads at any cache size. A candidate whose score changed since, or which is pinned, is passed over.
"""

from __future__ import annotations

import numpy as np

from .ghosts import line_at, mix, put, take
from .index import AHEAD
from .jit import I64, U64, inline, kernel
from .rawmem import prefetch
from .sorting import sort_pairs

FREE = np.int64(0)  # no row here
TOUCHED = np.int64(2**63 - 1)  # to be scored again before it may leave
NEEDED = np.int64(2**62)  # from here on: a batch of the known window needs the row
SOONEST = np.int64(2**62 + 2**61)  # minus the number of that batch is its score
WINDOW = 64  # batches that can be announced
SAMPLE = 1024
USE = 16  # what an occurrence adds to a frequency

# fields of the int64 state of a keeper
HEAD, TAIL, HAND, HIGH, RESIDENT, SEEN, NOW = 0, 1, 2, 3, 4, 5, 6
FIELDS = 8


@inline
def _set(state: np.ndarray, score: np.ndarray, slot: I64, value: I64) -> None:
    """A slot becomes, or is, resident."""
    if score[slot] == FREE:
        state[RESIDENT] += 1
    if slot >= state[HIGH]:
        state[HIGH] = slot + 1
    score[slot] = value


@inline
def _fetch(values: np.ndarray, slots: np.ndarray, i: I64) -> None:
    """The memory of the ``AHEAD``-th slot from here is on its way; ``values`` an array of 8 bytes a slot."""
    if i + AHEAD < slots.shape[0]:
        prefetch(values.ctypes.data + 8 * np.int64(slots[i + AHEAD]))


@inline
def _fetch_line(ghosts: np.ndarray, ids: np.ndarray, i: I64) -> None:
    """So is what is remembered of the ``AHEAD``-th id."""
    if i + AHEAD < ids.shape[0]:
        prefetch(line_at(ghosts, ids[i + AHEAD]))


@inline
def _fetch_words(words: np.ndarray, awaited: np.ndarray, slots: np.ndarray, ids: np.ndarray, i: I64) -> None:
    """So are its words, by slot and by id."""
    if i + AHEAD < ids.shape[0]:
        prefetch(words.ctypes.data + 16 * np.int64(slots[i + AHEAD]))
        mask = np.uint64(awaited.shape[0] - 1)
        prefetch(awaited.ctypes.data + 24 * np.int64(mix(ids[i + AHEAD]) & mask))


@kernel
def touch_recent(state: np.ndarray, score: np.ndarray, slots: np.ndarray, counts: np.ndarray, tick: int) -> None:
    """Least recently used: the number of the batch, then the occurrences in it, up to 255."""
    for i in range(slots.shape[0]):
        _fetch(score, slots, i)
        s = np.int64(slots[i])
        if s < score.shape[0]:
            _set(state, score, s, (tick << 8) + (counts[i] if counts[i] < 255 else 255))


@kernel
def touch_frequent(state: np.ndarray, score: np.ndarray, slots: np.ndarray, counts: np.ndarray) -> None:
    """Least frequently used: occurrences add up."""
    for i in range(slots.shape[0]):
        _fetch(score, slots, i)
        s = np.int64(slots[i])
        state[SEEN] += counts[i]
        if s < score.shape[0] and score[s] != FREE:
            score[s] += np.int64(counts[i]) * USE


@kernel
def insert_frequent(
    state: np.ndarray, score: np.ndarray, ghosts: np.ndarray, slots: np.ndarray, ids: np.ndarray, counts: np.ndarray
) -> None:
    """New rows: what is remembered of the id, and its occurrences in this batch."""
    for i in range(slots.shape[0]):
        _fetch(score, slots, i)
        _fetch_line(ghosts, ids, i)
        s = np.int64(slots[i])
        state[SEEN] += counts[i]
        worth = take(ghosts, ids[i]) + np.int64(counts[i]) * USE
        if s < score.shape[0]:
            _set(state, score, s, worth)
        else:
            put(ghosts, ids[i], worth)


@kernel
def drop(state: np.ndarray, score: np.ndarray, slots: np.ndarray) -> None:
    """The rows of these slots are gone; nothing of them stays in the slot."""
    for i in range(slots.shape[0]):
        _fetch(score, slots, i)
        s = np.int64(slots[i])
        if s < score.shape[0] and score[s] != FREE:
            score[s] = FREE
            state[RESIDENT] -= 1


@kernel
def drop_frequent(
    state: np.ndarray, score: np.ndarray, frequency: np.ndarray, ghosts: np.ndarray, slots: np.ndarray, ids: np.ndarray
) -> None:
    """The rows of these slots are gone; how often their ids were used is remembered elsewhere."""
    for i in range(slots.shape[0]):
        _fetch(score, slots, i)
        _fetch(frequency, slots, i)
        _fetch_line(ghosts, ids, i)
        s = np.int64(slots[i])
        if s < score.shape[0] and score[s] != FREE:
            put(ghosts, ids[i], frequency[s])
            frequency[s] = FREE
            score[s] = FREE
            state[RESIDENT] -= 1


@kernel
def halve(state: np.ndarray, frequency: np.ndarray) -> None:
    """Every frequency counts half."""
    state[SEEN] = 0
    for s in range(state[HIGH]):
        if frequency[s] > 1:
            frequency[s] >>= 1


# look-ahead: rows that the known window needs stay, the soonest longest; the others by frequency -------------------
#
# Of a row, and of an absent id, the batches that need it are the bits of a 64-bit word beside the number of a batch:
# bit k is the (k + 1)-th batch after that one. Words of absent ids: ``awaited`` uint64 [n, 3] (word, number, id), a
# hash table probed at eight places.


@inline
def _after(word: U64, since: I64, now: I64) -> U64:
    """The word of a row as seen from a later batch."""
    return word >> np.uint64(now - since) if now - since < WINDOW else np.uint64(0)


@inline
def _ahead(state: np.ndarray, score: np.ndarray, frequency: np.ndarray, words: np.ndarray, s: I64) -> None:
    """The score of a slot: when it is needed next, or its frequency; its word is seen from now on."""
    now = state[NOW]
    word = _after(words[s, 1], np.int64(words[s, 0]), now)
    words[s, 0], words[s, 1] = now, word
    if word == 0:
        _set(state, score, s, frequency[s])
    else:
        lowest = word & (~word + np.uint64(1))
        bit = (np.float64(lowest).view(np.int64) >> 52) - 1023
        _set(state, score, s, SOONEST - (now + 1 + bit))


@inline
def _known(awaited: np.ndarray, key: I64, now: I64, fresh: bool) -> I64:
    """Where the word of an absent id is, or with ``fresh`` may go; -1: nowhere."""
    mask = np.uint64(awaited.shape[0] - 1)
    h, dead = mix(key), np.int64(-1)
    for j in range(8):
        e = np.int64((h + np.uint64(j)) & mask)
        if _after(awaited[e, 0], np.int64(awaited[e, 1]), now) == 0:
            dead = e if dead < 0 else dead
        elif awaited[e, 2] == np.uint64(key):
            return e
    return dead if fresh else np.int64(-1)


@kernel
def move_awaited(state: np.ndarray, awaited: np.ndarray, bigger: np.ndarray) -> None:
    """Words that are still of use, to another table."""
    for i in range(awaited.shape[0]):
        if _after(awaited[i, 0], np.int64(awaited[i, 1]), state[NOW]) != 0:
            e = _known(bigger, np.int64(awaited[i, 2]), state[NOW], True)
            if e >= 0:
                bigger[e] = awaited[i]


@kernel
def touch_ahead(
    state: np.ndarray,
    score: np.ndarray,
    frequency: np.ndarray,
    words: np.ndarray,
    slots: np.ndarray,
    counts: np.ndarray,
) -> None:
    """Rows used by batch ``state[NOW]``; ``words`` uint64 [n, 2] by slot."""
    for i in range(slots.shape[0]):
        _fetch(score, slots, i)
        _fetch(frequency, slots, i)
        s = np.int64(slots[i])
        state[SEEN] += counts[i]
        if s < score.shape[0] and score[s] != FREE:
            frequency[s] += np.int64(counts[i]) * USE
            _ahead(state, score, frequency, words, s)


@kernel
def insert_ahead(
    state: np.ndarray,
    score: np.ndarray,
    frequency: np.ndarray,
    words: np.ndarray,
    ghosts: np.ndarray,
    awaited: np.ndarray,
    slots: np.ndarray,
    ids: np.ndarray,
    counts: np.ndarray,
) -> None:
    """New rows of batch ``state[NOW]``."""
    for i in range(slots.shape[0]):
        _fetch(score, slots, i)
        _fetch(frequency, slots, i)
        _fetch_line(ghosts, ids, i)
        _fetch_words(words, awaited, slots, ids, i)
        s = np.int64(slots[i])
        state[SEEN] += counts[i]
        worth = take(ghosts, ids[i]) + np.int64(counts[i]) * USE
        if s < score.shape[0]:
            e = _known(awaited, ids[i], state[NOW], False)
            frequency[s], words[s, 1] = worth, 0
            if e >= 0:
                words[s, 0], words[s, 1] = awaited[e, 1], awaited[e, 0]
                awaited[e, 0] = 0
            _ahead(state, score, frequency, words, s)
        else:
            put(ghosts, ids[i], worth)


@kernel
def drop_ahead(
    state: np.ndarray, score: np.ndarray, words: np.ndarray, awaited: np.ndarray, slots: np.ndarray, ids: np.ndarray
) -> None:
    """What is known of rows that are about to be dropped is kept by their ids."""
    for i in range(slots.shape[0]):
        _fetch(score, slots, i)
        _fetch_words(words, awaited, slots, ids, i)
        s = np.int64(slots[i])
        if s < score.shape[0] and score[s] != FREE and words[s, 1] != 0:
            e = _known(awaited, ids[i], state[NOW], True)
            if e >= 0:
                awaited[e, 0], awaited[e, 1], awaited[e, 2] = words[s, 1], words[s, 0], np.uint64(ids[i])


@kernel
def announce(
    state: np.ndarray,
    score: np.ndarray,
    frequency: np.ndarray,
    words: np.ndarray,
    awaited: np.ndarray,
    ids: np.ndarray,
    slots: np.ndarray,
    tick: int,
) -> bool:
    """Batch ``tick`` will need ``ids``; those that are resident stay. False: ``awaited`` is too full for all."""
    now, room = state[NOW], True
    ahead = tick - now - 1
    for i in range(ids.shape[0] if 0 <= ahead < WINDOW else 0):
        _fetch(score, slots, i)
        _fetch(frequency, slots, i)
        _fetch_words(words, awaited, slots, ids, i)
        s, bit = np.int64(slots[i]), np.uint64(1) << np.uint64(ahead)
        if 0 <= s < score.shape[0] and score[s] != FREE:
            words[s, 1] = _after(words[s, 1], np.int64(words[s, 0]), now) | bit
            words[s, 0] = now
            _ahead(state, score, frequency, words, s)
        else:
            e = _known(awaited, ids[i], now, True)
            if e < 0:
                room = False
            else:
                awaited[e, 0] = _after(awaited[e, 0], np.int64(awaited[e, 1]), now) | bit
                awaited[e, 1], awaited[e, 2] = now, np.uint64(ids[i])
    return room


@kernel
def unqueue(state: np.ndarray, seen: np.ndarray) -> None:
    """Candidates that a batch needs are none any more: others may have come up since."""
    while state[TAIL] > state[HEAD] and seen[state[TAIL] - 1] >= NEEDED:
        state[TAIL] -= 1


@kernel
def forgo(state: np.ndarray, score: np.ndarray, frequency: np.ndarray, words: np.ndarray) -> None:
    """Rows of a batch that has passed without them are judged anew."""
    for s in range(state[HIGH]):
        if NEEDED <= score[s] < TOUCHED and SOONEST - score[s] <= state[NOW]:
            _ahead(state, score, frequency, words, s)


# callables ---------------------------------------------------------------------------------------------------------


@kernel
def touch_own(
    state: np.ndarray,
    score: np.ndarray,
    uses: np.ndarray,
    last: np.ndarray,
    slots: np.ndarray,
    counts: np.ndarray,
    tick: int,
) -> None:
    """Note uses; the score has to be asked for again."""
    for i in range(slots.shape[0]):
        s = np.int64(slots[i])
        if s < score.shape[0]:
            if score[s] == FREE:
                uses[s] = 0
            _set(state, score, s, TOUCHED)
            uses[s] += counts[i]
            last[s] = tick


# victims -----------------------------------------------------------------------------------------------------------


@inline
def _threshold(state: np.ndarray, score: np.ndarray, pins: np.ndarray, want: I64, sample: np.ndarray) -> I64:
    """A score which about ``want`` of the slots that may leave do not exceed; TOUCHED where the sample finds none."""
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
    k = min(n - 1, want * n // max(state[RESIDENT], 1))
    return np.partition(sample[:n], k)[k]


@inline
def _sweep(
    state: np.ndarray, score: np.ndarray, pins: np.ndarray, queue: np.ndarray, seen: np.ndarray, limit: I64
) -> I64:
    """Collect candidates of at most ``limit``, which is below TOUCHED, from the hand on; returns the least score that
    was above it."""
    high, n, least = state[HIGH], 0, TOUCHED
    found, order = np.empty(queue.shape[0], np.int64), np.empty(queue.shape[0], np.uint64)
    s = state[HAND] if state[HAND] < high else 0
    for _ in range(high):
        value = score[s]
        if value <= limit:
            if value > FREE and pins[s] == 0:
                found[n], order[n] = s, value
                n += 1
                if n == queue.shape[0]:
                    break
        elif value < least and pins[s] == 0:  # and so it is less than TOUCHED
            least = value
        s += 1
        if s == high:
            s = 0
    sort_pairs(order[:n], found[:n])
    for i in range(n):
        queue[i], seen[i] = found[i], order[i]
    state[HEAD], state[TAIL], state[HAND] = 0, n, s + 1
    return least


@inline
def _sort_all(state: np.ndarray, score: np.ndarray, pins: np.ndarray, queue: np.ndarray, seen: np.ndarray) -> None:
    """Exactly the lowest, for caches that a sample would cover."""
    found, order, n = np.empty(state[HIGH], np.int64), np.empty(state[HIGH], np.uint64), 0
    for s in range(state[HIGH]):
        if FREE < score[s] < TOUCHED and pins[s] == 0:
            found[n], order[n] = s, score[s]
            n += 1
    sort_pairs(order[:n], found[:n])
    n = min(n, queue.shape[0])
    for i in range(n):
        queue[i], seen[i] = found[i], order[i]
    state[HEAD], state[TAIL] = 0, n


@inline
def _refill(
    state: np.ndarray, score: np.ndarray, pins: np.ndarray, queue: np.ndarray, seen: np.ndarray, sample: np.ndarray
) -> bool:
    """Fill the queue; False where no slot may leave."""
    if state[HIGH] <= sample.shape[0]:
        _sort_all(state, score, pins, queue, seen)
        return state[TAIL] > 0
    limit = _threshold(state, score, pins, queue.shape[0], sample)
    least = _sweep(state, score, pins, queue, seen, min(limit, NEEDED - 1) if limit < TOUCHED else FREE)
    if state[TAIL] == 0 and least < TOUCHED:  # the sample missed them all, or all are needed
        _sweep(state, score, pins, queue, seen, max(limit, least) if limit < TOUCHED else least)
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
            if state[HEAD] + AHEAD < state[TAIL]:
                later = np.int64(queue[state[HEAD] + AHEAD])
                prefetch(score.ctypes.data + 8 * later)
                prefetch(pins.ctypes.data + 4 * later)
            s = np.int64(queue[state[HEAD]])
            if score[s] == seen[state[HEAD]] and pins[s] == 0:
                out[n], kept[n] = s, score[s]
                score[s] = FREE  # a refill of this call must not find it again
                n += 1
            state[HEAD] += 1
    for i in range(n):
        score[out[i]] = kept[i]
    return n
