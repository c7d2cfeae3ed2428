"""Append-only files of row records: what one table received in (a part of) one generation.

A segment starts with a 64-byte head (magic, format, table, row bytes) and continues with the records of
``kernels/segments.py``. It is written with pwrite, so that a full disk is an error and not a signal, and read through a
map. Its description (file, table, generation, number of records, sum of their checks) says what of it counts; what a
crash leaves behind the last described record is ignored.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import CorruptStore, FormatVersion, StorageFull
from ..kernels import segments
from ..kernels.segments import stride_of
from ..statefile import named_when_full
from .mapping import Mapping

__all__ = ["FIRST", "Segment", "Source"]

MAGIC, VERSION = b"embcache segment", 1
FIRST = 64  # bytes before the first record
_HEAD = struct.Struct("<16sIIQ")
_LARGEST = 1 << 30  # bytes of address space that a segment asks for
_BUFFER = 4 << 20  # bytes encoded at a time
_SIGN = 1 << 64
_IN_ORDER = np.empty(0, np.int32)


class Source(Protocol):
    """Where files to write over come from (``spares.py``)."""

    def take(self, path: Path, table: int) -> int:
        """A descriptor of a file that is called ``path`` now, or -1."""

    def relieve(self) -> bool:
        """Whether there is more room on the disk now."""


class Segment:
    """One file. ``start`` numbers its first record among those of its table; only the overlay of the table uses it.

    Not thread-safe for writing; records that are counted never change, so reading them needs no lock.
    """

    def __init__(self, path: Path, table: int, row_bytes: int, start: int) -> None:
        self.path, self.table, self.row_bytes, self.start = path, table, row_bytes, start
        self.stride = stride_of(row_bytes)
        self.generation = 0
        self.records, self.check, self.synced = 0, 0, False
        self.descriptor = -1
        self.map: Mapping
        self._spares: Source | None = None

    @classmethod
    def create(
        cls, path: Path, table: int, row_bytes: int, start: int, room: int, spares: Source | None = None
    ) -> Segment:
        """A new file, or one of ``spares`` written over, for at least ``room`` records; StorageFull where there is none
        for its head."""
        new = cls(path, table, row_bytes, start)
        new._spares = spares
        new.descriptor = -1 if spares is None else spares.take(path, table)
        if new.descriptor < 0:
            new.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            new._write_at(0, _HEAD.pack(MAGIC, VERSION, table, row_bytes).ljust(FIRST, b"\0"))
            new.map = _reserve(new.descriptor, FIRST + room * new.stride, _LARGEST)
        except BaseException:
            new.close()
            path.unlink(missing_ok=True)
            raise
        return new

    @classmethod
    def load(cls, folder: Path, description: dict[str, Any], row_bytes: int, start: int) -> Segment:
        """The file of a description; FileNotFoundError if it is gone, CorruptStore unless it is what was written."""
        path = folder / str(description["file"])
        table, records = int(description["table"]), int(description["records"])
        loaded = cls(path, table, row_bytes, start)
        loaded.generation, loaded.synced = int(description["generation"]), True
        loaded.records, loaded.check = records, int(str(description["check"]), 16)
        loaded.descriptor = os.open(path, os.O_RDONLY)
        try:
            loaded._check_head()
            loaded.map = Mapping(loaded.descriptor, FIRST + records * loaded.stride)
        finally:
            loaded.close()
        loaded.verify()
        return loaded

    def _check_head(self) -> None:
        head = os.pread(self.descriptor, FIRST, 0)
        if len(head) < FIRST or not head.startswith(MAGIC):
            raise CorruptStore(f"{self.path} is not a segment of rows of this library")
        _, version, table, row_bytes = _HEAD.unpack_from(head)
        if version > VERSION:
            raise FormatVersion(str(self.path), version, VERSION)
        if (table, row_bytes) != (self.table, self.row_bytes):
            raise CorruptStore(
                f"{self.path} holds rows of {row_bytes} bytes of table {table}, "
                f"expected rows of {self.row_bytes} bytes of table {self.table}"
            )
        size, need = os.fstat(self.descriptor).st_size, FIRST + self.records * self.stride
        if size < need:
            raise CorruptStore(f"{self.path} has {size} bytes, {need} were written")

    def verify(self) -> None:
        """CorruptStore naming the first record that is not what was written."""
        bad, total = segments.find_altered(self.first, self.records, self.row_bytes)
        if bad >= 0:
            raise CorruptStore(f"{self.path}: record {bad} of {self.records} is torn or altered")
        if int(total) != self.check:
            raise CorruptStore(f"{self.path} holds other records than those that were written")

    @property
    def first(self) -> int:
        """Address of the first record."""
        return self.map.address + FIRST

    @property
    def room(self) -> int:
        """Records that may still be appended."""
        return (self.map.length - FIRST) // self.stride - self.records

    @property
    def size(self) -> int:
        """Bytes of the records."""
        return self.records * self.stride

    @property
    def end(self) -> int:
        """Where the next record goes."""
        return FIRST + self.size

    def append(self, keys: np.ndarray, rows: np.ndarray | None) -> int:
        """Write records behind the counted ones (None: tombstones) and return the sum of their checks; ``count`` makes
        them count. StorageFull leaves the file as it was."""
        size = max(1, _BUFFER // self.stride)
        buffer = np.empty(min(size, len(keys)) * self.stride // 8, dtype=np.uint64)
        address = 0 if rows is None else rows.ctypes.data
        total, end = 0, self.end
        try:
            for i in range(0, len(keys), size):
                part = keys[i : i + size]
                source = address + i * self.row_bytes
                dead = int(rows is None)
                total += int(segments.encode(part, source, _IN_ORDER, self.row_bytes, dead, buffer.ctypes.data))
                self._write_at(end + i * self.stride, buffer.view(np.uint8)[: len(part) * self.stride].data)
        except BaseException:
            self.cut()
            raise
        return total

    def write_behind(self, offset: int, data: memoryview) -> None:
        """Write records, ``offset`` bytes behind the counted ones; ``count`` makes them count, ``cut`` drops them."""
        self._write_at(self.end + offset, data)

    def cut(self) -> None:
        """The file ends behind the counted records."""
        os.ftruncate(self.descriptor, self.end)

    def count(self, records: int, check: int) -> None:
        """Records appended last now count."""
        self.records += records
        self.check = (self.check + check) % _SIGN

    def keys(self) -> tuple[np.ndarray, np.ndarray]:
        """(keys int64 [records], dead uint8 [records]: 1 for a tombstone), in the order of writing."""
        keys, dead = np.empty(self.records, np.int64), np.empty(self.records, np.uint8)
        segments.decode_keys(self.first, self.records, self.row_bytes, keys, dead)
        return keys, dead

    def sync(self) -> None:
        """Everything counted is on the disk, and the file takes no more."""
        if self.synced:
            return
        self.cut()
        self._relieved(None, os.fsync, self.descriptor)
        self.synced = True
        self.close()
        self.map.shrink(self.end)

    def describe(self) -> dict[str, Any]:
        """What ``load`` needs, as JSON."""
        return {
            "file": self.path.name,
            "table": self.table,
            "generation": self.generation,
            "records": self.records,
            "check": f"{self.check:016x}",
        }

    def close(self) -> None:
        """Close the file; what was mapped stays readable."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()

    def _write_at(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            done = self._relieved(len(view), os.pwrite, self.descriptor, view, offset)
            view, offset = view[done:], offset + done

    def _relieved(self, need: int | None, call: Callable[..., Any], *arguments: Any) -> Any:
        """The call; where there is no room for it, once more without the spare files."""
        try:
            with named_when_full(self.path, need):
                return call(*arguments)
        except StorageFull:
            if self._spares is None or not self._spares.relieve():
                raise
        with named_when_full(self.path, need):
            return call(*arguments)


def _reserve(descriptor: int, need: int, wish: int) -> Mapping:
    """A map of ``wish`` bytes, or less (not less than ``need``) where the address space is limited."""
    while True:
        try:
            return Mapping(descriptor, max(need, wish))
        except OSError:
            if wish <= need:
                raise
            wish //= 4
