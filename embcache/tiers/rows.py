"""All rows of a chain's last tier in main memory, by key."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from time import perf_counter

import numpy as np

from ..config import TableConfig
from ..errors import TableTooLarge
from ..kernels import cpu
from ..kernels.index import RowIndex
from ..kernels.memory import address_space, available_bytes, reserve
from .base import Block, Copying

MOST_ROWS = 2**31 - 2  # the index holds a slot + 1 in 31 bits
LOOKED = 64 << 20  # bytes of rows between two looks at what the system has left


class _Table:
    """Rows of one table in a slab that is reserved whole, in at most ``address`` bytes, and committed where rows
    come."""

    def __init__(self, table: TableConfig, address: int) -> None:
        self.name, self.row_bytes = table.name, table.row_bytes
        self.index = RowIndex()
        most = min(MOST_ROWS, table.num_embeddings or MOST_ROWS)
        free = available_bytes()
        self.room = max(1, min(most, (address if free is None else min(free, address)) // self.row_bytes))
        self.slab = reserve(self.room * self.row_bytes).numpy()
        self.high = self._promised = 0
        self.back = np.empty(0, dtype=np.int32)

    def require(self, n: int) -> None:
        """Room for ``n`` rows more; TableTooLarge where the system has none."""
        if self.high + n <= self._promised:
            return
        need, free = n * self.row_bytes, available_bytes()
        if self.high + n > self.room or (free is not None and need > free):
            raise TableTooLarge(need, free or 0, [self.name])
        self._promised = self.high + n + LOOKED // self.row_bytes

    def write(self, keys: np.ndarray, rows: np.ndarray) -> None:
        slots = self.index.get(keys)
        new = np.flatnonzero(slots < 0)
        again = min(len(new), len(self.back))
        self.require(len(new) - again)
        self.index.reserve(len(self.index) + len(new))
        fresh = np.arange(self.high, self.high + len(new) - again, dtype=np.int32)
        slots[new] = np.concatenate([self.back[len(self.back) - again :], fresh])
        self.back = self.back[: len(self.back) - again]
        self.high += len(fresh)
        self.index.put(keys[new], slots[new])
        cpu.scatter(rows, np.arange(len(keys)), slots, self.row_bytes, self.slab)

    def read(self, keys: np.ndarray, out: np.ndarray) -> np.ndarray:
        slots = self.index.get(keys)
        found = slots >= 0
        if found.all():
            cpu.gather(self.slab, self.row_bytes, slots, out)
        else:
            rows = np.empty((int(found.sum()), self.row_bytes), dtype=np.uint8)
            cpu.gather(self.slab, self.row_bytes, slots[found], rows)
            out[found] = rows
        return found

    def delete(self, keys: np.ndarray) -> None:
        slots = self.index.delete(keys)
        self.back = np.concatenate([self.back, slots[slots >= 0]])


class RowStore(Copying):
    """A ``BackTier`` in main memory. Thread-safe."""

    def __init__(self) -> None:
        self._tables: list[_Table] = []
        self._lock = threading.Lock()
        self._stats = dict.fromkeys(
            ("rows_read", "rows_found", "rows_written", "bytes_read", "bytes_written", "seconds_read", "seconds_write"),
            0.0,
        )

    def open(self, tables: Sequence[TableConfig]) -> None:
        """Empty."""
        address = address_space() // 4 // max(1, len(tables))
        self._tables = [_Table(table, address) for table in tables]

    def read(self, table: int, keys: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Fill ``out`` with the rows that are there."""
        begin = perf_counter()
        with self._lock:
            found = self._tables[table].read(keys, out)
            n, size = int(found.sum()), self._tables[table].row_bytes
            self._add(rows_read=len(keys), rows_found=n, bytes_read=n * size, seconds_read=perf_counter() - begin)
        return found

    def write(self, table: int, keys: np.ndarray, rows: np.ndarray) -> None:
        """Insert or replace. TableTooLarge, with nothing changed, where memory is full."""
        begin = perf_counter()
        with self._lock:
            self._tables[table].write(keys, rows)
            self._add(rows_written=len(keys), bytes_written=rows.nbytes, seconds_write=perf_counter() - begin)

    def offer(self, table: int, keys: np.ndarray, rows: np.ndarray) -> None:
        """They are here already."""

    def delete(self, table: int, keys: np.ndarray) -> None:
        """Remove rows."""
        with self._lock:
            self._tables[table].delete(keys)

    def scan(self, table: int, block: int) -> Iterator[Block]:
        """(keys, rows), keys ascending as unsigned numbers, of the keys that are there now."""
        with self._lock:
            keys, _ = self._tables[table].index.items()
        keys = np.sort(keys.view(np.uint64)).view(np.int64)
        for start in range(0, len(keys), block):
            part = keys[start : start + block]
            rows = np.empty((len(part), self._tables[table].row_bytes), dtype=np.uint8)
            with self._lock:
                found = self._tables[table].read(part, rows)
            yield part[found], rows[found]

    def count(self, table: int) -> int:
        """Rows that are there."""
        with self._lock:
            return len(self._tables[table].index)

    def stats(self) -> dict[str, float]:
        """Counters since it was opened."""
        with self._lock:
            return dict(self._stats)

    def _add(self, **more: float) -> None:
        for name, value in more.items():
            self._stats[name] += value

    def close(self) -> None:
        """Give the memory back."""
        self._tables = []
