"""What a staged batch holds, and the short turns in which pins change.

A lease may be released at any moment on any thread, by garbage collection too, even while the same thread is inside a
turn. So a release only queues and tries: whoever has the turn works the queue off before and after leaving it.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels import cpu
from .slots import SlotArrays

ALL, IN_CACHE, IN_OVERFLOW = 0, 1, 2


class Lease:
    """The distinct rows of a staged batch; a table's lie in one segment of the arrays by row.

    Attributes:
        training: False: rows are only read.
        tables: int64 [S], table of each segment.
        segments: int64 [S, 3]: base of the table's slots, first and last position of the segment.
        unique: int64, the ids.
        slots: int32, their slots within the table, -1 while there is none.
        counts: int32, occurrences in the batch.
        positions: int32 by id of the batch, position of its row.
        out: slots of the batch's ids.
    """

    __slots__ = (
        "counts", "open", "out", "overflow_held", "pinned", "positions", "ranges", "segments", "slots", "tables",
        "training", "unique",
    )  # fmt: skip

    def __init__(self, training: bool, values: int, rows: int, ranges: np.ndarray) -> None:
        self.training, self.ranges = training, ranges
        self.tables = np.empty(0, dtype=np.int64)
        self.segments = np.empty((0, 3), dtype=np.int64)
        self.unique = np.empty(rows, dtype=np.int64)
        self.slots = np.empty(rows, dtype=np.int32)
        self.counts = np.empty(rows, dtype=np.int32)
        self.positions = np.empty(values, dtype=np.int32)
        self.out: Tensor = torch.empty(0)
        self.open, self.pinned, self.overflow_held = True, False, False


class Turn:
    """``with turn:`` — pins and flags may change. Short: no I/O, nothing that waits."""

    def __init__(self, arrays: SlotArrays) -> None:
        self._arrays = arrays
        self._lock = threading.Lock()
        self._queue: deque[Lease] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: Any) -> None:
        self._work_off()
        self._lock.release()
        self._drain()

    def release(self, lease: Lease) -> None:
        """The lease ends; never waits and may be called anywhere, again too."""
        self._queue.append(lease)
        self._drain()

    def _drain(self) -> None:
        while self._queue and self._lock.acquire(blocking=False):
            self._work_off()
            self._lock.release()

    def _work_off(self) -> None:
        while self._queue:
            lease = self._queue.popleft()
            if lease.open:
                lease.open = False
                if lease.pinned:
                    self.unpin(lease, ALL)
                elif lease.overflow_held:
                    self.unpin(lease, IN_OVERFLOW)
                lease.pinned = lease.overflow_held = False

    def unpin(self, lease: Lease, what: int) -> None:
        """Take back a lease's pins, inside a turn."""
        cpu.unpin(lease.segments, lease.slots, self._arrays.pins, self._arrays.flags, what)
