"""Rows of one table that are newer than the base: segments on the disk, found through an index in memory.

The index maps a key to the number of its newest record; records are numbered through the table's segments in the order
of writing. Two locks: writers take turns, and a short lock guards the index, so that reading never waits for a disk.
Copying rows out needs no lock at all, because records never change and a map lives as long as somebody reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ..errors import StorageFull
from ..kernels import segments
from ..kernels.index import RowIndex
from .segment import Segment, Source

__all__ = ["Overlay", "View", "by_key"]

_MOST = 2**31 - 2  # records that an index of int32 can number
_IN_ORDER = np.empty(0, np.int32)
_SPARE = 1 << 26  # numbers below that limit at which they begin from 0 again
_PART = 1 << 20  # records that one write asks a new segment for at least
_TURN = 1 << 16  # keys that enter the index while readers wait


@dataclass(frozen=True)
class View:
    """Where records lie: arrays for the kernel, and what keeps the maps alive."""

    starts: np.ndarray
    addresses: np.ndarray
    held: tuple[object, ...]

    @cached_property
    def at(self) -> tuple[int, int, int]:
        """(address of starts, address of addresses, their number), for ``kernels/parts.py``."""
        return self.starts.ctypes.data, self.addresses.ctypes.data, len(self.starts)


@dataclass
class Late:
    """Numbers kept free for rows of a generation that is frozen already."""

    generation: int
    start: int
    rows: int


_NOTHING = View(np.zeros(0, np.int64), np.zeros(0, np.int64), ())


def by_key(keys: np.ndarray) -> np.ndarray:
    """The order of int64 keys as unsigned numbers."""
    return np.argsort(keys.view(np.uint64), kind="stable")


class Overlay:
    """See the module. ``new_path`` names a new file; ``spares``: files to write over instead of making new ones. Every
    method may be called from any thread."""

    def __init__(self, table: int, row_bytes: int, new_path: Callable[[], Path], spares: Source | None = None) -> None:
        self.table, self.row_bytes = table, row_bytes
        self.new_path, self._spares = new_path, spares
        self.writing = threading.RLock()  # held while records are appended and while segments change
        self.reading = threading.Lock()  # held while the index is looked at or replaced
        self.segments: list[Segment] = []  # oldest first; those with generation 0 are open
        self._index = RowIndex()
        self.view = _NOTHING
        self._late: Late | None = None

    # -- reading

    def look(self, keys: np.ndarray) -> tuple[np.ndarray, View]:
        """(number of the newest record of each key or -1, where records lie)."""
        with self.reading:
            return self._index.get(keys), self.view

    def fill(self, ordinals: np.ndarray, view: View, out: np.ndarray | None) -> tuple[np.ndarray, int]:
        """Copy records into ``out`` (None: nowhere); (state of each key: ABSENT, FOUND, DEAD; rows there)."""
        state = np.zeros(len(ordinals), np.uint8)
        if not len(view.starts):
            return state, 0
        found = segments.gather(
            ordinals,
            view.starts,
            view.addresses,
            self.row_bytes,
            0 if out is None else out.ctypes.data,
            _IN_ORDER,
            state,
        )
        return state, int(found)

    def entries(self) -> tuple[np.ndarray, np.ndarray, View]:
        """(keys ascending as unsigned numbers, their newest records, where these lie)."""
        with self.reading:
            keys, ordinals = self._index.items()
            view = self.view
        order = by_key(keys)
        return keys[order], ordinals[order], view

    def __len__(self) -> int:
        return len(self._index)

    @property
    def index_bytes(self) -> int:
        return self._index.nbytes

    @property
    def bytes(self) -> int:
        """Bytes of all records, superseded ones too."""
        return sum(s.size for s in list(self.segments))

    # -- writing

    def append(self, keys: np.ndarray, rows: np.ndarray | None) -> int:
        """Newest versions of rows (None: tombstones); bytes written. StorageFull: none of them is visible."""
        with self.writing:
            with self.claiming(len(keys)) as runs:
                checks, at = [], 0
                for segment, n in runs:
                    checks.append(segment.append(keys[at : at + n], None if rows is None else rows[at : at + n]))
                    at += n
            first = runs[0][0].start + runs[0][0].records
            with self.reading:
                for (segment, n), check in zip(runs, checks, strict=True):
                    segment.count(n, check)
                self._index.put(keys, np.arange(first, first + len(keys), dtype=np.int32))
                self.appended(0)
            return sum(n * segment.stride for segment, n in runs)

    @contextmanager
    def claiming(self, records: int) -> Iterator[list[tuple[Segment, int]]]:
        """The open segments that so many records go to, and how many to each; ``writing`` is held. New ones are gone
        after an error, and nothing is left behind what counts in the others."""
        before = len(self.segments)
        runs: list[tuple[Segment, int]] = []
        try:
            while records:
                segment = self._with_room(records, fresh=bool(runs))
                n = min(segment.room, records)
                runs.append((segment, n))
                records -= n
            yield runs
        except BaseException:
            for segment in self.segments[before:]:
                if not segment.records:  # else it was interrupted when the index may have known them already
                    segment.path.unlink(missing_ok=True)
                    self.segments.remove(segment)
            with self.reading:  # numbering anew may have made one with those that are gone
                self.view = self._make_view()
            if runs and runs[0][0] in self.segments:
                runs[0][0].cut()
            raise

    def index_at(self) -> tuple[int, int]:
        """(address, number) of the index's entries; good as long as ``reading`` is held."""
        return self._index.entries.ctypes.data, self._index.capacity

    def make_room(self, keys: int) -> None:
        """``keys`` may be put into the index where ``index_at`` says; ``reading`` is held."""
        self._index.reserve(len(self._index) + keys)

    def appended(self, new: int) -> None:
        """Records behind the last ones were counted and put into the index, with ``new`` keys that it did not have;
        ``reading`` is held."""
        self._index.count += new
        if len(self.view.starts) != len(self.segments):
            self.view = self._make_view()

    def _with_room(self, records: int, fresh: bool) -> Segment:
        """The open segment, or a new one; ``fresh``: what the last one has room for is taken."""
        last = self.segments[-1] if self.segments else None
        if last is not None and last.generation == 0 and last.room > 0 and not fresh:
            return last
        if fresh:
            assert last is not None
            start = last.start + last.records + last.room
        else:
            start = self._next()
        records = min(records, _PART)
        start = self._numbered(start, records)
        segment = self.new_segment(start, records)
        self.segments.append(segment)
        return segment

    def _next(self) -> int:
        """The number behind the last one given out."""
        last = self.segments[-1] if self.segments else None
        end = 0 if last is None else last.start + last.records
        return end if self._late is None else max(end, self._late.start + self._late.rows)

    def _numbered(self, start: int, records: int) -> int:
        """``start``, from which on there are numbers for so many records; or where that is, numbered anew."""
        if start + records > _MOST - _SPARE:
            start -= self._renumber()
            if start + records > _MOST - _SPARE:
                raise StorageFull(None, 0, f"table {self.table}: 2^31 rows wait to be committed and merged")
        return start

    def new_segment(self, start: int, room: int) -> Segment:
        """A file for at least ``room`` records, which is not yet one of ``segments``."""
        return Segment.create(self.new_path(), self.table, self.row_bytes, start, room, self._spares)

    def _renumber(self) -> int:
        """Number records from 0 again; by how much they moved."""
        late = self._late
        shift = min([s.start for s in self.segments[:1]] + ([] if late is None else [late.start]), default=0)
        with self.reading:
            keys, ordinals = self._index.items()
            index = RowIndex(len(keys))
            index.put(keys, ordinals - np.int32(shift))
            for segment in self.segments:
                segment.start -= shift
            if late is not None:
                late.start -= shift
            self._index, self.view = index, self._make_view()
        return shift

    def freeze(self, generation: int, late: int = 0) -> None:
        """What was written since the last time belongs to ``generation``, and so do ``late`` rows that ``land`` will
        bring: what is written from now on is newer than these. StorageFull: there are no numbers for so many."""
        with self.writing:
            for segment in self.segments:
                if segment.generation == 0:
                    segment.generation = generation
            self._late = None
            if late:
                self._late = Late(generation, self._numbered(self._next(), late), late)

    def land(self, keys: np.ndarray, rows: np.ndarray) -> int:
        """The late rows, distinct keys in any order; bytes written. An error before the disk has them all: none of them
        is visible. Writers and readers go on meanwhile."""
        done: list[Segment] = []
        try:
            at = 0
            while at < len(keys):
                room = min(len(keys) - at, _PART)
                segment = self.new_segment(0, room)
                done.append(segment)
                n = min(segment.room, len(keys) - at)
                segment.count(n, segment.append(keys[at : at + n], rows[at : at + n]))
                at += n
            self._insert(done)
        except BaseException:
            for segment in done:
                segment.close()
                segment.path.unlink(missing_ok=True)
            raise
        at = 0
        for segment in done:
            for i in range(0, segment.records, _TURN):
                n = min(_TURN, segment.records - i)
                with self.writing, self.reading:  # what was written since the freeze has larger numbers, and stays
                    numbers = np.arange(segment.start + i, segment.start + i + n, dtype=np.int32)
                    self._index.put_newer(keys[at : at + n], numbers)
                at += n
        return sum(segment.size for segment in done)

    def _insert(self, landed: list[Segment]) -> None:
        """Segments take the numbers that were kept free, and their place in the order of writing."""
        with self.writing, self.reading:
            late = self._late
            assert late is not None
            assert sum(s.records for s in landed) == late.rows
            self._index.reserve(len(self._index) + late.rows)
            at = late.start
            for segment in landed:
                segment.generation, segment.start = late.generation, at
                at += segment.records
            before = [s for s in self.segments if s.start < late.start]
            self.segments = [*before, *landed, *self.segments[len(before) :]]
            self.view, self._late = self._make_view(), None

    def abandon(self) -> None:
        """No late rows will come any more."""
        with self.writing:
            self._late = None

    # -- replacing

    def replace(self, loaded: Sequence[Segment]) -> None:
        """These segments and nothing else, oldest first; the index is built from their records."""
        with self.writing:
            index = RowIndex(sum(s.records for s in loaded) // 2)
            at = 0
            for segment in loaded:
                segment.start = at
                at += segment.records
                keys, _ = segment.keys()
                index.put(keys, np.arange(segment.start, at, dtype=np.int32))
            with self.reading:
                self._late = None
                self.segments = list(loaded)
                self._index, self.view = index, self._make_view()

    def forget(self, generation: int) -> list[Segment]:
        """Rows up to ``generation`` are in the base now: leave them out, and return the segments they were in."""
        with self.writing:
            gone = [s for s in self.segments if 0 < s.generation <= generation]
            if not gone:
                return []
            assert gone == self.segments[: len(gone)]
            limit = gone[-1].start + gone[-1].records
            keys, ordinals = self._index.items()
            keep = ordinals >= limit
            index = RowIndex(int(keep.sum()))
            index.put(keys[keep], ordinals[keep])
            with self.reading:
                self.segments = self.segments[len(gone) :]
                self._index, self.view = index, self._make_view()
            return gone

    def exchange(self, run: list[Segment], new: Segment) -> None:
        """``new``, numbered like the run's first, holds the newest of its records: it takes the run's place."""
        keys, _ = new.keys()
        low, high = run[0].start, run[-1].start + run[-1].records
        with self.writing, self.reading:
            at = self.segments.index(run[0])
            self.segments = [*self.segments[:at], new, *self.segments[at + len(run) :]]
            ordinals = self._index.get(keys)
            mine = (ordinals >= low) & (ordinals < high)
            self._index.put(keys[mine], (np.flatnonzero(mine) + low).astype(np.int32))
            self.view = self._make_view()

    def _make_view(self) -> View:
        return View(
            np.array([s.start for s in self.segments], np.int64),
            np.array([s.first for s in self.segments], np.int64),
            tuple(s.map for s in self.segments),
        )
