"""Bringing the missing rows of one table into the cache, in steps that can each be undone."""

from __future__ import annotations

import warnings

import numpy as np

from ..errors import CacheTooSmall, TableTooLarge
from ..kernels import cpu
from .hot import HotTable, ascending
from .lease import Lease, Turn

_NONE = np.empty(0, dtype=np.int32)


class Fill:
    """The rows of one table that a batch misses: ``choose`` places, ``write_down`` who must leave, ``occupy``,
    ``fetch``, ``finish``; ``cancel`` before and ``vacate`` after ``occupy`` undo.

    ``at``: positions of the missing rows in the lease; ``keys`` ascending as unsigned numbers.
    """

    def __init__(self, table: HotTable, lease: Lease, first: int, distinct: int, misses: int) -> None:
        self.table, self.lease = table, lease
        at = np.empty(misses, dtype=np.int64)
        cpu.missing(lease.slots, first, first + distinct, at)
        self.at = at[ascending(lease.unique[at])]
        self.keys = lease.unique[self.at]
        self.slots = self.taken = self.leaving = _NONE
        self.found = np.empty(0, dtype=np.bool_)

    def choose(self, turn: Turn, overflow: bool) -> None:
        """Free slots, then those of victims, then overflow."""
        table, n = self.table, len(self.keys)
        late = table.keeper is None and table.table.admission is not None  # only rows that are written may stay
        if self.lease.training and not late:
            if table.keeper is None:
                table.require_memory(n)
            self.taken = table.cache.take(n)
            self.leaving = self._victims(turn, n - len(self.taken))
            n -= len(self.taken) + len(self.leaving)
            if n and not overflow:
                self.cancel()
                needed = int(np.count_nonzero(table.pins[: table.rows])) + len(self.keys)
                raise CacheTooSmall(table.name, needed, table.rows)
        extra = table.overflow.take(n)
        self.slots = np.concatenate([self.taken, self.leaving, extra])
        self.taken = np.concatenate([self.taken, extra])
        if n and self.lease.training and table.keeper is not None and not table.warned:
            table.warned = True
            warnings.warn(
                f"table {table.name!r}: staged batches need {n} rows more than its cache of {table.rows} has room for: "
                f"they stay beside it ({n * table.row_bytes:,} bytes) until their batches are done",
                stacklevel=2,
            )
        if len(extra) < n:
            raise TableTooLarge(n * table.row_bytes, table.overflow.last * table.row_bytes, [table.name])

    def _victims(self, turn: Turn, need: int) -> np.ndarray:
        table, n = self.table, 0
        if table.keeper is None or need == 0:
            return _NONE
        out = np.empty(need, dtype=np.int32)
        while n < need:
            candidates = table.keeper.victims(need - n, table.pins)
            with turn:
                before, n = n, int(cpu.claim(candidates, table.pins, table.flags, out, n, need))
            if n == before:
                break
        return out[:n]

    def cancel(self) -> None:
        """Who was to leave stays."""
        self.table.stay(self.leaving)
        self.table.give(self.taken)
        self.taken = self.leaving = _NONE

    def write_down(self) -> None:
        """Dirty victims go to the tier below."""
        self.table.write_down(self.leaving)

    def occupy(self) -> None:
        """The victims are gone, the missing rows have their slots."""
        table = self.table
        if len(self.leaving):
            table.evicted += len(self.leaving)
            table.remove(self.leaving)
        table.occupy(self.slots, self.keys, new=False)
        self.lease.slots[self.at] = self.slots

    def vacate(self) -> None:
        """The missing rows are missing again."""
        self.table.vacate(self.slots, self.keys)
        self.lease.slots[self.at] = -1

    def fetch(self) -> None:
        """Read the rows, or make them."""
        self.found = self.table.fetch(self.keys, self.slots)

    def finish(self) -> None:
        """The rows are there."""
        table = self.table
        table.mark_loaded(self.slots, self.found)
        if self.lease.training and table.keeper is not None:
            table.keeper.insert(self.slots, self.keys, self.lease.counts[self.at], table.tick + 1)
