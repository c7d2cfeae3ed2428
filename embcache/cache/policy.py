"""Who leaves a full cache: one integer score per row, larger = keep.

* ``"lfu"``: how often the row was used, remembered also while it is away, so that the cache nears the best fixed choice
  of rows. Frequencies count half after 256 uses per cached row.
* ``"lfu_decay"``: the same with half after 32 uses per cached row, for ids whose popularity drifts.
* ``"lru"``: the batch that used the row last.
* ``"lookahead"``: rows that an announced batch needs stay, those needed soonest longest (Belady, "A Study of
  Replacement Algorithms for a Virtual-Storage Computer", 1966, inside the known window of up to 64 batches); the
  others as under ``"lfu"``.
* a callable ``f(ids int64 [n], counts int32 [n], last int64 [n]) -> int64 [n]`` of resident rows: uses since they came
  in, and the number of the batch that used them last. It is asked for many rows at once, only when rows have to leave.

A policy decides what is fetched again, never what is computed: results are the same bits with each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from ..errors import BadConfig
from ..kernels import ghosts
from ..kernels import score as kernels
from ..tiers.ram import POLICIES

Scorer = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
Policy = str | Scorer

HALF_LIVES = {"lfu": 256, "lfu_decay": 32, "lookahead": 256}  # uses per cached row
REMEMBERED = 2  # absent ids per cached row
LEAST_SEEN = 1 << 16
WINDOW = int(kernels.WINDOW)  # batches that a keeper can be told of in advance
_SPAN = 2**60


def check_policy(policy: Policy) -> Policy:
    """``policy`` if it names one or is callable; BadConfig otherwise."""
    if callable(policy) or policy in POLICIES:
        return policy
    raise BadConfig(f"policy = {policy!r}, must be one of {list(POLICIES)} or a callable(ids, counts, last) -> scores")


class _Rule(Protocol):
    """How scores come about. ``arrays``: what it keeps besides."""

    arrays: tuple[np.ndarray, ...]

    def hit(self, slots: np.ndarray, counts: np.ndarray, tick: int) -> None: ...
    def insert(self, slots: np.ndarray, ids: np.ndarray, counts: np.ndarray, tick: int) -> None: ...
    def drop(self, slots: np.ndarray, ids: np.ndarray) -> None: ...
    def announce(self, ids: np.ndarray, slots: np.ndarray, tick: int) -> None: ...
    def settle(self, pressed: bool) -> None: ...


class ScoreKeeper:
    """Scores of the slots ``[0, rows)`` of one cache.

    Slots from ``rows`` on (an overflow extent) may be passed: no row there is scored, uses of its id are remembered.
    ``tick`` is a number of the batch that never decreases. Not thread-safe: the cache calls it under its lock. Slots of
    one call are distinct.

    >>> keeper = ScoreKeeper("lru", rows=4)
    >>> keeper.insert(np.array([0, 1, 2]), np.array([70, 71, 72]), np.array([1, 1, 1], dtype=np.int32), tick=1)
    >>> keeper.hit(np.array([0]), np.array([1], dtype=np.int32), tick=2)
    >>> keeper.victims(2, pins=np.zeros(4, dtype=np.int32)).tolist()
    [1, 2]
    """

    def __init__(self, policy: Policy, rows: int) -> None:
        self.policy, self.rows = check_policy(policy), rows
        self.score = np.zeros(rows, dtype=np.int64)
        self._state = np.zeros(kernels.FIELDS, dtype=np.int64)
        candidates = max(rows // 32, min(128, rows // 4), 1)
        self._queue = np.zeros(candidates, dtype=np.int32)
        self._seen = np.zeros(candidates, dtype=np.int64)
        self._sample = np.zeros(min(kernels.SAMPLE, max(rows, 1)), dtype=np.int64)
        self._rule: _Rule = self._make(policy)
        self._used = False

    def _make(self, policy: Policy) -> _Rule:
        if not isinstance(policy, str):
            return _Own(self._state, self.score, policy)
        if policy == "lru":
            return _Recent(self._state, self.score)
        kind = _Ahead if policy == "lookahead" else _Frequent
        return kind(self._state, self.score, HALF_LIVES[policy])

    def hit(self, slots: np.ndarray, counts: np.ndarray, tick: int) -> None:
        """Resident rows were used, each ``counts`` (int32) times, by batch ``tick``."""
        self._rule.hit(slots, counts, tick)

    def insert(self, slots: np.ndarray, ids: np.ndarray, counts: np.ndarray, tick: int) -> None:
        """Rows of ``ids`` were put into ``slots``, used ``counts`` times by batch ``tick``."""
        self._used = True
        self._rule.insert(slots, ids, counts, tick)

    def victims(self, n: int, pins: np.ndarray) -> np.ndarray:
        """int64 [<= n]: distinct resident slots of low score whose ``pins`` (int32 by slot) are 0. Fewer only where no
        more may leave. Nothing changes: ``drop`` what really left. Raises what a callable policy raises."""
        out = np.empty(n, dtype=np.int64)
        if self.policy == "lookahead":
            kernels.unqueue(self._state, self._seen)
        self._rule.settle(self._state[kernels.TAIL] - self._state[kernels.HEAD] < n)
        arrays = self._state, self.score, pins, self._queue, self._seen, self._sample, out
        found = kernels.victims(*arrays)
        if found < n:  # candidates of before may have passed over rows used since
            self._rule.settle(True)
            found = kernels.victims(*arrays)
        return out[:found]

    def drop(self, slots: np.ndarray, ids: np.ndarray) -> None:
        """The rows of ``ids`` left ``slots``: their metadata is clean; how often the ids were used is remembered."""
        self._rule.drop(slots, ids)

    def announce(self, ids: np.ndarray, slots: np.ndarray, tick: int) -> None:
        """Batch ``tick`` of the known window will need ``ids`` (int64, distinct), resident at ``slots`` (-1: not).
        Batches are announced in order; policies other than "lookahead" do not listen."""
        self._used = True
        self._rule.announce(ids, slots, tick)

    def clear(self) -> None:
        """Nothing is resident and nothing was learnt. Pages that were never used stay uncommitted."""
        if self._used:
            for array in (self.score, self._state, *self._rule.arrays):
                array.fill(0)
        self._used = False

    @staticmethod
    def bytes_for(policy: Policy, rows: int) -> int:
        """``nbytes`` of ``ScoreKeeper(policy, rows)``, which keeps its zero pages uncommitted until they are used."""
        return ScoreKeeper(policy, rows).nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, as far as they can be used."""
        arrays: list[np.ndarray] = [self.score, self._queue, self._seen, self._sample, self._state, *self._rule.arrays]
        return sum(a.nbytes for a in arrays)


