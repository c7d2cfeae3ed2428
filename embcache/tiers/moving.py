"""Rows of several tables at once, between slots of arenas and the overlays and base of an ``Lmdb`` tier: a handful of
kernel calls, however many tables there are, and no copy on the way."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np

from ..kernels import parts as kernels
from ..kernels.bloom import seed_of
from .base import Moved
from .basefile import Snapshot
from .overlay import Overlay
from .presence import Presence
from .segment import Segment

__all__ = ["Mover", "Read"]

Begin = Callable[[], AbstractContextManager[Snapshot]]

_BUFFER = 4 << 20  # bytes of records encoded at a time


class Read(NamedTuple):
    """How many rows there were, how many the base was asked for, and how many of these it had."""

    found: int
    asked: int
    below: int


class _Run(NamedTuple):
    """Neighbouring keys of a part that go to one segment."""

    part: int
    segment: Segment
    begin: int
    keys: int


class Mover:
    """For any thread. ``overlays``: one for each table."""

    def __init__(self, overlays: Sequence[Overlay]) -> None:
        self._overlays = overlays
        self._seeds = np.array([seed_of(t) for t in range(len(overlays))], np.uint64).view(np.int64).tolist()
        self._buffer = np.empty(0, np.uint64)
        self._turn = threading.Lock()  # of who uses the buffer

    def _lines(self, parts: Sequence[Moved]) -> tuple[np.ndarray, list[object]]:
        """(``kernels/parts.py``'s lines, what they point into)."""
        kept: list[object] = []
        lines, first = [], 0
        for part in parts:
            keys, slots = np.ascontiguousarray(part.keys, np.int64), np.ascontiguousarray(part.slots, np.int32)
            assert part.slab.flags.c_contiguous
            assert len(keys) == len(slots) == len(part.found)
            kept += [keys, slots, part.slab]
            lines.append((len(keys), _address(keys), _address(slots), _address(part.slab), part.slab.shape[1], first))
            first += len(keys)
        out = np.zeros((len(parts), kernels.FIELDS), np.int64)
        out[:, : kernels.FIRST + 1] = lines
        out[:, kernels.SEED] = [self._seeds[part.table] for part in parts]
        return out, kept

    # -- reading

    def read(
        self,
        parts: Sequence[Moved],
        presence: Presence | None,
        snapshot: Callable[[], AbstractContextManager[Snapshot]],
    ) -> Read:
        """Fill the slots; ``presence`` None: the base holds nothing yet."""
        lines, _kept = self._lines(parts)
        total = int(lines[:, kernels.KEYS].sum())
        ordinals, state = np.empty(total, np.int32), np.empty(total, np.uint8)
        overlays = [self._overlays[part.table] for part in parts]
        with _all([o.reading for o in overlays]):
            views = [o.view for o in overlays]
            lines[:, kernels.INDEX_AT : kernels.CAPACITY + 1] = [o.index_at() for o in overlays]
            kernels.look(lines, ordinals)
        lines[:, kernels.STARTS_AT : kernels.SEGMENTS + 1] = [view.at for view in views]
        found, asked, below = int(kernels.gather(lines, ordinals, state)), 0, 0
        # in this order: see ``Lmdb.read``
        if found < total and presence is not None:
            asked = presence.screen_parts(lines, state)
            if asked:
                with snapshot() as base:
                    below = base.fetch(lines, [part.table for part in parts], state)
        there = state == 1
        for part, first in zip(parts, lines[:, kernels.FIRST].tolist(), strict=True):
            part.found[:] = there[first : first + len(part.found)]
        return Read(found + below, asked, below)

    # -- writing

    def write(self, parts: Sequence[Moved]) -> int:
        """Newest versions of rows; bytes written. After an error none of them is visible."""
        lines, _kept = self._lines(parts)
        overlays = [self._overlays[part.table] for part in parts]
        with _all([o.writing for o in overlays]), contextlib.ExitStack() as claims:
            runs: list[_Run] = []
            for p, (overlay, part) in enumerate(zip(overlays, parts, strict=True)):
                taken = claims.enter_context(overlay.claiming(len(part.keys)))
                lines[p, kernels.ORDINAL] = taken[0][0].start + taken[0][0].records
                begin = 0
                for segment, n in taken:
                    runs.append(_Run(p, segment, begin, n))
                    begin += n
            checks = self._write_runs(runs, lines)
            with _all([o.reading for o in overlays]):
                for overlay, part in zip(overlays, parts, strict=True):
                    overlay.make_room(len(part.keys))
                lines[:, kernels.INDEX_AT : kernels.CAPACITY + 1] = [o.index_at() for o in overlays]
                for run, check in zip(runs, checks, strict=True):
                    run.segment.count(run.keys, check)
                kernels.put(lines)
                for overlay, new in zip(overlays, lines[:, kernels.NEW].tolist(), strict=True):
                    overlay.appended(new)
        return sum(run.keys * run.segment.stride for run in runs)

    def _write_runs(self, runs: Sequence[_Run], lines: np.ndarray) -> list[int]:
        """The sum of checks of each run."""
        checks = [0] * len(runs)
        with self._turn:
            for pieces in _batches(runs):
                which, begins, counts = np.array(pieces, np.int64).T
                part = lines[[runs[k].part for k in which]]
                sizes = counts * np.array([runs[k].segment.stride for k in which])
                ends = np.cumsum(sizes)
                if len(self._buffer) < ends[-1] // 8:
                    self._buffer = np.empty(max(_BUFFER, int(ends[-1])) // 8, np.uint64)
                part[:, kernels.BEGIN], part[:, kernels.COUNT] = begins, counts
                part[:, kernels.RECORDS_AT] = _address(self._buffer) + ends - sizes
                kernels.encode(part)
                data = memoryview(self._buffer.view(np.uint8).data)
                for (k, begin, _), check, end, size in zip(
                    pieces, part[:, kernels.CHECK].tolist(), ends.tolist(), sizes.tolist(), strict=True
                ):
                    run = runs[k]
                    checks[k] += check % 2**64
                    run.segment.write_behind((begin - run.begin) * run.segment.stride, data[end - size : end])
        return checks


def _batches(runs: Sequence[_Run]) -> Iterator[list[tuple[int, int, int]]]:
    """(number of the run, first key, keys), as many at a time as the buffer has room for."""
    batch: list[tuple[int, int, int]] = []
    room = _BUFFER
    for k, run in enumerate(runs):
        begin, end = run.begin, run.begin + run.keys
        while begin < end:
            n = min(end - begin, room // run.segment.stride)
            if n < 1 and batch:
                yield batch
                batch, room = [], _BUFFER
                continue
            n = max(n, 1)
            batch.append((k, begin, n))
            begin, room = begin + n, room - n * run.segment.stride
    if batch:
        yield batch


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])  # a third of what ctypes.data costs


@contextlib.contextmanager
def _all(locks: Sequence[AbstractContextManager[object]]) -> Iterator[None]:
    """Hold all of these locks, which everybody takes in the order of the tables."""
    with contextlib.ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock)
        yield
