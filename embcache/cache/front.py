"""The first tier: what lookups and updates read. One object for all tables of a store.

Tables that lie whole in memory are addressed by id (``direct.py``); the others keep some rows, or all that were ever
used, in slots found through an index (``hot.py``).

Two locks. The *stage lock* belongs to whoever changes which rows are resident; it may be held while a tier below reads.
The *turn* guards pins and flags and is never held for long, so a thread that computes waits for the staging one only
where a row it needs has left. Rows change in ``step()`` alone, whose leases are pinned; so what leaves has settled.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import TableConfig
from ..errors import StaleLookup
from ..kernels import cpu, fused
from ..kernels.cpu import DIRTY, EXISTS, READY
from ..layout import BAGS, FIRST, TABLE
from ..tiers.base import Arena, BackTier, DurableTier
from .by_id import FrontRows
from .direct import DirectTable
from .fetching import Fetching
from .fill import Fill
from .hot import HotTable
from .lease import IN_CACHE, IN_OVERFLOW, Lease, Turn
from .lifetimes import Lifetimes
from .slots import SlotArrays

RELEASED = "this lease was released: stage the batch again"
STAGES = ("dedup_probe", "evict_write", "miss_read", "insert")


class Front(FrontRows):
    """Arenas of rows, and the slots of staged ids.

    ``stage``, ``slots``, ``relax`` and ``release`` may run on several threads at once; a lease is used by one at a
    time, and ``release`` may come from any, garbage collection included. The rest may run beside another thread's
    ``stage`` but not beside ``step``. Every error leaves rows, pins and index as they were.

    Args:
        tables: of the store.
        engines: of each table, a DirectTable or a HotTable.
        below: the tiers below, nearest first.
    """

    takes_weights = False  # ``stage`` is told the weights of the ids: by fronts that have others pool

    def __init__(
        self, tables: Sequence[TableConfig], engines: Sequence[DirectTable | HotTable], below: Sequence[BackTier]
    ) -> None:
        self.tables, self.below = list(tables), list(below)
        self._engines = list(engines)
        self._direct = {t: e for t, e in enumerate(engines) if isinstance(e, DirectTable)}
        self._hot = {t: e for t, e in enumerate(engines) if isinstance(e, HotTable)}
        self._arrays = SlotArrays([e.capacity for e in self._hot.values()])
        for engine, base in zip(self._hot.values(), self._arrays.bases, strict=True):
            engine.attach(self._arrays, base)
        self._hashed = np.array([t in self._hot for t in range(len(engines))], dtype=np.bool_)
        self._described = np.zeros((len(engines), fused.TABLE), dtype=np.int64)
        for t, engine in self._hot.items():
            self._described[t] = engine.described
        self._turn = Turn(self._arrays)
        self._lifetimes = Lifetimes(self._hot)
        self._stage_lock = threading.Lock()
        self._wide = any(e.rows >= 2**31 for e in self._direct.values())
        self.arenas = [self._arena(t) for t in range(len(self.tables))]
        self._stats = {"stages": 0, "unique_ids": 0, "hits": 0, "misses": 0, "ids": 0, "ids_hit": 0, "rows_restaged": 0}
        self._stats["evictions"] = 0
        self._fetching = Fetching()
        self._saving = None
        self._seconds = dict.fromkeys(STAGES, 0.0)

    def _arena(self, t: int) -> Arena:
        engine = self._engines[t]
        if isinstance(engine, DirectTable):
            return Arena(engine.slab, engine.written)
        return Arena(engine.slab, slot_ids=torch.from_numpy(engine.slot_ids))

    def direct(self, t: int) -> bool:
        """Whether a table lies whole in memory, slot = id."""
        return t in self._direct

    @property
    def durable(self) -> DurableTier | None:
        """The last tier, where it outlives the process."""
        return self.below[-1] if self.below and hasattr(self.below[-1], "freeze") else None  # type: ignore[return-value]

    # stage, slots, relax, release -------------------------------------------------------------------------------

    def stage(
        self, features: Tensor, values: Tensor, offsets: Tensor | None, training: bool, *, overflow: bool = True
    ) -> Any:
        """Make the rows of the ids resident and pin them; returns the lease.

        ``features`` int64 [F, 7] as the kernels take it; ``offsets`` None: a bag is an id. Not ``training``: the batch
        is read only and the cache stays as it is. ``overflow=False``: CacheTooSmall where the rows do not fit beside
        those that are pinned. Raises also what the tier below raises.
        """
        if not self._hot:
            return values
        tables, ends, ranges, whole = self._ranges(features, offsets)
        if not len(tables):
            return values
        ids = values.to(torch.int64).contiguous().numpy()
        lease = Lease(training, len(ids), int((ranges[:, 1] - ranges[:, 0]).sum()), ranges)
        with self._stage_lock:
            self._stage(lease, tables, ends, ranges, ids, overflow)
        try:
            lease.out = self._out(values, len(ids) == len(lease.unique), whole)
            cpu.spread(lease.ranges, lease.positions, lease.slots, lease.out.numpy())
        except BaseException:
            self.release(lease)
            raise
        return lease

    def _out(self, values: Tensor, covered: bool, direct: bool) -> Tensor:
        """Where the slots go; ids of direct tables are slots already, for those of no feature any slot will do."""
        dtype = torch.int64 if self._wide else torch.int32
        if direct:
            return values.to(dtype, copy=True)
        return torch.empty(len(values), dtype=dtype) if covered else torch.zeros(len(values), dtype=dtype)

    def _ranges(self, features: Tensor, offsets: Tensor | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
        """(the hashed tables that are read, how many ranges there are up to the last of each, int64 [R, 2] positions of
        their ids, table by table; whether a table that is not hashed is among the features)."""
        rows = features.numpy()
        hashed = self._hashed[rows[:, TABLE]]
        direct = not hashed.all()
        rows = rows[hashed]
        rows = rows[np.argsort(rows[:, TABLE], kind="stable")]
        ranges = np.stack([rows[:, FIRST], rows[:, FIRST] + rows[:, BAGS]], axis=1)
        if offsets is not None:
            ranges = offsets.numpy()[ranges].astype(np.int64, copy=False)
        ends = np.flatnonzero(np.diff(rows[:, TABLE], append=-1)) + 1
        return rows[ends - 1, TABLE], ends, ranges, direct

    def _stage(
        self,
        lease: Lease,
        tables: np.ndarray,
        ends: np.ndarray,
        ranges: np.ndarray,
        ids: np.ndarray,
        overflow: bool,
        again: bool = False,
    ) -> None:
        """Under the stage lock: fill a lease's arrays by row and pin; nothing has changed if it raises."""
        begin = perf_counter()
        sizes = np.diff(np.cumsum(ranges[:, 1] - ranges[:, 0])[ends - 1], prepend=0)
        firsts = np.cumsum(sizes) - sizes
        lease.tables = tables
        lease.segments = np.stack([self._described[tables, fused.BASE], firsts, firsts], axis=1)
        try:
            misses = self._locate(lease, ends, ranges, ids)
            with self._turn:
                cpu.pin(lease.segments, lease.slots, self._arrays.pins)
                lease.pinned = True
            self._seconds["dedup_probe"] += perf_counter() - begin
            self._reclaim()
            self._fill(lease, misses, overflow, again)
        except BaseException:
            self._forget_misses(lease)
            raise
        lease.overflow_held = True

    def _locate(self, lease: Lease, ends: np.ndarray, ranges: np.ndarray, ids: np.ndarray) -> int:
        """The distinct ids and their slots; returns how many have none. Indexes grow as they must."""
        states = np.zeros((len(ends), fused.STATE), dtype=np.int64)
        states[1:, fused.RANGE] = ends[:-1]
        while True:
            full = fused.locate_all(
                self._described,
                lease.tables,
                states,
                ends,
                ranges,
                ids,
                self._arrays.where,
                lease.positions,
                lease.unique,
                lease.slots,
                lease.counts,
                lease.segments,
            )
            if full < 0:
                return int(states[:, cpu.MISSES].sum())
            index = self._hot[int(lease.tables[full])].index
            index.reserve(index.count + 1)

    def _forget_misses(self, lease: Lease) -> None:
        if lease.pinned:
            with self._turn:
                self._turn.unpin(lease, 0)
                lease.pinned = False
        for t, (_, first, last) in zip(lease.tables.tolist(), lease.segments.tolist(), strict=True):
            missing = lease.slots[first:last] < 0
            self._hot[t].index.delete(lease.unique[first:last][missing])

    def _fill(self, lease: Lease, misses: int, overflow: bool, again: bool) -> None:
        begin = perf_counter()
        tables = [self._hot[t] for t in lease.tables.tolist()]
        ticks = np.array([table.tick + 1 for table in tables] if lease.training else [], dtype=np.int64)
        fill = Fill(tables, self._described, self._arrays, lease, misses)
        self._seconds["dedup_probe"] += perf_counter() - begin
        if misses:
            self._make_room(fill, overflow)
            self._bring(fill, ticks)
        if again:
            self._stats["rows_restaged"] += misses
            return
        if lease.training:
            begin = perf_counter()
            fill.hit(ticks)
            for table in tables:
                table.tick += 1
                table.tell()
            self._seconds["insert"] += perf_counter() - begin
        s = self._stats
        s["stages"] += 1
        s["unique_ids"] += len(fill.hits) + misses
        s["misses"] += misses
        s["hits"] += len(fill.hits)
        s["ids"] += len(lease.unique)
        s["ids_hit"] += fill.used

    def _make_room(self, fill: Fill, overflow: bool) -> None:
        begin = perf_counter()
        try:
            fill.choose(self._turn, overflow)
            fill.write_down()
        except BaseException:
            fill.cancel()
            raise
        finally:
            self._seconds["evict_write"] += perf_counter() - begin

    def _bring(self, fill: Fill, ticks: np.ndarray) -> None:
        begin = perf_counter()
        fill.occupy()
        self._stats["evictions"] += fill.evicted
        middle = perf_counter()
        try:
            fill.fetch(self._fetching)
        except BaseException:
            fill.vacate()
            raise
        finally:
            end = perf_counter()
            self._seconds["miss_read"] += end - middle
        fill.finish(ticks)
        self._seconds["insert"] += middle - begin + perf_counter() - end

    def _reclaim(self) -> None:
        """Rows of the overflow extent that nobody holds any more leave it."""
        for table in self._hot.values():
            if not table.overflow.used:
                continue
            out = np.empty(table.overflow.used, dtype=np.int32)
            with self._turn:
                pool = table.overflow
                slots = out[: cpu.idle(pool.first, pool.high, table.pins, table.flags, out)]
            if not len(slots):
                continue
            begin = perf_counter()
            try:
                if table.below is None:
                    table.settle(slots)
                else:
                    table.write_down(slots)
                    table.remove(slots)
            except BaseException:
                table.flags[slots] |= READY
                raise
            finally:
                self._seconds["evict_write"] += perf_counter() - begin
            table.give(slots)
            if table.keeper is not None:
                table.index.shrink(table.rows)

    def slots(self, lease: Any) -> Tensor:
        """The slot of each id; the rows are resident and pinned until ``relax`` or ``release``. Rows that have left
        since are staged again."""
        if isinstance(lease, Tensor):
            return lease
        if lease.pinned:
            return lease.out
        if not self._repin(lease):
            with self._stage_lock:
                if not self._repin(lease):
                    self._restage(lease)
        return lease.out

    def _repin(self, lease: Lease) -> bool:
        a = self._arrays
        with self._turn:
            if not lease.open:
                raise StaleLookup(RELEASED)
            lease.pinned = bool(
                cpu.repin(lease.segments, lease.slots, lease.unique, a.slot_ids, a.pins, a.flags, lease.overflow_held)
            )
        return lease.pinned

    def _restage(self, lease: Lease) -> None:
        """Under the stage lock: bring back a lease's rows that have left."""
        if lease.overflow_held:  # pinned anew with the others, or not at all
            with self._turn:
                self._turn.unpin(lease, IN_OVERFLOW)
                lease.overflow_held = False
        again = Lease(lease.training, len(lease.unique), len(lease.unique), lease.ranges)
        ends = np.arange(1, len(lease.tables) + 1)
        self._stage(again, lease.tables, ends, lease.segments[:, 1:].copy(), lease.unique, True, again=True)
        moved = np.full(len(lease.slots), -1, dtype=np.int32)
        # the same rows in the same order, but without gaps between segments
        for old, new in zip(lease.segments, again.segments, strict=True):
            moved[old[1] : old[2]] = again.slots[new[1] : new[2]]
        try:
            out = lease.out.clone()
            cpu.spread(lease.ranges, lease.positions, moved, out.numpy())
            with self._turn:
                if not lease.open:
                    raise StaleLookup(RELEASED)
                lease.slots, lease.out = moved, out
                lease.pinned, lease.overflow_held = True, True
        except BaseException:
            self.release(again)
            raise

    def relax(self, lease: Any) -> None:
        """Until the next ``slots`` the rows may leave; those in the overflow extent stay until ``release``."""
        if isinstance(lease, Tensor):
            return
        with self._turn:
            if lease.pinned:
                self._turn.unpin(lease, IN_CACHE)
                lease.pinned = False

    def release(self, lease: Any) -> None:
        """The lease ends; never raises, never waits, again is fine."""
        if isinstance(lease, Lease):
            self._turn.release(lease)

    def pins(self) -> int:
        """Pinned rows."""
        with self._turn:
            return sum(
                int(np.count_nonzero(table.pins[pool.first : pool.high]))
                for table in self._hot.values()
                for pool in (table.cache, table.overflow)
            )

    def announce(self, features: Tensor, values: Tensor, offsets: Tensor | None, ahead: int) -> None:
        """The ``ahead``-th batch from now will need these ids (1: the next to be staged for training): policies that
        look ahead keep their rows. Each batch once, in order."""
        if not self._hot:
            return
        tables, ends, ranges, _ = self._ranges(features, offsets)
        ids = values.to(torch.int64).contiguous().numpy()
        with self._stage_lock:
            for t, mine in zip(tables.tolist(), np.split(ranges, ends[:-1]), strict=True):
                table = self._hot[t]
                if table.keeper is not None and table.keeper.policy == "lookahead":
                    keys = np.unique(np.concatenate([ids[start:stop] for start, stop in mine.tolist()]))
                    table.announce(keys, table.tick + ahead)

    # step -------------------------------------------------------------------------------------------------------

    def admit(self, leases: Sequence[Any], frozen: Collection[int]) -> list[Tensor] | None:
        """Before an update, of the leases it reads, in call order: their slots where ids that are not admitted go to
        the sink. None: all are as they were staged."""
        return self._lifetimes.admit(leases, frozen)

    def occurred(self, lease: Any, positions: np.ndarray, counts: np.ndarray) -> None:
        """Admission counts the ids at ``positions`` of a staged batch so often, in place of once each: they stand for
        others that were brought together elsewhere. All positions of an id at once."""
        rows = lease.positions[positions]
        lease.counts[rows] = 0
        np.add.at(lease.counts, rows, counts)

    def stepped(self, leases: Sequence[Any], frozen: Collection[int], steps: Sequence[int]) -> None:
        """After an update: the rows of these leases were written, but for frozen tables."""
        seen: set[int] = set()
        for lease in leases:
            if isinstance(lease, Tensor) or id(lease) in seen:
                continue
            seen.add(id(lease))
            trained = np.array([t not in frozen for t in lease.tables.tolist()], dtype=np.bool_)
            with self._turn:
                kept = self._padding(lease)
                cpu.mark(lease.segments[trained], lease.slots, self._arrays.flags, DIRTY | EXISTS)
                for g, flags in kept:
                    self._arrays.flags[g] = flags
                self._lifetimes.unmark()
        self._lifetimes.stamp(leases, frozen, steps)
        for table in self._lifetimes.due(frozen, steps):
            with self._stage_lock:  # nothing is being loaded or leaving
                self._sweep(table)

    def _sweep(self, table: HotTable) -> None:
        """Rows that are over leave, or become initial where they are pinned; those below count as absent from here."""
        clock = table.expiry
        assert clock is not None
        clock.swept = clock.now
        self._renew(table, clock.over_slots(table.numpy, table.flagged(EXISTS, EXISTS)))

    def _padding(self, lease: Lease) -> list[tuple[int, Any]]:
        """(slot in all arrays, flags) of rows of padding ids, which no update touches."""
        kept = []
        for t, (base, first, last) in zip(lease.tables.tolist(), lease.segments.tolist(), strict=True):
            padding = self.tables[t].padding_idx
            if padding is not None:
                for k in np.flatnonzero(lease.unique[first:last] == padding) + first:
                    g = base + int(lease.slots[k])
                    kept.append((g, self._arrays.flags[g]))
        return kept

    # everything -------------------------------------------------------------------------------------------------

    def extra_state(self) -> dict[str, Tensor]:
        """What admission and expiry remember besides rows; copies."""
        return self._lifetimes.state()

    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        """Restore what ``extra_state`` gave; an empty one: nothing was counted, nothing is over."""
        self._lifetimes.load(state)

    def stats(self) -> dict[str, Any]:
        """Counters since the store was opened. hits + misses = unique ids, over hashed tables."""
        hot = self._hot.values()
        return {
            **self._stats,
            "rows_written_back": sum(table.written_back for table in hot),
            "overflow_peak": sum(table.overflow_peak for table in hot),
            "resident": sum(len(table.index) for table in hot),
            "bytes": sum(table.nbytes for table in hot) + sum(e.slab.numel() for e in self._direct.values()),
            "seconds": dict(self._seconds),
        }

    def close(self) -> None:
        """Close the tiers below and give memory back."""
        self._fetching.close()
        for tier in self.below:
            tier.close()
        self.arenas = []
        self._engines, self._direct, self._hot = [], {}, {}
