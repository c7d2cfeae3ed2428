"""One table's resident rows: index, slots, and what comes and goes over the tier below."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from ..config import TableConfig
from ..errors import TableTooLarge
from ..kernels import cpu, fused
from ..kernels.cpu import BELOW, DIRTY, EXISTS, READY, UNSAVED
from ..kernels.index import RowIndex
from ..kernels.initial import InitialRows
from ..kernels.memory import available_bytes, huge_empty, reserve
from ..tiers.base import BackTier, Block, Moved
from .expiry import ExpiryClock
from .policy import WINDOW, Policy, ScoreKeeper
from .slots import SlotArrays, SlotPool

HUGE_FROM = 4 << 20  # bytes of cached rows from which huge pages are worth their size
MOVED = 4 << 20  # bytes of rows moved in one piece


def ascending(keys: np.ndarray) -> np.ndarray:
    """The order in which keys ascend as unsigned numbers."""
    return np.argsort(keys.view(np.uint64))


class HotTable:
    """Rows of one table in ``[0, rows)`` (the cache), ``[rows, reserved)`` (the overflow extent) and the sink, the last
    slot, which takes what is to be dropped. Not thread-safe: ``Front`` holds its lock.

    Args:
        number: of the table in its store.
        rows, overflow: slots of the cache and of the overflow extent.
        policy: who leaves; None: nobody (there is no tier below).
        below: the next tier, or None.
    """

    def __init__(
        self, number: int, table: TableConfig, rows: int, overflow: int, policy: Policy | None, below: BackTier | None
    ) -> None:
        self.number, self.table, self.rows, self.below = number, table, rows, below
        self.name, self.row_bytes = table.name, table.row_bytes
        self.reserved = rows + overflow
        self.capacity = self.reserved + 1
        held = rows * self.row_bytes if policy is not None else self.capacity * self.row_bytes
        huge = held if held >= HUGE_FROM else 0
        self.slab: Tensor = reserve(self.capacity * self.row_bytes, huge).view(self.capacity, self.row_bytes)
        self.numpy = self.slab.numpy()
        self.flat = self.numpy.reshape(-1)
        self.index = RowIndex(rows if policy is not None else 0)
        self.cache, self.overflow = SlotPool(0, rows), SlotPool(rows, self.reserved)
        self.keeper = ScoreKeeper(policy, rows) if policy is not None else None
        self.initial = InitialRows(table)
        self._copies: Tensor | None = None  # where commits copy dirty rows to
        self.copied = 0  # bytes of it that have been used
        self.expiry: ExpiryClock | None = None  # set by who asks what is over
        self.block = max(1, MOVED // self.row_bytes)
        self.tick = 0  # batches staged for training
        self._coming: deque[tuple[int, np.ndarray]] = deque()  # announced, but still too far off
        self.warned = False  # that a batch was larger than the cache
        self._promised = 0  # rows for which there was memory when it was looked
        self.written_back = self.overflow_peak = 0

    def attach(self, arrays: SlotArrays, base: int) -> None:
        """Take this table's part of the arrays by slot; from now on kernels can be told of it (``described``)."""
        part = slice(base, base + self.capacity)
        self.base = base
        self.slot_ids, self.pins = arrays.slot_ids[part], arrays.pins[part]
        self.flags, self.where = arrays.flags[part], arrays.where[part]
        self.described = np.zeros(fused.TABLE, dtype=np.int64)
        fields = (self.index.header, self.cache.state, self.overflow.state)
        self.described[: len(fields)] = [field.ctypes.data for field in fields]
        self.described[fused.KEEPER] = 0 if self.keeper is None else self.keeper.fields.ctypes.data
        self.described[fused.BASE], self.described[fused.ROWS] = base, self.rows
        self.clean_sink()

    def clean_sink(self) -> None:
        """What was dropped into the sink is gone."""
        self.initial.fill(self.numpy, np.array([self.reserved]), np.zeros(1, dtype=np.int64))

    # finding ----------------------------------------------------------------------------------------------------

    def slots_of(self, keys: np.ndarray) -> np.ndarray:
        """int32 [n], -1 where a key is not resident."""
        return self.index.get(keys)

    def gather(self, slots: np.ndarray) -> np.ndarray:
        """Copies uint8 [n, row_bytes]."""
        out = np.empty((len(slots), self.row_bytes), dtype=np.uint8)
        cpu.gather(self.flat, self.row_bytes, slots, out)
        return out

    def scatter(self, rows: np.ndarray, chosen: np.ndarray, slots: np.ndarray) -> None:
        """``rows[chosen]`` to ``slots[chosen]``."""
        cpu.scatter(rows, chosen, slots, self.row_bytes, self.flat)

    def flagged(self, mask: np.uint8, bits: np.uint8) -> np.ndarray:
        """int32: slots whose flags under ``mask`` are ``bits``."""
        parts = []
        for pool in (self.cache, self.overflow):
            out = np.empty(pool.high - pool.first, dtype=np.int32)
            parts.append(out[: cpu.flagged(pool.first, pool.high, self.flags, mask, bits, out)])
        return np.concatenate(parts)

    # leaving ----------------------------------------------------------------------------------------------------

    def write_down(self, slots: np.ndarray) -> None:
        """The dirty rows of ``slots``, which nobody changes meanwhile, go to the tier below and are clean then; the
        clean ones are offered where that is wanted."""
        if self.below is None or not len(slots):
            return
        flags = self.flags[slots]
        for keys, block in self._blocks(slots[(flags & UNSAVED) != 0]):
            self.below.write(self.number, keys, self.gather(block))
            self.flags[block] = self.flags[block] & ~UNSAVED | BELOW
            self.written_back += len(block)
        if getattr(self.below, "keeps_offers", False):
            self.offer(slots[(flags & (UNSAVED | EXISTS)) == EXISTS])

    def offer(self, slots: np.ndarray) -> None:
        """The tier below may keep these rows, which it, or one further down, has."""
        for keys, block in self._blocks(slots):
            self.below.offer(self.number, keys, self.gather(block))  # type: ignore[union-attr]

    def _blocks(self, slots: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(keys ascending, their slots) in pieces that are moved at once."""
        keys = self.slot_ids[slots]
        order = ascending(keys)
        for start in range(0, len(order), self.block):
            part = order[start : start + self.block]
            yield keys[part], slots[part]

    def stay(self, slots: np.ndarray) -> None:
        """Rows that were marked as leaving are ready again."""
        self.pins[slots] = 0
        self.flags[slots] |= READY

    def remove(self, slots: np.ndarray) -> None:
        """Rows that nobody needs here any more leave index, scores and flags; their slots are not yet free."""
        ids = np.empty(len(slots), dtype=np.int64)
        self.index.count -= cpu.leave(self.index.entries, slots, self.slot_ids, self.flags, ids)
        if self.keeper is not None:
            self.keeper.drop(slots, ids)

    def give(self, slots: np.ndarray) -> None:
        """Slots are free."""
        extra = slots >= self.rows
        self.cache.give(slots[~extra])
        self.overflow.give(slots[extra])

    def require_memory(self, n: int) -> None:
        """Raise TableTooLarge where the system has no room for ``n`` rows more; for tables that only grow."""
        if self.cache.high + n <= self._promised:
            return
        need, free = n * (self.row_bytes + SlotArrays.BYTES), available_bytes()
        if self.cache.free < n or (free is not None and need > free):
            raise TableTooLarge(need, free or 0, [self.name])
        self._promised = self.cache.high + n + self.block

    # coming -----------------------------------------------------------------------------------------------------

    def occupy(self, slots: np.ndarray, keys: np.ndarray) -> None:
        """Rows of ``keys`` will be in ``slots``: indexed, pinned once, not ready."""
        self.index.reserve(self.index.count + len(keys))
        self.index.count += cpu.enter(self.index.entries, keys, slots, self.slot_ids, self.pins, self.flags, self.rows)

    def vacate(self, slots: np.ndarray, keys: np.ndarray) -> None:
        """Undo ``occupy``."""
        self.index.delete(keys)
        self.pins[slots] = 0
        self.flags[slots] = 0
        self.give(slots)

    def settle(self, slots: np.ndarray) -> None:
        """With no tier below: rows leave the overflow extent, those that were written for a slot of the cache."""
        written = slots[(self.flags[slots] & EXISTS) != 0]
        self.require_memory(len(written))
        keys, flags = self.slot_ids[written], self.flags[written]
        to = self.cache.take(len(written))
        self.scatter(self.gather(written), np.arange(len(written)), to)
        self.remove(slots)
        self.occupy(to, keys)
        self.pins[to] = 0
        self.flags[to] = flags & (EXISTS | DIRTY) | READY

    def complete(self, rows: Moved) -> None:
        """Of rows that are read: those that are over, or that the tier below does not have, become initial."""
        if self.expiry is not None:
            rows.found[:] &= ~self.expiry.over(self.numpy, rows.slots)
        if np.count_nonzero(rows.found) < len(rows.found):
            fresh = np.flatnonzero(~rows.found)
            self.initial.fill(self.numpy, rows.slots[fresh].astype(np.int64), rows.keys[fresh])

    # rows by id -------------------------------------------------------------------------------------------------

    def read_rows(self, keys: np.ndarray) -> np.ndarray:
        """Current rows of distinct keys, ascending."""
        out = np.empty((len(keys), self.row_bytes), dtype=np.uint8)
        for start in range(0, len(keys), self.block):
            part = slice(start, start + self.block)
            self._read(keys[part], out[part])
        return out

    def _read(self, keys: np.ndarray, out: np.ndarray) -> None:
        slots = self.slots_of(keys)
        here = slots >= 0
        out[here] = self.gather(slots[here])
        away = np.flatnonzero(~here)
        if self.below is not None and len(away):
            rows = np.empty((len(away), self.row_bytes), dtype=np.uint8)
            found = self._current(self.below.read(self.number, keys[away], rows), rows)
            out[away[found]] = rows[found]
            away = away[~found]
        if len(away):
            self.initial.fill(out, away, keys[away])

    def _current(self, found: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Of the stored rows that were found, those that are not over."""
        return found if self.expiry is None else found & ~self.expiry.over(rows)

    def stored(self, block: int, over: bool = False) -> Iterator[Block]:
        """Rows of the tier below; without ``over`` only those that are not."""
        blocks = iter(()) if self.below is None else self.below.scan(self.number, block)
        if over or self.expiry is None:
            return blocks
        current = ((keys, rows, ~self.expiry.over(rows)) for keys, rows in blocks)
        return ((keys[kept], rows[kept]) for keys, rows, kept in current)

    def count_written(self) -> int:
        """Rows that differ from their initial value."""
        if self.below is None:
            return len(self.flagged(EXISTS, EXISTS))
        if self.expiry is not None:  # what is stored of a resident row may be over though the row is not
            away = sum(len(keys) - self._exist(keys) for keys, _ in self.stored(65536))
            return away + len(self.flagged(EXISTS, EXISTS))
        return self.below.count(self.number) + len(self.flagged(EXISTS | BELOW, EXISTS))

    def _exist(self, keys: np.ndarray) -> int:
        slots = self.slots_of(keys)
        return int(np.count_nonzero(self.flags[slots[slots >= 0]] & EXISTS))

    def announce(self, keys: np.ndarray, tick: int) -> None:
        """Batch ``tick`` will need ``keys``; the keeper is told when it has come within its window."""
        if self._coming and self._coming[-1][0] > tick:  # another loop over batches
            self._coming.clear()
        self._coming.append((tick, keys))
        self.tell()

    def tell(self) -> None:
        """Pass on the announced batches that are near enough by now."""
        while self.keeper is not None and self._coming and self._coming[0][0] - self.tick <= WINDOW:
            tick, keys = self._coming.popleft()
            self.keeper.announce(keys, self.slots_of(keys), tick)

    def clear(self) -> None:
        """Nothing is resident."""
        for pool in (self.cache, self.overflow):
            self.flags[pool.first : pool.high] = 0
            self.pins[pool.first : pool.high] = 0
            pool.clear()
        self.index.clear()
        if self.keeper is not None:
            self.keeper.clear()

    def copies(self, size: int) -> np.ndarray:
        """uint8 [size]: memory for copies of rows, one user at a time. It is kept for the next: a page that is used for
        the first time costs more than the row that is copied to it."""
        if size > self.rows * self.row_bytes:  # rows beside the cache are among them
            return huge_empty(size).numpy()
        if self._copies is None:
            self._copies = huge_empty(self.rows * self.row_bytes)
        self.copied = max(self.copied, size)
        return self._copies[:size].numpy()

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use: rows, arrays by slot, index, scores, copies for commits."""
        slots = self.cache.high - self.cache.first + self.overflow.high - self.overflow.first + 1
        scores = 0 if self.keeper is None else self.keeper.nbytes
        return slots * (self.row_bytes + SlotArrays.BYTES) + self.index.nbytes + scores + self.copied
