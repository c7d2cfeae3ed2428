"""A bounded cache between the front and another tier: it keeps rows that left the front (a victim cache).

Rows that the front asks for are copied up and stay here until others push them out. Dirty ones are written below only
then, or by ``flush``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np

from ..config import TableConfig
from ..errors import StorageFull
from ..kernels.cpu import BELOW, DIRTY, READY
from ..tiers.base import BackTier, Block, Copying, DurableTier
from .hot import HotTable, ascending
from .merged import merged
from .policy import Policy
from .saving import Saving
from .slots import SlotArrays

COUNTERS = ("rows_read", "rows_found", "rows_written", "rows_offered", "bytes_read", "bytes_written", "evictions")


class Middle(Copying):
    """A ``BackTier`` over another one, already opened. Thread-safe: one call at a time.

    Args:
        rows: cached of each table.
        policy: which of them stay.
        below: the next tier.
    """

    keeps_offers = True

    def __init__(self, rows: Sequence[int], policy: Policy, below: BackTier) -> None:
        self._rows, self._policy, self.below = list(rows), policy, below
        self._lock = threading.RLock()
        self._tables: list[HotTable] = []
        self._tick = 0
        self._stats = dict.fromkeys(COUNTERS, 0.0)

    def open(self, tables: Sequence[TableConfig]) -> None:
        """Allocate; address space until rows come."""
        self._tables = [
            HotTable(t, table, min(rows, table.num_embeddings or rows), 1, self._policy, self.below)
            for t, (table, rows) in enumerate(zip(tables, self._rows, strict=True))
        ]
        arrays = SlotArrays([table.capacity for table in self._tables])
        for table, base in zip(self._tables, arrays.bases, strict=True):
            table.attach(arrays, base)

    def read(self, table: int, keys: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Fill ``out`` from here or from below."""
        hot = self._tables[table]
        with self._lock:
            slots = hot.slots_of(keys)
            here = slots >= 0
            if here.any():
                out[here] = hot.gather(slots[here])
                self._touch(hot, slots[here])
            away = np.flatnonzero(~here)
            if len(away):
                rows = np.empty((len(away), hot.row_bytes), dtype=np.uint8)
                found = self.below.read(table, keys[away], rows)
                out[away[found]] = rows[found]
                here[away] = found
            n = int(here.sum())
            self._add(rows_read=len(keys), rows_found=n, bytes_read=n * hot.row_bytes)
        return here

    def _touch(self, hot: HotTable, slots: np.ndarray) -> None:
        self._tick += 1
        if hot.keeper is not None:
            hot.keeper.hit(slots, np.ones(len(slots), dtype=np.int32), self._tick)

    def write(self, table: int, keys: np.ndarray, rows: np.ndarray) -> None:
        """Keep dirty rows; what finds no place goes below. Raises what the tier below raises, with nothing changed."""
        with self._lock:
            self._keep(self._tables[table], keys, rows, dirty=True)
            self._add(rows_written=len(keys), bytes_written=rows.nbytes)

    def offer(self, table: int, keys: np.ndarray, rows: np.ndarray) -> None:
        """Keep clean rows as far as there is place; those below have them."""
        with self._lock:
            hot = self._tables[table]
            new = hot.slots_of(keys) < 0
            try:
                self._keep(hot, keys[new], rows[new], dirty=False)
            except StorageFull:  # dirty rows could not make place: they stay
                return
            self._add(rows_offered=len(keys))

    def _keep(self, hot: HotTable, keys: np.ndarray, rows: np.ndarray, dirty: bool) -> None:
        slots = hot.slots_of(keys)
        new = np.flatnonzero(slots < 0)
        taken = hot.cache.take(len(new))
        hot.pins[slots[slots >= 0]] = 1  # not to be chosen
        leaving = (
            hot.keeper.victims(len(new) - len(taken), hot.pins) if hot.keeper and len(taken) < len(new) else taken[:0]
        )
        leaving = leaving.astype(np.int32)
        hot.pins[slots[slots >= 0]] = 0
        place = np.concatenate([taken, leaving])
        kept, rest = new[: len(place)], new[len(place) :]
        try:
            hot.write_down(leaving)
            if dirty and len(rest):
                self.below.write(hot.number, keys[rest], rows[rest])
        except BaseException:
            hot.give(taken)
            raise
        self._add(evictions=len(leaving))
        hot.remove(leaving)
        hot.occupy(place, keys[kept])
        hot.pins[place] = 0
        slots[kept] = place
        here = np.flatnonzero(slots >= 0)
        hot.scatter(rows, here, slots)
        hot.flags[slots[here]] |= READY
        if dirty:
            hot.flags[slots[here]] |= DIRTY
        else:
            hot.flags[place] |= BELOW
        self._score(hot, slots, kept, keys)

    def _score(self, hot: HotTable, slots: np.ndarray, kept: np.ndarray, keys: np.ndarray) -> None:
        old = slots >= 0
        old[kept] = False
        self._touch(hot, slots[old])
        if hot.keeper is not None and len(kept):
            hot.keeper.insert(slots[kept], keys[kept], np.ones(len(kept), dtype=np.int32), self._tick)

    def delete(self, table: int, keys: np.ndarray) -> None:
        """Gone, here and below."""
        with self._lock:
            hot = self._tables[table]
            self.below.delete(table, keys)
            slots = hot.slots_of(keys)
            slots = slots[slots >= 0]
            hot.remove(slots)
            hot.give(slots)

    def scan(self, table: int, block: int) -> Iterator[Block]:
        """(keys, rows) of this tier and those below."""
        hot = self._tables[table]
        with self._lock:
            resident = hot.slot_ids[hot.flagged(DIRTY, DIRTY)]
        yield from merged(
            self.below.scan(table, block), resident[ascending(resident)], lambda keys: self._copies(hot, keys), block
        )

    def _copies(self, hot: HotTable, keys: np.ndarray) -> np.ndarray:
        with self._lock:
            return hot.read_rows(keys)

    def count(self, table: int) -> int:
        """Rows that ``scan`` would give; asks the tier below for each row that it may not have."""
        with self._lock:
            hot = self._tables[table]
            keys = hot.slot_ids[hot.flagged(DIRTY | BELOW, DIRTY)]
            keys = keys[ascending(keys)]
            n = self.below.count(table)
            for start in range(0, len(keys), hot.block):
                part = keys[start : start + hot.block]
                rows = np.empty((len(part), hot.row_bytes), dtype=np.uint8)
                n += int(np.count_nonzero(~self.below.read(table, part, rows)))
            return n

    def flush(self) -> None:
        """Write every dirty row below."""
        for hot in self._tables:
            with self._lock:
                slots = hot.flagged(DIRTY, DIRTY)
                slots = slots[ascending(hot.slot_ids[slots])]
                for start in range(0, len(slots), hot.block):
                    part = slots[start : start + hot.block]
                    self.below.write(hot.number, hot.slot_ids[part], hot.gather(part))
                    hot.flags[part] = hot.flags[part] & ~DIRTY | BELOW

    def saving(self, number: int) -> Saving:
        """To copy what is dirty here into generation ``number`` of the tier below, which outlives the process."""
        return Saving(number, self._tables, cast(DurableTier, self.below), self._lock, contextlib.nullcontext())

    def forget(self) -> None:
        """Drop every row unwritten."""
        with self._lock:
            for hot in self._tables:
                hot.clear()

    def stats(self) -> dict[str, float]:
        """Counters since it was opened, and rows resident now."""
        with self._lock:
            return {**self._stats, "resident": float(sum(len(hot.index) for hot in self._tables))}

    def _add(self, **more: float) -> None:
        for name, value in more.items():
            self._stats[name] += value

    def close(self) -> None:
        """Give the memory back; the tier below is closed by its owner."""
        self._tables = []