class _Recent:
    """Least recently used."""

    arrays: tuple[np.ndarray, ...] = ()

    def __init__(self, state: np.ndarray, score: np.ndarray) -> None:
        self.state, self.score = state, score

    def hit(self, slots: np.ndarray, counts: np.ndarray, tick: int) -> None:
        kernels.touch_recent(self.state, self.score, slots, counts, tick)

    def insert(self, slots: np.ndarray, ids: np.ndarray, counts: np.ndarray, tick: int) -> None:
        kernels.touch_recent(self.state, self.score, slots, counts, tick)

    def drop(self, slots: np.ndarray, ids: np.ndarray) -> None:
        kernels.drop(self.state, self.score, slots)

    def announce(self, ids: np.ndarray, slots: np.ndarray, tick: int) -> None:
        return

    def settle(self, pressed: bool) -> None:
        return


class _Frequent(_Recent):
    """Least frequently used; frequencies fade and outlive the stay in the cache."""

    def __init__(self, state: np.ndarray, score: np.ndarray, half_life: int) -> None:
        super().__init__(state, score)
        self.frequency = score
        self.ghosts = ghosts.lines(REMEMBERED * len(score))
        self.arrays = (self.ghosts,)
        self.fades_at = max(half_life * len(score), LEAST_SEEN)

    def hit(self, slots: np.ndarray, counts: np.ndarray, tick: int) -> None:
        kernels.touch_frequent(self.state, self.score, slots, counts)
        self._fade()

    def insert(self, slots: np.ndarray, ids: np.ndarray, counts: np.ndarray, tick: int) -> None:
        kernels.insert_frequent(self.state, self.score, self.ghosts, slots, ids, counts)
        self._fade()

    def drop(self, slots: np.ndarray, ids: np.ndarray) -> None:
        kernels.drop_frequent(self.state, self.score, self.frequency, self.ghosts, slots, ids)

    def _fade(self) -> None:
        if self.state[kernels.SEEN] >= self.fades_at:
            kernels.halve(self.state, self.frequency)
            ghosts.fade(self.ghosts)


