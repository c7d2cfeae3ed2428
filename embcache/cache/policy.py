"""Who leaves a full cache: one integer score per row, larger = keep.

* ``"lru"``: the batch that used the row last.
* ``"lfu"``: how often the row was used.
* a callable ``f(ids int64 [n], counts int32 [n], last int64 [n]) -> int64 [n]``.

A policy decides what is fetched again, never what is computed: results are the same bits with each.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..errors import BadConfig
from ..kernels import score as kernels

Scorer = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
Policy = str | Scorer

POLICIES = ("lfu", "lfu_decay", "lookahead", "lru")


def check_policy(policy: Policy) -> Policy:
    """``policy`` if it names one or is callable; BadConfig otherwise."""
    if callable(policy) or policy in POLICIES:
        return policy
    raise BadConfig(f"policy = {policy!r}, must be one of {list(POLICIES)} or a callable(ids, counts, last) -> scores")


class ScoreKeeper:
    """Scores of the slots ``[0, rows)`` of one cache.

    Slots from ``rows`` on (an overflow extent) may be passed and are passed over. ``tick`` is a number of the batch that
    never decreases. Not thread-safe: the cache calls it under its lock. All slots of a call are distinct.

    >>> keeper = ScoreKeeper("lru", rows=4)
    >>> keeper.insert(np.array([0, 1, 2]), np.array([70, 71, 72]), np.array([1, 1, 1], dtype=np.int32), tick=1)
    >>> keeper.hit(np.array([0]), np.array([1], dtype=np.int32), tick=2)
    >>> keeper.victims(2, pins=np.zeros(4, dtype=np.int32)).tolist()
    [1, 2]
    """

    def __init__(self, policy: Policy, rows: int) -> None:
        self.policy = check_policy(policy)
        self.rows = rows
        self.score = np.zeros(rows, dtype=np.int64)
        self._state = np.zeros(kernels.FIELDS, dtype=np.int64)
        candidates = max(rows // 32, min(128, rows // 4), 1)
        self._queue = np.zeros(candidates, dtype=np.int32)
        self._seen = np.zeros(candidates, dtype=np.int64)
        self._sample = np.zeros(min(kernels.SAMPLE, max(rows, 1)), dtype=np.int64)

    def hit(self, slots: np.ndarray, counts: np.ndarray, tick: int) -> None:
        """Resident rows were used, each ``counts`` times, by batch ``tick``."""
        if self.policy == "lru":
            kernels.touch_recent(self._state, self.score, slots, counts, tick << 8)
        else:
            kernels.touch_frequent(self.score, slots, counts, 1)

    def insert(self, slots: np.ndarray, ids: np.ndarray, counts: np.ndarray, tick: int) -> None:
        """Rows of ``ids`` were put into ``slots``, used ``counts`` times by batch ``tick``."""
        if self.policy == "lru":
            kernels.touch_recent(self._state, self.score, slots, counts, tick << 8)
        else:
            kernels.insert_frequent(self._state, self.score, slots, counts, 1)

    def victims(self, n: int, pins: np.ndarray) -> np.ndarray:
        """int64 [<= n]: distinct resident slots of low score whose ``pins`` (int32 by slot) are 0. Fewer only where no
        more may leave. Nothing changes: ``drop`` what really left."""
        out = np.empty(n, dtype=np.int64)
        found = kernels.victims(self._state, self.score, pins, self._queue, self._seen, self._sample, out)
        return out[:found]

    def drop(self, slots: np.ndarray, ids: np.ndarray) -> None:
        """The rows of ``ids`` left ``slots``: their metadata is clean, what was learnt of the ids may be remembered."""
        kernels.drop(self._state, self.score, slots)

    def announce(self, ids: np.ndarray, slots: np.ndarray, tick: int) -> None:
        """Batch ``tick`` of the known window will need ``ids``, resident at ``slots`` (-1: not)."""

    def clear(self) -> None:
        """Nothing is resident and nothing was learnt."""
        self.score.fill(0)
        self._state.fill(0)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in (self.score, self._queue, self._seen, self._sample, self._state))
