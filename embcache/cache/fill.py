"""Bringing the missing rows of a batch into the cache, all tables at once, in steps that can each be undone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import numpy as np

from ..errors import CacheTooSmall, TableTooLarge
from ..kernels import fused
from ..kernels.cpu import EXISTS, UNSAVED
from ..tiers.base import Moved
from .fetching import Fetching
from .hot import HotTable
from .lease import Lease, Turn
from .slots import SlotArrays

_ANY = np.uint8(0)


class Fill:
    """The rows that a batch misses: ``choose`` places, ``write_down`` who must leave, ``occupy``, ``fetch``,
    ``finish``; ``cancel`` before and ``vacate`` after ``occupy`` undo.

    Args:
        tables: those of the lease, in the order of its segments.
        described: of all tables of the front, for ``kernels.fused``.
        misses: rows of the lease that have no slot.

    ``at``: positions of the missing rows in the lease, by table; ``keys`` ascending as unsigned numbers; ``bounds``:
    where those of a table begin. ``hits``: positions of the other rows, which occur ``used`` times in the batch.
    """

    def __init__(
        self, tables: Sequence[HotTable], described: np.ndarray, arrays: SlotArrays, lease: Lease, misses: int
    ) -> None:
        self.tables, self.lease, self._arrays = tables, lease, arrays
        rows = int((lease.segments[:, 2] - lease.segments[:, 1]).sum())
        self.at, self.keys = np.empty(misses, dtype=np.int64), np.empty(misses, dtype=np.int64)
        self.bounds = np.empty(len(tables) + 1, dtype=np.int64)
        self.hits = np.empty(rows - misses, dtype=np.int64)
        self.used = int(
            fused.sort_out(
                lease.segments,
                lease.unique,
                lease.slots,
                lease.counts,
                self.at,
                self.keys.view(np.uint64),
                self.bounds,
                self.hits,
            )
        )
        self.slots = np.empty(misses, dtype=np.int32)
        self.found = np.zeros(misses, dtype=np.bool_)
        self._plan = np.zeros((len(tables), fused.PLAN), dtype=np.int64)
        self._where = described, lease.tables, self.bounds

    # choosing ---------------------------------------------------------------------------------------------------

    def choose(self, turn: Turn, overflow: bool) -> None:
        """Free slots, then those of victims, then overflow. Whoever catches what it raises has to ``cancel``."""
        plan = self._plan
        if self.lease.training:
            plan[:, fused.ASKING] = self.bounds[1:] > self.bounds[:-1]
            for s, table in enumerate(self.tables):
                if table.keeper is None:
                    self._grow(s, table)
            fused.take_all(*self._where, plan, self.slots)
            self._victims(turn)
        if plan[:, :2].sum() < len(self.keys):
            self._extend(overflow)

    def _grow(self, s: int, table: HotTable) -> None:
        if table.table.admission is not None:  # only rows that are written may stay
            self._plan[s, fused.ASKING] = 0
        elif self._plan[s, fused.ASKING]:
            table.require_memory(int(self.bounds[s + 1] - self.bounds[s]))

    def _victims(self, turn: Turn) -> None:
        plan, arrays = self._plan, self._arrays
        proposed = np.empty(len(self.keys), dtype=np.int64)
        again = bool(plan[:, fused.ASKING].any())
        while again:
            fused.propose_all(*self._where, plan, arrays.pins, proposed)
            for s, table in enumerate(self.tables):
                if table.keeper is not None and table.keeper.asks and plan[s, fused.ASKING]:
                    begin = self.bounds[s] + plan[s, fused.TAKEN] + plan[s, fused.LEAVING]
                    chosen = table.keeper.victims(int(self.bounds[s + 1] - begin), table.pins)
                    proposed[begin : begin + len(chosen)] = chosen
                    plan[s, fused.PROPOSED] = len(chosen)
            with turn:
                again = fused.claim_all(*self._where, plan, proposed, arrays.pins, arrays.flags, self.slots)

    def _extend(self, overflow: bool) -> None:
        lease, need = self.lease, np.diff(self.bounds) - self._plan[:, : fused.EXTRA].sum(axis=1)
        short = [(s, table, int(need[s])) for s, table in enumerate(self.tables) if need[s]]
        if lease.training and not overflow:
            for s, table, _ in short:
                if table.keeper is not None or table.table.admission is None:
                    self.cancel()
                    held = int(np.count_nonzero(table.pins[: table.rows]))
                    raise CacheTooSmall(table.name, held + int(self.bounds[s + 1] - self.bounds[s]), table.rows)
        fused.extend_all(*self._where, self._plan, self.slots)
        for s, table, n in short:
            if lease.training and table.keeper is not None and not table.warned:
                table.warned = True
                warnings.warn(
                    f"table {table.name!r}: staged batches need {n} rows more than its cache of {table.rows} has room "
                    f"for: they stay beside it ({n * table.row_bytes:,} bytes) until their batches are done",
                    stacklevel=2,
                )
            if self._plan[s, fused.EXTRA] < n:
                raise TableTooLarge(n * table.row_bytes, table.overflow.last * table.row_bytes, [table.name])

    def cancel(self) -> None:
        """Who was to leave stays."""
        for s, table in enumerate(self.tables):
            taken, leaving, extra = self._plan[s, : fused.EXTRA + 1]
            slots = self.slots[self.bounds[s] :]
            table.stay(slots[taken : taken + leaving])
            table.give(np.concatenate([slots[:taken], slots[taken + leaving : taken + leaving + extra]]))
        self._plan[:] = 0

    # leaving ----------------------------------------------------------------------------------------------------

    def write_down(self) -> None:
        """Dirty victims go to the tier below. Whoever catches what it raises has to ``cancel``."""
        below = self.tables[0].below
        if below is None or not self._plan[:, fused.LEAVING].any():
            return
        keys, slots, ends = self._leaving(UNSAVED, _ANY)
        written = np.zeros(len(keys), dtype=np.bool_)
        parts = list(self._parts(keys, slots, written, [0, *ends.tolist()]))
        try:
            if parts:
                below.write_from([part for _, part in parts])
            if getattr(below, "keeps_offers", False):
                _, clean, bounds = self._leaving(UNSAVED | EXISTS, EXISTS)
                for table, some in zip(self.tables, np.split(clean, bounds[:-1]), strict=True):
                    table.offer(some)
        except BaseException:  # they stay
            fused.saved_all(*self._where[:2], ends, slots, written, self._arrays.flags)
            raise
        finally:
            for table, part in parts:
                table.written_back += int(np.count_nonzero(part.found))

    def _leaving(self, mask: np.uint8, bits: np.uint8) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(keys, slots, where those of each table end) of the rows that leave and have some flags (see the kernel)."""
        most = int(self._plan[:, fused.LEAVING].sum())
        keys, slots = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int32)
        ends = np.empty(len(self.tables), dtype=np.int64)
        a = self._arrays
        fused.unsaved_all(*self._where, self._plan, self.slots, a.slot_ids, a.flags, mask, bits, keys, slots, ends)
        return keys[: ends[-1]], slots[: ends[-1]], ends

    def _parts(
        self, keys: np.ndarray, slots: np.ndarray, found: np.ndarray, bounds: Sequence[int]
    ) -> Iterator[tuple[HotTable, Moved]]:
        begin = 0
        for table, end in zip(self.tables, bounds[1:], strict=True):
            if begin < end:
                part = slice(begin, end)
                yield table, Moved(table.number, keys[part], table.numpy, slots[part], found[part])
            begin = end

    # coming -----------------------------------------------------------------------------------------------------

    def occupy(self) -> None:
        """The victims are gone, the missing rows have their slots."""
        a = self._arrays
        fused.exchange_all(
            *self._where, self._plan, self.at, self.keys, self.slots, a.slot_ids, a.pins, a.flags, self.lease.slots
        )
        for s in np.flatnonzero(self._plan[:, fused.EXTRA]).tolist():
            table = self.tables[s]
            table.overflow_peak = max(table.overflow_peak, table.overflow.used)

    @property
    def evicted(self) -> int:
        """Rows that had to leave."""
        return int(self._plan[:, fused.LEAVING].sum())

    def vacate(self) -> None:
        """The missing rows are missing again."""
        for table, part in self._parts(self.keys, self.slots, self.found, self.bounds.tolist()):
            table.vacate(part.slots, part.keys)
        self.lease.slots[self.at] = -1

    def fetch(self, fetching: Fetching) -> None:
        """Read the rows, or make them. Whoever catches what it raises has to ``vacate``."""
        parts = list(self._parts(self.keys, self.slots, self.found, self.bounds.tolist()))
        fetching.run(self._fetch, parts, len(self.keys))

    def _fetch(self, parts: Sequence[tuple[HotTable, Moved]]) -> None:
        below = self.tables[0].below
        if below is not None:
            below.read_into([part for _, part in parts])
        for table, part in parts:
            table.complete(part)

    def finish(self, ticks: np.ndarray) -> None:
        """The rows are there, and used by the batches ``ticks`` of their tables (empty: they are only read)."""
        fused.finish_all(
            *self._where,
            self.at,
            self.keys,
            self.slots,
            self.found,
            self._arrays.flags,
            self.lease.counts,
            ticks,
        )

    def hit(self, ticks: np.ndarray) -> None:
        """So are the others."""
        if len(self.hits):
            lease = self.lease
            fused.hit_all(*self._where[:2], lease.segments, self.hits, lease.slots, lease.counts, ticks)
