"""Files of segments that no generation needs any more, kept to be written over.

A new file costs a page of memory for every 4 KiB, which a virtual machine may first have to get from its host: writing
over one whose pages are in memory is several times faster. What such a file still holds behind the records that its new
owner counts is ignored, as is what a crash leaves there (``segment.py``).

A file is kept only where nobody can be looking at it: not while a reader is in the folder, and not before the last map
of it in this process is gone. The name under which it waits is one that nothing reads.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .compact import ReaderLock
from .mapping import Mapping
from .segment import Segment

__all__ = ["Spares"]

LIMIT = 1 << 30  # bytes kept
PART = 8  # at most one byte in so many that are free


class _Spare(NamedTuple):
    path: Path
    table: int
    size: int
    map: weakref.ref[Mapping]


class Spares:
    """For any thread. ``folder``: the tier's; without ``keep`` every file that is given is removed."""

    def __init__(self, folder: Path, keep: bool = True) -> None:
        self._folder, self._place, self._keep = folder, folder / "spare", keep
        self._lock = threading.Lock()
        self._spares: list[_Spare] = []
        self._numbers = itertools.count()

    def sweep(self) -> None:
        """Remove what a writer before has left."""
        shutil.rmtree(self._place, ignore_errors=True)

    @property
    def nbytes(self) -> int:
        """Bytes of the files, whoever keeps them."""
        total = 0
        with contextlib.suppress(FileNotFoundError):
            for path in self._place.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    total += path.stat().st_size
        return total

    def give(self, segments: Sequence[Segment]) -> None:
        """Nothing names these any more: they are kept as far as there is place for them."""
        with self._lock:
            alone = self._alone() if self._keep else None
            for segment in segments:
                spare = self._place / f"{next(self._numbers):06x}"
                if alone is None or not self._move(segment, spare):
                    segment.path.unlink(missing_ok=True)
            if alone is not None:
                alone.release()
            self._fit()

    def _alone(self) -> ReaderLock | None:
        """A lock that keeps readers out; None: there are some, or nobody knows."""
        try:
            lock = ReaderLock(self._folder, alone=True)
        except BlockingIOError:
            return None
        return lock if lock.sure else None

    def _move(self, segment: Segment, to: Path) -> bool:
        try:
            self._place.mkdir(exist_ok=True)
            size = segment.path.stat().st_size
            segment.path.rename(to)
        except OSError:
            return False
        self._spares.append(_Spare(to, segment.table, size, weakref.ref(segment.map)))
        return True

    def take(self, path: Path, table: int) -> int:
        """A descriptor of a spare file, now called ``path``; -1: there is none. One of the same table comes first:
        it is likely to be as long as the new one will be."""
        with self._lock:
            free = [spare for spare in self._spares if spare.map() is None]
            if not free:
                return -1
            best = max(free, key=lambda spare: (spare.table == table, spare.size))
            self._spares.remove(best)
            try:
                best.path.rename(path)
                return os.open(path, os.O_RDWR)
            except OSError:
                path.unlink(missing_ok=True)
                best.path.unlink(missing_ok=True)
                return -1

    def relieve(self) -> bool:
        """Somebody has no room: remove all; whether there were any."""
        with self._lock:
            some = bool(self._spares)
            self._cut(0)
            return some

    def fit(self) -> None:
        """Remove what is too much for what the disk has left."""
        with self._lock:
            self._fit()

    def _fit(self) -> None:
        if self._spares:
            self._cut(min(LIMIT, shutil.disk_usage(self._place).free // PART))

    def _cut(self, limit: int) -> None:
        total = sum(spare.size for spare in self._spares)
        while total > limit:
            oldest = self._spares.pop(0)
            oldest.path.unlink(missing_ok=True)
            total -= oldest.size
