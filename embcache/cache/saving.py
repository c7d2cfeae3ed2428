"""Rows on their way into a generation while training goes on.

A commit copies what is dirty in the cache over the last tier and marks the slots SAVING; ``land`` writes the copies,
usually on a thread of its own. Until then such a row counts as dirty where it leaves the cache, so that at every moment
each row is in the cache or below; what is written below meanwhile is newer than the copies (``DurableTier.begin``), and
what changes in the cache meanwhile is dirty besides.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from ..kernels import cpu
from ..kernels.cpu import BELOW, DIRTY
from ..kernels.memory import available_bytes
from ..tiers.base import DurableTier
from .hot import HotTable

_TURN = 1 << 18  # slots whose flags change in one turn


class Copied(NamedTuple):
    """Dirty rows of one table: copies, and where they were."""

    table: HotTable
    slots: np.ndarray
    ids: np.ndarray
    rows: np.ndarray


class Saving:
    """``copy`` and ``freeze`` on the thread that trains, then ``land`` on any, or ``abort``.

    Args:
        number: of the generation.
        tables: of the cache over the last tier.
        tier: the last one.
        stage, turn: held, in this order, while flags change; the first alone keeps rows from leaving.
    """

    def __init__(
        self,
        number: int,
        tables: Iterable[HotTable],
        tier: DurableTier,
        stage: AbstractContextManager[Any],
        turn: AbstractContextManager[Any],
    ) -> None:
        self.number, self.tier = number, tier
        self._tables, self._stage, self._turn = list(tables), stage, turn
        self._parts: list[Copied] = []
        self._ending = threading.Lock()  # taken for good by who lands the copies, or gives up
        self.done = threading.Event()
        """The copies are below, or their rows are dirty again."""
        self.promised = False
        """Some thread will ``land`` or ``abort``, whatever happens to the one that copied."""

    def settle(self) -> None:
        """Until it is ``done``. Who copied was interrupted before anybody could land the copies: they are given up."""
        if self.promised:
            self.done.wait()
        if self._parts or not self.done.is_set():  # or giving them up was interrupted too
            self._ending.acquire(blocking=False)
            self._undo()

    def copy(self) -> bool:
        """Copy every dirty row; False, and they are dirty still, where that takes more than half of the free memory."""
        free = available_bytes()
        left = None if free is None else free // 2
        with self._stage:  # for all tables: whoever stages ahead would take turns with them
            for table in self._tables:
                slots = table.flagged(DIRTY, DIRTY)
                size = len(slots) * table.row_bytes
                if left is not None:
                    left -= max(0, size - table.copied)
                    if left < 0:
                        break
                if size:
                    try:
                        self._copy(table, slots, table.copies(size))
                    except (MemoryError, OSError):
                        break
            else:
                return True
        self._end(DIRTY)
        return False

    def _copy(self, table: HotTable, slots: np.ndarray, memory: np.ndarray) -> None:
        rows = memory.reshape(len(slots), table.row_bytes)
        cpu.gather(table.flat, table.row_bytes, slots, rows)
        self._parts.append(Copied(table, slots, table.slot_ids[slots], rows))
        with self._turn:
            cpu.begin_saving(slots, table.flags)

    def freeze(self) -> None:
        """What is below, with the copies laid over it, is the generation."""
        late = [0] * len(self._tables)
        for part in self._parts:
            late[part.table.number] = len(part.ids)
        self.tier.begin(self.number, late)

    def land(self) -> dict[str, Any]:
        """Write the copies; what describes the generation then. An error leaves what was not written dirty."""
        if not self._ending.acquire(blocking=False):
            raise RuntimeError("this commit was given up")
        try:
            while self._parts:
                table, _, ids, rows = self._parts[-1]
                self.tier.land(table.number, ids, rows)
                table.written_back += len(ids)
                self._end(BELOW, last=True)
            described = self.tier.describe()
        except BaseException:
            self._undo()
            raise
        self.done.set()
        return described

    def abort(self) -> None:
        """What was copied is dirty again, and stays out of the generation; nothing, once it is landing or has."""
        if self._ending.acquire(blocking=False):
            self._undo()

    def _undo(self) -> None:
        try:
            self._end(DIRTY)
            self.tier.abandon()
        finally:
            self.done.set()

    def _end(self, bit: np.uint8, last: bool = False) -> None:
        """The rows of all parts, or of the last one, are no longer SAVING, where they still are in their slots."""
        while self._parts:
            table, slots, ids, _ = self._parts[-1]
            for i in range(0, len(slots), _TURN):
                part = slice(i, i + _TURN)
                with self._stage, self._turn:
                    cpu.end_saving(slots[part], ids[part], table.slot_ids, table.flags, bit)
            self._parts.pop()
            if last:
                return
