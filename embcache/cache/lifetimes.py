"""When rows begin and end, over the tables of a front: who is admitted in a step, who was updated when, who is over.

All of it advances in ``step()`` only, from the leases of that step, so it is a function of the batches alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import SchemaMismatch
from ..kernels import cpu
from ..kernels.cpu import DIRTY, EXISTS
from .admission import AdmissionFilter
from .expiry import ExpiryClock
from .hot import HotTable
from .lease import Lease

Segment = tuple[int, int, int, int]


class Lifetimes:
    """Admission filters and expiry clocks of the tables that have them.

    Not thread-safe: used within ``step()``, and between steps to save and load.
    """

    def __init__(self, hot: Mapping[int, HotTable]) -> None:
        self._hot = dict(hot)
        self.filters: dict[int, AdmissionFilter] = {}
        self.clocks: dict[int, ExpiryClock] = {}
        for t, table in hot.items():
            if table.table.admission is not None:
                self.filters[t] = AdmissionFilter(table.table.admission)
            if table.table.expiry is not None:
                self.clocks[t] = table.expiry = ExpiryClock(table.table)
        self._refused: list[tuple[HotTable, np.ndarray]] = []

    # admission --------------------------------------------------------------------------------------------------

    def admit(self, leases: Sequence[Any], frozen: Collection[int]) -> list[Tensor] | None:
        """Count the ids of ``leases`` that have no row, then send those not admitted to their table's sink: the
        slots of each lease, or None where all stay as they are."""
        self._refused = []
        asked = self.filters.keys() - set(frozen)
        strange: dict[int, list[tuple[Segment, np.ndarray]]] = {}
        for lease in _leases(leases) if asked else ():
            if id(lease) not in strange:
                strange[id(lease)] = [(s, self._strange(lease, s)) for s in _segments(lease) if s[0] in asked]
            for (t, *_), at in strange[id(lease)]:
                self.filters[t].count(lease.unique[at], lease.counts[at])
        sent = {id(lease): self._sent(lease, strange[id(lease)]) for lease in _leases(leases) if id(lease) in strange}
        if not self._refused:
            return None
        return [lease if isinstance(lease, Tensor) else sent[id(lease)] for lease in leases]

    def _strange(self, lease: Lease, segment: Segment) -> np.ndarray:
        """Positions of the rows of a segment that do not exist."""
        t, _, first, last = segment
        flags = self._hot[t].flags[lease.slots[first:last]]
        return np.flatnonzero((flags & EXISTS) == 0) + first

    def _sent(self, lease: Lease, strange: Sequence[tuple[Segment, np.ndarray]]) -> Tensor:
        slots = lease.slots
        for (t, *_), at in strange:
            refused = at[~self.filters[t].admitted(lease.unique[at])]
            if len(refused):
                slots = slots.copy() if slots is lease.slots else slots
                self._refused.append((self._hot[t], slots[refused]))
                slots[refused] = self._hot[t].reserved
        if slots is lease.slots:
            return lease.out
        out = lease.out.clone()
        cpu.spread(lease.ranges, lease.positions, slots, out.numpy())
        return out

    def unmark(self) -> None:
        """Rows that were refused in this step are as they were; inside a turn, after the leases' rows were marked."""
        for table, slots in self._refused:
            table.flags[slots] &= ~(DIRTY | EXISTS)

    # expiry -----------------------------------------------------------------------------------------------------

    def stamp(self, leases: Sequence[Any], frozen: Collection[int], steps: Sequence[int]) -> None:
        """The rows of ``leases`` that exist were updated in this step; the sinks are clean again."""
        asked = self.clocks.keys() - set(frozen)
        for lease in _leases(leases) if asked else ():
            for t, _, first, last in _segments(lease):
                if t in asked:
                    self._stamp(self._hot[t], lease.slots[first:last], lease.unique[first:last], steps[t])
        for table, _ in self._refused:
            table.clean_sink()
        self._refused = []

    def _stamp(self, table: HotTable, slots: np.ndarray, ids: np.ndarray, step: int) -> None:
        updated = (table.flags[slots] & EXISTS) != 0
        if table.table.padding_idx is not None:
            updated &= ids != table.table.padding_idx
        if table.expiry is not None:
            table.expiry.stamp(table.numpy, slots[updated], step)

    def due(self, frozen: Collection[int], steps: Sequence[int]) -> list[HotTable]:
        """Tables whose rows are to be swept after this step."""
        found = []
        for t, clock in self.clocks.items():
            if t not in frozen:
                clock.now = steps[t]
                if steps[t] % clock.every == 0:
                    found.append(self._hot[t])
        return found

    # saving -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Copies: ``<table>.admission``, the counters; ``<table>.expiry``, int64 (step, last sweep)."""
        out = {}
        for t, known in self.filters.items():
            out[f"{self._hot[t].name}.admission"] = torch.from_numpy(known.cells.copy())
        for t, clock in self.clocks.items():
            out[f"{self._hot[t].name}.expiry"] = torch.tensor([clock.now, clock.swept])
        return out

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` gave; an empty one: as at the beginning. SchemaMismatch, before any change, where it
        is of other tables."""
        mine = self.state()
        if state:
            shapes = [{k: (list(v.shape), str(v.dtype)) for k, v in sorted(each.items())} for each in (state, mine)]
            if shapes[0] != shapes[1]:
                raise SchemaMismatch("admission and expiry", *shapes)
        for t, known in self.filters.items():
            known.clear()
            if state:
                known.cells[:] = state[f"{self._hot[t].name}.admission"].numpy()
        for t, clock in self.clocks.items():
            clock.clear()
            if state:
                clock.now, clock.swept = (int(n) for n in state[f"{self._hot[t].name}.expiry"])

    def clear(self, t: int) -> None:
        """Table ``t`` is as at the beginning."""
        if t in self.filters:
            self.filters[t].clear()
        if t in self.clocks:
            self.clocks[t].clear()


def _leases(leases: Sequence[Any]) -> Iterator[Lease]:
    return (lease for lease in leases if isinstance(lease, Lease))


def _segments(lease: Lease) -> Iterator[Segment]:
    """(table, base, first, last)."""
    for t, (base, first, last) in zip(lease.tables.tolist(), lease.segments.tolist(), strict=True):
        yield t, base, first, last
