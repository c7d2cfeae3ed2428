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

import numpy as np

from ..errors import BadConfig
from ..kernels import ghosts, keeping
from ..kernels import score as kernels
from ..tiers.ram import POLICIES

Scorer = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
Policy = str | Scorer

CODES = {
    "lru": keeping.RECENT, "lfu": keeping.FREQUENT, "lfu_decay": keeping.FREQUENT, "lookahead": keeping.KNOWN,
}  # fmt: skip
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


class ScoreKeeper:
    """Scores of the slots ``[0, rows)`` of one cache.

    Slots from ``rows`` on (an overflow extent) may be passed: no row there is scored, uses of its id are remembered.
    ``tick`` is a number of the batch that never decreases. Not thread-safe: the cache calls it under its lock. Slots of
    one call are distinct. ``fields`` is what kernels are told of it (``kernels/keeping.py``).

    >>> keeper = ScoreKeeper("lru", rows=4)
    >>> keeper.insert(np.array([0, 1, 2]), np.array([70, 71, 72]), np.array([1, 1, 1], dtype=np.int32), tick=1)
    >>> keeper.hit(np.array([0]), np.array([1], dtype=np.int32), tick=2)
    >>> keeper.victims(2, pins=np.zeros(4, dtype=np.int32)).tolist()
    [1, 2]
    """

    def __init__(self, policy: Policy, rows: int) -> None:
        self.policy, self.rows = check_policy(policy), rows
        self.asks = not isinstance(policy, str)  # a callable, before victims can be chosen
        candidates = max(rows // 32, min(128, rows // 4), 1)
        self.fields = np.zeros(keeping.KEEPER, dtype=np.int64)
        self.fields[keeping.CODE] = CODES[policy] if isinstance(policy, str) else keeping.OWN
        self.fields[keeping.ROWS] = rows
        self._arrays: dict[int, np.ndarray] = {}
        self._state = self._array(keeping.STATE, np.zeros(kernels.FIELDS, dtype=np.int64))
        self.score = self._array(keeping.SCORE, np.zeros(rows, dtype=np.int64))
        self._array(keeping.QUEUE, np.zeros(candidates, dtype=np.int32), keeping.CANDIDATES)
        self._array(keeping.QUEUE_SCORES, np.zeros(candidates, dtype=np.int64), keeping.CANDIDATES)
        self._array(keeping.SAMPLE, np.zeros(min(kernels.SAMPLE, max(rows, 1)), dtype=np.int64), keeping.SAMPLES)
        if self.asks:
            for field, dtype in ((keeping.IDS, np.int64), (keeping.USES, np.int32), (keeping.LAST, np.int64)):
                self._array(field, np.zeros(rows, dtype=dtype))
        elif policy != "lru":
            self._remember(str(policy))
        self._told = False  # of batches to come

    def _array(self, field: int, array: np.ndarray, length: int | None = None) -> np.ndarray:
        """``array`` is what the kernels find under ``field``."""
        self._arrays[field] = array
        self.fields[field] = array.ctypes.data
        if length is not None:
            self.fields[length] = len(array)
        return array

    def _remember(self, policy: str) -> None:
        """Frequencies, which fade and outlive the stay in the cache; under "lookahead" beside the scores."""
        self.fields[keeping.FADES_AT] = max(HALF_LIVES[policy] * self.rows, LEAST_SEEN)
        self.fields[keeping.FREQUENCY] = self.fields[keeping.SCORE]
        self._array(keeping.GHOSTS, ghosts.lines(REMEMBERED * self.rows), keeping.LINES)
        if policy == "lookahead":
            self._array(keeping.FREQUENCY, np.zeros_like(self.score))
            self._array(keeping.WORDS, np.zeros((self.rows, 2), dtype=np.uint64))
            self._array(keeping.AWAITED, np.zeros((1 << 12, 3), dtype=np.uint64), keeping.AWAITING)

    def hit(self, slots: np.ndarray, counts: np.ndarray, tick: int) -> None:
        """Resident rows were used, each ``counts`` (int32) times, by batch ``tick``."""
        keeping.hit(self.fields, _slots(slots), counts, tick)

    def insert(self, slots: np.ndarray, ids: np.ndarray, counts: np.ndarray, tick: int) -> None:
        """Rows of ``ids`` were put into ``slots``, used ``counts`` times by batch ``tick``."""
        keeping.insert(self.fields, _slots(slots), ids, counts, tick)

    def victims(self, n: int, pins: np.ndarray) -> np.ndarray:
        """int64 [<= n]: distinct resident slots of low score whose ``pins`` (int32 by slot) are 0. Fewer only where no
        more may leave. Nothing changes: ``drop`` what really left. Raises what a callable policy raises."""
        out = np.empty(n, dtype=np.int64)
        if not self.asks:
            return out[: keeping.choose(self.fields, pins, out)]
        if keeping.pressed(self.fields, n):
            self._ask()
        found = keeping.pick(self.fields, pins, out)
        if found < n:
            self._ask()
            found = keeping.pick(self.fields, pins, out)
        return out[:found]

    def _ask(self) -> None:
        """Score every resident row anew."""
        resident = np.flatnonzero(self.score[: self._state[kernels.HIGH]])
        if not len(resident):
            return
        known = [self._arrays[field][resident] for field in (keeping.IDS, keeping.USES, keeping.LAST)]
        scores = np.asarray(self.policy(*known))  # type: ignore[operator]
        if scores.shape != resident.shape or not np.issubdtype(scores.dtype, np.integer):
            raise BadConfig(
                f"policy {self.policy!r} gave {scores.dtype} {list(scores.shape)} for {len(resident)} rows, "
                f"must be int64 [{len(resident)}]"
            )
        self.score[resident] = np.clip(scores.astype(np.int64), -_SPAN, _SPAN - 2) + (_SPAN + 1)

    def drop(self, slots: np.ndarray, ids: np.ndarray) -> None:
        """The rows of ``ids`` left ``slots``: their metadata is clean; how often the ids were used is remembered."""
        keeping.remove(self.fields, _slots(slots), ids)

    def announce(self, ids: np.ndarray, slots: np.ndarray, tick: int) -> None:
        """Batch ``tick`` of the known window will need ``ids`` (int64, distinct), resident at ``slots`` (-1: not).
        Batches are announced in order; policies other than "lookahead" do not listen."""
        self._told = True
        while not keeping.foretell(self.fields, ids, _slots(slots), tick):
            held = self._arrays[keeping.AWAITED]
            bigger = np.zeros((2 * len(held), 3), dtype=np.uint64)
            kernels.move_awaited(self._state, held, bigger)
            self._array(keeping.AWAITED, bigger, keeping.AWAITING)

    def clear(self) -> None:
        """Nothing is resident and nothing was learnt. Pages that were never used stay uncommitted."""
        if self._told or self._state.any():
            for field, array in self._arrays.items():
                if field not in (keeping.QUEUE, keeping.QUEUE_SCORES, keeping.SAMPLE):
                    array.fill(0)
        self._told = False

    @staticmethod
    def bytes_for(policy: Policy, rows: int) -> int:
        """``nbytes`` of ``ScoreKeeper(policy, rows)``, which keeps its zero pages uncommitted until they are used."""
        return ScoreKeeper(policy, rows).nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, as far as they can be used."""
        return sum(array.nbytes for array in self._arrays.values())


def _slots(slots: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(slots, dtype=np.int32)
