"""Rows of a front by id, whether resident or below: reading, replacing, deleting, walking, flushing."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..kernels.cpu import BELOW, DIRTY, EXISTS, READY, UNSAVED
from ..tiers.base import BackTier, DurableTier
from .direct import DirectTable
from .hot import HotTable, ascending
from .lease import Turn
from .lifetimes import Lifetimes
from .merged import merged
from .saving import Saving


class FrontRows:
    """What ``Front`` offers besides batches. May run beside another thread's ``stage``, not beside ``step``."""

    below: list[BackTier]
    _engines: list[DirectTable | HotTable]
    _hot: dict[int, HotTable]
    _turn: Turn
    _lifetimes: Lifetimes
    _stage_lock: threading.Lock
    _saving: Saving | None

    @property
    def durable(self) -> DurableTier | None:
        """The last tier, where it outlives the process."""
        raise NotImplementedError

    def pins(self) -> int:
        """Pinned rows."""
        raise NotImplementedError

    def read_rows(self, t: int, ids: Tensor) -> Tensor:
        """uint8 [n, row_bytes]: the rows of any ids as they are now; nothing becomes resident."""
        engine = self._engines[t]
        if isinstance(engine, DirectTable):
            return engine.read_rows(ids)
        keys, inverse = _distinct(ids.numpy())
        with self._stage_lock:
            rows = engine.read_rows(keys)
        return torch.from_numpy(rows[inverse])

    def over(self, t: int, rows: np.ndarray) -> np.ndarray:
        """bool [n]: which rows, as a tier below stores them, count as absent because they have expired."""
        clock = self._hot[t].expiry if t in self._hot else None
        return np.zeros(len(rows), dtype=np.bool_) if clock is None else clock.over(rows)

    def load_rows(self, t: int, ids: Tensor, rows: Tensor) -> None:
        """Replace rows by id, noted as written; of an id that occurs twice the last counts."""
        engine = self._engines[t]
        if isinstance(engine, DirectTable):
            engine.load_rows(ids, rows)
            return
        backwards, inverse = ids.numpy()[::-1], rows.contiguous().numpy()[::-1]
        unique, first = np.unique(
            backwards.view(np.uint64) if len(backwards) else np.empty(0, np.uint64), return_index=True
        )
        keys, block = unique.view(np.int64), np.ascontiguousarray(inverse[first])
        if engine.expiry is not None:
            block = engine.expiry.adopt(block)
        self.settle()
        with self._stage_lock:
            self._load(engine, keys, block)

    def _load(self, table: HotTable, keys: np.ndarray, rows: np.ndarray) -> None:
        slots = table.slots_of(keys)
        away = np.flatnonzero(slots < 0)
        if table.below is not None:
            table.below.write(table.number, keys[away], rows[away])
        elif len(away):
            table.require_memory(len(away))
            slots[away] = table.cache.take(len(away))
            table.occupy(slots[away], keys[away])
            table.pins[slots[away]] = 0
            table.flags[slots[away]] = READY
        here = np.flatnonzero(slots >= 0)
        table.scatter(rows, here, slots)
        with self._turn:
            table.flags[slots[here]] |= DIRTY | EXISTS

    def delete(self, t: int, ids: Tensor) -> None:
        """Rows read as initial from now on."""
        engine = self._engines[t]
        if isinstance(engine, DirectTable):
            engine.delete(ids)
            return
        keys, _ = _distinct(ids.numpy())
        self.settle()  # the copies of a commit would come back over the deletion
        with self._stage_lock:
            self._delete(engine, keys)

    def _delete(self, table: HotTable, keys: np.ndarray) -> None:
        if table.below is not None and len(keys):
            table.below.delete(table.number, keys)
        slots = table.slots_of(keys)
        self._renew(table, slots[slots >= 0])

    def _renew(self, table: HotTable, slots: np.ndarray) -> None:
        """Resident rows leave unwritten, pinned ones become initial in place; under the stage lock."""
        with self._turn:
            unused = table.pins[slots] == 0
            table.flags[slots[unused]] &= ~READY
        leaving, staying = slots[unused], slots[~unused]
        if len(leaving):
            table.remove(leaving)
            table.give(leaving)
        if len(staying):  # pinned: made new in place
            ids = table.slot_ids[staying]
            table.initial.fill(table.numpy, staying.astype(np.int64), ids)
            with self._turn:
                table.flags[staying] &= ~(UNSAVED | EXISTS | BELOW)

    def reset(self, t: int) -> None:
        """Every row of a table reads as initial."""
        engine = self._engines[t]
        if isinstance(engine, DirectTable):
            engine.reset()
            return
        self.settle()
        with self._stage_lock:
            below = [keys for keys, _ in engine.stored(65536, over=True)]
            resident, _ = engine.index.items()
            for keys in below:
                self._delete(engine, keys)
            self._delete(engine, resident[ascending(resident)])
        self._lifetimes.clear(t)

    def purge(self) -> int:
        """Delete from the tiers below the rows that are over already; returns their number. Nothing reads differently,
        but what is stored shrinks. Walks every row of the tables that expire."""
        count = 0
        self.settle()
        for table in self._hot.values():
            if table.expiry is None or table.below is None:
                continue
            with self._stage_lock:
                gone = [keys[table.expiry.over(rows)] for keys, rows in table.stored(65536, over=True)]
                for keys in gone:
                    if len(keys):
                        table.below.delete(table.number, keys)
                        count += len(keys)
        return count

    def written(self, t: int, block: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(ids, rows), copies, at most ``block`` at a time: every row that differs from its initial value, resident or
        below, ids ascending as unsigned numbers. Not beside ``step``."""
        engine = self._engines[t]
        if isinstance(engine, DirectTable):
            yield from engine.written_rows(block)
            return
        self.settle()
        with self._stage_lock:
            resident = engine.slot_ids[engine.flagged(EXISTS, EXISTS)]
        resident = resident[ascending(resident)]
        for keys, rows in merged(engine.stored(block), resident, lambda keys: self._copies(engine, keys), block):
            yield torch.from_numpy(keys), torch.from_numpy(rows)

    def _copies(self, table: HotTable, keys: np.ndarray) -> np.ndarray:
        with self._stage_lock:
            return table.read_rows(keys)

    def count_written(self, t: int) -> int:
        """Rows that differ from their initial value."""
        self.settle()
        with self._stage_lock:
            return self._engines[t].count_written()

    def flush(self) -> None:
        """Write every dirty row to the tier below, and what that one holds on to further down. Where it raises, what
        was not written is still dirty here."""
        self.settle()
        self._pour()
        for tier in self.below:
            getattr(tier, "flush", lambda: None)()

    def _pour(self) -> None:
        for table in self._hot.values():
            if table.below is None:
                continue
            with self._stage_lock:
                slots = table.flagged(DIRTY, DIRTY)
                ids = table.slot_ids[slots]
            order = ascending(ids)
            for start in range(0, len(order), table.block):
                part = order[start : start + table.block]
                with self._stage_lock:
                    self._flush(table, slots[part], ids[part])

    def _flush(self, table: HotTable, slots: np.ndarray, ids: np.ndarray) -> None:
        still = (table.slot_ids[slots] == ids) & ((table.flags[slots] & DIRTY) != 0)  # others have been written since
        slots, ids = slots[still], ids[still]
        if table.below is not None and len(slots):
            table.below.write(table.number, ids, table.gather(slots))
            with self._turn:
                table.flags[slots] = table.flags[slots] & ~DIRTY | BELOW
            table.written_back += len(slots)

    def begin_save(self, number: int, wait: bool) -> Saving:
        """Every row as it is now belongs to generation ``number`` of the last tier, once the result has landed. Not
        ``wait``: what is dirty is copied; else, or where there is no memory for copies, it is written at once."""
        durable = self.durable
        assert durable is not None
        self.settle()
        *middle, _ = self.below
        saving = Saving(number, self._hot.values(), durable, self._stage_lock, self._turn)
        if middle and not wait:  # from cache to cache is a copy too
            self._pour()
            for tier in middle[:-1]:
                tier.flush()  # type: ignore[attr-defined]
            saving = middle[-1].saving(number)  # type: ignore[attr-defined]
        try:
            if wait or not saving.copy():
                self.flush()
            saving.freeze()  # what left since the copies were made is in the generation too: nothing has changed since
            self._saving = saving
        except BaseException:
            saving.abort()
            raise
        return saving

    def settle(self) -> None:
        """Until what a commit has copied is below, or, if that failed, dirty again. Not under the stage lock."""
        saving = self._saving
        if saving is not None:
            saving.settle()
            self._saving = None

    def forget(self) -> None:
        """Drop every resident row unwritten. RuntimeError while rows are pinned."""
        self.settle()
        with self._stage_lock:
            if self.pins():
                raise RuntimeError(f"{self.pins()} rows are pinned: release every handle first")
            for table in self._hot.values():
                table.clear()
        for tier in self.below:
            getattr(tier, "forget", lambda: None)()


def _distinct(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(distinct keys ascending as unsigned numbers, position of each id in them)."""
    keys, inverse = np.unique(np.ascontiguousarray(ids).view(np.uint64), return_inverse=True)
    return keys.view(np.int64), inverse.reshape(-1)