class _Ahead(_Frequent):
    """Rows that the known window needs stay; the others by frequency."""

    def __init__(self, state: np.ndarray, score: np.ndarray, half_life: int) -> None:
        super().__init__(state, score, half_life)
        self.frequency = np.zeros_like(score)
        self.words = np.zeros((len(score), 2), dtype=np.uint64)
        self._await(np.zeros((1 << 12, 3), dtype=np.uint64))
        self._scored = state, score, self.frequency, self.words

    def hit(self, slots: np.ndarray, counts: np.ndarray, tick: int) -> None:
        self.state[kernels.NOW] = tick
        kernels.touch_ahead(*self._scored, slots, counts)
        self._fade()

    def insert(self, slots: np.ndarray, ids: np.ndarray, counts: np.ndarray, tick: int) -> None:
        self.state[kernels.NOW] = tick
        kernels.insert_ahead(*self._scored, self.ghosts, self.awaited, slots, ids, counts)
        self._fade()

    def drop(self, slots: np.ndarray, ids: np.ndarray) -> None:
        kernels.drop_ahead(self.state, self.score, self.words, self.awaited, slots, ids)
        super().drop(slots, ids)

    def announce(self, ids: np.ndarray, slots: np.ndarray, tick: int) -> None:
        while not kernels.announce(*self._scored, self.awaited, ids, slots, tick):
            bigger = np.zeros((2 * len(self.awaited), 3), dtype=np.uint64)
            kernels.move_awaited(self.state, self.awaited, bigger)
            self._await(bigger)

    def _await(self, table: np.ndarray) -> None:
        self.awaited = table
        self.arrays = (self.ghosts, self.frequency, self.words, table)

    def settle(self, pressed: bool) -> None:
        if pressed:
            kernels.forgo(*self._scored)


class _Own(_Recent):
    """Scores of the user's own; asked for where the queue of candidates runs out."""

    def __init__(self, state: np.ndarray, score: np.ndarray, scorer: Scorer) -> None:
        super().__init__(state, score)
        self.scorer = scorer
        self.ids, self.last = np.zeros_like(score), np.zeros_like(score)
        self.uses = np.zeros(len(score), dtype=np.int32)
        self.arrays = (self.ids, self.last, self.uses)

    def hit(self, slots: np.ndarray, counts: np.ndarray, tick: int) -> None:
        kernels.touch_own(self.state, self.score, self.uses, self.last, slots, counts, tick)

    def insert(self, slots: np.ndarray, ids: np.ndarray, counts: np.ndarray, tick: int) -> None:
        kept = slots < len(self.score)
        self.ids[slots[kept]] = ids[kept]
        kernels.touch_own(self.state, self.score, self.uses, self.last, slots, counts, tick)

    def settle(self, pressed: bool) -> None:
        resident = np.flatnonzero(self.score[: self.state[kernels.HIGH]])
        if not pressed or not len(resident):
            return
        scores = np.asarray(self.scorer(self.ids[resident], self.uses[resident], self.last[resident]))
        if scores.shape != resident.shape or not np.issubdtype(scores.dtype, np.integer):
            raise BadConfig(
                f"policy {self.scorer!r} gave {scores.dtype} {list(scores.shape)} for {len(resident)} rows, "
                f"must be int64 [{len(resident)}]"
            )
        self.score[resident] = np.clip(scores.astype(np.int64), -_SPAN, _SPAN - 2) + (_SPAN + 1)
