"""Places for rows: which are free, and what is known of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..kernels.memory import reserve


class SlotPool:
    """Free slots of ``[first, last)``: fresh ones in order, those given back first. Not thread-safe.

    >>> pool = SlotPool(10, 13)
    >>> pool.take(2).tolist(), pool.free, pool.take(5).tolist()
    ([10, 11], 1, [12])
    """

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.clear()

    def clear(self) -> None:
        """Every slot is free."""
        self.high = self.first  # slots from here on were never given out
        self._back = np.empty(0, dtype=np.int32)
        self._held = 0

    @property
    def free(self) -> int:
        """Slots that can be taken."""
        return self.last - self.high + self._held

    @property
    def used(self) -> int:
        """Slots that are taken."""
        return self.high - self.first - self._held

    def take(self, n: int) -> np.ndarray:
        """int32 [<= n]: as many slots as there are."""
        again = min(n, self._held)
        fresh = min(n - again, self.last - self.high)
        self._held -= again
        out = np.empty(again + fresh, dtype=np.int32)
        out[:again] = self._back[self._held : self._held + again]
        out[again:] = np.arange(self.high, self.high + fresh, dtype=np.int32)
        self.high += fresh
        return out

    def give(self, slots: np.ndarray) -> None:
        """These are free again."""
        need = self._held + len(slots)
        if need > len(self._back):
            grown = np.empty(max(need, 2 * len(self._back)), dtype=np.int32)
            grown[: self._held] = self._back[: self._held]
            self._back = grown
        self._back[self._held : need] = slots
        self._held = need
        if self._held == self.high - self.first:
            self.clear()


class SlotArrays:
    """What is known of every slot of several tables, in one array each; table k owns ``capacities[k]`` slots from
    ``bases[k]`` on. Memory is committed where slots are used. 17 bytes a slot.

    Attributes:
        slot_ids: int64, the id of the row in a slot.
        pins: int32, leases that need it where it is.
        flags: uint8, bits of ``kernels.cpu``.
        where: int32, scratch of ``kernels.cpu.locate``.
    """

    BYTES = 17

    def __init__(self, capacities: Sequence[int]) -> None:
        bounds = np.concatenate([[0], np.cumsum(np.asarray(capacities, dtype=np.int64))])
        self.bases = [int(b) for b in bounds[:-1]]
        total = int(bounds[-1])
        self.slot_ids = _lazy(total, np.int64)
        self.pins = _lazy(total, np.int32)
        self.flags = _lazy(total, np.uint8)
        self.where = _lazy(total, np.int32)


def _lazy(n: int, dtype: type) -> np.ndarray:
    return reserve(n * np.dtype(dtype).itemsize).numpy().view(dtype)
