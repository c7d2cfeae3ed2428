"""Rows that are over (``config.Expiry``): resident ones are renewed by the sweep, those below count as absent from then
on, whoever asks, until they are written again. So no tier has to be searched, and none decides."""

from __future__ import annotations

import numpy as np

from ..config import TableConfig
from ..kernels import lifetime


class ExpiryClock:
    """When the rows of one table are over.

    Attributes:
        now: step of the table's last update.
        swept: step of the last sweep, 0 before the first.
    """

    def __init__(self, table: TableConfig) -> None:
        rule = table.expiry
        assert rule is not None
        self.every, self._first = rule.every, rule.below or 1
        self._idle = int(lifetime.NEVER) if rule.idle is None else rule.idle
        self._below = int(lifetime.NEVER) if rule.below is None else rule.below
        self._at = table.meta_offset // 4
        self.now = self.swept = 0

    def metas(self, rows: np.ndarray) -> np.ndarray:
        """View int32 [n, 2] of whole rows uint8 [n, row_bytes]: step of the last update, number of updates."""
        return rows.view(np.int32)[:, self._at : self._at + 2]

    def over(self, rows: np.ndarray, chosen: np.ndarray | None = None) -> np.ndarray:
        """bool [n]: which of these stored rows, all or those ``chosen`` (int32), the last sweep took."""
        out = np.zeros(len(rows if chosen is None else chosen), dtype=np.bool_)
        if self.swept and len(out):
            metas = self.metas(rows) if chosen is None else self.metas(rows)[chosen]
            lifetime.over(metas, self.swept, self._idle, self._below, out)
        return out

    def over_slots(self, slab: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Those of ``slots`` (int32) whose rows the sweep at ``swept`` takes."""
        out = np.empty_like(slots)
        return out[: lifetime.over_slots(self.metas(slab), slots, self.swept, self._idle, self._below, out)]

    def stamp(self, slab: np.ndarray, slots: np.ndarray, step: int) -> None:
        """The rows of ``slots`` (int32) were updated in ``step``."""
        lifetime.stamp(self.metas(slab), slots, step)

    def adopt(self, rows: np.ndarray) -> np.ndarray:
        """Rows from outside: of those that were never updated, this is the first update, and they are not rare."""
        metas = self.metas(rows)
        new = (metas == 0).all(axis=1)
        if new.any():
            rows = rows.copy()
            self.metas(rows)[new] = self.now, self._first
        return rows

    def clear(self) -> None:
        """As at the beginning."""
        self.now = self.swept = 0
