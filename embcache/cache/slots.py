"""Places for rows: which are free, and what is known of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..kernels import cpu
from ..kernels.memory import reserve


class SlotPool:
    """Free slots of ``[first, last)``: fresh ones in order, those given back first. Not thread-safe.

    >>> pool = SlotPool(10, 13)
    >>> pool.take(2).tolist(), pool.free, pool.take(5).tolist()
    ([10, 11], 1, [12])
    """

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.state = np.zeros(cpu.POOL, dtype=np.int64)  # what kernels are told of it
        self.clear()

    def clear(self) -> None:
        """Every slot is free."""
        self._back = np.empty(0, dtype=np.int32)
        self.state[:] = self.first, self.last, 0, self._back.ctypes.data

    @property
    def high(self) -> int:
        """Slots from here on were never given out."""
        return int(self.state[cpu.FRESH])

    @property
    def free(self) -> int:
        """Slots that can be taken."""
        return self.last - self.high + int(self.state[cpu.HELD])

    @property
    def used(self) -> int:
        """Slots that are taken."""
        return self.high - self.first - int(self.state[cpu.HELD])

    def take(self, n: int) -> np.ndarray:
        """int32 [<= n]: as many slots as there are."""
        out = np.empty(min(n, self.free), dtype=np.int32)
        cpu.take(self.state, out)
        return out

    def give(self, slots: np.ndarray) -> None:
        """These are free again."""
        held = int(self.state[cpu.HELD])
        need = held + len(slots)
        if need > len(self._back):
            grown = np.empty(max(need, 2 * len(self._back)), dtype=np.int32)
            grown[:held] = self._back[:held]
            self._back = grown
            self.state[cpu.BACK] = grown.ctypes.data
        self._back[held:need] = slots
        self.state[cpu.HELD] = need
        if need == self.high - self.first:
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
